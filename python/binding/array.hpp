// An array of another library, seen as a pointer with a shape: torch tensors by their own attributes, all others by DLPack.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "treemla/dtype.hpp"
#include "treemla/error.hpp"

namespace treemla::python {

namespace nb = nanobind;

enum class Element : uint8_t { kF32, kF16, kBF16, kF8E4M3, kU8, kBool, kU16, kI32, kU32, kI64, kU64, kOther };
const char* element_name(Element e);
constexpr int element_bytes(Element e) {
  switch (e) {
    case Element::kF8E4M3:
    case Element::kU8:
    case Element::kBool:
      return 1;
    case Element::kF16:
    case Element::kBF16:
    case Element::kU16:
      return 2;
    case Element::kI64:
    case Element::kU64:
      return 8;
    default:
      return 4;
  }
}

[[noreturn]] void fail(const std::string& argument, const std::string& message);

// Moves, but doesn't copy. Keeps the array alive.
class Array {
 public:
  static constexpr int kMaxDims = 6;

  // Throws Error(kInvalidArgument) with `name` for what is no array, has no plain strided memory, or lives on a device that is
  // neither the host nor a CUDA device. `stream` is the cudaStream_t on which the memory will be used: the producer makes its own
  // pending work come first.
  Array(nb::handle object, const char* name, uintptr_t stream);
  Array(Array&& other) noexcept { *this = std::move(other); }
  Array& operator=(Array&& other) noexcept;
  ~Array() { release(); }

  const char* name = "";
  void* data = nullptr;
  Element element = Element::kOther;
  int ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};  // in elements; of axes of extent 0 or 1 whatever makes them compact
  Memory memory = Memory::kHost;
  int device_id = 0;
  bool read_only = false;

  std::string shape_text() const;  // "[3, 8, 576]"
  std::string place() const;       // "cpu", "cuda:0"
  bool is_compact() const;
  int64_t size() const;

  // Each throws with the name, what it is and what is allowed.
  void need_element(std::initializer_list<Element> allowed) const;
  void need_shape(std::initializer_list<int64_t> wanted, const char* symbols) const;  // -1: any extent
  void need_compact() const;
  void need_writable() const;
  // 1-D or more, compact, of one dtype and the given shape.
  template <class T>
  T* typed(Element e, std::initializer_list<int64_t> wanted, const char* symbols) const {
    need_element({e});
    need_shape(wanted, symbols);
    need_compact();
    return static_cast<T*>(data);
  }

 private:
  bool from_torch(nb::handle object);
  void from_dlpack(nb::handle object, uintptr_t stream);
  void from_capsule(PyObject* capsule);
  void normalise_strides();
  void release() noexcept;

  PyObject* owner_ = nullptr;  // the object itself
  void* managed_ = nullptr;    // a DLManagedTensor or DLManagedTensorVersioned, to be given back
  bool managed_is_versioned_ = false;
};

// The numbers of queries, caches and outputs.
DType number_dtype(const Array& a);

}  // namespace treemla::python
