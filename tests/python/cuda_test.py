"""On a GPU: captured graphs, streams, faults that only the device sees, recording, overlap of planner and torch memory."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

import treemla  # noqa: E402

CASE = {"d_v": 512, "d_rope": 64, "lengths": ((300, 9), (0, 0), (47, 17)), "page_size": 16, "h_q": 8}


def tensors(case, dtype=torch.bfloat16):
    q, kv = (torch.from_numpy(a).to("cuda", dtype) for a in (case.q, case.kv))
    return q, kv, {k: torch.from_numpy(v).cuda() if isinstance(v, np.ndarray) else v for k, v in case.keywords.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_captured_graph_serves_changing_lengths(make_case, dtype):
    case = make_case(**CASE)
    q, kv, keywords = tensors(case, dtype)
    planner = treemla.Planner().plan(q, kv, **keywords)
    out, lse = planner.run(q, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planner.update()
        planner.run(q, kv, out=out, lse=lse)
    kv_len, tree = keywords["kv_len"], keywords["tree"]
    for first, last, parents in ((309, 64, None), (200, 30, None), (9, 17, "chain"), (0, 0, None), (309, 0, None)):
        kv_len.copy_(torch.tensor([first, 0, last], dtype=torch.int32))
        if parents:
            tree.copy_(torch.tensor([*range(-1, 8), *range(-1, 16)], dtype=torch.int32))
        q.normal_()
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        want = treemla.verify(q, kv, **keywords)
        fresh = treemla.Planner().plan(q, kv, **keywords).run(q, kv)
        planner.check()
        assert torch.equal(out, want.out) and torch.equal(lse, want.lse), (first, last)
        assert torch.equal(out, fresh.out)


def test_the_current_stream_is_respected(make_case):
    case = make_case(**CASE)
    q, kv, keywords = tensors(case)
    planner = treemla.Planner().plan(q, kv, **keywords)
    want = planner.run(q, kv).out.clone()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    late = torch.zeros_like(q)
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: what runs on another stream would see zeros
        late.copy_(q)
        got = planner.run(late, kv).out
        direct = treemla.verify(late, kv, **keywords).out
    side.synchronize()
    assert torch.equal(got, want) and torch.equal(direct, want)
    explicit = planner.run(q, kv, stream=side)
    side.synchronize()
    assert torch.equal(explicit.out, want)


def test_faults_on_the_device(make_case):
    case = make_case(**CASE)
    q, kv, keywords = tensors(case)
    planner = treemla.Planner().plan(q, kv, **keywords)
    planner.run(q, kv)
    planner.check()
    good = keywords["page_table"].clone()
    keywords["page_table"][0, 2] = 2147480000
    planner.update()
    out, lse = planner.run(q, kv)
    with pytest.raises(treemla.InvalidArgument, match="request 0"):
        planner.check()
    assert not torch.isnan(out[9:]).any()
    keywords["page_table"].copy_(good)
    keywords["kv_len"][2] = 5
    planner.update()
    out, lse = planner.run(q, kv)
    with pytest.raises(treemla.InvalidArgument, match="kv_len"):
        planner.check()
    assert (out[9:] == 0).all() and torch.isneginf(lse[9:]).all()


def test_arguments_in_two_places(make_case):
    case = make_case(**CASE)
    q, kv, keywords = tensors(case)
    with pytest.raises(treemla.InvalidArgument, match="kv_len is on cpu: must be where q is, on cuda:0"):
        treemla.verify(q, kv, **(keywords | {"kv_len": keywords["kv_len"].cpu()}))
    with pytest.raises(treemla.InvalidArgument, match="out is on cpu"):
        treemla.verify(q, kv, out=torch.empty(len(q), 8, 512), **keywords)
    with pytest.raises(treemla.InvalidArgument, match="dense mask on cuda:0"):
        treemla.verify(q, kv, **(keywords | {"tree": torch.ones(26, 26, dtype=torch.bool, device="cuda")}))


def test_host_and_device_agree_on_tree_steps():
    rng = np.random.default_rng(3)
    scores = rng.standard_normal((3, 4, 300)).astype(np.float32)
    logits = rng.standard_normal((3 * 17, 300)).astype(np.float32)
    cache = rng.standard_normal((2, 3 * 60, 16)).astype(np.float32)
    table = rng.permutation(180).reshape(3, 60).astype(np.int32)
    results = []
    for to in (lambda a: torch.from_numpy(a.copy()), lambda a: torch.from_numpy(a.copy()).cuda()):
        tree = treemla.build_tree(to(scores), 16, check=True)
        indptr, kv_len = to(np.array([0, 17, 34, 51], np.int32)), to(np.array([40, 17, 60], np.int32))
        accepted = treemla.accept_path(
            tree.token_ids.reshape(-1),
            q_indptr=indptr,
            parents=tree.parents.reshape(-1),
            logits=to(logits * 0 + scores.reshape(-1, 300)[:1]),
            method="deterministic",
            seeds=to(np.array([1, 2, 3])),
            path_len=17,
            check=True,
        )
        layers = [to(cache[0]), to(cache[1])]
        done = treemla.compact_cache(
            layers, q_indptr=indptr, kv_len=kv_len, accept_index=accepted.accept_index,
            num_accepted=accepted.num_accepted, total_q=51, page_table=to(table), check=True,
        )  # fmt: skip
        stacked = to(cache)
        treemla.compact_cache(
            stacked, q_indptr=indptr, kv_len=kv_len, accept_index=accepted.accept_index,
            num_accepted=accepted.num_accepted, total_q=51, page_table=to(table), check=True,
        )  # fmt: skip
        freed = [done.freed_pages[17 * r : 17 * r + int(n)] for r, n in enumerate(done.num_freed)]
        results.append([t.cpu() for t in (*tree, *accepted, done.kv_len, done.num_freed, *freed, *layers, stacked)])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert torch.equal(torch.stack(results[1][-3:-1]), results[1][-1])


def test_a_fault_in_a_tree_step():
    scores = torch.full((1, 2, 8), float("nan"), device="cuda")
    assert treemla.build_tree(scores, 3).num_nodes.item() == 1  # inert
    with pytest.raises(treemla.InvalidArgument, match="NaN"):
        treemla.build_tree(scores, 3, check=True)


def test_recorded_calls_replay(make_case, tmp_path, treemla_command):
    import subprocess

    case = make_case(**CASE)
    q, kv, keywords = tensors(case)
    with treemla.record(tmp_path, expected=True) as recorder:
        treemla.verify(q, kv, **keywords)
        treemla.verify(q, kv.to(torch.float8_e4m3fn), kv_scale=0.5, **keywords)
    assert len(recorder.paths) == 2
    done = subprocess.run([treemla_command, "verify", str(tmp_path)], capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [line.split() for line in done.stdout.splitlines()]
    for path, cache, scale in zip(recorder.paths, (kv, kv.to(torch.float8_e4m3fn)), (1.0, 0.5)):
        for backend in treemla.list_backends():
            if backend.memory != "cuda" or not backend.available:
                continue  # those of the host: record_test.py
            if treemla.why_unsupported(backend.name, q, cache, kv_scale=scale, **keywords):
                continue
            assert any(path.stem in line and backend.name in line and "PASS" in line for line in results), (path, backend.name)
    assert "cuda_mma" in done.stdout and "cpu_simd" in done.stdout


def test_capturing_is_not_recorded(make_case, tmp_path):
    case = make_case(**CASE)
    q, kv, keywords = tensors(case)
    planner = treemla.Planner().plan(q, kv, **keywords)
    out, lse = planner.run(q, kv)
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="captured"), treemla.record(tmp_path) as recorder, torch.cuda.graph(graph):
        planner.run(q, kv, out=out, lse=lse)
    graph.replay()
    torch.cuda.synchronize()
    assert len(recorder.skipped) == 1


def test_cupy_gives_the_same_bits(make_case):
    cupy = pytest.importorskip("cupy")
    case = make_case(**CASE)
    for dtype in (torch.float32, torch.float16):
        q, kv, keywords = tensors(case, dtype)
        want = treemla.verify(q, kv, **keywords)
        theirs = {k: cupy.asarray(v) if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
        got = treemla.verify(cupy.asarray(q), cupy.asarray(kv), **theirs)
        assert isinstance(got.out, cupy.ndarray)
        assert torch.equal(torch.from_dlpack(got.out), want.out) and torch.equal(torch.from_dlpack(got.lse), want.lse)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        planner = treemla.Planner().plan(cupy.asarray(q), cupy.asarray(kv), **theirs)
        got = planner.run(cupy.asarray(q), cupy.asarray(kv))
        stream.synchronize()
    assert torch.equal(torch.from_dlpack(got.out), want.out)
