"""Operators of torch, so that torch.compile(fullgraph=True) takes treemla.verify() and Planner.run() without a graph break.

    torch.ops.treemla.verify        a whole call
    torch.ops.treemla.run           a run of a Planner, by its number
    torch.ops.treemla.verify_into, torch.ops.treemla.run_into    the same, writing into out and lse

treemla imports this itself: with torch, or when a call is first compiled.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import _arrays, _verify
from ._errors import invalid

_NAMES = ("float32", "float16", "bfloat16")


def _call(
    q: Tensor,
    kv: Tensor,
    q_indptr: Tensor,
    kv_len: Tensor,
    tree: Optional[Tensor],
    mask: str,
    sm_scale: float,
    page_table: Optional[Tensor],
    page_indptr: Optional[Tensor],
    page_indices: Optional[Tensor],
    page_size: int,
    d_v: int,
    kv_scale: float,
    kv_packed: bool,
    max_q_len: int,
    max_kv_len: int,
    backend: str,
    num_threads: int,
    batch_invariant: bool,
    split_keys: int,
    out: Any,
    lse: Any,
    out_dtype: str,
) -> tuple[Tensor, Tensor]:
    return _verify.verify(
        q,
        kv,
        q_indptr=q_indptr,
        kv_len=kv_len,
        tree=mask if tree is None else tree,
        sm_scale=sm_scale,
        page_table=page_table,
        page_indptr=page_indptr,
        page_indices=page_indices,
        page_size=page_size or None,
        d_v=d_v,
        kv_scale=kv_scale,
        kv_packed=kv_packed,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        out=out,
        lse=lse,
        out_dtype=out_dtype,
        backend=backend,
        num_threads=num_threads,
        batch_invariant=batch_invariant,
        split_keys=split_keys,
    )


@torch.library.custom_op("treemla::verify", mutates_args=())
def verify_op(
    q: Tensor,
    kv: Tensor,
    q_indptr: Tensor,
    kv_len: Tensor,
    tree: Optional[Tensor],
    mask: str,
    sm_scale: float,
    page_table: Optional[Tensor],
    page_indptr: Optional[Tensor],
    page_indices: Optional[Tensor],
    page_size: int,
    d_v: int,
    kv_scale: float,
    kv_packed: bool,
    max_q_len: int,
    max_kv_len: int,
    backend: str,
    num_threads: int,
    batch_invariant: bool,
    split_keys: int,
    out_dtype: str,
) -> tuple[Tensor, Tensor]:
    out, lse = _call(
        q, kv, q_indptr, kv_len, tree, mask, sm_scale, page_table, page_indptr, page_indices, page_size, d_v, kv_scale,
        kv_packed, max_q_len, max_kv_len, backend, num_threads, batch_invariant, split_keys, None, None, out_dtype,
    )  # fmt: skip
    return out, lse


@verify_op.register_fake
def _verify_fake(q, *arguments):
    d_v, out_dtype = arguments[10], arguments[-1]
    return _fake_outputs(q, d_v, out_dtype)


def _fake_outputs(q: Tensor, d_v: int, out_dtype: str) -> tuple[Tensor, Tensor]:
    total_q, h_q, _ = q.shape
    out = q.new_empty((total_q, h_q, d_v), dtype=getattr(torch, out_dtype))
    return out, q.new_empty((total_q, h_q), dtype=torch.float32)


@torch.library.custom_op("treemla::verify_into", mutates_args=("out", "lse"))
def verify_into_op(
    q: Tensor,
    kv: Tensor,
    q_indptr: Tensor,
    kv_len: Tensor,
    tree: Optional[Tensor],
    mask: str,
    sm_scale: float,
    page_table: Optional[Tensor],
    page_indptr: Optional[Tensor],
    page_indices: Optional[Tensor],
    page_size: int,
    d_v: int,
    kv_scale: float,
    kv_packed: bool,
    max_q_len: int,
    max_kv_len: int,
    backend: str,
    num_threads: int,
    batch_invariant: bool,
    split_keys: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    _call(
        q, kv, q_indptr, kv_len, tree, mask, sm_scale, page_table, page_indptr, page_indices, page_size, d_v, kv_scale,
        kv_packed, max_q_len, max_kv_len, backend, num_threads, batch_invariant, split_keys, out, lse, "float32",
    )  # fmt: skip


@torch.library.custom_op("treemla::run", mutates_args=())
def run_op(planner: int, d_v: int, out_dtype: str, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _planner(planner).run(q, kv)
    return out, lse


@run_op.register_fake
def _run_fake(planner, d_v, out_dtype, q, kv):
    return _fake_outputs(q, d_v, out_dtype)


@torch.library.custom_op("treemla::run_into", mutates_args=("out", "lse"))
def run_into_op(planner: int, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor) -> None:
    _planner(planner).run(q, kv, out=out, lse=lse)


def _planner(number: int) -> _verify.Planner:
    planner = _verify.planners.get(number)
    if planner is None:
        raise invalid("planner", f"planner = {number}: that Planner is gone; keep it as long as the compiled function")
    return planner


def _both_or_none(out: Any, lse: Any) -> None:
    if (out is None) != (lse is None) or lse is False:
        raise invalid("lse", "out and lse: inside torch.compile give both or none")


def compiled_verify(
    q, kv, q_indptr, kv_len, tree, sm_scale, page_table, page_indptr, page_indices, page_size, d_v, kv_scale, kv_packed,
    max_q_len, max_kv_len, out, lse, out_dtype, backend, num_threads, batch_invariant, split_keys, stream,
):  # fmt: skip
    """treemla.verify() as torch.compile sees it."""
    _both_or_none(out, lse)
    if stream is not None:
        raise invalid("stream", "stream: inside torch.compile calls run on the current one")
    mask, parents = (tree, None) if isinstance(tree, str) else ("", tree)
    if d_v is None:
        if q.shape[2] not in (512, 576):
            raise invalid("d_v", f"d_v is missing: it is 512 for rows of 576 or 512, but q has {q.shape[2]}")
        d_v = 512
    arguments = (
        q, kv, q_indptr, kv_len, parents, mask, float(sm_scale), page_table, page_indptr, page_indices, page_size or 0,
        d_v, float(kv_scale), kv_packed, max_q_len, max_kv_len, backend, num_threads, batch_invariant, split_keys,
    )  # fmt: skip
    if out is None:
        dtype = _arrays.dtype_name(q.dtype if out_dtype is None else out_dtype)
        return _verify.Verified(*torch.ops.treemla.verify(*arguments, dtype))
    torch.ops.treemla.verify_into(*arguments, out, lse)
    return _verify.Verified(out, lse)


def compiled_run(number: int, d_v: int, out_dtype: str, q: Tensor, kv: Tensor, out: Any, lse: Any) -> _verify.Verified:
    """Planner.run() as torch.compile sees it."""
    _both_or_none(out, lse)
    if out is None:
        return _verify.Verified(*torch.ops.treemla.run(number, d_v, out_dtype, q, kv))
    torch.ops.treemla.run_into(number, q, kv, out, lse)
    return _verify.Verified(out, lse)
