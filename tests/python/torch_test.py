"""torch: custom operators, torch.compile, CUDA graphs, streams. What needs a GPU is skipped, and says so, where there is none."""

import gc
import os
import shutil
import sysconfig

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import treemla  # noqa: E402
import treemla.torch_ops  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]
CASE = {"d_v": 512, "d_rope": 64, "lengths": ((300, 9), (0, 0), (47, 17)), "page_size": 16}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """torch.compile gives up on a function after a few versions of it, and parametrised tests share theirs."""
    torch.compiler.reset()


def tensors(case, device, dtype=torch.float32):
    q, kv = (torch.from_numpy(a).to(device, dtype) for a in (case.q, case.kv))
    return (
        q,
        kv,
        {k: torch.from_numpy(v).to(device) if isinstance(v, np.ndarray) else v for k, v in case.keywords.items()},
    )


def reference(case, q, kv):
    return case.reference(q.float().cpu().numpy(), kv.float().cpu().numpy())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_equals_the_definition(make_case, assert_close, device, dtype):
    case = make_case(**CASE)
    q, kv, keywords = tensors(case, device, getattr(torch, dtype))
    got = treemla.verify(q, kv, **keywords)
    assert got.out.device == q.device and got.out.dtype == q.dtype and got.lse.dtype == torch.float32
    assert_close((got.out.float().cpu(), got.lse.cpu()), reference(case, q, kv), dtype)
    again = treemla.verify(q, kv, **keywords)
    assert torch.equal(got.out, again.out) and torch.equal(got.lse, again.lse)


@pytest.mark.parametrize("device", DEVICES)
def test_operators_pass_opcheck(make_case, device):
    case = make_case(d_v=256, d_rope=64)
    q, kv, k = tensors(case, device, torch.bfloat16)
    arguments = (q, kv, k["q_indptr"], k["kv_len"], k["tree"], "", 0.2, k["page_table"], None, None, 0, 256, 1.0, "", 0,
                 0, "best", 0, False, 0)  # fmt: skip
    # Not the schema check's clones of inputs with NaN in them: it finds NaN unequal to itself.
    kv.nan_to_num_()
    torch.library.opcheck(torch.ops.treemla.verify.default, (*arguments, "bfloat16"))
    out, lse = (torch.empty(*shape, device=device) for shape in ((len(q), 4, 256), (len(q), 4)))
    torch.library.opcheck(torch.ops.treemla.verify_into.default, (*arguments, out, lse))
    planner = treemla.Planner().plan(q, kv, **k)
    torch.library.opcheck(torch.ops.treemla.run.default, (planner.number, 256, "bfloat16", q, kv))
    torch.library.opcheck(torch.ops.treemla.run_into.default, (planner.number, q, kv, out, lse))


