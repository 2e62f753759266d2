"""torch: custom operators, torch.compile, CUDA graphs, streams. What needs a GPU is skipped, and says so, where there is none."""

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import treemla  # noqa: E402
import treemla.torch_ops  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]
CASE = {"d_v": 512, "d_rope": 64, "lengths": ((300, 9), (0, 0), (47, 17)), "page_size": 16}


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
    arguments = (q, kv, k["q_indptr"], k["kv_len"], k["tree"], "", 0.2, k["page_table"], None, None, 0, 256, 1.0, False, 0,
                 0, "best", 0, False, 0)  # fmt: skip
    # Not the schema check's clones of inputs with NaN in them: it finds NaN unequal to itself.
    kv.nan_to_num_()
    torch.library.opcheck(torch.ops.treemla.verify.default, (*arguments, "bfloat16"))
    out, lse = (torch.empty(*shape, device=device) for shape in ((len(q), 4, 256), (len(q), 4)))
    torch.library.opcheck(torch.ops.treemla.verify_into.default, (*arguments, out, lse))
    planner = treemla.Planner().plan(q, kv, **k)
    torch.library.opcheck(torch.ops.treemla.run.default, (planner.number, 256, "bfloat16", q, kv))
    torch.library.opcheck(torch.ops.treemla.run_into.default, (planner.number, q, kv, out, lse))


# Whole graphs, on eager kernels: what is tested is the operators, not the compiler behind them. On a GPU also that one.
BACKENDS = [
    ("cpu", "aot_eager"),
    pytest.param("cuda", "aot_eager", marks=DEVICES[1].marks),
    pytest.param("cuda", "inductor", marks=DEVICES[1].marks),
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
