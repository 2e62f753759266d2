"""Build, accept and compact: published vectors, lossless sampling, rows where they belong, errors."""

import numpy as np
import pytest

import treemla


def i32(*values):
    return np.array(values, np.int32)


def test_ddtree_chooses_the_likeliest_paths():
    scores = np.log(np.array([[[0.5, 0.3, 0.2], [0.62, 0.28, 0.1]]], np.float32))
    tree = treemla.build_tree(scores, 5, root_tokens=i32(9), prefix_len=i32(100), are_log_probs=True)
    # Depth 1: .5 .3 .2; depth 2 below them: .31 .14 .05, .186 .084 .03, .124 .056 .02.
    assert tree.token_ids[0].tolist() == [9, 0, 0, 1, 2, 0]
    assert tree.parents[0].tolist() == [-1, 0, 1, 0, 0, 3]
    assert tree.depth[0].tolist() == [0, 1, 2, 1, 1, 2]
    assert tree.positions[0].tolist() == [100, 101, 102, 101, 101, 102]
    assert np.allclose(np.exp(tree.log_probs[0]), [1, 0.5, 0.31, 0.3, 0.2, 0.186], rtol=1e-5)
    assert tree.retrieve_next_token[0].tolist() == [1, 2, -1, 5, -1, -1]
    assert tree.retrieve_next_sibling[0].tolist() == [-1, 3, -1, 4, -1, -1]
    assert tree.ancestor_bits[0, :, 0].tolist() == [1, 3, 7, 9, 17, 41]
    assert tree.num_nodes.tolist() == [6]


def test_other_builders():
    chain = treemla.build_chain(np.array([[4, 5, 6], [7, -1, -1]], np.int32))
    assert chain.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, 0, 0]] and chain.num_nodes.tolist() == [4, 2]
    assert chain.log_probs is None
    own = treemla.build_tree_from_parents(i32(-1, 0, 0, 2)[None], i32(1, 2, 3, 4)[None])
    assert own.depth.tolist() == [[0, 1, 1, 2]] and own.token_ids.tolist() == [[1, 2, 3, 4]]
    logits = np.random.default_rng(1).standard_normal((1, 1, 20)).astype(np.float32)
    beam = treemla.expand_beam(logits, 4)
    best = np.argsort(-logits[0, 0])[:4]
    assert beam.token_ids[0, 0].tolist() == best.tolist() and beam.beam[0].tolist() == [0, 1, 2, 3]
    picked = treemla.build_tree_from_candidates(beam.token_ids[:, 0], np.full((1, 4), -1, np.int32), beam.log_probs[:, 0], 2)
    assert sorted(picked.token_ids[0, 1:].tolist()) == sorted(best[:2].tolist())


def test_greedy_golden_vector():
    argmax = np.full(12, 18, np.int32)
    argmax[[0, 3, 4, 6, 10]] = [3, 4, 5, 11, 12]
    got = treemla.accept_path(
        np.concatenate([np.arange(6), np.arange(7, 13)]).astype(np.int32),
        q_indptr=i32(0, 6, 12),
        retrieve_next_token=i32(1, 2, -1, 4, 5, -1, 4, 2, 3, -1, 5, -1),
        retrieve_next_sibling=i32(-1, 3, -1, -1, -1, -1, -1, -1, -1, -1, 1, -1),
        target_argmax=argmax,
        path_len=4,
    )
    assert got.accept_index.tolist() == [[0, 3, 4, 5], [6, 10, 11, -1]]
    assert got.num_accepted.tolist() == [3, 2] and got.bonus_token.tolist() == [18, 18]
    assert got.predicts.tolist() == [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18]


