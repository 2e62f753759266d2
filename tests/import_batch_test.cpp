// Importing an engine's batch against the definition: layouts, lengths, padding, indices of both widths, hostile tables.

#include "treemla/import_batch.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "error_of.hpp"
#include "treemla/error.hpp"
#include "treemla/tree.hpp"
#include "trees/import_plan.hpp"

namespace treemla {
namespace {

using testing::HasSubstr;
using Ints = std::vector<int32_t>;

constexpr int32_t kUntouched = 2147480000;

// A random batch of an engine: token rows in random order, prefixes of 0 and 1 among them, trees and their masks in both layouts.
struct Batch {
  int b, q_len, words;
  int64_t row_width = 60, row_stride = 64;
  Ints table, row_index, seq_len, parents;
  std::vector<int64_t> row_index64, seq_len64;
  std::vector<uint8_t> full, qlen_only;
  Ints kv_len, pages;
  std::vector<uint32_t> bits;

  Batch(uint32_t seed, int q_len_)
      : b(5), q_len(q_len_), words(words_per_row(q_len_) + static_cast<int>(seed % 2)) {
    std::mt19937 rng(seed);
    row_width += q_len;
    row_stride += q_len;
    table.assign(8 * row_stride, -7);
    for (int row = 0; row < 8; ++row)
      for (int t = 0; t < row_width; ++t) table[row * row_stride + t] = static_cast<int32_t>(rng() % 100000);
    row_index.resize(8);
    std::iota(row_index.begin(), row_index.end(), 0);
    std::shuffle(row_index.begin(), row_index.end(), rng);
    row_index.resize(b);
    seq_len = {0, 1, static_cast<int32_t>(rng() % 60), 60, 33};
    row_index64.assign(row_index.begin(), row_index.end());
    seq_len64.assign(seq_len.begin(), seq_len.end());
    for (int r = 0; r < b; ++r) {
      Ints tree(q_len, -1);
      for (int i = 1; i < q_len; ++i) tree[i] = static_cast<int32_t>(rng() % static_cast<unsigned>(i));
      for (const uint8_t cell : full_mask_from_parents(tree, seq_len[r])) full.push_back(cell);
      for (const uint8_t cell : dense_from_parents(tree)) qlen_only.push_back(cell);
      parents.insert(parents.end(), tree.begin(), tree.end());
    }
    kv_len.assign(b, kUntouched);
    pages.assign(b * row_width, kUntouched);
    bits.assign(static_cast<std::size_t>(b) * q_len * words, ~0u);
  }

  ImportProblem problem(MaskLayout layout) const {
    ImportProblem p;
    p.b = b;
    p.q_len = q_len;
    p.token_table = table.data();
    p.num_rows = 8;
    p.row_width = row_width;
    p.row_stride = row_stride;
    p.row_index = row_index.data();
    p.seq_len = seq_len.data();
    p.mask_layout = layout;
    const std::vector<uint8_t>& mask = layout == MaskLayout::kFull ? full : qlen_only;
    p.mask = mask.data();
    p.mask_len = static_cast<int64_t>(mask.size());
    return p;
  }
  ImportOutput output() { return {kv_len.data(), pages.data(), row_width, bits.data(), words}; }

