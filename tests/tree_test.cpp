// Tree encodings: round trips, equivalences, the golden links of SGLang's verify buffers, and hostile input.

#include "treemla/tree.hpp"

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

namespace treemla {
namespace {

using testing::HasSubstr;
using Ints = std::vector<int32_t>;

Ints random_tree(int q_len, uint32_t seed) {
  std::mt19937 rng(seed);
  Ints parents(q_len, -1);
  for (int i = 1; i < q_len; ++i) parents[i] = static_cast<int32_t>(rng() % static_cast<uint32_t>(i));
  return parents;
}
Ints chain(int q_len) {
  Ints parents(q_len);
  std::iota(parents.begin(), parents.end(), -1);
  return parents;
}

// Straight from the definition: j is i or an ancestor of i.
bool sees(const Ints& parents, int i, int j) {
  while (i != -1 && i != j) i = parents[i];
  return i == j;
}

class RoundTrip : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Tree, RoundTrip, testing::Values(0, 1, 2, 31, 32, 33, 64, 65, 257, 1025));

TEST_P(RoundTrip, EveryEncodingGivesTheParentsBack) {
  const int q_len = GetParam();
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    SCOPED_TRACE(seed);
    const Ints parents = random_tree(q_len, seed);
    const int words = words_per_row(q_len);

    const auto bits = bits_from_parents(parents);
    EXPECT_EQ(bits.size(), static_cast<std::size_t>(q_len) * words);
    EXPECT_EQ(parents_from_bits(bits, q_len, words), parents);
    const auto wide = bits_from_parents(parents, words + 3);
    EXPECT_EQ(parents_from_bits(wide, q_len, words + 3), parents);

    const auto dense = dense_from_parents(parents);
    EXPECT_EQ(dense_from_bits(bits, q_len, words), dense);
    EXPECT_EQ(dense_from_bits(wide, q_len, words + 3), dense);
    EXPECT_EQ(bits_from_dense(dense, q_len), bits);
    EXPECT_EQ(bits_from_dense(dense, q_len, words + 3), wide);
    EXPECT_EQ(parents_from_dense(dense, q_len), parents);

    for (int64_t prefix_len : {0, 1, 70}) {
      const auto full = full_mask_from_parents(parents, prefix_len);
      EXPECT_EQ(bits_from_full_mask(full, q_len, prefix_len), bits);
      EXPECT_EQ(parents_from_full_mask(full, q_len, prefix_len), parents);
    }

    const RetrieveLinks links = links_from_parents(parents);
    EXPECT_EQ(parents_from_links(links.next_token, links.next_sibling), parents);
  }
}

TEST_P(RoundTrip, BitsAreTheAncestorRelation) {
  const int q_len = GetParam();
  const Ints parents = random_tree(q_len, 7);
  const int words = words_per_row(q_len);
  const auto bits = bits_from_parents(parents);
  for (int i = 0; i < q_len; ++i) {
    for (int j = 0; j < words * 32; ++j) {
      const bool got = (bits[static_cast<std::size_t>(i) * words + j / 32] >> (j % 32)) & 1;
      ASSERT_EQ(got, j < q_len && sees(parents, i, j)) << "node " << i << " key " << j;
    }
  }
}

TEST_P(RoundTrip, ChainBitsAreCausal) {
  const int q_len = GetParam();
  const auto dense = dense_from_parents(chain(q_len));
  const auto from_bits = dense_from_bits(bits_from_parents(chain(q_len)), q_len, words_per_row(q_len));
  for (int i = 0; i < q_len; ++i) {
    for (int j = 0; j < q_len; ++j) {
      ASSERT_EQ(dense[static_cast<std::size_t>(i) * q_len + j], j <= i) << i << " " << j;
    }
  }
  EXPECT_EQ(from_bits, dense);
}

TEST(Tree, LargeTreesAreQuick) {  // a quadratic walk of links or depths would take minutes
  const int q_len = 2'000'000;
  for (const Ints& parents : {chain(q_len), Ints(random_tree(q_len, 3))}) {
    const RetrieveLinks links = links_from_parents(parents);
    EXPECT_EQ(parents_from_links(links.next_token, links.next_sibling), parents);
    EXPECT_EQ(tree_depths(parents).size(), parents.size());
  }
}

