// What the tree steps find wrong with contents: the same codes, and so the same words, on the host and on a device.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace treemla {

enum class TreeFault : int {
  kNone = 0,
  kScoreNaN = 1,         // position: row of the request
  kScoreInfinite = 2,    // +inf
  kScoresEmpty = 3,      // a row of nothing but -inf
  kParent = 4,           // not before its child, or a second root; position: node
  kPrefixLen = 5,        // negative, or positions pass 32 bits
  kCandidateParent = 6,  // not before its child; position: candidate
  kCandidateNaN = 7,
  kBeamNaN = 8,     // row_log_probs
  kQIndptr = 9,     // negative, falls, or passes total_q
  kLink = 10,       // leaves the tree, or a child before its parent; position: the node it leaves from
  kLinkCycle = 11,  // more children than nodes
  kTemperature = 12,
  kDraftProb = 13,     // position: node
  kCoin = 14,          // position: node
  kArgmax = 15,        // negative
  kKvLen = 16,         // negative, or positive and below q_len
  kPageTable = 17,     // too short for kv_len
  kPageEntry = 18,     // outside [0, num_pages); position: page of the request
  kAcceptIndex = 19,   // doesn't rise from the root within the request; position: place on the path
  kNumAccepted = 20,   // passes path_stride or q_len
  kLayerPointer = 21,  // misaligned or null; position: layer
  kRowIndex = 22,      // outside the token table; position: the index
  kSeqLen = 23,        // negative, or more than a row or the page table has room for; position: seq_len
};

// Zero is no fault: FaultWord{}. (No initialiser, so that it may lie in a GPU's shared memory.)
struct FaultWord {
  uint64_t word;
  TREEMLA_HD explicit operator bool() const { return word != 0; }
};

// Requests below 2^24.
TREEMLA_HD inline FaultWord make_fault(TreeFault fault, int request, int position) {
  return {static_cast<uint64_t>(fault) << 56 | static_cast<uint64_t>(request & 0xFFFFFF) << 32 |
          static_cast<uint32_t>(position)};
}

// Throws Error(kInvalidArgument) that names the argument, the request and the place, if the word is a fault.
void throw_if_fault(FaultWord fault);

}  // namespace treemla
