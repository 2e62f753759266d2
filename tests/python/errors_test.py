"""Bad input: an exception that names the argument and its value, never a crash or a read out of bounds."""

import gc

import numpy as np
import pytest

import treemla


class Lying:
    """An array whose __dlpack__ gives whatever it is told to."""

    shape, dtype = (18, 4, 48), "float32"

    def __init__(self, capsule, device=(1, 0)):
        self.capsule, self.device = capsule, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        if isinstance(self.capsule, Exception):
            raise self.capsule
        return self.capsule


def f32(*shape):
    return np.zeros(shape, np.float32)


def i32(*values):
    return np.array(values, np.int32)


BAD = [
    # argument, what it is, part of the message
    ("q", f32(18, 48), r"q has shape \[18, 48\]: must be \[total_q, h_q, d_qk\]"),
    ("q", np.zeros((15, 4, 48)), "q is of a dtype"),
    ("q", np.zeros((15, 4, 48), np.int32), "q is int32: must be float32, float16, bfloat16"),
    ("q", None, "q is None"),
    ("q", [[1.0]], "q is a list: must be an array"),
    ("q", "q", "q is a str"),
    ("q", f32(15, 4, 96)[:, :, ::2], "q has strides"),
    ("q", f32(15, 4, 48)[::-1], "q has strides|q.token_stride"),
    ("q", np.broadcast_to(f32(1, 4, 48), (15, 4, 48)), "q has strides|token_stride|overlap"),
    ("q", f32(14, 4, 48), r"must be \[total_q\] .* = \[14\]"),
    ("q", f32(15, 0, 48), "h_q = 0"),
    ("q", f32(15, 4, 0), "d_v = 32"),
    ("q", f32(1, 1, 1, 1, 1, 1, 1, 1), "axes"),
    ("q", Lying("no capsule"), "no DLPack capsule"),
    ("q", Lying(None, (7, 0)), "device of DLPack's type 7"),
    ("q", Lying(BufferError("not today")), "q can't be had by DLPack: .*not today"),
    ("kv", f32(66), "kv has shape"),
    ("kv", f32(66, 1, 47), "kv has rows of 47: must be 48"),
    ("kv", np.zeros((66, 1, 48), np.uint8), "kv is uint8"),
    ("kv", f32(66, 48)[:, None][::-1], "kv has strides"),
    ("kv", np.broadcast_to(f32(1, 1, 48), (66, 1, 48)), "kv has strides"),
    ("kv", f32(20, 1, 48), "page entry|entries"),
    ("q_indptr", i32(0, 5, 6), r"kv_len has shape \[3\]: must be \[b\] = \[2\]"),
    ("q_indptr", np.array([0, 5, 6, 15]), "q_indptr is int64: must be int32"),
    ("q_indptr", i32(0, 5, 6, 14), "q_indptr"),
    ("q_indptr", i32(0, 6, 5, 15), "q_indptr"),
    ("q_indptr", i32(), "q_indptr is empty"),
    ("q_indptr", i32(0, 9, 5, 9, 6, 9, 15)[::2], "q_indptr .*strides"),
    ("kv_len", i32(45, 1, 8), r"kv_len\[2\] = 8"),
    ("kv_len", i32(45, 1, -1), r"kv_len\[2\] = -1"),
    ("kv_len", i32(45, 1, 4000), "kv_len"),
    ("kv_len", f32(3), "kv_len is float32"),
    ("page_table", None, "page_table and page_indices"),
    ("page_table", i32(0, 1, 2), "page_table has shape"),
    ("page_table", np.zeros((3, 3), np.int32), "kv_len|pages"),
    ("page_table", np.full((3, 60), 66, np.int32), "66 is outside"),
    ("page_table", np.full((3, 60), -1, np.int32), "-1 is outside"),
    ("page_table", f32(3, 60), "page_table is float32"),
    ("page_indices", i32(0), "one of them"),
    ("page_indptr", i32(0), "page_indptr"),
    ("tree", None, "tree is None"),
    ("tree", "chain", 'tree = "chain": must be'),
    ("tree", np.zeros(15, np.int32), "parents"),
    ("tree", i32(-1), r"tree has shape \[1\]"),
    ("tree", np.zeros((15, 0), np.uint32), "words_per_row|ancestor_bits"),
    ("tree", f32(15), "tree is an array of float32"),
    ("tree", np.ones((15, 15), bool), "tree is a dense mask of shape"),
    ("sm_scale", float("nan"), "sm_scale"),
    ("sm_scale", "1", None),
    ("sm_scale", "one", "sm_scale = 'one'"),
    ("sm_scale", -1.0, "sm_scale = -1"),
    ("d_v", 49, "d_v = 49"),
    ("d_v", 0, "d_v = 0: must be at least 1"),
    ("d_v", None, "d_v is missing"),
    ("d_v", 31.5, "d_v = 31.5: must be an integer"),
    ("page_size", 0, "page_size = 0"),
    ("page_size", 7, "kv has 66 rows: must be a multiple of page_size = 7"),
    ("page_size", 2**40, "page_size"),
    ("kv_scale", 0, "kv.scale = 0|kv_scale"),
    ("kv_packed", True, "kv is float32: must be uint8"),
    ("kv_packed", "q8_0", "kv is float32: must be uint8"),
    ("kv_packed", "q4_0", 'kv_packed = "q4_0": must be False, "e4m3_packed" .* or "q8_0"'),
    ("max_q_len", -1, "max_q_len = -1"),
    ("out", f32(15, 4, 33), r"out has shape \[15, 4, 33\]: must be \[total_q, h_q, d_v\] = \[15, 4, 32\]"),
    ("out", np.zeros((15, 4, 32), np.int32), "out is int32"),
    ("out", f32(15, 8, 32)[:, ::2], "out .*strides.*contiguous"),
    ("lse", f32(15, 5), "lse has shape"),
    ("lse", np.zeros((15, 4), np.float16), "lse is float16"),
    ("out_dtype", "int8", "out_dtype = int8"),
    ("backend", "fastest", "fastest"),
    ("backend", 3, "backend = 3"),
    ("num_threads", -1, "num_threads = -1"),
    ("num_threads", 2**40, "num_threads"),
    ("split_keys", 64, "split_keys = 64"),
    ("stream", "fast", "stream = 'fast'"),
]


