/* A stranger's C program: one tiny problem, its numbers, and an error. */
#include <stdio.h>
#include <string.h>

#include "treemla/treemla.h"

static int near(float got, double want) { return got - want < 1e-5 && want - got < 1e-5; }

int main(void) {
  /* A prefix of one token, then a root and its child. Widths 2 + 1, one head, page size 1, pages out of
   * order. */
  const float q[] = {1, 0, 0, 0, 1, 0};
  const float kv[] = {0, 1, 0, 1, 1, 0, 1, 0, 0};
  const int32_t pages[] = {2, 0, 1}, page_indptr[] = {0, 3}, q_indptr[] = {0, 2}, parents[] = {-1, 0};
  const double e = 2.718281828459045;
  int32_t kv_len[] = {3};
  float out[4], lse[2];
  treemla_problem p;
  treemla_output o;

  treemla_problem_init(&p, sizeof p);
  p.h_q = 1;
  p.d_v = 2;
  p.d_rope = 1;
  p.b = 1;
  p.q = q;
  p.q_dtype = TREEMLA_F32;
  p.total_q = 2;
  p.kv = kv;
  p.kv_dtype = TREEMLA_F32;
  p.num_pages = 3;
  p.page_entries = pages;
  p.num_page_entries = 3;
  p.page_indptr = page_indptr;
  p.q_indptr = q_indptr;
  p.kv_len = kv_len;
  p.mask = TREEMLA_MASK_TREE;
  p.parents = parents;
  p.sm_scale = 1;
  treemla_output_init(&o, sizeof o);
  o.out = out;
  o.lse = lse;
  if (treemla_verify(&p, &o, NULL) != TREEMLA_OK) {
    puts(treemla_last_error());
    return 1;
  }
  /* Scores of the root: 1, 0. Of the child: 0, 1, 1. */
  if (!near(out[0], e / (e + 1)) || !near(out[1], 1 / (e + 1)) || !near(out[2], (1 + e) / (1 + 2 * e)) ||
      !near(out[3], 2 * e / (1 + 2 * e)) || !near(lse[0], 1.3132616875) || !near(lse[1], 1.8619948040)) {
    printf("out %.9g %.9g %.9g %.9g, lse %.9g %.9g\n", out[0], out[1], out[2], out[3], lse[0], lse[1]);
    return 1;
  }

  kv_len[0] = 1;
  if (treemla_verify(&p, &o, NULL) != TREEMLA_INVALID_ARGUMENT ||
      strcmp(treemla_last_error_argument(), "kv_len") != 0) {
    printf("the error is about '%s': %s\n", treemla_last_error_argument(), treemla_last_error());
    return 1;
  }
  printf("C consumer of treemla %s: ok\n", treemla_version());
  return 0;
}