def test_sampling_reproduces_the_target_distribution():
    """The first emitted token over many seeds, whatever was drafted: a chi-squared test at 6 sigma."""
    b, vocab = 20000, 5
    logits = np.array([0.0, 1.0, 0.5, -1.0, -np.inf], np.float32)
    p = np.exp(logits) / np.exp(logits).sum()
    tokens = np.tile(i32(7, 1, 3), b)
    got = treemla.accept_path(
        tokens,
        q_indptr=np.arange(0, 3 * b + 1, 3, dtype=np.int32),
        parents=np.tile(i32(-1, 0, 0), b),
        logits=np.tile(logits, (3 * b, 1)),
        method="deterministic",
        seeds=np.arange(b, dtype=np.uint64),
        path_len=3,
    )
    first = np.where(got.num_accepted > 0, tokens[np.maximum(got.accept_index[:, 1], 0)], got.bonus_token)
    counts = np.bincount(first, minlength=vocab)
    expected = b * p
    chi2 = ((counts - expected)[:4] ** 2 / expected[:4]).sum()
    assert counts[4] == 0 and chi2 < 3 + 6 * np.sqrt(6), (counts, expected)
    again = treemla.accept_path(
        tokens[:3],
        q_indptr=i32(0, 3),
        parents=i32(-1, 0, 0),
        logits=np.tile(logits, (3, 1)),
        method="deterministic",
        seeds=np.array([0], np.int64),
    )
    assert again.bonus_token[0] == got.bonus_token[0]  # a request's result is its own, not the batch's