TEST(Tree, DepthsAndPositionsOfUnsortedNodes) {
  const Ints parents{-1, 0, 1, 2, 0, 4, 1};  // node 4 is shallower than node 3
  EXPECT_EQ(tree_depths(parents), (Ints{0, 1, 2, 3, 1, 2, 2}));
  EXPECT_EQ(tree_positions(parents, 100), (Ints{100, 101, 102, 103, 101, 102, 102}));
  EXPECT_EQ(tree_depths({}), Ints{});
}

TEST(Tree, DepthsMatchTheNumberOfVisibleNodes) {
  const Ints parents = random_tree(257, 11), depths = tree_depths(parents);
  const auto dense = dense_from_parents(parents);
  for (int i = 0; i < 257; ++i) {
    EXPECT_EQ(std::count(dense.begin() + i * 257, dense.begin() + (i + 1) * 257, 1), depths[i] + 1);
  }
}

TEST(Tree, FullMaskHasPrefixThenTree) {
  const auto full = full_mask_from_parents(Ints{-1, 0, 0}, 2);
  EXPECT_EQ(full, (std::vector<uint8_t>{1, 1, 1, 0, 0,  //
                                        1, 1, 1, 1, 0,  //
                                        1, 1, 1, 0, 1}));
}

TEST(Tree, AnyNonzeroByteAttends) {
  const std::vector<uint8_t> dense{255, 0, 2, 128};
  EXPECT_EQ(bits_from_dense(dense, 2), (std::vector<uint32_t>{1, 3}));
}

TEST(Tree, MasksThatAreNoTreesAreCarriedOver) {
  std::mt19937 rng(5);
  const int q_len = 67;
  std::vector<uint8_t> dense(q_len * q_len);
  for (auto& x : dense) x = rng() & 1;
  EXPECT_EQ(dense_from_bits(bits_from_dense(dense, q_len), q_len, words_per_row(q_len)), dense);
}

TEST(Tree, BitsPastTheLastNodeMeanNothing) {
  const Ints parents = random_tree(33, 2);
  auto bits = bits_from_parents(parents, 3);
  for (int i = 0; i < 33; ++i) {
    bits[i * 3 + 1] |= ~1u;
    bits[i * 3 + 2] = ~0u;
  }
  EXPECT_EQ(parents_from_bits(bits, 33, 3), parents);
  EXPECT_EQ(dense_from_bits(bits, 33, 3), dense_from_parents(parents));
}

// ---- links

TEST(Links, GoldenVectors) {  // FIELD.md section 3, from SGLang's test of verify_tree_greedy
  EXPECT_EQ(parents_from_links(Ints{1, 2, -1, 4, 5, -1}, Ints{-1, 3, -1, -1, -1, -1}),
            (Ints{-1, 0, 1, 0, 3, 4}));
  // The second request lists child 4 before child 1: any order of siblings is fine.
  EXPECT_EQ(parents_from_links(Ints{4, 2, 3, -1, 5, -1}, Ints{-1, -1, -1, -1, 1, -1}),
            (Ints{-1, 0, 1, 2, 0, 4}));
}

TEST(Links, ChildrenInNumberingOrder) {
  const RetrieveLinks first = links_from_parents(Ints{-1, 0, 1, 0, 3, 4});
  EXPECT_EQ(first.next_token, (Ints{1, 2, -1, 4, 5, -1}));
  EXPECT_EQ(first.next_sibling, (Ints{-1, 3, -1, -1, -1, -1}));
  const RetrieveLinks second = links_from_parents(Ints{-1, 0, 1, 2, 0, 4});
  EXPECT_EQ(second.next_token, (Ints{1, 2, 3, -1, 5, -1}));
  EXPECT_EQ(second.next_sibling, (Ints{-1, 4, -1, -1, -1, -1}));
}

