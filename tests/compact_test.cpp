// Compacting caches against a reference that gathers every row before it scatters any: page sizes, row sizes, overlapping moves,
// freed pages, hostile tables.

#include "treemla/compact.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "error_of.hpp"
#include "treemla/error.hpp"

namespace treemla {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Ints = std::vector<int32_t>;
using Bytes = std::vector<unsigned char>;

// A random batch over pages in random order; unused entries are poisoned.
struct Cache {
  int b, num_layers, page_size, path_stride;
  int64_t row_bytes, row_stride, layer_stride, num_pages;
  Ints q_indptr{0}, kv_len, accept_index, num_accepted, page_indptr{0};
  std::vector<int64_t> entries;
  Bytes pool;

  Cache(uint32_t seed, int page_size_, int64_t row_bytes_) : page_size(page_size_), row_bytes(row_bytes_) {
    std::mt19937 rng(seed);
    const auto below = [&](int n) { return static_cast<int>(rng() % static_cast<unsigned>(n)); };
    b = 1 + below(6);
    num_layers = 1 + below(4);
    path_stride = 1 + below(12);
    row_stride = row_bytes + (below(2) ? 0 : 16 * below(3));
    int64_t pages = 0;
    for (int r = 0; r < b; ++r) {
      const int q_len = below(5) == 0 ? 0 : 1 + below(40);
      const int len = below(6) == 0 ? 0 : q_len + below(100);
      q_indptr.push_back(q_indptr.back() + q_len);
      kv_len.push_back(len);
      page_indptr.push_back(page_indptr.back() + (len + page_size - 1) / page_size + below(3));
      pages = page_indptr.back();
      Ints nodes(q_len);
      std::iota(nodes.begin(), nodes.end(), 0);
      if (q_len > 1) std::shuffle(nodes.begin() + 1, nodes.end(), rng);
      nodes.resize(std::min(q_len, 1 + below(path_stride)));
      std::sort(nodes.begin(), nodes.end());
      num_accepted.push_back(q_len == 0 ? 0 : static_cast<int>(nodes.size()) - 1);
      if (q_len > 0 && below(8) == 0) num_accepted.back() = -1;  // after a fault
      for (int j = 0; j < path_stride; ++j)
        accept_index.push_back(j < static_cast<int>(nodes.size()) ? q_indptr[r] + nodes[j] : -1);
    }
    num_pages = pages + 3;
    std::vector<int64_t> order(num_pages);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    entries.assign(order.begin(), order.begin() + pages);
    for (int r = 0; r < b; ++r)
      for (int i = page_indptr[r] + (kv_len[r] + page_size - 1) / page_size; i < page_indptr[r + 1]; ++i)
        entries[i] = 2147480000;
    layer_stride = num_pages * page_size * row_stride + 32;
    pool.resize(num_layers * layer_stride);
    for (auto& x : pool) x = static_cast<unsigned char>(rng());
  }

  CompactProblem problem() {
    CompactProblem p;
    p.b = b;
    p.num_layers = num_layers;
    p.pool = pool.data();
    p.layer_stride_bytes = layer_stride;
    p.row_bytes = row_bytes;
    p.row_stride_bytes = row_stride;
    p.num_pages = num_pages;
    p.page_size = page_size;
    p.pages = {entries.data(), IndexType::kI64, static_cast<int64_t>(entries.size()), page_indptr.data(), 0};
    p.q_indptr = q_indptr.data();
    p.total_q = q_indptr.back();
    p.kv_len = kv_len.data();
    p.accept_index = accept_index.data();
    p.path_stride = path_stride;
    p.num_accepted = num_accepted.data();
    return p;
  }

  bool active(int r) const { return q_indptr[r + 1] > q_indptr[r] && kv_len[r] > 0 && num_accepted[r] >= 0; }
  int64_t byte_of(int r, int64_t t) const {
    return (entries[page_indptr[r] + t / page_size] * page_size + t % page_size) * row_stride;
  }

