"""verify() and Planner."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple

from . import _arrays, _core, _record
from ._errors import invalid

__all__ = ["Backend", "Planner", "Verified", "list_backends", "verify", "why_unsupported"]


class Verified(NamedTuple):
    """The result of a verification."""

    out: Any  #: [total_q, h_q, d_v]
    lse: Any  #: [total_q, h_q] float32, natural log; None if lse=False was given


class Backend(NamedTuple):
    """A kernel of this build."""

    name: str
    memory: str  #: "cpu" or "cuda": where its arrays live
    available: bool  #: on this machine
    reason: str  #: why not, or a line about what it will use


def list_backends() -> list[Backend]:
    """All backends of this build, in the order in which "best" prefers them, oracles last."""
    return [Backend(*b) for b in _core.list_backends()]


def packed_dtype(kv_packed: bool | str) -> str:
    """What the rows of a uint8 kv are, as the extension takes it; "" for other arrays."""
    return kv_packed if isinstance(kv_packed, str) else "e4m3_packed" if kv_packed else ""


def _problem(
    q: Any,
    kv: Any,
    *,
    q_indptr: Any,
    kv_len: Any,
    tree: Any,
    sm_scale: float,
    page_table: Any = None,
    page_indptr: Any = None,
    page_indices: Any = None,
    page_size: int | None = None,
    d_v: int | None = None,
    kv_scale: float = 1.0,
    kv_packed: bool | str = False,
    max_q_len: int = 0,
    max_kv_len: int = 0,
) -> tuple:
    """The arguments in the order that the extension takes them."""
    return (
        q,
        kv,
        q_indptr,
        kv_len,
        page_table,
        page_indptr,
        page_indices,
        tree,
        0 if page_size is None else _arrays.index("page_size", page_size, 1),
        0 if d_v is None else _arrays.index("d_v", d_v, 1),
        _arrays.number("sm_scale", sm_scale),
        _arrays.number("kv_scale", kv_scale),
        packed_dtype(kv_packed),
        _arrays.index("max_q_len", max_q_len),
        _arrays.index("max_kv_len", max_kv_len),
    )


def _options(backend: str, num_threads: int, batch_invariant: bool, split_keys: int) -> tuple:
    if not isinstance(backend, str):
        raise invalid("backend", f"backend = {backend!r}: must be a name of list_backends(), or 'best'")
    numbers = {"num_threads": num_threads, "split_keys": split_keys}
    for name, value in numbers.items():
        if _arrays.index(name, value) >= 2**31:
            raise invalid(name, f"{name} = {value}: must be less than 2^31")
    return backend, int(num_threads), bool(batch_invariant), int(split_keys)


def _out_shape(q: Any, d_v: int | None) -> tuple[int, int, int] | None:
    """None where q or d_v can't be right: the extension says so."""
    shape = getattr(q, "shape", ())
    if len(shape) != 3 or (d_v is None and shape[2] not in (512, 576)):
        return None
    return int(shape[0]), int(shape[1]), 512 if d_v is None else int(d_v)


