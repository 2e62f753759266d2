// Draft trees: encodings of "which node sees which" and the conversions between them.
//
// A tree of q nodes is its parents array: parents[0] = -1 (the root, the last emitted token), 0 <= parents[i] < i for the
// others. Parents come first, but nodes need not be sorted by depth. One function works on one request; `request` only goes
// into error messages. All of them throw Error(kInvalidArgument) naming request and node, and never read out of bounds.
//
// Encodings (q nodes, prefix_len cached tokens before the tree):
//   ancestor bits   [q, words_per_row(q)] uint32, bit j of row i set: node i sees node j. Rows contain their own node.
//   dense           [q, q] uint8, row-major, nonzero = attend
//   FULL_MASK       [q, prefix_len + q] uint8, row-major: SGLang's eager layout; only the q x q tail carries information
//   QLEN_ONLY       [q, q] uint8: SGLang's short layout, the same bytes as dense
//   retrieve links  next_token[i] = first child, next_sibling[i] = next sibling, -1 ends (SGLang's verify buffers)
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace treemla {

// 32-bit words an ancestor-bit row of a q-node tree needs.
constexpr int words_per_row(int64_t q_len) { return static_cast<int>((q_len + 31) / 32); }

// Exactly one root, at node 0, and every other parent before its child.
void check_parents(std::span<const int32_t> parents, int request = 0);

std::vector<int32_t> tree_depths(std::span<const int32_t> parents, int request = 0);
// prefix_len + depth: siblings share a position.
std::vector<int32_t> tree_positions(std::span<const int32_t> parents, int64_t prefix_len, int request = 0);

// [q, words] with words >= words_per_row(q); 0 picks words_per_row(q).
std::vector<uint32_t> bits_from_parents(std::span<const int32_t> parents, int words = 0, int request = 0);
std::vector<uint8_t> dense_from_parents(std::span<const int32_t> parents, int request = 0);
std::vector<uint8_t> full_mask_from_parents(std::span<const int32_t> parents, int64_t prefix_len,
                                            int request = 0);

// Bits from masks that need not be trees: any pattern is carried over.
std::vector<uint32_t> bits_from_dense(std::span<const uint8_t> dense, int q_len, int words = 0);
std::vector<uint8_t> dense_from_bits(std::span<const uint32_t> bits, int q_len, int words);
// Also checks that no prefix token is masked: TreeMLA, like every engine, reads the whole prefix.
std::vector<uint32_t> bits_from_full_mask(std::span<const uint8_t> full_mask, int q_len, int64_t prefix_len,
                                          int words = 0, int request = 0);

// The tree behind a mask. Throws if the mask is not the ancestor relation of one tree: a row without its own node, a node
// seen that comes later, two roots, or a row that differs from its parent's row plus itself.
std::vector<int32_t> parents_from_bits(std::span<const uint32_t> bits, int q_len, int words, int request = 0);
std::vector<int32_t> parents_from_dense(std::span<const uint8_t> dense, int q_len, int request = 0);
std::vector<int32_t> parents_from_full_mask(std::span<const uint8_t> full_mask, int q_len, int64_t prefix_len,
                                            int request = 0);

struct RetrieveLinks {
  std::vector<int32_t> next_token;    // [q] first child, -1 for a leaf
  std::vector<int32_t> next_sibling;  // [q] next child of the same parent, -1 for the last
};
// Children in numbering order.
RetrieveLinks links_from_parents(std::span<const int32_t> parents, int request = 0);
// Rejects cycles, orphans, nodes reached twice, parents after their children and indices past the end.
std::vector<int32_t> parents_from_links(std::span<const int32_t> next_token,
                                        std::span<const int32_t> next_sibling, int request = 0);

// The ancestor bits of a whole ragged batch: row q_indptr[r] + i holds node i of request r.
// parents [total_q], q_indptr [b + 1] -> [total_q, words], words = words_per_row(largest q_len).
struct BatchBits {
  std::vector<uint32_t> bits;
  int words = 0;
};
BatchBits batch_bits_from_parents(std::span<const int32_t> parents, std::span<const int32_t> q_indptr);

}  // namespace treemla
