"""record(): the calls of a scope as case files, so that what went wrong in production is replayed anywhere."""

from __future__ import annotations

import os
import pathlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import _arrays, _core
from ._errors import Error, invalid

__all__ = ["Recorder", "record"]

#: The recorders in scope; calls look here.
recorders: list[Recorder] = []


class Recorder:
    """What record() yields.

    Attributes:
        paths: the files written so far.
        skipped: a line for each call that was not written, and why.
    """

    def __init__(self, folder: pathlib.Path, expected: bool, max_bytes: int, max_calls: int):
        self.folder = folder
        self.expected = expected
        self.bytes_left = max_bytes
        self.calls_left = max_calls
        self.calls = 0
        self.paths: list[pathlib.Path] = []
        self.skipped: list[str] = []


@contextmanager
def record(
    path: str | os.PathLike[str], *, expected: bool = False, max_bytes: int = 1 << 30, max_calls: int = 1000
) -> Iterator[Recorder]:
    """Writes each verification in scope to the folder `path`, as 00000.kdtr, 00001.kdtr, ...

    `treemla verify path` replays them on every backend. Of the cache only the rows in use are written, in pages of their own
    numbering; queries, lengths and trees as they are. A call on a GPU is waited for. Calls that replay a captured CUDA graph
    pass no Python and are not seen; calls that are being captured can't be read: leave the scope first.

    Args:
        path: a folder; made if it isn't there.
        expected: write the float64 oracle's result too. Slow; `treemla verify` computes it where it is missing.
        max_bytes: stop writing before all files together pass this.
        max_calls: stop after so many.

    Yields:
        a Recorder: `paths` written, and `skipped` with the reasons.
    """
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder, expected, _arrays.index("max_bytes", max_bytes), _arrays.index("max_calls", max_calls))
    recorders.append(recorder)
    try:
        yield recorder
    finally:
        recorders.remove(recorder)


def record_call(problem: tuple, backend: str) -> None:
    """What can't be recorded must not stop the call that did succeed: it is listed, and warned of."""
    for recorder in recorders:
        name = f"{recorder.calls:05d}.kdtr"
        recorder.calls += 1
        try:
            _record(recorder, recorder.folder / name, problem, backend)
        except Error as error:
            recorder.skipped.append(f"{name}: {error}")
            warnings.warn(f"treemla.record skips {recorder.skipped[-1]}", stacklevel=3)


def _record(recorder: Recorder, path: pathlib.Path, problem: tuple, backend: str) -> None:
    if recorder.calls_left == 0:
        raise invalid("max_calls", "max_calls reached")
    if _arrays.is_capturing(problem[0]):
        raise invalid("record", "the call is being captured into a CUDA graph: nothing can be read")
    case = _Case(problem)
    if case.num_bytes > recorder.bytes_left:
        raise invalid("max_bytes", f"{case.num_bytes} bytes, and {recorder.bytes_left} of max_bytes are left")
    tensors, dtypes = case.tensors()
    _core.write_case(
        os.fspath(path), tensors, dtypes, case.d_v, case.d_rope, case.sm_scale, case.page_size, case.mask, case.kv_scale,
        case.kv_packed, f"recorded by treemla.record, backend {backend}", recorder.expected,
    )  # fmt: skip
    recorder.calls_left -= 1
    recorder.bytes_left -= path.stat().st_size
    recorder.paths.append(path)


_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "uint8": "U8"}


