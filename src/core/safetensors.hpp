// The safetensors container: 8-byte little-endian header length, JSON header, one buffer that the tensors
// fill without gap or overlap. https://huggingface.co/docs/safetensors. What the tensors of a case mean is
// case_file.cpp's business.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace treemla::safetensors {

// A case's header has about 1 KB. The cap bounds what a lying length can make us allocate.
constexpr std::size_t kMaxHeaderBytes = std::size_t{1} << 20;
constexpr std::size_t kLengthBytes = 8;

struct DTypeInfo {
  std::string_view name;
  int bytes;  // of an element, also its alignment
};
// Null for a dtype that no reader of whole-byte elements knows.
const DTypeInfo* find_dtype(std::string_view name);

struct Tensor {
  std::string name;
  std::string dtype = {};
  std::vector<int64_t> shape = {};
  uint64_t begin = 0;  // in the buffer
  uint64_t end = 0;
};

using Metadata = std::vector<std::pair<std::string, std::string>>;

struct Header {
  Metadata metadata;  // in file order
  bool has_metadata = false;
  std::vector<Tensor> tensors;  // in buffer order
  std::size_t bytes = 0;  // of the JSON text, padding included: the buffer starts at kLengthBytes + bytes
};

// Reads and checks the container in `file`; on return every tensor lies within the buffer, and they fill it.
// Throws Error(kBadFile) whose message starts with `name`.
Header parse(std::span<const std::byte> file, const std::string& name);

// Length and header for tensors with shapes and dtypes as given; `begin` and `end` are assigned in the given
// order. Padded with spaces so that the buffer starts at a multiple of 8. Throws Error(kInvalidArgument) for
// texts that are not UTF-8 and for a header beyond kMaxHeaderBytes.
std::string write_header(const Metadata& metadata, std::span<Tensor> tensors);

// The order in which safetensors writers lay tensors out: widest dtype first, then by name. True if a comes
// before b.
bool before(std::string_view name_a, std::string_view dtype_a, std::string_view name_b,
            std::string_view dtype_b);

// Elements times size. Throws Error(kInvalidArgument) for an unknown dtype, a negative extent and products
// past int64.
uint64_t tensor_bytes(const std::string& name, std::string_view dtype, std::span<const int64_t> shape);

std::string shape_text(std::span<const int64_t> shape);  // "[9, 8, 576]"

}  // namespace treemla::safetensors
