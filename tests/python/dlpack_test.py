"""Arrays of other libraries: the same bits as NumPy's, and results in the library they came from."""

import numpy as np
import pytest

import treemla


def jax_library():
    jax = pytest.importorskip("jax")
    jax.config.update("jax_platforms", "cpu")
    return jax.numpy.asarray, jax.Array


def torch_library():
    torch = pytest.importorskip("torch")
    return (lambda a: torch.from_numpy(np.array(a))), torch.Tensor


def strict_library():
    xp = pytest.importorskip("array_api_strict")
    return xp.asarray, type(xp.asarray([1]))


LIBRARIES = {"jax": jax_library, "torch": torch_library, "array_api_strict": strict_library}


def as_library(asarray, keywords):
    return {k: asarray(v) if isinstance(v, np.ndarray) else v for k, v in keywords.items()}


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_same_bits(make_case, name):
    asarray, array_type = LIBRARIES[name]()
    case = make_case(page_size=16)
    want = treemla.verify(case.q, case.kv, **case.keywords)
    q, kv, keywords = asarray(case.q), asarray(case.kv), as_library(asarray, case.keywords)
    got = treemla.verify(q, kv, **keywords)
    planned = treemla.Planner().plan(q, kv, **keywords).run(q, kv)
    for result in (got, planned):
        assert isinstance(result.out, array_type) and isinstance(result.lse, array_type)
        for array, wanted in zip(result, want):
            assert np.array_equal(np.from_dlpack(array), wanted)


@pytest.mark.parametrize("name", LIBRARIES)
def test_tree_steps(name):
    asarray, array_type = LIBRARIES[name]()
    scores = np.random.default_rng(3).standard_normal((2, 3, 50)).astype(np.float32)
    want, tree = treemla.build_tree(scores, 12), treemla.build_tree(asarray(scores), 12)
    for field, array, wanted in zip(tree._fields, tree, want):
        assert isinstance(array, array_type), field
        assert np.array_equal(np.from_dlpack(array), wanted), field


@pytest.mark.parametrize("name", ["jax", "torch", "ml_dtypes"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(make_case, assert_close, name, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = make_case(d_v=64, d_rope=32, page_size=4)
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q, kv = case.q.astype(narrow), case.kv.astype(narrow)
    if name == "torch":
        torch = pytest.importorskip("torch")
        pair = [torch.from_numpy(a.view(np.int16)).view(getattr(torch, dtype)) for a in (q, kv)]
        keywords = as_library(torch_library()[0], case.keywords)
    elif name == "jax":
        asarray = jax_library()[0]
        pair, keywords = [asarray(q), asarray(kv)], as_library(asarray, case.keywords)
    else:
        pair, keywords = [q, kv], case.keywords
    got = treemla.verify(*pair, **keywords)
    assert dtype in str(got.out.dtype)
    out = got.out.float().numpy() if name == "torch" else np.asarray(got.out).astype(np.float32)
    assert_close((out, np.asarray(got.lse)), case.reference(q.astype(np.float32), kv.astype(np.float32)), dtype)


def test_e4m3_with_a_scale(make_case, assert_close):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = make_case(d_v=64, d_rope=32)
    kv = case.kv.astype(ml_dtypes.float8_e4m3fn)
    got = treemla.verify(case.q, kv, kv_scale=0.5, **case.keywords)
    assert_close(got, case.reference(kv=kv.astype(np.float32) * np.float32(0.5)))


def test_packed_rows(assert_close, make_case):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    case = make_case(d_v=256, d_rope=64)
    rng = np.random.default_rng(7)
    latents = case.kv[..., :256].astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.3, 2.0, (*case.kv.shape[:2], 2)).astype(np.float32)
    rope = case.kv[..., 256:].astype(ml_dtypes.bfloat16)
    packed = np.concatenate([latents.view(np.uint8), scales.view(np.uint8), rope.view(np.uint8)], axis=-1)
    real = np.concatenate([latents.astype(np.float32) * np.repeat(scales, 128, axis=-1), rope.astype(np.float32)], axis=-1)
    got = treemla.verify(case.q, packed, kv_packed=True, **case.keywords)
    assert_close(got, case.reference(kv=real))
    with pytest.raises(treemla.InvalidArgument, match="kv has rows of 391: must be 392 bytes"):
        treemla.verify(case.q, packed[..., :-1], kv_packed=True, **case.keywords)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_q8_0_rows(assert_close, make_case, library):
    case = make_case(d_v=256, d_rope=64)
    blocks = np.nan_to_num(case.kv, nan=1.0).reshape(*case.kv.shape[:2], 10, 32)  # of rows that nobody names too
    scales = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    numbers = np.rint(blocks / scales.astype(np.float32)).clip(-127, 127).astype(np.int8)
    kv = np.concatenate([scales.view(np.uint8), numbers.view(np.uint8)], axis=-1).reshape(*case.kv.shape[:2], 340)
    real = (scales.astype(np.float32) * numbers).reshape(case.kv.shape)
    q, keywords = case.q, case.keywords
    if library == "torch":
        torch = pytest.importorskip("torch")
        q, kv, keywords = torch.from_numpy(q), torch.from_numpy(kv), as_library(torch_library()[0], keywords)
    want = case.reference(kv=real)
    got = treemla.verify(q, kv, kv_packed="q8_0", **keywords)
    assert_close((np.asarray(got.out), np.asarray(got.lse)), want)
    planner = treemla.Planner().plan(q, kv, kv_packed="q8_0", **keywords)
    got = planner.run(q, kv)
    assert_close((np.asarray(got.out), np.asarray(got.lse)), want)
    with pytest.raises(treemla.InvalidArgument, match="kv has rows of 338: must be 340 bytes: q8_0 rows"):
        treemla.verify(q, kv[..., :-2], kv_packed="q8_0", **keywords)
    with pytest.raises(treemla.InvalidArgument, match='kv is uint8: .*"q8_0"'):
        treemla.verify(q, kv, **keywords)


def test_mixed_libraries(make_case):
    """All in one place is what counts, not whose they are; outputs go with q."""
    torch = pytest.importorskip("torch")
    case = make_case()
    want = treemla.verify(case.q, case.kv, **case.keywords)
    got = treemla.verify(case.q, torch.from_numpy(case.kv), **case.keywords)
    assert isinstance(got.out, np.ndarray) and np.array_equal(got.out, want.out)
