// A stranger's C++ program: one tiny problem, its numbers, and an error.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "treemla/treemla.hpp"

int main() {
  // A prefix of one token, then a root and its child. Widths 2 + 1, one head, page size 1, pages out of
  // order.
  const std::vector<float> q = {1, 0, 0, 0, 1, 0};
  const std::vector<float> kv = {0, 1, 0, 1, 1, 0, 1, 0, 0};
  const std::vector<int32_t> pages = {2, 0, 1}, page_indptr = {0, 3}, q_indptr = {0, 2}, kv_len = {3};
  const std::vector<int32_t> parents = {-1, 0};
  std::vector<float> out(4), lse(2);

  treemla::VerifyProblem p;
  p.shape = {1, 2, 1};
  p.b = 1;
  p.q.data = q.data();
  p.q.dtype = treemla::DType::kF32;
  p.q.total_q = 2;
  p.kv.data = kv.data();
  p.kv.dtype = treemla::DType::kF32;
  p.kv.num_pages = 3;
  p.pages.entries = pages.data();
  p.pages.num_entries = 3;
  p.pages.indptr = page_indptr.data();
  p.q_indptr = q_indptr.data();
  p.kv_len = kv_len.data();
  p.mask.kind = treemla::MaskKind::kTree;
  p.mask.parents = parents.data();
  p.sm_scale = 1;
  treemla::VerifyOutput o;
  o.out = out.data();
  o.lse = lse.data();
  treemla::verify(p, o);

  // Scores of the root: 1, 0. Of the child: 0, 1, 1.
  const double e = std::exp(1.0);
  const double want[] = {e / (e + 1),         1 / (e + 1),     (1 + e) / (1 + 2 * e),
                         2 * e / (1 + 2 * e), std::log(e + 1), std::log(1 + 2 * e)};
  const float got[] = {out[0], out[1], out[2], out[3], lse[0], lse[1]};
  for (int i = 0; i < 6; ++i) {
    if (!(std::fabs(got[i] - want[i]) < 1e-5)) {
      std::printf("number %d is %.9g, not %.9g\n", i, got[i], want[i]);
      return 1;
    }
  }

  const std::vector<int32_t> kv_len_too_short = {1};
  p.kv_len = kv_len_too_short.data();
  try {
    treemla::verify(p, o);
  } catch (const treemla::Error& e) {
    if (e.code() != treemla::ErrorCode::kInvalidArgument || e.argument() != "kv_len") {
      std::printf("the error is about '%s': %s\n", e.argument().c_str(), e.what());
      return 1;
    }
    std::printf("C++ consumer of treemla %s: ok\n", treemla::version());
    return std::strcmp(treemla::version(), TREEMLA_VERSION) != 0;
  }
  std::puts("no error for a kv_len below q_len");
  return 1;
}