  // What request r must have become; `active` false: inert.
  void expect(int r, int64_t length, bool tree, bool active = true) const {
    SCOPED_TRACE(testing::Message() << "request " << r << ", q_len " << q_len);
    EXPECT_EQ(kv_len[r], active ? length : 0);
    for (int64_t t = 0; t < row_width; ++t)
      ASSERT_EQ(pages[r * row_width + t],
                active && t < length ? table[row_index[r] * row_stride + t] : kUntouched)
          << t;
    Ints chain(q_len);
    std::iota(chain.begin(), chain.end(), -1);
    const std::vector<uint32_t> want = bits_from_parents(
        tree ? std::span<const int32_t>(parents).subspan(static_cast<std::size_t>(r) * q_len, q_len)
             : std::span<const int32_t>(chain),
        words);
    for (std::size_t i = 0; i < want.size(); ++i)
      ASSERT_EQ(bits[static_cast<std::size_t>(r) * want.size() + i], active ? want[i] : 0) << i;
  }
};

TEST(ImportBatch, EveryLayout) {
  for (const int q_len : {1, 2, 9, 32, 33, 64, 65}) {
    for (const MaskLayout layout : {MaskLayout::kNone, MaskLayout::kFull, MaskLayout::kQlenOnly}) {
      Batch batch(static_cast<uint32_t>(q_len), q_len);
      import_batch(batch.problem(layout), batch.output());
      for (int r = 0; r < batch.b; ++r)
        batch.expect(r, batch.seq_len[r] + q_len, layout != MaskLayout::kNone);
    }
  }
}

TEST(ImportBatch, WideIndicesGiveTheSame) {
  Batch batch(3, 9);
  ImportProblem p = batch.problem(MaskLayout::kFull);
  p.row_index = batch.row_index64.data();
  p.row_index_type = IndexType::kI64;
  p.seq_len = batch.seq_len64.data();
  p.seq_len_type = IndexType::kI64;
  import_batch(p, batch.output());
  for (int r = 0; r < batch.b; ++r) batch.expect(r, batch.seq_len[r] + 9, true);
}

TEST(ImportBatch, LengthsThatCountTheTree) {
  Batch batch(4, 9);
  ImportProblem p = batch.problem(MaskLayout::kQlenOnly);
  p.seq_len_has_tree = true;
  batch.seq_len = {0, 8, 9, 60, 33};  // the first two are padding
  import_batch(p, batch.output());
  for (int r = 0; r < batch.b; ++r) batch.expect(r, batch.seq_len[r], true, r >= 2);
}

TEST(ImportBatch, AMaskOfASmallerBatchLeavesTheRestInert) {
  for (const MaskLayout layout : {MaskLayout::kFull, MaskLayout::kQlenOnly}) {
    Batch batch(5, 9);
    ImportProblem p = batch.problem(layout);
    p.mask_len -= layout == MaskLayout::kFull ? 9 * (60 + 9) + 9 * (33 + 9) : 2 * 81;
    import_batch(p, batch.output());
    for (int r = 0; r < batch.b; ++r) batch.expect(r, batch.seq_len[r] + 9, true, r < 3);
  }
}

TEST(ImportBatch, OnlyTheTailOfAFullMaskIsRead) {
  Batch batch(6, 9);
  std::size_t at = 0;
  for (int r = 0; r < batch.b; ++r)
    for (int i = 0; i < 9; ++i, at += batch.seq_len[r] + 9)
      std::fill_n(batch.full.begin() + at, batch.seq_len[r],
                  uint8_t{0});  // an engine that left the prefix unset
  import_batch(batch.problem(MaskLayout::kFull), batch.output());
  for (int r = 0; r < batch.b; ++r) batch.expect(r, batch.seq_len[r] + 9, true);
}

TEST(ImportBatch, AnyOutputMayBeMissing) {
  Batch batch(7, 9);
  ImportProblem p = batch.problem(MaskLayout::kFull);
  import_batch(p, {});
  ImportOutput only_bits;
  only_bits.ancestor_bits = batch.bits.data();
  only_bits.words_per_row = batch.words;
  p.token_table = nullptr;
  p.row_width = 0;
  p.num_rows = 0;
  import_batch(p, only_bits);
  EXPECT_EQ(batch.bits[0], 1u);
  EXPECT_EQ(batch.kv_len[0], kUntouched);
}

TEST(ImportBatch, Errors) {
  const auto with = [](const auto& change, auto... arguments) {
    Batch batch(8, 9);
    ImportProblem p = batch.problem(MaskLayout::kQlenOnly);
    ImportOutput out = batch.output();
    change(batch, p, out, arguments...);
    return error_of([&] { import_batch(p, out); });
  };
  EXPECT_THAT(with([](Batch&, ImportProblem& p, ImportOutput&) { p.q_len = 0; }), HasSubstr("q_len = 0"));
  EXPECT_THAT(with([](Batch&, ImportProblem& p, ImportOutput&) { p.row_index = nullptr; }),
              HasSubstr("row_index is null"));
  EXPECT_THAT(with([](Batch&, ImportProblem& p, ImportOutput&) { p.mask = nullptr; }),
              HasSubstr("mask is null"));
  EXPECT_THAT(with([](Batch&, ImportProblem&, ImportOutput& out) { out.words_per_row = 0; }),
              HasSubstr("output.words_per_row = 0 is outside [1,"));
  EXPECT_THAT(with([](Batch& b, ImportProblem&, ImportOutput&) { b.row_index[2] = 8; }),
              HasSubstr("row_index[2] = 8 is outside"));
  EXPECT_THAT(with([](Batch& b, ImportProblem&, ImportOutput&) { b.row_index[2] = -1; }),
              HasSubstr("row_index[2] = -1 is outside"));
  EXPECT_THAT(with([](Batch& b, ImportProblem&, ImportOutput&) { b.seq_len[4] = -2; }),
              HasSubstr("seq_len[4] = -2 must not be negative"));
  EXPECT_THAT(with([](Batch& b, ImportProblem&, ImportOutput&) { b.seq_len[4] = 61; }),
              HasSubstr("seq_len[4] = 61"));
  EXPECT_THAT(with([](Batch&, ImportProblem&, ImportOutput& out) { out.page_stride = 68; }),
              HasSubstr("seq_len[3] = 60"));
  EXPECT_THAT(with([](Batch&, ImportProblem& p, ImportOutput& out) { p.seq_len = out.kv_len; }),
              HasSubstr("must not be the array seq_len"));
}

// No length, however far from any that a request can have, moves a later request's mask to where none is.
TEST(ImportBatch, LengthsOf64Bits) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  for (const int q_len : {1, 3, 16, 64})
    for (const int64_t length : {kHuge, kHuge - 1, int64_t{1} << 59, int64_t{1} << 32, int64_t{1} << 31,
                                 (int64_t{1} << 31) - 1, -kHuge - 1, int64_t{-1} << 32}) {
      SCOPED_TRACE(testing::Message() << "q_len " << q_len << ", length " << length);
      Batch batch(9, q_len);
      batch.seq_len64[0] = length;
      ImportProblem p = batch.problem(MaskLayout::kFull);
      p.seq_len = batch.seq_len64.data();
      p.seq_len_type = IndexType::kI64;
      for (const bool copies : {true, false}) {
        ImportOutput out = batch.output();
        if (!copies) out.page_table = nullptr;
        EXPECT_THAT(error_of([&] { import_batch(p, out); }),
                    HasSubstr(length < 0 ? "must not be negative" : "seq_len[0] = 2147483647"));
      }
      // What a device does with the requests after it.
      FaultWord fault{};
      const ImportRequest c = read_import_request(p, batch.output(), 1, full_mask_width(p, 0), fault);
      EXPECT_TRUE(length < 0 || c.kv_len == 0);
      EXPECT_GE(c.mask_at, 0);
    }
  Batch batch(9, 3);
  batch.row_index64[1] = int64_t{1} << 40;
  ImportProblem p = batch.problem(MaskLayout::kNone);
  p.row_index = batch.row_index64.data();
  p.row_index_type = IndexType::kI64;
  EXPECT_THAT(error_of([&] { import_batch(p, batch.output()); }), HasSubstr("row_index[1] = 2147483647"));
}

TEST(ImportBatch, AnEmptyBatch) { import_batch({}, {}); }

}  // namespace
}  // namespace treemla
