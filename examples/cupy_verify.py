#!/usr/bin/env python3
"""TreeMLA on CuPy arrays: two requests with draft trees on a GPU, checked against the definition written in CuPy.

pip install . cupy-cuda13x
python examples/cupy_verify.py
"""

import cupy as cp

import treemla

PAGE_SIZE, HEADS, D_V, D_ROPE, SCALE = 16, 8, 512, 64, 0.1447
prefix, q_len = [1000, 333], 5
parents = [-1, 0, 0, 1, 2]  # of both requests

rng = cp.random.default_rng(1)
total = 2 * q_len
q = rng.standard_normal((total, HEADS, D_V + D_ROPE), dtype=cp.float32)
kv_len = cp.array([n + q_len for n in prefix], cp.int32)
pages = -(-int(kv_len.max()) // PAGE_SIZE)
page_table = cp.random.permutation(2 * pages).reshape(2, pages).astype(cp.int32)
kv = rng.standard_normal((2 * pages, PAGE_SIZE, D_V + D_ROPE), dtype=cp.float32)

out, lse = treemla.verify(
    q, kv, q_indptr=cp.array([0, q_len, total], cp.int32), kv_len=kv_len, page_table=page_table,
    tree=cp.array(parents * 2, cp.int32), sm_scale=SCALE,
)  # fmt: skip

worst = 0.0
for r in range(2):
    tokens = cp.arange(int(kv_len[r]))
    rows = kv[page_table[r, tokens // PAGE_SIZE], tokens % PAGE_SIZE].astype(cp.float64)
    for i in range(q_len):
        sees = cp.ones(len(tokens), bool)
        sees[prefix[r] :] = False
        node = i
        while node >= 0:
            sees[prefix[r] + node] = True
            node = parents[node]
        s = SCALE * q[r * q_len + i].astype(cp.float64) @ rows[sees].T
        weights = cp.exp(s - s.max(axis=1, keepdims=True))
        want = weights / weights.sum(axis=1, keepdims=True) @ rows[sees][:, :D_V]
        worst = max(worst, float(cp.linalg.norm(out[r * q_len + i] - want) / cp.linalg.norm(want)))
print(f"relative error of the worst node {worst:.1e}, at most 5e-6 is right")
raise SystemExit(worst > 5e-6)
