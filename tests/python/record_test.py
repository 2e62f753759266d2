"""record(): calls become case files that the command replays on every backend."""

import pathlib
import re
import subprocess
import warnings

import numpy as np
import pytest

import treemla


def replay(command, folder, *options):
    done = subprocess.run([command, "verify", str(folder), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("expected", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"d_v": 512, "d_rope": 64},
        {"d_v": 64, "d_rope": 32, "page_size": 16},
        {"d_v": 64, "d_rope": 32, "page_size": 3, "index": "int64", "tree": "causal"},
        {"d_v": 64, "d_rope": 32, "lengths": ((9, 4), (0, 0), (3, 2)), "tree": "none"},
    ],
    ids=str,
)
def test_replays(make_case, tmp_path, treemla_command, fields, expected):
    case = make_case(**fields)
    with treemla.record(tmp_path, expected=expected) as recorder:
        treemla.verify(case.q, case.kv, **case.keywords)
        planner = treemla.Planner().plan(case.q, case.kv, **case.keywords)
        planner.run(case.q, case.kv)
        planner.run(case.q * 2, case.kv)
    treemla.verify(case.q, case.kv, **case.keywords)  # out of scope
    assert [p.name for p in recorder.paths] == ["00000.kdtr", "00001.kdtr", "00002.kdtr"] and not recorder.skipped
    assert sorted(tmp_path.iterdir()) == recorder.paths
    bodies = [data[8 + int.from_bytes(data[:8], "little") :] for data in map(pathlib.Path.read_bytes, recorder.paths)]
    assert bodies[0] == bodies[1] != bodies[2]
    text = replay(treemla_command, tmp_path)
    assert ("computed them" in text) != expected
    for backend in treemla.list_backends():
        if backend.memory == "cpu" and not treemla.why_unsupported(backend.name, case.q, case.kv, **case.keywords):
            for path in recorder.paths:
                assert re.search(rf"^{path.stem} +{backend.name} .*PASS", text, re.M), (path.stem, backend.name)


@pytest.mark.parametrize("packed, row_bytes", [(True, 128 + 4 + 2 * 32), ("q8_0", 160 // 32 * 34)])
def test_rows_of_bytes_replay(make_case, tmp_path, treemla_command, packed, row_bytes):
    case = make_case(d_v=128, d_rope=32)
    kv = np.full((*case.kv.shape[:2], row_bytes), 0x22, np.uint8)  # small positive numbers of every kind
    with treemla.record(tmp_path) as recorder:
        treemla.verify(case.q, kv, kv_packed=packed, **case.keywords)
        treemla.Planner().plan(case.q, kv, kv_packed=packed, **case.keywords).run(case.q, kv)
    assert len(recorder.paths) == 2 and not recorder.skipped
    assert f'"kv_layout":"{"e4m3_packed" if packed is True else packed}"'.encode() in recorder.paths[0].read_bytes()
    replay(treemla_command, tmp_path)


def test_only_rows_in_use_are_written(make_case, tmp_path):
    case = make_case(d_v=64, d_rope=32)
    pool = np.full((5000, 1, 96), np.nan, np.float32)
    pool[: len(case.kv)] = case.kv
    with treemla.record(tmp_path) as recorder:
        treemla.verify(case.q, pool, **case.keywords)
    rows = int(case.kv_len.sum())
    assert recorder.paths[0].stat().st_size < case.q.nbytes + rows * 96 * 4 + 4096


def test_the_layouts_of_a_pool_give_one_file(make_case, tmp_path):
    case = make_case(d_v=64, d_rope=32, page_size=4)
    flat = case.kv.reshape(-1, 96)
    with treemla.record(tmp_path) as recorder:
        treemla.verify(case.q, case.kv, **case.keywords)
        for kv in (flat, flat[:, None], case.kv[:, :, None]):
            treemla.verify(case.q, kv, page_size=4, **case.keywords)
    assert len(recorder.paths) == 4 and len({path.read_bytes() for path in recorder.paths}) == 1


def test_the_mask_may_be_bits_or_dense(make_case, tmp_path, treemla_command):
    case = make_case(d_v=64, d_rope=32, lengths=((20, 40), (3, 40)))
    dense = np.stack([case.sees(0), case.sees(1)])
    bits = np.zeros((80, 2), np.uint32)
    for i, j in zip(*np.nonzero(dense.reshape(80, 40))):
        bits[i, j // 32] |= np.uint32(1) << np.uint32(j % 32)
    with treemla.record(tmp_path) as recorder:
        for tree in (case.parents, dense, bits):
            treemla.verify(case.q, case.kv, **(case.keywords | {"tree": tree}))
    files = {path.read_bytes() for path in recorder.paths}
    assert len(recorder.paths) == 3 and len(files) == 1
    replay(treemla_command, tmp_path)


def test_sixteen_and_eight_bits(make_case, tmp_path, treemla_command):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = make_case(d_v=512, d_rope=64)
    q = case.q.astype(ml_dtypes.bfloat16)
    with treemla.record(tmp_path) as recorder:
        treemla.verify(q, case.kv.astype(ml_dtypes.bfloat16), **case.keywords)
        treemla.verify(q, case.kv.astype(ml_dtypes.float8_e4m3fn), kv_scale=0.5, **case.keywords)
    assert len(recorder.paths) == 2
    assert b'"kv_scale":"0.5"' in recorder.paths[1].read_bytes()
    replay(treemla_command, tmp_path)


def test_limits_are_kept(make_case, tmp_path):
    case = make_case()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with treemla.record(tmp_path, max_calls=1) as recorder:
            for _ in range(2):
                treemla.verify(case.q, case.kv, **case.keywords)
        with treemla.record(tmp_path / "small", max_bytes=1000) as small:
            treemla.verify(case.q, case.kv, **case.keywords)
    assert len(recorder.paths) == 1 and "max_calls" in recorder.skipped[0]
    assert not small.paths and "max_bytes" in small.skipped[0] and not list((tmp_path / "small").iterdir())
    assert len(caught) == 2


def test_what_is_no_tree_is_skipped(make_case, tmp_path):
    case = make_case(lengths=((5, 3),))
    mask = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]], bool)  # three roots
    with pytest.warns(UserWarning, match="skips 00000.kdtr"), treemla.record(tmp_path) as recorder:
        treemla.verify(case.q, case.kv, **(case.keywords | {"tree": mask}))
    assert not recorder.paths and len(recorder.skipped) == 1


def test_a_failed_call_leaves_no_file(make_case, tmp_path):
    case = make_case()
    with pytest.raises(treemla.InvalidArgument), treemla.record(tmp_path) as recorder:
        treemla.verify(case.q, case.kv, **(case.keywords | {"sm_scale": -1}))
    assert not recorder.paths and not list(tmp_path.iterdir())