class _Case:
    """A call reduced to what it reads: lengths first, then the pages that they name."""

    def __init__(self, problem: tuple):
        import numpy

        (q, kv, q_indptr, kv_len, page_table, page_indptr, page_indices, tree, page_size, d_v, self.sm_scale, self.kv_scale,
         self.kv_packed, _, _) = problem  # fmt: skip
        self.q, self.q_dtype = q, _SAFETENSORS[_arrays.dtype_name(q.dtype)]
        self.kv, self.kv_dtype = kv, _SAFETENSORS[_arrays.dtype_name(kv.dtype)]
        self.d_v = d_v or 512
        self.d_rope = int(q.shape[2]) - self.d_v
        self.page_size = int(page_size or (kv.shape[1] if len(kv.shape) >= 3 else 1))
        self.q_indptr = _arrays.to_numpy(q_indptr)
        self.kv_len = _arrays.to_numpy(kv_len)
        q_lens = numpy.diff(self.q_indptr)
        total_q = int(self.q_indptr[-1])
        if total_q != q.shape[0]:  # the padding of a captured graph is nobody's
            self.q = q[:total_q]
        if (q_lens < 0).any() or ((self.kv_len != 0) & (self.kv_len < q_lens)).any():
            raise invalid("kv_len", "the lengths are broken: kv_len must be 0 or at least q_len, q_indptr must not fall")
        # Of each request the pages in use; the pool is renumbered in the order of first use.
        counts = numpy.where(q_lens > 0, -(-self.kv_len.astype(numpy.int64) // self.page_size), 0)
        self.kv_len = numpy.where(q_lens > 0, self.kv_len, 0).astype(numpy.int32)
        if page_table is not None:
            table = _arrays.to_numpy(page_table)
            used = [table[r, :n] for r, n in enumerate(counts)]
        else:
            begin, entries = _arrays.to_numpy(page_indptr), _arrays.to_numpy(page_indices)
            used = [entries[begin[r] : begin[r] + n] for r, n in enumerate(counts)]
        old = numpy.concatenate([*used, numpy.empty(0, numpy.int64)]).astype(numpy.int64)
        num_pages = int(numpy.prod(kv.shape[:-1])) // self.page_size
        if old.size != counts.sum() or (old.size and not 0 <= old.min() <= old.max() < num_pages):
            raise invalid("page_indices", f"the page table is broken: entries must be in [0, {num_pages})")
        self.pages, self.page_indices = numpy.unique(old, return_inverse=True)
        self.page_indices = self.page_indices.astype(numpy.int32).reshape(-1)
        self.page_indptr = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int32)
        self.mask, self.parents = "tree", None
        if isinstance(tree, str):
            self.mask = tree
        else:
            self.parents = _parents(_arrays.to_numpy(tree), self.q_indptr)
        row_bytes = int(kv.shape[-1]) * {"F32": 4, "F16": 2, "BF16": 2}.get(self.kv_dtype, 1)
        q_bytes = int(numpy.prod(self.q.shape)) * (4 if self.q_dtype == "F32" else 2)
        tables = 4 * (self.page_indices.size + 3 * self.kv_len.size + 2 + total_q)
        self.num_bytes = len(self.pages) * self.page_size * row_bytes + q_bytes + tables

    def tensors(self) -> tuple[dict[str, Any], dict[str, str]]:
        import numpy

        rows = (self.pages[:, None] * self.page_size + numpy.arange(self.page_size)).reshape(-1)
        columns = self.kv.shape[-1]
        if len(self.kv.shape) == 2:
            kv = _arrays.take_rows(self.kv, rows)
        else:  # pages are taken whole: a view of the pool as rows need not exist
            per_entry = int(self.kv.shape[1]) * (int(self.kv.shape[2]) if len(self.kv.shape) == 4 else 1)
            kv = _arrays.take_rows(self.kv, self.pages if per_entry == self.page_size else rows)
        arrays = {
            "q": (_arrays.to_numpy(self.q), self.q_dtype),
            "kv": (kv.reshape(-1, columns), self.kv_dtype),
            "q_indptr": (self.q_indptr, "I32"),
            "kv_len": (self.kv_len, "I32"),
            "page_indptr": (self.page_indptr, "I32"),
            "page_indices": (self.page_indices, "I32"),
        }
        if self.parents is not None:
            arrays["parents"] = (self.parents, "I32")
        tensors = {name: numpy.ascontiguousarray(a) for name, (a, _) in arrays.items()}
        dtypes = {name: dtype for name, (_, dtype) in arrays.items()}
        return tensors, dtypes


def _parents(tree: Any, q_indptr: Any) -> Any:
    """Parents of all requests, from parents, ancestor bits or dense masks."""
    import numpy

    total_q = int(q_indptr[-1])
    if tree.ndim == 1 and tree.dtype == numpy.int32:
        return tree[:total_q]
    parents = numpy.empty(total_q, numpy.int32)
    dense = tree.reshape(-1) if tree.dtype in (numpy.bool_, numpy.uint8) else None
    at = 0
    for r, (begin, end) in enumerate(zip(q_indptr[:-1], q_indptr[1:])):
        n = int(end - begin)
        if n == 0:
            continue
        if dense is None:
            bits = tree[begin:end]
        else:
            cells = dense[at : at + n * n].reshape(n, n) != 0
            at += n * n
            packed = numpy.packbits(cells, axis=1, bitorder="little")
            padded = numpy.zeros((n, -(-n // 32) * 4), numpy.uint8)
            padded[:, : packed.shape[1]] = packed
            bits = padded.view("<u4")
        _core.parents_from_bits(numpy.ascontiguousarray(bits), parents[begin:end], r)
    return parents
