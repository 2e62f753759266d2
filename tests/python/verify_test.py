"""verify() and Planner on NumPy arrays, against the definition in float64."""

import numpy as np
import pytest

import treemla

CASES = {
    "ragged": {},
    "pages of 16": {"page_size": 16, "seed": 2},
    "pages of 3, int64": {"page_size": 3, "seed": 3, "index": "int64"},
    "padding": {"lengths": ((9, 4), (0, 0), (3, 2), (0, 0)), "seed": 4},
    "wide tree": {"lengths": ((5, 70),), "seed": 5, "h_q": 2},
    "causal": {"tree": "causal", "seed": 6},
    "none": {"tree": "none", "seed": 7},
    "deepseek": {"d_v": 512, "d_rope": 64, "lengths": ((100, 9), (30, 3)), "seed": 8},
    "one head": {"h_q": 1, "seed": 9},
    "empty": {"lengths": ()},
}
BACKENDS = [b.name for b in treemla.list_backends() if b.memory == "cpu" and b.available]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(make_case, assert_close, name, backend):
    case = make_case(**CASES[name])
    got = treemla.verify(case.q, case.kv, backend=backend, **case.keywords)
    assert got.out.dtype == np.float32 and got.lse.dtype == np.float32
    assert_close(got, case.reference())


@pytest.mark.parametrize("name", ["ragged", "pages of 16", "pages of 3, int64", "padding"])
def test_ways_to_give_pages_agree(make_case, name):
    case = make_case(**CASES[name])
    want = treemla.verify(case.q, case.kv, **case.keywords)
    keywords = {k: v for k, v in case.keywords.items() if k != "page_table"}
    indptr, indices = case.csr()
    flat = case.kv.reshape(-1, case.kv.shape[-1])
    wide = np.full((case.page_table.shape[0], case.page_table.shape[1] + 5), 2147480000, case.page_table.dtype)
    wide[:, : case.page_table.shape[1]] = case.page_table
    size = case.param.page_size
    ways = {
        "csr": (case.kv, {"page_indptr": indptr, "page_indices": indices}),
        "rows": (flat, {"page_table": case.page_table, "page_size": size}),
        "rows with a head axis": (flat[:, None], {"page_table": case.page_table, "page_size": size}),
        "pages with a head axis": (case.kv[:, :, None], {"page_table": case.page_table}),
        "a view of a table": (case.kv, {"page_table": wide[:, : case.page_table.shape[1]]}),
    }
    for way, (kv, pages) in ways.items():
        if way == "pages with a head axis" and size == 1:
            continue  # [slots, 1, 1, d] is the same
        got = treemla.verify(case.q, kv, **keywords, **pages)
        assert np.array_equal(got.out, want.out) and np.array_equal(got.lse, want.lse), way