@pytest.mark.parametrize("argument,value,message", BAD, ids=[f"{a}-{i}" for i, (a, _, _) in enumerate(BAD)])
def test_bad_argument(make_case, argument, value, message):
    case = make_case()
    arguments = {"q": case.q, "kv": case.kv[:66], **case.keywords}
    arguments["page_table"] = np.minimum(arguments["page_table"], 65)
    arguments[argument] = value
    if message is None:  # fine after all
        treemla.verify(**arguments)
        return
    with pytest.raises(treemla.Error, match=message) as caught:
        treemla.verify(**arguments)
    assert isinstance(caught.value, (ValueError, NotImplementedError))
    assert "\n" not in str(caught.value)


def test_the_exception_has_the_argument(make_case):
    case = make_case()
    with pytest.raises(treemla.InvalidArgument) as caught:
        treemla.verify(case.q, case.kv, **(case.keywords | {"d_v": 100}))
    assert caught.value.argument == "d_v"


def test_read_only_output(make_case):
    case = make_case()
    out = np.zeros((15, 4, 32), np.float32)
    out.flags.writeable = False
    with pytest.raises(treemla.InvalidArgument, match="out"):
        treemla.verify(case.q, case.kv, out=out, **case.keywords)
    for array in (case.q, case.kv, case.kv_len, case.page_table, case.parents):  # read-only inputs are fine
        array.flags.writeable = False
    treemla.verify(case.q, case.kv, **case.keywords)


def test_unsupported_names_the_reasons(make_case):
    case = make_case()
    cuda = [b.name for b in treemla.list_backends() if b.memory == "cuda"]
    for name in cuda:
        with pytest.raises(treemla.Unsupported, match=name):
            treemla.verify(case.q, case.kv, backend=name, **case.keywords)


def test_planner_misuse(make_case):
    case = make_case()
    planner = treemla.Planner()
    for call in (lambda: planner.run(case.q, case.kv, out=case.q), planner.update, planner.check):
        with pytest.raises(treemla.InvalidArgument, match="needs a plan"):
            call()
    planner.plan(case.q, case.kv, **case.keywords)
    with pytest.raises(treemla.InvalidArgument, match=r"q has shape \[15, 3, 48\]"):
        planner.run(np.zeros((15, 3, 48), np.float32), case.kv)
    with pytest.raises(treemla.InvalidArgument, match="q has 14 nodes"):
        planner.run(np.zeros((14, 4, 48), np.float32), case.kv)
    with pytest.raises(treemla.InvalidArgument, match="num_pages"):
        planner.run(case.q, case.kv[:-1])
    with pytest.raises(treemla.InvalidArgument, match="q.dtype"):
        planner.run(case.q.astype(np.float16), case.kv)
    with pytest.raises(treemla.InvalidArgument, match="kv_len"):
        planner.plan(case.q, case.kv, **(case.keywords | {"kv_len": case.kv_len[:1]}))
    with pytest.raises(treemla.InvalidArgument, match="needs a plan"):  # a failed plan leaves none behind
        planner.run(case.q, case.kv)


def test_arrays_are_kept_and_given_back(make_case):
    """A plan keeps its arrays alive, and nothing longer than the plan."""
    import weakref

    class Array(np.ndarray):
        pass

    case = make_case()
    kv_len = case.kv_len.view(Array)
    alive = weakref.ref(kv_len)
    want = treemla.verify(case.q, case.kv, **case.keywords).out
    planner = treemla.Planner().plan(case.q, case.kv, **(case.keywords | {"kv_len": kv_len}))
    case.keywords["kv_len"] = None
    del kv_len
    gc.collect()
    assert alive() is not None
    assert np.array_equal(planner.run(case.q, case.kv).out, want)
    del planner
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("seed", range(20))
def test_random_nonsense(make_case, random_value, seed):
    """Either it is an error of the library's, or the result is whole: every element was written."""
    rng = np.random.default_rng(seed)
    case = make_case(page_size=4, seed=seed)
    indptr, indices = case.csr()
    good = {"q": case.q, "kv": case.kv, **case.keywords}
    good |= {"out": np.zeros((15, 4, 32), np.float32), "lse": np.zeros((15, 4), np.float32)}
    refused = 0
    with np.errstate(all="ignore"):
        for i in range(60):
            arguments = dict(good)
            if i % 2:
                del arguments["page_table"]
                arguments |= {"page_indptr": indptr, "page_indices": indices}
            for name in rng.choice(list(arguments), size=rng.integers(1, 3), replace=False):
                arguments[name] = random_value(rng, arguments[name])
            if arguments["lse"] is None or arguments["out"] is None:
                continue
            try:
                out, lse = treemla.verify(**arguments)
            except treemla.Error as error:
                refused += 1
                assert error.args and "\n" not in str(error)
            else:
                assert out.shape[:2] == lse.shape
    assert refused > 20  # most of it is nonsense
