// What the fuzzers run on each input. The ordinary test suite runs the same functions over fuzz/corpus.
//
// A broken property is thrown as std::logic_error, which libFuzzer reports as a crash and GoogleTest as a
// failure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "treemla/treemla.hpp"

namespace treemla::fuzz {

inline void require(bool ok, const char* property) {
  if (!ok) throw std::logic_error(property);
}

// Forces a read of every byte, for the address sanitizer.
inline unsigned touch(const void* data, std::size_t bytes) {
  const auto* p = static_cast<const volatile unsigned char*>(data);
  unsigned sum = 0;
  for (std::size_t i = 0; i < bytes; ++i) sum += p[i];
  return sum;
}

// Everything that a backend would read of a checked problem. A small file can name an inert request's rows
// only, so this is bounded by the file and kMaxRows.
inline void touch_problem(const VerifyProblem& p) {
  constexpr int64_t kMaxRows = 4096;
  const int64_t row_bytes =
      kv_row_elements(p.shape, p.kv.dtype) * static_cast<int64_t>(dtype_bytes(p.kv.dtype));
  const auto* entries = static_cast<const int32_t*>(p.pages.entries);
  int64_t rows = 0;
  for (int r = 0; r < p.b; ++r) {
    if (p.q_indptr[r + 1] == p.q_indptr[r]) continue;
    for (int64_t t = 0; t < p.kv_len[r] && rows < kMaxRows; ++t, ++rows) {
      const int64_t row =
          int64_t{entries[p.pages.indptr[r] + t / p.kv.page_size]} * p.kv.page_size + t % p.kv.page_size;
      touch(static_cast<const char*>(p.kv.data) + row * row_bytes, static_cast<std::size_t>(row_bytes));
    }
  }
}

// Bytes that claim to be a case: refused with Error(kBadFile) in one line, or read, written and read again to
// the same. True if they are a case.
inline bool run_case_file(std::span<const uint8_t> input) {
  Case c;
  try {
    c = parse_case(input.data(), input.size(), "input");
  } catch (const Error& e) {
    require(e.code() == ErrorCode::kBadFile, "a bad file is reported as kBadFile");
    const std::string what = e.what();
    require(what.starts_with("input: "), "the message starts with the name of the file");
    require(what.find('\n') == std::string::npos, "the message is one line");
    require(what.size() < 1024, "the message is short");
    return false;
  }
  for (const CaseTensor& t : c.tensors()) touch(t.data, t.bytes);
  touch_problem(c.problem());

  const std::vector<std::byte> bytes = serialize_case(c);
  const Case again = parse_case(bytes.data(), bytes.size());
  require(serialize_case(again) == bytes, "what was written is read and written the same");
  require(again.shape.h_q == c.shape.h_q && again.shape.d_v == c.shape.d_v &&
              again.shape.d_rope == c.shape.d_rope && again.sm_scale == c.sm_scale &&
              again.page_size == c.page_size && again.mask == c.mask && again.kv_scale == c.kv_scale &&
              again.kv_packed == c.kv_packed && again.source == c.source,
          "the fields survive");
  require(again.tensors().size() == c.tensors().size(), "the tensors survive");
  for (const CaseTensor& t : c.tensors()) {
    const CaseTensor* other = again.find(t.name);
    require(other && other->dtype == t.dtype && other->shape == t.shape && other->bytes == t.bytes &&
                std::equal(t.data, t.data + t.bytes, other->data),
            "every tensor survives");
  }
  return true;
}

// Enough for rows of several words; the encodings are quadratic.
constexpr std::size_t kMaxNumbers = 140;

// The result of `f`, or nothing if it refused its arguments.
template <typename F>
auto attempt(F f) -> std::pair<bool, decltype(f())> {
  try {
    return {true, f()};
  } catch (const Error& e) {
    require(e.code() == ErrorCode::kInvalidArgument, "a bad tree is reported as kInvalidArgument");
    return {false, {}};
  }
}

// Tree functions on arbitrary arrays. Byte 0 picks the encoding that the rest stands for, byte 1 a size.
inline void run_tree(std::span<const uint8_t> input) {
  if (input.size() < 2) return;
  const int choice = input[0] % 5, size = input[1];
  input = input.subspan(2);
  // Signed bytes: small indices, -1 and other negatives are all within one mutation.
  const auto numbers = [](std::span<const uint8_t> bytes) {
    std::vector<int32_t> v(bytes.size());
    std::transform(bytes.begin(), bytes.end(), v.begin(), [](uint8_t x) {
      return x == 0x7F ? int32_t{2147480000} : x == 0x80 ? INT32_MIN : int32_t{static_cast<int8_t>(x)};
    });
    return v;
  };

  // Every encoding of a tree leads back to it.
  const auto round_trips = [](const std::vector<int32_t>& parents, int64_t prefix_len, int extra_words) {
    const int q = static_cast<int>(parents.size()), words = words_per_row(q) + extra_words;
    require(parents_from_bits(bits_from_parents(parents, words), q, words ? words : 0) == parents, "bits");
    const std::vector<uint8_t> dense = dense_from_parents(parents);
    require(parents_from_dense(dense, q) == parents, "dense");
    require(dense_from_bits(bits_from_parents(parents, words), q, words) == dense, "bits and dense agree");
    require(parents_from_full_mask(full_mask_from_parents(parents, prefix_len), q, prefix_len) == parents,
            "full mask");
    const RetrieveLinks links = links_from_parents(parents);
    require(parents_from_links(links.next_token, links.next_sibling) == parents, "links");
    const std::vector<int32_t> depths = tree_depths(parents), positions = tree_positions(parents, prefix_len);
    for (int i = 0; i < q; ++i) {
      require(positions[i] == prefix_len + depths[i], "positions");
      require(
          std::count(dense.begin() + int64_t{i} * q, dense.begin() + int64_t{i + 1} * q, 1) == depths[i] + 1,
          "a node sees itself and its ancestors");
    }
  };

  if (choice == 0) {  // parents
    const std::vector<int32_t> parents = numbers(input.first(std::min(input.size(), kMaxNumbers)));
    const bool ok = attempt([&] { return check_parents(parents), true; }).first;
    require(attempt([&] { return bits_from_parents(parents); }).first == ok, "bits check their parents");
    require(attempt([&] { return links_from_parents(parents); }).first == ok, "links check their parents");
    require(attempt([&] { return full_mask_from_parents(parents, 3); }).first == ok,
            "masks check their parents");
    if (ok) round_trips(parents, size, size % 3);
    attempt([&] { return tree_positions(parents, INT32_MAX - size); });
    attempt([&] { return bits_from_parents(parents, size - 128); });
  } else if (choice == 1) {  // ancestor bits
    const int q = size % 80, words = std::max(1, words_per_row(q) + (size >> 6) - 1);
    std::vector<uint32_t> bits(std::min(input.size() / 4, static_cast<std::size_t>(q) * words));
    if (!bits.empty()) std::memcpy(bits.data(), input.data(), bits.size() * 4);
    if (input.size() % 4 == 0) bits.resize(static_cast<std::size_t>(q) * words);
    const auto dense = attempt([&] { return dense_from_bits(bits, q, words); });
    const auto parents = attempt([&] { return parents_from_bits(bits, q, words); });
    require(dense.first || !parents.first, "a tree mask is a mask");
    if (dense.first)
      require(dense_from_bits(bits_from_dense(dense.second, q, words), q, words) == dense.second, "dense");
    if (parents.first) {
      require(dense_from_parents(parents.second) == dense.second, "the parents say what the bits said");
      round_trips(parents.second, 1, 0);
    }
  } else if (choice == 2 ||
             choice == 3) {  // dense or full mask, one bit an element so that trees are within reach
    const int q = size % 32, prefix = choice == 2 ? 0 : size / 32;
    std::vector<uint8_t> mask;
    for (std::size_t i = 0; i < input.size() * 8 && i < 2048; ++i)
      mask.push_back((input[i / 8] >> (i % 8)) & 1);
    if (size & 1) mask.resize(static_cast<std::size_t>(q) * static_cast<std::size_t>(q + prefix));
    const auto bits = attempt(
        [&] { return choice == 2 ? bits_from_dense(mask, q) : bits_from_full_mask(mask, q, prefix); });
    const auto parents = attempt(
        [&] { return choice == 2 ? parents_from_dense(mask, q) : parents_from_full_mask(mask, q, prefix); });
    require(bits.first || !parents.first, "a tree mask is a mask");
    if (parents.first) {
      require(bits_from_parents(parents.second) == bits.second, "the parents say what the mask said");
      round_trips(parents.second, prefix, 1);
    }
    attempt([&] { return bits_from_full_mask(mask, q, INT64_MAX - size); });
    attempt([&] { return bits_from_dense(mask, -size); });
  } else {  // links, then the same numbers as a ragged batch
    const std::vector<int32_t> all = numbers(input.first(std::min(input.size(), kMaxNumbers)));
    const std::size_t half = std::min<std::size_t>(size & 1 ? all.size() / 2 : size, all.size());
    const std::span<const int32_t> first(all.data(), half), second(all.data() + half, all.size() - half);
    const auto parents = attempt([&] { return parents_from_links(first, second); });
    if (parents.first) round_trips(parents.second, 0, 0);
    const auto batch = attempt([&] { return batch_bits_from_parents(first, second); });
    if (batch.first && batch.second.words > 0) {
      for (std::size_t r = 0; r + 1 < second.size(); ++r) {
        const auto tree = first.subspan(second[r], second[r + 1] - second[r]);
        const auto bits = bits_from_parents(tree, batch.second.words);
        require(std::equal(bits.begin(), bits.end(),
                           batch.second.bits.begin() + int64_t{second[r]} * batch.second.words),
                "a request's rows in a batch are its rows alone");
      }
    }
  }
}

}  // namespace treemla::fuzz