def verify(
    q: Any,
    kv: Any,
    *,
    q_indptr: Any,
    kv_len: Any,
    tree: Any,
    sm_scale: float,
    page_table: Any = None,
    page_indptr: Any = None,
    page_indices: Any = None,
    page_size: int | None = None,
    d_v: int | None = None,
    kv_scale: float = 1.0,
    kv_packed: bool | str = False,
    max_q_len: int = 0,
    max_kv_len: int = 0,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    backend: str = "best",
    num_threads: int = 0,
    batch_invariant: bool = False,
    split_keys: int = 0,
    stream: Any = None,
) -> Verified:
    """Attends every node of every request's draft tree to its cached prefix and to its own ancestors.

    For request r, node i, head h, over the keys j that node i may see::

        s_j = sm_scale * dot(q[i, h], kv[j])        lse = log(sum_j exp(s_j))
        out = sum_j exp(s_j - lse) * kv[j, :d_v]

    Arrays come from any library that speaks DLPack (NumPy, torch, CuPy, JAX), all in one place: the host or one GPU.

    Args:
        q: [total_q, h_q, d_qk] absorbed queries, latent part first; float32, float16 or bfloat16. Any strides whose
            rows are contiguous.
        kv: [num_pages, page_size, d_qk] or [rows, d_qk] cached rows, the latent part first; float32, float16,
            bfloat16 or float8_e4m3fn; or uint8 rows of kv_packed. Rows that no request names may hold anything, NaN too.
        q_indptr: int32 [b + 1]; request r owns the query rows q_indptr[r] to q_indptr[r + 1].
        kv_len: int32 [b] cached rows of each request, its tree rows included: they are the last ones.
        tree: who sees whom. int32 [total_q]: parents within the request's tree, -1 for its root. uint32 or int32
            [total_q, words]: ancestor bits. On the host also a dense bool mask: [q_len, q_len], [b, q_len, q_len] or
            all requests' cells one after the other. "causal": a chain. "none": every node sees every node.
        sm_scale: the factor of scores: (d_nope + d_rope)^-0.5 times YaRN's m^2. It can't be derived from d_qk.
        page_table: int32 or int64 [b, max_pages] pages of each request; entries past kv_len are never read.
        page_indptr: int32 [b + 1], with page_indices: int32 or int64 [n], the pages of all requests one after the
            other. Give these two or page_table.
        page_size: tokens a page. By default that of a kv of three axes, else 1.
        d_v: latent width, 512 by default if d_qk is 576 or 512.
        kv_scale: real row = stored row * kv_scale.
        kv_packed: what a kv of uint8 holds. True or "e4m3_packed": rows of d_v e4m3 latents, float32 scales of 128 each,
            bfloat16 rope. "q8_0": rows of llama.cpp's q8_0, blocks of a float16 scale and 32 int8; on the host only.
        max_q_len: on a GPU, the most nodes of a request; 0: what total_q allows. A request past it comes out inert.
        max_kv_len: on a GPU, the most cached rows of a request; 0: what the page table allows.
        out: [total_q, h_q, d_v] contiguous float32, float16 or bfloat16 to write into; made if None.
        lse: float32 [total_q, h_q] to write into; made if None; not computed if False.
        out_dtype: dtype of an `out` that is made: that of q by default.
        backend: a name of list_backends(), or "best": the fastest one that takes the problem.
        num_threads: CPU backends: 0 is what the environment's TREEMLA_NUM_THREADS says, or one per core.
        batch_invariant: a request's rows come out bit-equal alone and in any batch.
        split_keys: with batch_invariant: keys a split; 0 is the backend's default.
        stream: a CUDA stream: of torch, of CuPy, or a cudaStream_t as int. By default the current one of q's library.

    Returns:
        (out, lse). A row that sees no key has out 0 and lse -inf. On a GPU the work is enqueued.

    Raises:
        InvalidArgument: with the argument, its value and what is allowed. What lives on a GPU can't be seen by the
            host: requests with broken lengths or pages come out inert there, and Planner.check() tells.
        Unsupported: no backend takes the problem; the text has every backend's reason.
    """
    if _arrays.is_compiling():
        from . import torch_ops

        return torch_ops.compiled_verify(
            q, kv, q_indptr, kv_len, tree, sm_scale, page_table, page_indptr, page_indices, page_size, d_v, kv_scale,
            kv_packed, max_q_len, max_kv_len, out, lse, out_dtype, backend, num_threads, batch_invariant, split_keys,
            stream,
        )  # fmt: skip
    problem = _problem(
        q,
        kv,
        q_indptr=q_indptr,
        kv_len=kv_len,
        tree=tree,
        sm_scale=sm_scale,
        page_table=page_table,
        page_indptr=page_indptr,
        page_indices=page_indices,
        page_size=page_size,
        d_v=d_v,
        kv_scale=kv_scale,
        kv_packed=kv_packed,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
    )
    options = _options(backend, num_threads, batch_invariant, split_keys)
    shape = _out_shape(q, d_v)
    with _arrays.device_guard(q, stream):
        made_out = made_lse = None
        if shape is not None:
            if out is None:
                dtype = _arrays.default_dtype(q) if out_dtype is None else _arrays.check_dtype("out_dtype", out_dtype)
                out = made_out = _arrays.empty(q, shape, dtype)
            if lse is None:
                lse = made_lse = _arrays.empty(q, shape[:2], "float32", "lse")
        wanted_lse = None if lse is False else lse
        handle = _arrays.stream_handle(q, stream)
        _core.verify(problem, out, wanted_lse, *options, handle)
    if _record.recorders:
        _record.record_call(problem, options[0])
    return Verified(
        out if made_out is None else _arrays.finish(q, made_out),
        wanted_lse if made_lse is None else _arrays.finish(q, made_lse),
    )


def why_unsupported(backend: str, q: Any, kv: Any, **problem: Any) -> str:
    """Would `backend` run this problem (the arguments of verify())? "" or the reason for the refusal."""
    with _arrays.device_guard(q):
        return _core.why_unsupported(backend, _problem(q, kv, **problem), _arrays.stream_handle(q))


