// Conversions between tree encodings. Because parents come first, one pass in node order is enough for each
// of them: a node's row is its parent's finished row plus itself.

#include "treemla/tree.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <new>

#include "core/fail.hpp"

namespace treemla {
namespace {

constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

// Quadratic encodings of absurd trees must end in an Error, not in std::bad_alloc or std::length_error.
template <typename T>
std::vector<T> make_array(int64_t rows, int64_t columns) {
  constexpr int64_t kAddressSpace = int64_t{1} << 47;
  const int64_t count = saturating_mul(rows, columns);
  try {
    if (count > kAddressSpace / static_cast<int64_t>(sizeof(T))) throw std::bad_alloc();
    return std::vector<T>(static_cast<std::size_t>(count));
  } catch (const std::bad_alloc&) {
    throw Error(
        ErrorCode::kOutOfMemory, "q_len",
        fmt::format("no memory for an array of {} x {} elements of {} bytes", rows, columns, sizeof(T)));
  }
}

// Checks the number of nodes and gives it as a signed number.
int64_t node_count(const char* argument, std::size_t size, int request) {
  if (size > static_cast<std::size_t>(kInt32Max)) {
    fail(argument, "{} of request {} has {} nodes: allowed are at most {}", argument, request, size,
         kInt32Max);
  }
  return static_cast<int64_t>(size);
}

void check_q_len(int q_len, int request) {
  if (q_len < 0) fail("q_len", "q_len of request {} = {} must not be negative", request, q_len);
}

void check_size(const char* argument, std::size_t size, int64_t rows, int64_t columns, int request) {
  const int64_t expected = saturating_mul(rows, columns);
  if (expected == kInt64Max || size != static_cast<std::size_t>(expected)) {
    fail(argument, "{} of request {} has {} elements: {} x {} are needed", argument, request, size, rows,
         columns);
  }
}

int64_t full_row(int q_len, int64_t prefix_len, int request) {
  if (prefix_len < 0 || prefix_len > kInt64Max - q_len) {
    fail("prefix_len", "prefix_len of request {} = {} is outside [0, 2^63 - 1 - q_len]", request, prefix_len);
  }
  return prefix_len + q_len;
}

// The words of a row: what is asked for, or as few as do.
int choose_words(int words, int64_t q_len, int request) {
  const int needed = words_per_row(q_len);
  if (words == 0) return needed;
  if (words < needed) {
    fail("words", "words of request {} = {} must be at least {}: a row has {} nodes, 32 a word", request,
         words, needed, q_len);
  }
  return words;
}

void set_bit(uint32_t* row, int64_t j) { row[j / 32] |= 1u << (j % 32); }
bool get_bit(const uint32_t* row, int64_t j) { return (row[j / 32] >> (j % 32)) & 1; }

// Fills rows [q, words] of zeros from checked parents.
void fill_bits(std::span<const int32_t> parents, uint32_t* rows, int64_t words) {
  for (std::size_t i = 0; i < parents.size(); ++i) {
    uint32_t* row = rows + static_cast<int64_t>(i) * words;
    if (i > 0) {
      const uint32_t* parent_row = rows + parents[i] * words;
      std::copy(parent_row, parent_row + parents[i] / 32 + 1,
                row);  // nothing is set past the parent's own bit
    }
    set_bit(row, static_cast<int64_t>(i));
  }
}

// [q, row] bytes: `row` - q ones for the prefix, then the tree's own columns.
std::vector<uint8_t> bytes_from_parents(std::span<const int32_t> parents, int64_t row) {
  const auto q_len = static_cast<int64_t>(parents.size());
  auto mask = make_array<uint8_t>(q_len, row);
  for (int64_t i = 0; i < q_len; ++i) {
    uint8_t* tail = mask.data() + i * row + (row - q_len);
    std::fill(mask.data() + i * row, tail, uint8_t{1});
    if (i > 0) {
      const uint8_t* parent_tail = mask.data() + parents[i] * row + (row - q_len);
      std::copy(parent_tail, parent_tail + parents[i] + 1, tail);
    }
    tail[i] = 1;
  }
  return mask;
}

// Bits of the last q columns of [q, row] bytes.
std::vector<uint32_t> bits_from_bytes(const uint8_t* mask, int64_t q_len, int64_t row, int64_t words) {
  auto bits = make_array<uint32_t>(q_len, words);
  for (int64_t i = 0; i < q_len; ++i) {
    const uint8_t* tail = mask + i * row + (row - q_len);
    for (int64_t j = 0; j < q_len; ++j) {
      if (tail[j]) set_bit(bits.data() + i * words, j);
    }
  }
  return bits;
}

}  // namespace

void check_parents(std::span<const int32_t> parents, int request) {
  const int64_t q_len = node_count("parents", parents.size(), request);
  if (q_len > 0 && parents[0] != -1) {
    fail("parents", "parent of node 0 of request {} (parents[0]) = {} must be -1: node 0 is the root",
         request, parents[0]);
  }
  for (int64_t i = 1; i < q_len; ++i) {
    if (parents[i] < 0 || parents[i] >= i) {
      fail("parents", "parent of node {} of request {} (parents[{}]) = {} is outside [0, {}): {}", i, request,
           i, parents[i], i,
           parents[i] == -1 ? "a request has one root" : "parents come before their children");
    }
  }
}

std::vector<int32_t> tree_depths(std::span<const int32_t> parents, int request) {
  check_parents(parents, request);
  std::vector<int32_t> depths(parents.size(), 0);
  for (std::size_t i = 1; i < parents.size(); ++i) depths[i] = depths[parents[i]] + 1;
  return depths;
}

std::vector<int32_t> tree_positions(std::span<const int32_t> parents, int64_t prefix_len, int request) {
  std::vector<int32_t> positions = tree_depths(parents, request);
  const int64_t deepest = positions.empty() ? 0 : *std::max_element(positions.begin(), positions.end());
  if (prefix_len < 0 || prefix_len > kInt32Max - deepest) {
    fail("prefix_len", "prefix_len of request {} = {} is outside [0, {}]: positions are 32-bit numbers",
         request, prefix_len, kInt32Max - deepest);
  }
  for (int32_t& p : positions) p += static_cast<int32_t>(prefix_len);
  return positions;
}

std::vector<uint32_t> bits_from_parents(std::span<const int32_t> parents, int words, int request) {
  check_parents(parents, request);
  const auto q_len = static_cast<int64_t>(parents.size());
  words = choose_words(words, q_len, request);
  auto bits = make_array<uint32_t>(q_len, words);
  fill_bits(parents, bits.data(), words);
  return bits;
}

std::vector<uint8_t> dense_from_parents(std::span<const int32_t> parents, int request) {
  check_parents(parents, request);
  return bytes_from_parents(parents, static_cast<int64_t>(parents.size()));
}

std::vector<uint8_t> full_mask_from_parents(std::span<const int32_t> parents, int64_t prefix_len,
                                            int request) {
  check_parents(parents, request);
  return bytes_from_parents(parents, full_row(static_cast<int>(parents.size()), prefix_len, request));
}

std::vector<uint32_t> bits_from_dense(std::span<const uint8_t> dense, int q_len, int words) {
  check_q_len(q_len, 0);
  check_size("dense", dense.size(), q_len, q_len, 0);
  return bits_from_bytes(dense.data(), q_len, q_len, choose_words(words, q_len, 0));
}

std::vector<uint8_t> dense_from_bits(std::span<const uint32_t> bits, int q_len, int words) {
  check_q_len(q_len, 0);
  words = choose_words(words, q_len, 0);
  check_size("bits", bits.size(), q_len, words, 0);
  auto dense = make_array<uint8_t>(q_len, q_len);
  for (int64_t i = 0; i < q_len; ++i) {
    for (int64_t j = 0; j < q_len; ++j) dense[i * q_len + j] = get_bit(bits.data() + i * words, j);
  }
  return dense;
}

std::vector<uint32_t> bits_from_full_mask(std::span<const uint8_t> full_mask, int q_len, int64_t prefix_len,
                                          int words, int request) {
  check_q_len(q_len, request);
  const int64_t row = full_row(q_len, prefix_len, request);
  check_size("full_mask", full_mask.size(), q_len, row, request);
  for (int64_t i = 0; i < q_len; ++i) {
    const auto begin = full_mask.begin() + i * row, end = begin + prefix_len;
    const auto masked = std::find(begin, end, uint8_t{0});
    if (masked != end) {
      fail("full_mask",
           "full_mask of request {}: node {} does not see prefix token {} (full_mask[{}]) = 0, but every "
           "node must "
           "see the whole prefix",
           request, i, masked - begin, masked - full_mask.begin());
    }
  }
  return bits_from_bytes(full_mask.data(), q_len, row, choose_words(words, q_len, request));
}

std::vector<int32_t> parents_from_bits(std::span<const uint32_t> bits, int q_len, int words, int request) {
  check_q_len(q_len, request);
  words = choose_words(words, q_len, request);
  check_size("bits", bits.size(), q_len, words, request);
  std::vector<int32_t> parents(static_cast<std::size_t>(q_len), -1);
  const int num_words = words_per_row(q_len);
  const uint32_t last_mask = q_len % 32 ? (1u << (q_len % 32)) - 1 : ~0u;  // bits past q_len mean nothing
  const auto word = [&](int64_t row, int w) {
    return bits[row * words + w] & (w == num_words - 1 ? last_mask : ~0u);
  };
  for (int64_t i = 0; i < q_len; ++i) {
    const int own = static_cast<int>(i / 32);
    const uint32_t own_bit = 1u << (i % 32), lower = own_bit - 1;
    if (!(word(i, own) & own_bit)) {
      fail("bits", "mask of request {}: node {} does not see itself, but every node must", request, i);
    }
    for (int w = own; w < num_words; ++w) {
      const uint32_t later = word(i, w) & (w == own ? ~(lower | own_bit) : ~0u);
      if (later) {
        fail("bits", "mask of request {}: node {} sees node {}, which comes later: allowed are nodes 0..{}",
             request, i, w * 32 + std::countr_zero(later), i);
      }
    }
    // The nearest ancestor is the highest node seen below i: ancestors have ever smaller numbers.
    int64_t parent = -1;
    for (int w = own; w >= 0 && parent < 0; --w) {
      const uint32_t earlier = word(i, w) & (w == own ? lower : ~0u);
      if (earlier) parent = w * 32 + 31 - std::countl_zero(earlier);
    }
    if (i == 0) continue;
    if (parent < 0) {
      fail("bits",
           "mask of request {}: node {} sees only itself and so is a second root: node 0 is the only root",
           request, i);
    }
    for (int w = 0; w <= own; ++w) {
      const uint32_t differ = (w == own ? word(i, w) & ~own_bit : word(i, w)) ^ word(parent, w);
      if (differ) {
        const int at = w * 32 + std::countr_zero(differ);
        const bool seen = (word(i, w) >> (at % 32)) & 1;
        fail("bits",
             "mask of request {}: node {} {} node {}, but its parent {} {}: a row must be its parent's plus "
             "itself",
             request, i, seen ? "sees" : "does not see", at, parent, seen ? "does not" : "does");
      }
    }
    parents[i] = static_cast<int32_t>(parent);
  }
  return parents;
}

std::vector<int32_t> parents_from_dense(std::span<const uint8_t> dense, int q_len, int request) {
  check_q_len(q_len, request);
  check_size("dense", dense.size(), q_len, q_len, request);
  const int words = words_per_row(q_len);
  return parents_from_bits(bits_from_bytes(dense.data(), q_len, q_len, words), q_len, words, request);
}

std::vector<int32_t> parents_from_full_mask(std::span<const uint8_t> full_mask, int q_len, int64_t prefix_len,
                                            int request) {
  const auto bits = bits_from_full_mask(full_mask, q_len, prefix_len, 0, request);
  return parents_from_bits(bits, q_len, words_per_row(q_len), request);
}

RetrieveLinks links_from_parents(std::span<const int32_t> parents, int request) {
  check_parents(parents, request);
  RetrieveLinks links{std::vector<int32_t>(parents.size(), -1), std::vector<int32_t>(parents.size(), -1)};
  // Backwards, so that pushing each node in front of its siblings leaves them in numbering order.
  for (std::size_t i = parents.size(); i-- > 1;) {
    int32_t& first = links.next_token[parents[i]];
    links.next_sibling[i] = first;
    first = static_cast<int32_t>(i);
  }
  return links;
}

std::vector<int32_t> parents_from_links(std::span<const int32_t> next_token,
                                        std::span<const int32_t> next_sibling, int request) {
  const int64_t q_len = node_count("next_token", next_token.size(), request);
  check_size("next_sibling", next_sibling.size(), q_len, 1, request);
  constexpr int32_t kUnset = -2;
  std::vector<int32_t> parents(next_token.size(), kUnset);
  if (q_len == 0) return parents;
  parents[0] = -1;
  if (next_sibling[0] != -1) {
    fail("next_sibling", "next_sibling of node 0 of request {} = {} must be -1: the root has no siblings",
         request, next_sibling[0]);
  }
  // Every step of the inner loop sets one more node, so cycles run into a set node within q steps in all.
  for (int64_t i = 0; i < q_len; ++i) {
    if (parents[i] == kUnset) {
      fail("next_token",
           "node {} of request {} is no child of an earlier node: it is an orphan, or "
           "its parent comes after it",
           i, request);
    }
    int64_t from = i;
    const char* argument = "next_token";
    for (int64_t child = next_token[i]; child != -1; child = next_sibling[child]) {
      if (child < 0 || child >= q_len) {
        fail(argument, "{} of node {} of request {} = {} is outside [-1, {})", argument, from, request, child,
             q_len);
      }
      if (parents[child] != kUnset) {
        fail(argument, "{} of node {} of request {} = {}: node {} is reached twice (a cycle, or two parents)",
             argument, from, request, child, child);
      }
      parents[child] = static_cast<int32_t>(i);
      from = child;
      argument = "next_sibling";
    }
  }
  return parents;
}

BatchBits batch_bits_from_parents(std::span<const int32_t> parents, std::span<const int32_t> q_indptr) {
  const int64_t total_q = node_count("parents", parents.size(), 0);
  if (q_indptr.empty()) fail("q_indptr", "q_indptr has no elements: b + 1 are needed");
  if (q_indptr[0] != 0) fail("q_indptr", "q_indptr[0] = {} must be 0", q_indptr[0]);
  int64_t max_q_len = 0;
  for (std::size_t r = 0; r + 1 < q_indptr.size(); ++r) {
    if (q_indptr[r + 1] < q_indptr[r] || q_indptr[r + 1] > total_q) {
      fail("q_indptr", "q_indptr[{}] = {} is outside [{}, {}]: it must not fall, nor pass the {} parents",
           r + 1, q_indptr[r + 1], q_indptr[r], total_q, total_q);
    }
    max_q_len = std::max<int64_t>(max_q_len, q_indptr[r + 1] - q_indptr[r]);
  }
  if (q_indptr.back() != total_q) {
    fail("q_indptr", "q_indptr[{}] = {} must equal {}, the number of parents", q_indptr.size() - 1,
         q_indptr.back(), total_q);
  }
  BatchBits batch;
  batch.words = words_per_row(max_q_len);
  batch.bits = make_array<uint32_t>(total_q, batch.words);
  for (std::size_t r = 0; r + 1 < q_indptr.size(); ++r) {
    const auto tree = parents.subspan(q_indptr[r], q_indptr[r + 1] - q_indptr[r]);
    check_parents(tree, static_cast<int>(r));
    fill_bits(tree, batch.bits.data() + static_cast<int64_t>(q_indptr[r]) * batch.words, batch.words);
  }
  return batch;
}

}  // namespace treemla
