// A serving engine's batch as verification takes it: lengths, page table and ancestor bits, in one launch.
//
// Engines keep the slots of every request they serve in one token table, a row a request, and a batch names rows of it. Masks come
// as bytes. This step gathers, for the requests of one batch,
//
//     kv_len[r]            = seq_len[r] + q_len                       (or seq_len[r], where it counts the tree already)
//     page_table[r, t]     = token_table[row_index[r], t]             t < kv_len[r]; later entries keep what they hold
//     ancestor_bits[r, i]  = the last q_len cells of row i of request r's mask
//
// The page table has page size 1, whatever the engine's: slots are what every engine's table leads to. Every request has the same
// q_len, as in SGLang's TARGET_VERIFY. Masks need not be trees: any pattern is carried over.
//
//     MaskLayout::kFull      request after request q_len rows of kv_len bytes: SGLang's FULL_MASK
//                            | prefix ........ | q_len cells |   only these are read: every node sees the whole prefix
//     MaskLayout::kQlenOnly  q_len rows of q_len bytes: QLEN_ONLY
//     MaskLayout::kNone      no mask: a chain, node i sees nodes 0..i
#pragma once

#include <cstddef>
#include <cstdint>

#include "treemla/dtype.hpp"
#include "treemla/tree_run.hpp"

namespace treemla {

enum class MaskLayout : int { kNone = 0, kFull = 1, kQlenOnly = 2 };

struct ImportProblem {
  int b = 0;      // requests
  int q_len = 1;  // tree nodes of each of them, >= 1

  const int32_t* token_table = nullptr;  // [num_rows, row_width] slot of token t
  int64_t num_rows = 0;
  int64_t row_width = 0;   // tokens a row has room for
  int64_t row_stride = 0;  // elements between rows; 0 means row_width

  const void* row_index = nullptr;  // [b] rows of the token table
  IndexType row_index_type = IndexType::kI32;
  const void* seq_len = nullptr;  // [b] cached tokens
  IndexType seq_len_type = IndexType::kI32;
  bool seq_len_has_tree = false;  // seq_len counts the q_len tree rows; else they follow

  MaskLayout mask_layout = MaskLayout::kNone;
  const uint8_t* mask = nullptr;  // [mask_len] nonzero = attend
  // A request whose cells reach past the end is padding, which the mask of a smaller batch doesn't cover: it comes out inert.
  int64_t mask_len = 0;

  Memory memory = Memory::kHost;  // of every pointer above and of the output
};

// Any pointer may be null.
struct ImportOutput {
  int32_t* kv_len = nullptr;          // [b]; 0 for inert requests
  int32_t* page_table = nullptr;      // [b, page_stride]
  int64_t page_stride = 0;            // a request with more tokens is at fault
  uint32_t* ancestor_bits = nullptr;  // [b * q_len, words_per_row]; 0 for inert requests
  int words_per_row = 0;              // >= ceil(q_len / 32)
};

// With seq_len_has_tree a request with seq_len below q_len is padding, and comes out inert; without, seq_len 0 is an empty prefix.
// Throws Error(kInvalidArgument) naming the argument, its value and what is allowed. On a device a request at fault comes
// out inert and check_tree_run() tells.
void import_batch(const ImportProblem& problem, const ImportOutput& output, const TreeRun& run = {});
// 0 for host problems. Depends on no pointer.
std::size_t import_workspace_bytes(const ImportProblem& problem);

}  // namespace treemla