struct BadLinks {
  const char* what;
  Ints next_token, next_sibling;
  std::vector<const char*> says;
};
TEST(Links, MalformedOnesAreRefused) {
  const BadLinks kBad[] = {
      {"self cycle", {0, -1}, {-1, -1}, {"next_token", "node 0 of request 9 = 0", "reached twice"}},
      {"cycle through the root",
       {1, 2, 0},
       {-1, -1, -1},
       {"next_token", "node 2 of request 9 = 0", "reached twice"}},
      {"sibling cycle",
       {1, -1, -1},
       {-1, 2, 1},
       {"next_sibling", "node 2 of request 9 = 1", "reached twice"}},
      {"sibling of itself", {1, -1}, {-1, 1}, {"next_sibling", "node 1 of request 9 = 1", "reached twice"}},
      {"two parents",
       {1, 2, -1, -1},
       {-1, 3, 3, -1},
       {"next_sibling", "node 2 of request 9 = 3", "reached twice"}},
      {"orphan", {1, -1, -1}, {-1, -1, -1}, {"node 2 of request 9", "orphan"}},
      {"child before its parent",
       {2, -1, 1},
       {-1, -1, -1},
       {"node 1 of request 9", "its parent comes after it"}},
      {"token past the end", {1, 2}, {-1, -1}, {"next_token", "node 1 of request 9 = 2", "[-1, 2)"}},
      {"token below -1", {-2, -1}, {-1, -1}, {"next_token", "node 0 of request 9 = -2", "[-1, 2)"}},
      {"sibling past the end",
       {1, -1},
       {-1, 2147480000},
       {"next_sibling", "node 1 of request 9 = 2147480000"}},
      {"lowest int", {std::numeric_limits<int32_t>::min()}, {-1}, {"next_token", "-2147483648"}},
      {"root with a sibling", {-1, -1}, {1, -1}, {"next_sibling", "node 0 of request 9 = 1", "-1"}},
      {"lengths differ", {1, -1}, {-1}, {"next_sibling", "1 elements", "2 x 1"}},
  };
  for (const BadLinks& bad : kBad) {
    SCOPED_TRACE(bad.what);
    const std::string text = error_of([&] { parents_from_links(bad.next_token, bad.next_sibling, 9); });
    for (const char* part : bad.says) EXPECT_THAT(text, HasSubstr(part));
  }
}

// ---- hostile input

TEST(Parents, MalformedOnesAreRefused) {
  const struct {
    Ints parents;
    std::vector<const char*> says;
  } kBad[] = {
      {{0}, {"node 0 of request 4 (parents[0]) = 0", "must be -1"}},
      {{-1, -1}, {"node 1 of request 4 (parents[1]) = -1", "[0, 1)", "one root"}},
      {{-1, 0, 2}, {"node 2 of request 4 (parents[2]) = 2", "[0, 2)", "before their children"}},
      {{-1, 2, 1}, {"node 1 of request 4 (parents[1]) = 2", "[0, 1)"}},
      {{-1, 0, 2147480000}, {"(parents[2]) = 2147480000"}},
      {{-1, -2147483647}, {"(parents[1]) = -2147483647"}},
  };
  for (const auto& bad : kBad) {
    for (const std::string& text :
         {error_of([&] { check_parents(bad.parents, 4); }), error_of([&] { tree_depths(bad.parents, 4); }),
          error_of([&] { tree_positions(bad.parents, 5, 4); }),
          error_of([&] { bits_from_parents(bad.parents, 0, 4); }),
          error_of([&] { dense_from_parents(bad.parents, 4); }),
          error_of([&] { full_mask_from_parents(bad.parents, 3, 4); }),
          error_of([&] { links_from_parents(bad.parents, 4); })}) {
      for (const char* part : bad.says) EXPECT_THAT(text, HasSubstr(part));
    }
  }
}