def test_ways_to_give_the_tree_agree(make_case):
    case = make_case(lengths=((20, 40), (8, 33), (0, 0), (4, 40)), seed=11)
    want = treemla.verify(case.q, case.kv, **case.keywords)
    sees = [case.sees(r) for r in range(4)]
    bits = np.zeros((len(case.q), 2), np.uint32)
    for r, mask in enumerate(sees):
        for i, j in zip(*np.nonzero(mask)):
            bits[case.q_indptr[r] + i, j // 32] |= np.uint32(1) << np.uint32(j % 32)
    flat = np.concatenate([mask.reshape(-1) for mask in sees])
    for tree in (bits, bits.view(np.int32), flat, flat.astype(np.uint8)):
        got = treemla.verify(case.q, case.kv, **(case.keywords | {"tree": tree}))
        assert np.array_equal(got.out, want.out)
    one = make_case(lengths=((20, 40),))
    want = treemla.verify(one.q, one.kv, **one.keywords)
    for tree in (one.sees(0), one.sees(0)[None]):
        assert np.array_equal(treemla.verify(one.q, one.kv, **(one.keywords | {"tree": tree})).out, want.out)


def test_strided_arrays(make_case):
    case = make_case(page_size=4)
    want = treemla.verify(case.q, case.kv, **case.keywords)
    wide_q = np.full((*case.q.shape[:2], case.q.shape[2] + 7), np.nan, np.float32)
    wide_q[..., :-7] = case.q
    wide_kv = np.full((*case.kv.shape[:2], case.kv.shape[2] + 3), np.nan, np.float32)
    wide_kv[..., :-3] = case.kv
    by_head = np.ascontiguousarray(case.q.transpose(1, 0, 2)).transpose(1, 0, 2)
    for q, kv in ((wide_q[..., :-7], case.kv), (case.q, wide_kv[..., :-3]), (by_head, case.kv)):
        assert np.array_equal(treemla.verify(q, kv, **case.keywords).out, want.out)


def test_outputs_in_place(make_case):
    case = make_case()
    want = treemla.verify(case.q, case.kv, **case.keywords)
    out, lse = np.full_like(want.out, np.nan), np.full_like(want.lse, np.nan)
    got = treemla.verify(case.q, case.kv, out=out, lse=lse, **case.keywords)
    assert got.out is out and got.lse is lse
    assert np.array_equal(out, want.out) and np.array_equal(lse, want.lse)
    assert treemla.verify(case.q, case.kv, lse=False, **case.keywords).lse is None
    half = treemla.verify(case.q, case.kv, out_dtype="float16", **case.keywords).out
    assert half.dtype == np.float16 and np.array_equal(half, want.out.astype(np.float16))


def test_batch_invariance(make_case):
    case = make_case(lengths=((300, 5), (40, 3)), seed=12)
    both = treemla.verify(case.q, case.kv, batch_invariant=True, split_keys=64, **case.keywords)
    alone = case.keywords | {
        "q_indptr": case.q_indptr[:2],
        "kv_len": case.kv_len[:1],
        "page_table": case.page_table[:1],
        "tree": case.parents[:5],
    }
    one = treemla.verify(case.q[:5], case.kv, batch_invariant=True, split_keys=64, **alone)
    assert np.array_equal(both.out[:5], one.out)


def test_planner_runs_layers(make_case, assert_close):
    case = make_case(page_size=16)
    planner = treemla.Planner()
    assert planner.backend == ""
    assert planner.plan(case.q, case.kv, **case.keywords) is planner
    assert planner.backend in BACKENDS and planner.backend in planner.describe() and planner.workspace_bytes >= 0
    rng = np.random.default_rng(5)
    for _ in range(3):
        q = rng.standard_normal(case.q.shape).astype(np.float32)
        kv = case.kv * rng.standard_normal(case.kv.shape).astype(np.float32)
        assert_close(planner.run(q, kv), case.reference(q, kv))
        assert np.array_equal(planner.run(q, kv).out, treemla.verify(q, kv, **case.keywords).out)


def test_planner_update_follows_the_arrays(make_case, assert_close):
    case = make_case()
    planner = treemla.Planner().plan(case.q, case.kv, **case.keywords)
    planner.run(case.q, case.kv)
    case.kv_len[0] -= 3  # another prefix; the tree rows are the last ones
    case.rows[0] = case.rows[0][:-3]
    case.parents[1:5] = [0, 0, 1, 2]
    planner.update()
    assert_close(planner.run(case.q, case.kv), case.reference())


def test_version_and_backends():
    assert treemla.__version__.count(".") == 2
    names = [b.name for b in treemla.list_backends()]
    assert "cpu_oracle" in names and "cpu_simd" in names


def test_why_unsupported(make_case):
    case = make_case()
    assert treemla.why_unsupported("cpu_oracle", case.q, case.kv, **case.keywords) == ""
    with pytest.raises(treemla.InvalidArgument, match="backend"):
        treemla.why_unsupported("no such", case.q, case.kv, **case.keywords)


def test_threads_share_a_planner(make_case):
    """Calls of several threads at once come out as if they had waited for each other."""
    from concurrent.futures import ThreadPoolExecutor

    case = make_case(d_v=128, d_rope=64, lengths=((400, 9), (200, 17)))
    planner = treemla.Planner().plan(case.q, case.kv, **case.keywords)
    queries = [case.q * scale for scale in (1, 2, 3, 4)]
    want = [planner.run(q, case.kv).out for q in queries]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            got = list(pool.map(lambda q: planner.update().run(q, case.kv).out, queries))
            assert all(np.array_equal(a, b) for a, b in zip(got, want))
