/* The C API: one request, 4 cached tokens, then a draft tree of a root with two children. 8 heads, latent 512, rope 64.
 *
 *     cc verify.c $(pkg-config --cflags --libs treemla)
 */
#include <stdio.h>

#include "treemla/treemla.h"

static float q[3 * 8 * 576], kv[10 * 576], out[3 * 8 * 512], lse[3 * 8];

int main(void) {
  const int32_t parents[] = {-1, 0, 0}, q_indptr[] = {0, 3}, kv_len[] = {4 + 3};
  const int32_t slots[] = {5, 2, 9, 7, 1, 3, 8}; /* page size 1, any order */
  treemla_problem p;
  treemla_output o;
  size_t i;

  for (i = 0; i < sizeof q / sizeof *q; ++i) q[i] = 0.01f;
  for (i = 0; i < sizeof kv / sizeof *kv; ++i) kv[i] = 0.02f;

  treemla_problem_init(&p, sizeof p);
  p.h_q = 8;
  p.d_v = 512;
  p.d_rope = 64;
  p.b = 1;
  p.q = q;
  p.q_dtype = TREEMLA_F32;
  p.total_q = 3;
  p.kv = kv;
  p.kv_dtype = TREEMLA_F32;
  p.num_pages = 10;
  p.page_entries = slots;
  p.num_page_entries = 7;
  p.page_stride = 7;
  p.q_indptr = q_indptr;
  p.kv_len = kv_len;
  p.mask = TREEMLA_MASK_TREE;
  p.parents = parents;
  p.sm_scale = 0.1447;

  treemla_output_init(&o, sizeof o);
  o.out = out;
  o.lse = lse;
  if (treemla_verify(&p, &o, NULL) != TREEMLA_OK) {
    fprintf(stderr, "%s\n", treemla_last_error());
    return 1;
  }
  printf("lse of the root %.4f, of a leaf %.4f\n", lse[0], lse[2 * 8]);
  return 0;
}