TEST(Masks, ThoseThatAreNoTreesHaveNoParents) {
  const struct {
    std::vector<uint8_t> dense;
    std::vector<const char*> says;
  } kBad[] = {
      {{1, 0, 0,  //
        1, 0, 0,  //
        1, 0, 1},
       {"request 6", "node 1 does not see itself"}},
      {{1, 0, 1,  //
        1, 1, 0,  //
        1, 0, 1},
       {"request 6", "node 0 sees node 2", "nodes 0..0"}},
      {{1, 0, 0,  //
        1, 1, 0,  //
        0, 0, 1},
       {"request 6", "node 2", "second root"}},
      {{1, 0, 0,  //
        1, 1, 0,  //
        0, 1, 1},
       {"request 6", "node 2 does not see node 0", "its parent 1 does"}},
      {{1, 0, 0, 0,  //
        1, 1, 0, 0,  //
        1, 0, 1, 0,  //
        1, 1, 1, 1},
       {"request 6", "node 3 sees node 1", "its parent 2 does not"}},
  };
  for (const auto& bad : kBad) {
    const int q_len = bad.dense.size() == 9 ? 3 : 4;
    const std::string from_dense = error_of([&] { parents_from_dense(bad.dense, q_len, 6); });
    const auto bits = bits_from_dense(bad.dense, q_len);
    const std::string from_bits = error_of([&] { parents_from_bits(bits, q_len, 1, 6); });
    for (const char* part : bad.says) {
      EXPECT_THAT(from_dense, HasSubstr(part));
      EXPECT_THAT(from_bits, HasSubstr(part));
    }
  }
}

TEST(Masks, EveryFlippedBitIsNoticed) {  // past word borders too
  const int q_len = 40;
  const Ints parents = random_tree(q_len, 4);
  const auto good = dense_from_parents(parents);
  for (std::size_t k = 0; k < good.size(); ++k) {
    auto dense = good;
    dense[k] ^= 1;
    try {  // a flip may give another tree, never the same one
      EXPECT_NE(parents_from_dense(dense, q_len), parents) << k;
      EXPECT_EQ(dense_from_parents(parents_from_dense(dense, q_len)), dense) << k;
    } catch (const Error&) {
    }
  }
}