@pytest.mark.parametrize("layout", ["list", "stacked", "rows"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8])
def test_compaction_moves_accepted_rows(layout, dtype):
    num_layers, pages, size, d = 3, 6, 4, 8
    cache = np.arange(num_layers * pages * size * d).reshape(num_layers, pages, size, d).astype(dtype)
    before = cache.reshape(num_layers, -1, d).copy()
    table = np.array([[5, 2, 0, 99]], np.int32)
    kv_len, q_len, path = 11, 6, [0, 2, 5]
    index = np.full((1, q_len), -1, np.int32)
    index[0, :3] = path
    argument = {"list": list(cache), "stacked": cache, "rows": [c.reshape(-1, d) for c in cache]}[layout]
    got = treemla.compact_cache(
        argument,
        q_indptr=i32(0, q_len),
        kv_len=i32(kv_len),
        accept_index=index,
        num_accepted=i32(2),
        total_q=q_len,
        page_table=table,
        page_size=size,
    )
    assert got.kv_len.tolist() == [8] and got.num_freed.tolist() == [1] and got.freed_pages[0] == 0

    def row(t):
        return table[0, t // size] * size + t % size

    after, prefix = cache.reshape(num_layers, -1, d), kv_len - q_len
    for j, node in enumerate(path):
        assert np.array_equal(after[:, row(prefix + j)], before[:, row(prefix + node)]), j
    untouched = sorted(set(range(pages * size)) - {row(prefix + j) for j in range(3)})
    assert np.array_equal(after[:, untouched], before[:, untouched])


def test_results_in_arrays_of_ones_own():
    """A second step writes where the first one did; None is made."""
    rng = np.random.default_rng(4)
    steps = []
    tree = path = done = beam = None
    for fresh in (True, False):
        for seed in range(2):
            cache = np.random.default_rng(seed).standard_normal((40, 8)).astype(np.float32)
            scores = np.random.default_rng(seed).standard_normal((2, 3, 9)).astype(np.float32)
            if fresh:
                tree = path = done = beam = None
            old = [a for made in (tree, path, done, beam) if made for a in made]
            tree = treemla.build_tree(scores, 5, out=tree)
            path = treemla.accept_path(
                tree.token_ids.reshape(-1), q_indptr=i32(0, 6, 12), parents=tree.parents.reshape(-1),
                target_argmax=scores.argmax(-1).astype(np.int32)[[0, 0, 1, 1], [0, 1, 0, 1]].repeat(3), path_len=6, out=path,
            )  # fmt: skip
            done = treemla.compact_cache(
                [cache], q_indptr=i32(0, 6, 12), kv_len=i32(9, 6), accept_index=path.accept_index,
                num_accepted=path.num_accepted, total_q=12, page_table=np.arange(40, dtype=np.int32).reshape(2, 20), out=done,
            )  # fmt: skip
            beam = treemla.expand_beam(scores[:, :1].copy(), 3, out=beam)
            new = [*tree, *path, *done, *beam]
            assert all(a is b for a, b in zip(old, new))
            steps.append([a.copy() for a in (*tree, *path, done.kv_len, done.num_freed, *beam, cache)])
    assert all(np.array_equal(a, b) for i in range(2) for a, b in zip(steps[i], steps[i + 2]))
    scores = rng.standard_normal((2, 3, 9)).astype(np.float32)
    partly = treemla.build_tree(scores, 5, out=tree._replace(depth=None, num_nodes=None))
    assert partly.parents is tree.parents and partly.depth is not tree.depth and partly.num_nodes is not tree.num_nodes
    assert treemla.build_chain(i32(1, 2, 3, 4, 5)[None].repeat(2, 0), out=tree).log_probs is None
    with pytest.raises(treemla.InvalidArgument, match="out is list: must be a Tree"):
        treemla.build_tree(scores, 5, out=[tree])
    for bad in (np.zeros((2, 5), np.int32), np.zeros((2, 6)), np.zeros((2, 12), np.int32)[:, ::2], 3):
        with pytest.raises(treemla.InvalidArgument, match="depth"):
            treemla.build_tree(scores, 5, out=tree._replace(depth=bad))


GOOD_ACCEPT = {
    "token_ids": i32(7, 1, 2),
    "q_indptr": i32(0, 3),
    "parents": i32(-1, 0, 0),
    "target_argmax": i32(1, 5, 5),
}
BAD_ACCEPT = [
    ({"parents": i32(-1, 2, 1)}, "parents"),
    ({"parents": i32(-1, 0)}, r"parents has shape \[2\]"),
    ({"parents": None}, "parents|retrieve"),
    ({"token_ids": np.zeros((3, 1), np.int32)}, r"token_ids is of shape \[3, 1\]"),
    ({"token_ids": np.zeros(3)}, "token_ids is of a dtype"),
    ({"q_indptr": i32(0, 4)}, "q_indptr"),
    ({"target_argmax": None}, "logits|target_argmax"),
    ({"method": "typical"}, 'method = "typical"'),
    ({"method": "deterministic"}, "logits"),
    ({"method": 3}, "method = 3"),
    ({"logits": np.full((3, 4), np.nan, np.float32), "target_argmax": None}, "hold NaN"),
    ({"path_len": 0}, "path_len = 0"),
    ({"seeds": i32(1)}, "seeds is int32"),
    ({"temperature": np.array([-1.0], np.float32), "logits": np.zeros((3, 4), np.float32), "target_argmax": None,
      "method": "deterministic"}, "temperature"),
]  # fmt: skip


@pytest.mark.parametrize("changes,message", BAD_ACCEPT, ids=range(len(BAD_ACCEPT)))
def test_bad_accept(changes, message):
    assert treemla.accept_path(**GOOD_ACCEPT).num_accepted.tolist() == [1]
    with pytest.raises(treemla.InvalidArgument, match=message):
        treemla.accept_path(**(GOOD_ACCEPT | changes))


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: treemla.build_tree(np.zeros((1, 2, 8), np.float32), 0), "budget = 0"),
        (lambda: treemla.build_tree(np.zeros((1, 2, 8), np.float32), 1025), "budget = 1025"),
        (lambda: treemla.build_tree(np.zeros((2, 8), np.float32), 3), r"scores is of shape \[2, 8\]"),
        (lambda: treemla.build_tree([1], 3), "scores is list"),
        (lambda: treemla.build_tree(np.full((1, 2, 8), np.nan, np.float32), 3), "scores"),
        (lambda: treemla.build_tree(np.zeros((1, 2, 8)), 3), "scores is of a dtype"),
        (lambda: treemla.build_tree(np.zeros((1, 2, 8), np.float32)[:, :, ::2], 3), "scores .*contiguous rows"),
        (lambda: treemla.build_tree(np.zeros((1, 2, 8), np.float32), 3, root_tokens=i32(1, 2)), "root_tokens"),
        (lambda: treemla.build_chain(np.zeros((1, 2))), "tokens is of a dtype"),
        (lambda: treemla.build_tree_from_parents(i32(-1, 5)[None]), "parent"),
        (lambda: treemla.expand_beam(np.zeros((1, 1, 8), np.float32), 65), "top_k = 65"),
    ],
    ids=range(11),
)
def test_bad_build(call, message):
    with pytest.raises(treemla.InvalidArgument, match=message):
        call()