@pytest.mark.parametrize("device", DEVICES)
def test_tree_operators_pass_opcheck(device):
    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    ops, check = torch.ops.treemla, torch.library.opcheck
    scores = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1)).to(device)
    check(ops.build_tree.default, (scores, 7, ints(3, 4), None, -1, False, False))
    check(ops.build_tree.default, (scores.bfloat16(), 40, None, ints(9, 0), 5, True, True))
    first = scores[:, :1].contiguous()
    check(ops.expand_beam.default, (first, 4, None, False, False))
    beam = treemla.expand_beam(first, 4)
    best = (beam.token_ids[:, 0].contiguous(), ints(*[-1] * 8).view(2, 4), beam.log_probs[:, 0].contiguous())
    check(ops.build_tree_from_candidates.default, (*best, 3, None, None, -1, False))
    check(ops.build_chain.default, (ints(4, 5, 6, 7, -1, -1).view(2, 3), None, None, -1, False))
    check(ops.build_tree_from_parents.default, (ints(-1, 0, 0, 2)[None], None, None, False))
    tree, indptr = treemla.build_tree(scores, 7), ints(0, 8, 16)
    tokens, parents = tree.token_ids.reshape(-1), tree.parents.reshape(-1)
    logits = torch.randn(16, 40, generator=torch.Generator().manual_seed(2)).to(device)
    for method, seeds in (("greedy", None), ("deterministic", torch.tensor([4, 5], device=device))):
        links = (tokens, indptr, parents, None, None, None, logits, method, *[None] * 4, seeds, *[None] * 3)
        check(ops.accept_path.default, (*links, 4, False))
    path = treemla.accept_path(tokens, q_indptr=indptr, parents=parents, logits=logits, path_len=4)
    table = torch.arange(40, device=device, dtype=torch.int32).view(2, 20)
    cache = torch.randn(2, 40, 8, device=device)
    # Not the check that results of two runs are equal: of freed_pages only the beginnings are written.
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    for layers, stacked in (([cache], True), (list(cache.clone()), False)):
        arguments = (indptr, ints(12, 9), path.accept_index, path.num_accepted, 16, table, None, None, 1, False)
        check(ops.compact_cache.default, (layers, stacked, *arguments), test_utils=some)
    mask = torch.ones(2 * 81, dtype=torch.bool, device=device)
    # Of page tables only the beginnings are written.
    check(ops.import_batch.default, (table, ints(1, 0), ints(3, 0), 9, False, mask, "qlen_only", 20, False), test_utils=some)
    check(ops.import_batch.default, (table, ints(1, 0).long(), ints(12, 9), 9, True, None, "full", 12, True), test_utils=some)


@pytest.mark.parametrize("device", DEVICES)
def test_an_engines_batch_inside_a_compiled_function(device):
    table = torch.arange(60, dtype=torch.int32, device=device).view(3, 20)
    rows, lens = torch.tensor([2, 0], device=device), torch.tensor([4, 0], device=device)
    q, kv = torch.randn(6, 4, 576, device=device), torch.randn(60, 576, device=device)
    mask = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 1] * 2, dtype=torch.uint8, device=device)

    def step(q, kv, lens):
        batch = treemla.import_batch(table, row_index=rows, seq_len=lens, q_len=3, mask=mask, mask_layout="qlen_only")
        indptr = torch.arange(0, 9, 3, dtype=torch.int32, device=device)
        return treemla.verify(q, kv, q_indptr=indptr, kv_len=batch.kv_len, page_table=batch.page_table, page_size=1,
                              tree=batch.ancestor_bits, sm_scale=0.1).out  # fmt: skip

    want = step(q, kv, lens)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(q, kv, lens), want)
    with pytest.raises(Exception, match="out"):
        made = treemla.import_batch(table, row_index=rows, seq_len=lens)
        torch.compile(
            lambda: treemla.import_batch(table, row_index=rows, seq_len=lens, out=made), backend="aot_eager", fullgraph=True
        )()


# What inductor compiles for a GPU is loaded by a C program of Triton's.
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")))
    or not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
    reason="no C compiler or no Python.h for Triton",
)

# Whole graphs, on eager kernels: what is tested is the operators, not the compiler behind them. On a GPU also that one.
BACKENDS = [
    ("cpu", "aot_eager"),
    pytest.param("cuda", "aot_eager", marks=DEVICES[1].marks),
    pytest.param("cuda", "inductor", marks=[*DEVICES[1].marks, needs_compiler]),
]


@pytest.mark.parametrize("device,backend", BACKENDS)
def test_compiled_equals_eager(make_case, device, backend):
    case = make_case(**CASE)
    q, kv, keywords = tensors(case, device, torch.bfloat16)

    def layer(q, kv, keywords):
        out, lse = treemla.verify(q, kv, **keywords)
        return out * 1.0, lse

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for scale in (1.0, 0.5):
        for got, want in zip(compiled(q * scale, kv, keywords), layer(q * scale, kv, keywords)):
            assert torch.equal(got, want)

    planner = treemla.Planner().plan(q, kv, **keywords)

    def step(q, kv):
        out, lse = planner.run(q, kv)
        return out * 1.0, lse

    for got, want in zip(torch.compile(step, fullgraph=True, backend=backend)(q, kv), step(q, kv)):
        assert torch.equal(got, want)

    def in_place(q, kv, out, lse):
        planner.run(q, kv, out=out, lse=lse)
        return out + 1

    out, lse = torch.zeros_like(step(q, kv)[0]), torch.zeros(q.shape[:2], device=device)
    got = torch.compile(in_place, fullgraph=True, backend=backend)(q, kv, out, lse)
    assert torch.equal(out, planner.run(q, kv).out) and torch.equal(got, out + 1)