  // Gathers all, then scatters all.
  Bytes expected() const {
    Bytes result = pool;
    std::vector<std::pair<int64_t, Bytes>> rows;
    for (int layer = 0; layer < num_layers; ++layer) {
      for (int r = 0; r < b; ++r) {
        const int64_t prefix = kv_len[r] - (q_indptr[r + 1] - q_indptr[r]);
        for (int j = 0; active(r) && j <= num_accepted[r]; ++j) {
          const int node = accept_index[r * path_stride + j] - q_indptr[r];
          const auto from = pool.begin() + layer * layer_stride + byte_of(r, prefix + node);
          rows.push_back({layer * layer_stride + byte_of(r, prefix + j), Bytes(from, from + row_bytes)});
        }
      }
    }
    for (const auto& [to, bytes] : rows) std::copy(bytes.begin(), bytes.end(), result.begin() + to);
    return result;
  }
};

TEST(Compact, RandomCachesAgainstGatherThenScatter) {
  uint32_t seed = 1;
  for (const int page_size : {1, 2, 16, 64}) {
    for (const int64_t row_bytes : {1152, 656, 576, 7, 1}) {
      for (int i = 0; i < 12; ++i, ++seed) {
        SCOPED_TRACE(testing::Message()
                     << "seed " << seed << ", page_size " << page_size << ", row_bytes " << row_bytes);
        Cache c(seed, page_size, row_bytes);
        const Bytes expected = c.expected();
        CompactProblem p = c.problem();
        std::vector<void*> layers;
        for (int layer = 0; layer < c.num_layers; ++layer)
          layers.push_back(c.pool.data() + layer * c.layer_stride);
        if (i % 2 == 1) {
          p.layers = layers.data();
          p.pool = nullptr;
        }
        Ints new_len(c.b, -9), num_freed(c.b, -9);
        std::vector<int64_t> freed(p.total_q, -9);
        compact_cache(p, {new_len.data(), freed.data(), num_freed.data()});
        ASSERT_EQ(c.pool, expected);
        for (int r = 0; r < c.b; ++r) {
          const int q_len = c.q_indptr[r + 1] - c.q_indptr[r];
          const int kept = c.active(r) ? c.kv_len[r] - q_len + 1 + c.num_accepted[r] : c.kv_len[r];
          EXPECT_EQ(new_len[r], kept);
          const int first = (kept + page_size - 1) / page_size,
                    end = (c.kv_len[r] + page_size - 1) / page_size;
          ASSERT_EQ(num_freed[r], end - first);
          for (int i_freed = 0; i_freed < end - first; ++i_freed)
            EXPECT_EQ(freed[c.q_indptr[r] + i_freed], c.entries[c.page_indptr[r] + first + i_freed]);
        }
        // A second compaction of the compacted cache moves nothing.
        Ints chain = c.accept_index;
        for (int r = 0; r < c.b; ++r)
          for (int j = 0; j <= c.num_accepted[r]; ++j) chain[r * c.path_stride + j] = c.q_indptr[r] + j;
        p.accept_index = chain.data();
        compact_cache(p, {});
        EXPECT_EQ(c.pool, expected);
      }
    }
  }
}

TEST(Compact, AWindowOfOverlappingRows) {
  // Every destination but the first is itself a source: 0 1 2 .. <- 0 2 3 4 ..
  Bytes pool(8);
  std::iota(pool.begin(), pool.end(), 0);
  const Ints q_indptr{0, 8}, kv_len{8}, path{0, 2, 3, 4, 5, 6, 7}, accepted{6}, slots{0, 1, 2, 3, 4, 5, 6, 7};
  CompactProblem p;
  p.b = 1;
  p.pool = pool.data();
  p.row_bytes = 1;
  p.num_pages = 8;
  p.pages = {slots.data(), IndexType::kI32, 8, nullptr, 8};
  p.q_indptr = q_indptr.data();
  p.total_q = 8;
  p.kv_len = kv_len.data();
  p.accept_index = path.data();
  p.path_stride = 7;
  p.num_accepted = accepted.data();
  compact_cache(p, {});
  EXPECT_THAT(pool, ElementsAre(0, 2, 3, 4, 5, 6, 7, 7));
}

TEST(Compact, HostileInput) {
  const auto make = [] {  // one request whose cache is as it should be
    for (uint32_t seed = 1000;; ++seed) {
      Cache c(seed, 2, 8);
      if (c.active(0) && c.num_accepted[0] >= 2 && c.b == 1) return c;
    }
  };
  const auto error_with = [&](auto change) {
    Cache c = make();
    const Bytes before = c.pool;
    CompactProblem p = c.problem();
    change(c, p);
    const std::string error = error_of([&] { compact_cache(p, {}); });
    EXPECT_EQ(c.pool, before) << "rows moved before the error";
    return error;
  };
  using C = Cache;
  using P = CompactProblem;
  EXPECT_THAT(error_with([](C& c, P&) { c.accept_index[1] = c.accept_index[2]; }),
              HasSubstr("accept_index[0, 2]"));
  EXPECT_THAT(error_with([](C& c, P&) { c.accept_index[0] = 1; }), HasSubstr("accept_index[0, 0]"));
  EXPECT_THAT(error_with([](C& c, P&) { c.accept_index[2] = -1; }), HasSubstr("accept_index[0, 2]"));
  EXPECT_THAT(error_with([](C& c, P&) { c.accept_index[2] = 2147483647; }), HasSubstr("accept_index[0, 2]"));
  EXPECT_THAT(error_with([](C& c, P&) { c.num_accepted[0] = c.path_stride; }), HasSubstr("num_accepted[0]"));
  EXPECT_THAT(error_with([](C& c, P&) { c.kv_len[0] = 1; }), HasSubstr("kv_len[0] = 1"));
  EXPECT_THAT(error_with([](C& c, P&) { c.kv_len[0] = -5; }), HasSubstr("kv_len[0] = -5"));
  EXPECT_THAT(error_with([](C& c, P&) { c.kv_len[0] = 100000; }), HasSubstr("page table of request 0"));
  EXPECT_THAT(error_with([](C& c, P&) { c.page_indptr[0] = -3; }), HasSubstr("page table of request 0"));
  EXPECT_THAT(error_with([](C& c, P&) {
                for (auto& e : c.entries) e = 2147480000;
              }),
              HasSubstr("pages.entries: page entry"));
  EXPECT_THAT(error_with([](C& c, P&) { c.q_indptr[1] = -1; }), HasSubstr("q_indptr[1]"));
  EXPECT_THAT(error_with([](C&, P& p) { p.pool = nullptr; }), HasSubstr("layers and pool are null"));
  EXPECT_THAT(error_with([](C&, P& p) { p.row_bytes = 0; }), HasSubstr("row_bytes = 0"));
  EXPECT_THAT(error_with([](C&, P& p) { p.row_stride_bytes = 4; }), HasSubstr("row_stride_bytes = 4"));
  EXPECT_THAT(error_with([](C&, P& p) { p.page_size = 0; }), HasSubstr("page_size = 0"));
  EXPECT_THAT(error_with([](C&, P& p) { p.num_pages = int64_t{1} << 61; }), HasSubstr("64-bit"));
  Cache c = make();
  EXPECT_THAT(error_of([&] {
                compact_cache(c.problem(), {c.kv_len.data(), nullptr, nullptr});
              }),
              HasSubstr("output.kv_len must not be the input array"));
}

}  // namespace
}  // namespace treemla