GOOD_COMPACT = {
    "cache": np.zeros((8, 4), np.float32),
    "q_indptr": i32(0, 3),
    "kv_len": i32(4),
    "accept_index": i32(0, 2)[None],
    "num_accepted": i32(1),
    "total_q": 3,
    "page_table": i32(0, 1, 2, 6)[None],
}
BAD_COMPACT = [
    ({"cache": []}, "cache is empty"),
    ({"cache": [np.zeros((8, 4), np.float32), np.zeros((7, 4), np.float32)]}, "same rows"),
    ({"cache": [np.zeros(8, np.float32)]}, r"cache has shape \[8\]"),
    ({"cache": [np.zeros((8, 8), np.float32)[:, ::2]]}, "cache .*contiguous rows"),
    ({"cache": [np.zeros((8, 4), np.float32).T]}, "cache .*contiguous rows"),
    ({"cache": [np.zeros((2, 4), np.float32)]}, "page|entries"),
    ({"kv_len": None}, "kv_len is None"),
    ({"kv_len": i32(1)}, "kv_len"),
    ({"accept_index": i32(0, 5)[None]}, "accept_index"),
    ({"page_size": 3}, "multiple of page_size = 3"),
    ({"page_table": i32(0, 1, 2, 99)[None]}, "page entry 3 of request 0"),
    ({"total_q": -1}, "total_q = -1"),
]


@pytest.mark.parametrize("changes,message", BAD_COMPACT, ids=range(len(BAD_COMPACT)))
def test_bad_compact(changes, message):
    good = GOOD_COMPACT | {"cache": [GOOD_COMPACT["cache"].copy()]}
    assert treemla.compact_cache(**good).kv_len.tolist() == [3]
    with pytest.raises(treemla.InvalidArgument, match=message):
        treemla.compact_cache(**(good | changes))


def test_read_only_cache():
    cache = np.zeros((8, 4), np.float32)
    cache.flags.writeable = False
    with pytest.raises(treemla.InvalidArgument, match="cache is read-only"):
        treemla.compact_cache(**(GOOD_COMPACT | {"cache": [cache]}))


@pytest.mark.parametrize("seed", range(20))
def test_random_nonsense(random_value, seed):
    rng = np.random.default_rng(seed)
    logits = {"logits": np.zeros((3, 4), np.float32), "method": "deterministic", "temperature": np.ones(1, np.float32)}
    scores = {"scores": rng.standard_normal((2, 3, 9)).astype(np.float32), "root_tokens": i32(1, 2), "prefix_len": i32(3, 4)}
    calls = [
        (treemla.accept_path, GOOD_ACCEPT),
        (treemla.accept_path, {k: v for k, v in GOOD_ACCEPT.items() if k != "target_argmax"} | logits),
        (treemla.build_tree, scores | {"budget": 5}),
        (treemla.compact_cache, GOOD_COMPACT),
    ]
    refused = 0
    for i in range(80):
        function, good = calls[i % len(calls)]
        arguments = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in good.items()}
        for name in rng.choice(list(arguments), size=rng.integers(1, 3), replace=False):
            if name not in ("total_q", "budget"):  # sizes of outputs: checked one by one above
                arguments[name] = random_value(rng, arguments[name])
        try:
            with np.errstate(all="ignore"):
                function(**arguments)
        except treemla.Error as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 20


# ---- an engine's batch ----