TEST(Masks, MaskedPrefixIsRefused) {
  auto full = full_mask_from_parents(Ints{-1, 0, 0}, 4);
  full[2 * 7 + 3] = 0;
  const std::string text = error_of([&] { bits_from_full_mask(full, 3, 4, 0, 5); });
  for (const char* part : {"full_mask", "request 5", "node 2", "prefix token 3", "full_mask[17]"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  EXPECT_THAT(error_of([&] { parents_from_full_mask(full, 3, 4, 5); }), HasSubstr("prefix token 3"));
}

TEST(Masks, SizesAreChecked) {
  const std::vector<uint8_t> bytes(12);
  const std::vector<uint32_t> bits(12);
  EXPECT_THAT(error_of([&] { bits_from_dense(bytes, 3); }), HasSubstr("12 elements: 3 x 3"));
  EXPECT_THAT(error_of([&] { bits_from_dense(bytes, -1); }), HasSubstr("q_len of request 0 = -1"));
  EXPECT_THAT(error_of([&] { parents_from_dense(bytes, 4, 2); }), HasSubstr("dense of request 2 has 12"));
  EXPECT_THAT(error_of([&] { parents_from_bits(bits, 5, 2, 2); }), HasSubstr("bits of request 2 has 12"));
  EXPECT_THAT(error_of([&] { parents_from_bits(bits, 33, 1, 2); }),
              HasSubstr("words of request 2 = 1 must be at least 2"));
  EXPECT_THAT(error_of([&] { parents_from_bits(bits, 12, -1, 2); }), HasSubstr("words of request 2 = -1"));
  EXPECT_THAT(error_of([&] { dense_from_bits(bits, 4, 1); }), HasSubstr("12 elements: 4 x 1"));
  EXPECT_THAT(error_of([&] { bits_from_full_mask(bytes, 3, 2); }), HasSubstr("12 elements: 3 x 5"));
  EXPECT_THAT(error_of([&] { bits_from_full_mask(bytes, 3, -1); }),
              HasSubstr("prefix_len of request 0 = -1"));
  EXPECT_THAT(error_of([&] { bits_from_full_mask(bytes, 3, std::numeric_limits<int64_t>::max()); }),
              HasSubstr("prefix_len"));
  EXPECT_THAT(error_of([&] { bits_from_full_mask(bytes, 3, std::numeric_limits<int64_t>::max() - 3); }),
              HasSubstr("12 elements"));  // 3 x 2^63 overflows
  EXPECT_THAT(error_of([&] { parents_from_full_mask(bytes, std::numeric_limits<int>::max(), 2); }),
              HasSubstr("12 elements"));
  EXPECT_THAT(error_of([&] { bits_from_parents(random_tree(33, 1), 1); }),
              HasSubstr("words of request 0 = 1"));
  EXPECT_THAT(error_of([&] {
                tree_positions(Ints{-1, 0}, -1, 3);
              }),
              HasSubstr("prefix_len of request 3 = -1"));
  EXPECT_THAT(error_of([&] { tree_positions(Ints{-1, 0}, 2147483647, 3); }), HasSubstr("[0, 2147483646]"));
  EXPECT_EQ(tree_positions(Ints{-1, 0}, 2147483646), (Ints{2147483646, 2147483647}));
}

TEST(Masks, NoMemoryIsAnError) {
  try {
    full_mask_from_parents(Ints{-1, 0}, int64_t{1} << 61);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kOutOfMemory);
  }
}

TEST(Masks, RandomGarbageGivesAnErrorOrATree) {
  std::mt19937 rng(17);
  for (int trial = 0; trial < 20000; ++trial) {
    const int q_len = 1 + static_cast<int>(rng() % 6);
    Ints next_token(q_len), next_sibling(q_len), parents(q_len);
    for (int i = 0; i < q_len; ++i) {
      const auto draw = [&] {
        return rng() % 16 == 0 ? static_cast<int32_t>(rng()) : static_cast<int32_t>(rng() % (q_len + 2)) - 1;
      };
      next_token[i] = draw();
      next_sibling[i] = rng() % 2 ? -1 : draw();
      parents[i] = draw();
    }
    try {
      check_parents(parents_from_links(next_token, next_sibling));
    } catch (const Error&) {
    }
    try {
      const auto bits = bits_from_parents(parents);
      EXPECT_EQ(parents_from_bits(bits, q_len, 1), parents);
    } catch (const Error&) {
    }
    std::vector<uint32_t> bits(q_len);
    for (auto& x : bits) x = rng();
    try {
      check_parents(parents_from_bits(bits, q_len, 1));
    } catch (const Error&) {
    }
  }
}

// ---- batches

TEST(Batch, RowsOfEveryRequest) {
  const Ints a = random_tree(5, 1), b = random_tree(70, 2), c = random_tree(33, 3);
  Ints parents, q_indptr{0};
  for (const Ints& tree : {a, Ints{}, b, c}) {
    parents.insert(parents.end(), tree.begin(), tree.end());
    q_indptr.push_back(static_cast<int32_t>(parents.size()));
  }
  const BatchBits batch = batch_bits_from_parents(parents, q_indptr);
  EXPECT_EQ(batch.words, 3);
  std::vector<uint32_t> expected;
  for (const Ints& tree : {a, b, c}) {
    const auto bits = bits_from_parents(tree, 3);
    expected.insert(expected.end(), bits.begin(), bits.end());
  }
  EXPECT_EQ(batch.bits, expected);
}

TEST(Batch, NoRequests) {
  const BatchBits batch = batch_bits_from_parents({}, Ints{0});
  EXPECT_TRUE(batch.bits.empty());
  EXPECT_EQ(batch.words, 0);
}

TEST(Batch, MalformedOnesAreRefused) {
  const Ints parents{-1, 0, -1, 0};
  const auto text = [&](const Ints& q_indptr) {
    return error_of([&] { batch_bits_from_parents(parents, q_indptr); });
  };
  EXPECT_THAT(text({}), HasSubstr("q_indptr has no elements"));
  EXPECT_THAT(text({1, 4}), HasSubstr("q_indptr[0] = 1 must be 0"));
  EXPECT_THAT(text({0, 3, 2, 4}), HasSubstr("q_indptr[2] = 2 is outside [3, 4]"));
  EXPECT_THAT(text({0, 2, 5}), HasSubstr("q_indptr[2] = 5 is outside [2, 4]"));
  EXPECT_THAT(text({0, -2147483647, 4}), HasSubstr("q_indptr[1] = -2147483647"));
  EXPECT_THAT(text({0, 2}), HasSubstr("q_indptr[1] = 2 must equal 4"));
  EXPECT_THAT(text({0, 4}), HasSubstr("parent of node 2 of request 0"));
  EXPECT_THAT(text({0, 1, 4}), HasSubstr("parent of node 0 of request 1"));
}

}  // namespace
}  // namespace treemla
