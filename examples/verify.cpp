#include <cstdio>
#include <vector>

#include "treemla/treemla.hpp"

// One request: 4 cached tokens, then a draft tree of a root with two children. 8 heads, latent 512, rope 64.
int main() {
  const std::vector<int32_t> parents = {-1, 0, 0}, q_indptr = {0, 3}, kv_len = {4 + 3};
  const std::vector<int32_t> slots = {5, 2, 9, 7, 1, 3, 8}, slot_indptr = {0, 7};  // page size 1, any order
  const std::vector<float> q(3 * 8 * 576, 0.01f), kv(10 * 576, 0.02f);
  std::vector<float> out(3 * 8 * 512), lse(3 * 8);

  treemla::VerifyProblem p;
  p.shape = {.h_q = 8, .d_v = 512, .d_rope = 64};
  p.b = 1;
  p.q = {.data = q.data(), .dtype = treemla::DType::kF32, .total_q = 3};
  p.kv = {.data = kv.data(), .dtype = treemla::DType::kF32, .num_pages = 10};
  p.pages = {.entries = slots.data(), .num_entries = 7, .indptr = slot_indptr.data()};
  p.q_indptr = q_indptr.data();
  p.kv_len = kv_len.data();
  p.mask = {.kind = treemla::MaskKind::kTree, .parents = parents.data()};
  p.sm_scale = 0.1447;
  treemla::verify(p, {.out = out.data(), .lse = lse.data()});
  std::printf("lse of the root %.4f, of a leaf %.4f\n", lse[0], lse[2 * 8]);
}