class Decoding:
    """Two requests that decode on made-up scores: the next token's logits are the first columns of a layer's output."""

    B, BUDGET, DEPTHS, VOCAB, PAGE_SIZE, PAGES, LAYERS, HEADS = 2, 11, 3, 6, 4, 16, 2, 4

    def __init__(self, device, method="greedy", stacked=False, spare_pages=0):
        generator = torch.Generator().manual_seed(5)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

        self.method, self.q_len = method, self.BUDGET + 1
        ints = {"dtype": torch.int32, "device": device}
        rows = self.B * self.q_len
        self.scores = random(self.B, self.DEPTHS, self.VOCAB).float()
        self.q, self.new_rows = random(self.LAYERS, rows, self.HEADS, 576), random(self.LAYERS, rows, 576)
        table = torch.randperm(self.B * self.PAGES, generator=generator).view(self.B, self.PAGES)
        self.page_table = table.to(**ints)
        cache = random(self.LAYERS, self.B * self.PAGES + spare_pages, self.PAGE_SIZE, 576)
        for r, n in enumerate((21, 6)):  # of the rows behind the prefix nothing may be read before it is written
            for page in range(self.PAGES):
                cache[:, table[r, page], max(0, min(self.PAGE_SIZE, n - page * self.PAGE_SIZE)) :] = float("nan")
        self.cache = cache if stacked else [layer.clone() for layer in cache]
        self.prefix, self.root = torch.tensor([21, 6], **ints), torch.tensor([1, 2], **ints)
        self.q_indptr = torch.arange(0, rows + 1, self.q_len, **ints)
        self.request = torch.arange(self.B, device=device).repeat_interleave(self.q_len)
        self.node = torch.arange(self.q_len, device=device).repeat(self.B)
        self.seeds = torch.tensor([7, 8], device=device)

    def state(self):
        return self.cache, self.prefix, self.root, self.scores, self.seeds

    def keywords(self, kv_len, parents):
        return {"q_indptr": self.q_indptr, "kv_len": kv_len, "tree": parents, "page_table": self.page_table, "sm_scale": 0.05}

    def draft(self, prefix, root, scores):
        tree = treemla.build_tree(scores, self.BUDGET, root_tokens=root, prefix_len=prefix)
        return tree, prefix + self.q_len

    def decode(self, cache, tree, kv_len, seeds, planner=None):
        tokens, parents = tree.token_ids.reshape(-1), tree.parents.reshape(-1)
        index = (kv_len - self.q_len)[self.request] + self.node
        page, slot = self.page_table[self.request, index // self.PAGE_SIZE], index % self.PAGE_SIZE
        verified = []
        for layer in range(self.LAYERS):
            cache[layer][page, slot] = self.new_rows[layer]
            if planner is None:
                out, lse = treemla.verify(self.q[layer], cache[layer], **self.keywords(kv_len, parents))
            else:
                out, lse = planner.run(self.q[layer], cache[layer])
            verified += [out, lse]
        path = treemla.accept_path(
            tokens, q_indptr=self.q_indptr, parents=parents, logits=out[:, 0, : self.VOCAB].float().contiguous() * 8,
            method=self.method, seeds=None if self.method == "greedy" else seeds, path_len=self.DEPTHS + 1,
        )  # fmt: skip
        done = treemla.compact_cache(
            cache, q_indptr=self.q_indptr, kv_len=kv_len, accept_index=path.accept_index, num_accepted=path.num_accepted,
            total_q=len(tokens), page_table=self.page_table, page_size=self.PAGE_SIZE,
        )  # fmt: skip
        return verified, path, done

    def step(self, cache, prefix, root, scores, seeds):
        tree, kv_len = self.draft(prefix, root, scores)
        return tree, *self.decode(cache, tree, kv_len, seeds)

    def advance(self, result):
        _, _, path, done = result
        self.prefix.copy_(done.kv_len)
        self.root.copy_(path.bonus_token)
        self.seeds += 10
        self.scores.copy_(self.scores.roll(1, 2))

    def bits(self, result):
        """Everything that is defined, as bytes. Any NaN equals any other: a compiler may rewrite those that nothing reads."""
        tree, verified, path, done = result
        freed = [done.freed_pages[self.q_len * r :][: int(n)] for r, n in enumerate(done.num_freed)]
        tensors = (*tree, *verified, *path, done.kv_len, done.num_freed, *freed, *self.cache)
        plain = (t.masked_fill(t.isnan(), float("nan")) if t.is_floating_point() else t for t in tensors)
        return [t.contiguous().cpu().view(torch.uint8) for t in plain]


def assert_same(got, want):
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want)):
        assert torch.equal(a, b), i


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("method", ["greedy", "deterministic"])
@pytest.mark.parametrize("device,backend", BACKENDS)
def test_a_compiled_step_equals_eager(device, backend, method, stacked):
    eager, compiled = (Decoding(device, method, stacked) for _ in range(2))
    step = torch.compile(compiled.step, fullgraph=True, backend=backend)
    accepted = 0
    for _ in range(4):
        want, got = eager.step(*eager.state()), step(*compiled.state())
        assert type(got[2]) is treemla.Accepted
        assert_same(compiled.bits(got), eager.bits(want))
        accepted += int(want[2].num_accepted.sum())
        eager.advance(want)
        compiled.advance(got)
    assert accepted > 2 and not torch.isnan(want[1][0]).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@needs_compiler