#: Planners by their number, for operators inside torch.compile, which take numbers and tensors.
planners: weakref.WeakValueDictionary[int, Planner] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Planner:
    """Plans once a step, runs once a layer::

        planner = treemla.Planner()
        planner.plan(q, kv, q_indptr=..., kv_len=..., tree=..., ...)    # any layer's q and kv
        for layer in layers:
            out, lse = planner.run(layer.q, layer.kv)

    On a GPU everything is enqueued on the current stream. After one plan(), a captured CUDA graph of update() and run()s
    serves every later content of the lengths, page tables and trees: write them into the arrays that plan() was given,
    then replay. Requests of length 0 are padding.

    Args:
        backend, num_threads, batch_invariant, split_keys: as in verify().
    """

    def __init__(
        self,
        *,
        backend: str = "best",
        num_threads: int = 0,
        batch_invariant: bool = False,
        split_keys: int = 0,
    ):
        options = _options(backend, num_threads, batch_invariant, split_keys)
        self._core = _core.Planner(*options)
        self._shape: tuple[int, int, int] = (0, 0, 0)
        self._dtype = "float32"
        self._problem: tuple = ()
        self.number = next(_numbers)
        planners[self.number] = self

    def plan(
        self,
        q: Any,
        kv: Any,
        *,
        q_indptr: Any,
        kv_len: Any,
        tree: Any,
        sm_scale: float,
        page_table: Any = None,
        page_indptr: Any = None,
        page_indices: Any = None,
        page_size: int | None = None,
        d_v: int | None = None,
        kv_scale: float = 1.0,
        kv_packed: bool | str = False,
        max_q_len: int = 0,
        max_kv_len: int = 0,
        out_dtype: Any = None,
        stream: Any = None,
    ) -> Planner:
        """Checks the problem, chooses the backend, splits the work and allocates the workspace; verify() has the arguments.

        The arrays are kept, by reference. Not to be captured into a graph: see update().
        """
        problem = _problem(
            q,
            kv,
            q_indptr=q_indptr,
            kv_len=kv_len,
            tree=tree,
            sm_scale=sm_scale,
            page_table=page_table,
            page_indptr=page_indptr,
            page_indices=page_indices,
            page_size=page_size,
            d_v=d_v,
            kv_scale=kv_scale,
            kv_packed=kv_packed,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
        )
        dtype = _arrays.default_dtype(q) if out_dtype is None else _arrays.check_dtype("out_dtype", out_dtype)
        with _arrays.device_guard(q, stream):
            self._core.plan(problem, _arrays.stream_handle(q, stream))
        self._shape, self._dtype, self._problem = self._core.out_shape, dtype, problem
        return self

    def update(self, *, stream: Any = None) -> Planner:
        """Plans again, from the arrays of plan(), whose contents have changed. On a GPU: enqueued, may be captured."""
        q = self._problem[0] if self._problem else None
        with _arrays.device_guard(q, stream):
            self._core.update(_arrays.stream_handle(q, stream))
        return self

    def run(self, q: Any, kv: Any, *, out: Any = None, lse: Any = None, stream: Any = None) -> Verified:
        """Attention of one layer with the planned lengths, pages and trees.

        Args:
            q: [total_q, h_q, d_qk], of the planned shape, strides and dtype.
            kv: as planned; another layer's cache, say.
            out: [total_q, h_q, d_v] to write into; made if None.
            lse: float32 [total_q, h_q] to write into; made if None; not computed if False.
            stream: as in verify().

        Returns:
            (out, lse). On a GPU the work is enqueued.
        """
        if _arrays.is_compiling():
            from . import torch_ops

            return torch_ops.compiled_run(self.number, self._shape[2], self._dtype, q, kv, out, lse)
        made_out = made_lse = None
        with _arrays.device_guard(q, stream):
            if out is None:
                out = made_out = _arrays.empty(q, self._shape, self._dtype)
            if lse is None:
                lse = made_lse = _arrays.empty(q, self._shape[:2], "float32", "lse")
            elif lse is False:
                lse = None
            self._core.run(q, kv, out, lse, _arrays.stream_handle(q, stream))
        if _record.recorders:
            _record.record_call((q, kv, *self._problem[2:]), self.backend)
        if made_out is not None:
            out = _arrays.finish(q, made_out)
        if made_lse is not None:
            lse = _arrays.finish(q, made_lse)
        return Verified(out, lse)

    def check(self, *, stream: Any = None) -> None:
        """On a GPU: waits, and raises InvalidArgument if lengths, pages or parents met since plan() were out of range.

        Such requests came out inert, or wrong; nothing was read or written out of bounds.
        """
        q = self._problem[0] if self._problem else None
        with _arrays.device_guard(q, stream):
            self._core.check(_arrays.stream_handle(q, stream))

    @property
    def backend(self) -> str:
        """The chosen backend's name; "" before plan()."""
        return self._core.backend

    @property
    def workspace_bytes(self) -> int:
        """Memory that the plan holds besides the caller's arrays."""
        return self._core.workspace_bytes

    def describe(self) -> str:
        """The plan, for people."""
        return self._core.describe()

    def __repr__(self) -> str:
        return f"<treemla.Planner backend={self.backend or None!r} out={list(self._shape)}>"