def engine_batch(q_len=9, seed=2):
    """A token table of more requests than the batch has, prefixes of 0 and 1 among them, random trees in both mask layouts."""
    rng = np.random.default_rng(seed)
    prefixes = np.array([0, 1, 40, 7])
    table = rng.integers(0, 10**6, (7, 60 + q_len)).astype(np.int32)
    rows = rng.permutation(7)[:4]
    sees = np.zeros((4, q_len, q_len), bool)
    for tree in sees:
        for i in range(q_len):
            if i:
                tree[i] = tree[rng.integers(0, i)]
            tree[i, i] = True
    full = np.concatenate([np.concatenate([np.ones((q_len, n), bool), s], 1).reshape(-1) for n, s in zip(prefixes, sees)])
    return table, rows, prefixes, sees, full


@pytest.mark.parametrize("q_len", [1, 9, 33])
@pytest.mark.parametrize("layout", ["full", "qlen_only", None])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_an_engines_batch(q_len, layout, index):
    table, rows, prefixes, sees, full = engine_batch(q_len)
    masks = {"full": full, "qlen_only": sees.reshape(-1).astype(np.uint8), None: None}
    padded = np.zeros((7, 2 * table.shape[1]), np.int32)  # rows with a stride
    padded[:, : table.shape[1]] = table
    got = treemla.import_batch(
        padded[:, : table.shape[1]], row_index=rows.astype(index), seq_len=prefixes.astype(index), q_len=q_len,
        mask=masks[layout], mask_layout=layout or "full",
    )  # fmt: skip
    assert got.kv_len.tolist() == (prefixes + q_len).tolist()
    bits = np.unpackbits(got.ancestor_bits.view(np.uint8), axis=1, bitorder="little")[:, :q_len].reshape(4, q_len, q_len)
    assert np.array_equal(bits, sees if layout else np.broadcast_to(np.tri(q_len), sees.shape))
    for r, n in enumerate(got.kv_len):
        assert np.array_equal(got.page_table[r, :n], table[rows[r], :n])


def test_padding_of_an_engines_batch():
    table, rows, prefixes, sees, full = engine_batch()
    got = treemla.import_batch(table, row_index=rows, seq_len=np.array([0, 8, 9, 40]), q_len=9, seq_len_has_tree=True)
    assert got.kv_len.tolist() == [0, 0, 9, 40] and not got.ancestor_bits[:18].any() and got.ancestor_bits[18:].all()
    got = treemla.import_batch(table, row_index=rows, seq_len=prefixes, q_len=9, mask=full[: 9 * 9 + 9 * 10])
    assert got.kv_len.tolist() == [9, 10, 0, 0]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"row_index": np.array([0, 1, 9, 2])}, r"row_index\[2\] = 9 is outside"),
        ({"seq_len": np.array([0, -1, 1, 2])}, r"seq_len\[1\] = -1 must not be negative"),
        ({"seq_len": np.array([0, 61, 1, 2])}, r"seq_len\[1\] = 61"),
        ({"seq_len": np.array([2**63 - 1, 3, 1, 2]), "mask": np.ones(64, bool)}, r"seq_len\[0\] = 2147483647"),
        ({"seq_len": np.array([-(2**62), 3, 1, 2])}, r"seq_len\[0\] = -2147483648 must not be negative"),
        ({"max_tokens": 20}, r"seq_len\[2\] = 40"),
        ({"seq_len": np.zeros(3, np.int64)}, r"seq_len has shape \[3\]"),
        ({"q_len": 0}, "q_len = 0: must be at least 1"),
        ({"mask": np.ones(324, np.float32)}, "mask is float32"),
        ({"mask": np.ones(324, bool), "mask_layout": "packed"}, 'mask_layout = "packed": must be full or qlen_only'),
        ({"token_table": np.zeros((7, 69), np.int64)}, "token_table is int64"),
    ],
)
def test_bad_engine_batches(changes, message):
    table, rows, prefixes, _, _ = engine_batch()
    good = {"token_table": table, "row_index": rows, "seq_len": prefixes, "q_len": 9}
    treemla.import_batch(**good)
    with pytest.raises(treemla.InvalidArgument, match=message):
        treemla.import_batch(**(good | changes))