def test_the_compiled_step_copies_no_cache():
    decoding = Decoding("cuda", spare_pages=20_000)
    step = torch.compile(decoding.step, fullgraph=True)
    step(*decoding.state())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(*decoding.state())
    assert torch.cuda.max_memory_allocated() - before < decoding.cache[0].nbytes / 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@needs_compiler
def test_reduce_overhead_equals_eager():
    """torch captures what may be captured into graphs of its own; verify() and run() stay outside."""
    eager, compiled = (Decoding("cuda") for _ in range(2))
    step = torch.compile(compiled.step, fullgraph=True, mode="reduce-overhead")
    for _ in range(5):
        want, got = eager.step(*eager.state()), step(*compiled.state())
        assert_same(compiled.bits(got), eager.bits(want))
        eager.advance(want)
        compiled.advance(got)


@pytest.mark.parametrize("device", DEVICES)
def test_other_builders_compiled(device):
    def build(tokens, parents, logits):
        chain = treemla.build_chain(tokens)
        own = treemla.build_tree_from_parents(parents, tokens)
        beam = treemla.expand_beam(logits, 3)
        picked = treemla.build_tree_from_candidates(
            beam.token_ids[:, 0].contiguous(), torch.full_like(tokens, -1), beam.log_probs[:, 0].contiguous(), 2
        )
        return chain, own, beam, picked

    tokens = torch.tensor([[4, 5, -1], [7, 8, 9]], dtype=torch.int32, device=device)
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1]], dtype=torch.int32, device=device)
    logits = torch.randn(2, 1, 20, generator=torch.Generator().manual_seed(3)).to(device)
    got = torch.compile(build, fullgraph=True, backend="aot_eager")(tokens, parents, logits)
    for a, b in zip(got, build(tokens, parents, logits)):
        assert type(a) is type(b)
        for x, y in zip(a, b):
            assert (x is None and y is None) or (x.dtype == y.dtype and torch.equal(x, y))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("method", ["greedy", "deterministic"])
def test_a_captured_step_serves_later_ones(method, compiled):
    """A whole step in one CUDA graph, of eager or of compiled parts; replayed while prefixes, trees and scores change."""
    eager, captured = (Decoding("cuda", method) for _ in range(2))
    draft, decode = captured.draft, captured.decode
    if compiled:
        draft, decode = (torch.compile(part, fullgraph=True) for part in (draft, decode))
    planned_len, planned_parents = captured.prefix + captured.q_len, torch.arange(-1, captured.BUDGET, device="cuda").int()
    planned_parents = planned_parents.repeat(captured.B)
    planner = treemla.Planner()
    planner.plan(captured.q[0], captured.cache[0], **captured.keywords(planned_len, planned_parents))

    def step():
        tree, kv_len = draft(captured.prefix, captured.root, captured.scores)
        planned_len.copy_(kv_len)
        planned_parents.copy_(tree.parents.reshape(-1))
        planner.update()
        return tree, *decode(captured.cache, tree, kv_len, captured.seeds, planner)

    # A step warms up and writes the cache, which is then put back.
    kept, side = [layer.clone() for layer in captured.cache], torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        for layer, old in zip(captured.cache, kept):
            layer.copy_(old)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(4):
        graph.replay()
        planner.check()
        want = eager.step(*eager.state())
        assert_same(captured.bits(got), eager.bits(want))
        eager.advance(want)
        captured.advance(got)


def test_compiled_keeps_errors(make_case):
    case = make_case(**CASE)
    q, kv, keywords = tensors(case, "cpu")
    compiled = torch.compile(treemla.verify, fullgraph=True, backend="aot_eager")
    with pytest.raises(treemla.InvalidArgument, match="kv_len"):
        compiled(q, kv, **(keywords | {"kv_len": keywords["kv_len"] - 400}))
    planner = treemla.Planner().plan(q, kv, **keywords)
    number = planner.number
    del planner
    gc.collect()
    # What is wrong with a call itself is said while it is traced.
    with pytest.raises(Exception, match="inside torch.compile"):
        torch.compile(treemla.build_chain, fullgraph=True, backend="aot_eager")(torch.zeros(1, 2).int(), stream=3)
    build = torch.compile(treemla.build_tree, fullgraph=True, backend="aot_eager")
    with pytest.raises(treemla.InvalidArgument, match="scores.* NaN"):
        build(torch.full((1, 2, 8), float("nan")), 3)
    with pytest.raises(treemla.InvalidArgument, match=f"planner = {number}"):
        torch.ops.treemla.run(number, 512, "float32", q, kv)


def test_bad_tensors(make_case):
    case = make_case()
    q, kv, keywords = tensors(case, "cpu")
    bad = [
        ("requires grad", q.clone().requires_grad_()),
        ("device meta", q.to("meta")),
        ("negated", torch.complex(q, q).conj().imag),
        ("strides", q.expand(2, *q.shape)[:, 0]),
        ("is of a dtype", q.double()),
    ]
    for message, tensor in bad:
        with pytest.raises(treemla.InvalidArgument, match=message):
            treemla.verify(tensor, kv, **keywords)
    with pytest.raises((treemla.InvalidArgument, RuntimeError)):
        treemla.verify(q.to_sparse(), kv, **keywords)
    with pytest.raises(treemla.InvalidArgument, match="kv_len is int64"):
        treemla.verify(q, kv, **(keywords | {"kv_len": keywords["kv_len"].long()}))


def test_a_step_of_decoding(make_case):
    """Build, verify, accept and compact on torch tensors give what they give on NumPy arrays."""
    scores = np.random.default_rng(1).standard_normal((2, 3, 40)).astype(np.float32)
    for library in (np.asarray, torch.from_numpy):
        tree = treemla.build_tree(library(scores), 7)
        accepted = treemla.accept_path(
            tree.token_ids.reshape(-1),
            q_indptr=library(np.array([0, 8, 16], np.int32)),
            parents=tree.parents.reshape(-1),
            logits=library(np.random.default_rng(2).standard_normal((16, 40)).astype(np.float32)),
            method="deterministic",
            seeds=library(np.array([5, 6])),
        )
        result = [np.asarray(a) for a in (*tree, *accepted)]
        if library is np.asarray:
            want = result
    assert all(np.array_equal(a, b) for a, b in zip(result, want))
