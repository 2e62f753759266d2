"""Operators of torch, so that torch.compile(fullgraph=True) takes a step of decoding, verify to compact, without a graph break.

    torch.ops.treemla.verify        a whole call
    torch.ops.treemla.run           a run of a Planner, by its number
    torch.ops.treemla.verify_into, torch.ops.treemla.run_into    the same, writing into out and lse
    torch.ops.treemla.build_tree, build_tree_from_candidates, build_chain, build_tree_from_parents, expand_beam, accept_path
    torch.ops.treemla.import_batch, compact_cache    the same as the functions of these names; the last writes the cache

treemla imports this itself: with torch, or when a call is first compiled. Shapes of results follow from shapes and numbers of
the arguments alone, so the fake kernels read no tensor.
"""

from __future__ import annotations

from typing import Any, List, Optional  # noqa: UP035

import torch
from torch import Tensor

from . import _arrays, _trees, _verify
from ._errors import invalid

# verify() allocates its workspace. A run that was captured would outlive the plan that it was captured with, unseen: capture
# update() and run() by hand. The other operators may be captured, by torch.compile(mode="reduce-overhead") too.
_UNSAFE = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


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
    kv_packed: str,
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


@torch.library.custom_op("treemla::verify", mutates_args=(), **_UNSAFE)
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
    kv_packed: str,
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


@torch.library.custom_op("treemla::verify_into", mutates_args=("out", "lse"), **_UNSAFE)
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
    kv_packed: str,
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


@torch.library.custom_op("treemla::run", mutates_args=(), **_UNSAFE)
def run_op(planner: int, d_v: int, out_dtype: str, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _planner(planner).run(q, kv)
    return out, lse


@run_op.register_fake
def _run_fake(planner, d_v, out_dtype, q, kv):
    return _fake_outputs(q, d_v, out_dtype)


@torch.library.custom_op("treemla::run_into", mutates_args=("out", "lse"), **_UNSAFE)
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


def _current(stream: Any, out: Any = None) -> None:
    if stream is not None:
        raise invalid("stream", "stream: inside torch.compile calls run on the current one")
    if out is not None:
        raise invalid("out", "out: inside torch.compile the results of tree steps are made")


def compiled_verify(
    q, kv, q_indptr, kv_len, tree, sm_scale, page_table, page_indptr, page_indices, page_size, d_v, kv_scale, kv_packed,
    max_q_len, max_kv_len, out, lse, out_dtype, backend, num_threads, batch_invariant, split_keys, stream,
):  # fmt: skip
    """treemla.verify() as torch.compile sees it."""
    _both_or_none(out, lse)
    _current(stream)
    mask, parents = (tree, None) if isinstance(tree, str) else ("", tree)
    if d_v is None:
        if q.shape[2] not in (512, 576):
            raise invalid("d_v", f"d_v is missing: it is 512 for rows of 576 or 512, but q has {q.shape[2]}")
        d_v = 512
    arguments = (
        q, kv, q_indptr, kv_len, parents, mask, float(sm_scale), page_table, page_indptr, page_indices, page_size or 0,
        d_v, float(kv_scale), _verify.packed_dtype(kv_packed), max_q_len, max_kv_len, backend, num_threads,
        batch_invariant, split_keys,
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


# The tree steps. What Tree, Accepted and Compacted hold comes back in their order; a Tree of chains or parents has no log_probs.
_Scored = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Unscored = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _without_scores(tree: _trees.Tree) -> _Unscored:
    return tree[:7] + tree[8:]


def _with_none(tree: _Unscored) -> _trees.Tree:
    return _trees.Tree(*tree[:7], None, tree[7])


def _fake_tree(like: Tensor, b: int, q_len: int) -> _Unscored:
    def ints(*shape):
        return like.new_empty(shape, dtype=torch.int32)

    per_node = [ints(b, q_len) for _ in range(4)]
    bits = ints(b, q_len, (q_len + 31) // 32)
    return (*per_node, bits, ints(b, q_len), ints(b, q_len), ints(b))


def _fake_scored_tree(like: Tensor, b: int, q_len: int) -> _Scored:
    tree = _fake_tree(like, b, q_len)
    return (*tree[:7], like.new_empty((b, q_len), dtype=torch.float32), tree[7])


@torch.library.custom_op("treemla::build_tree", mutates_args=())
def build_tree_op(
    scores: Tensor,
    budget: int,
    root_tokens: Optional[Tensor],
    prefix_len: Optional[Tensor],
    pad_token: int,
    are_log_probs: bool,
    check: bool,
) -> _Scored:
    return tuple(
        _trees.build_tree(
            scores,
            budget,
            root_tokens=root_tokens,
            prefix_len=prefix_len,
            pad_token=pad_token,
            are_log_probs=are_log_probs,
            check=check,
        )
    )


@build_tree_op.register_fake
def _build_tree_fake(scores, budget, *_):
    return _fake_scored_tree(scores, scores.shape[0], budget + 1)


def compiled_build_tree(scores, budget, root_tokens, prefix_len, pad_token, are_log_probs, out, check, stream):
    """treemla.build_tree() as torch.compile sees it."""
    _current(stream, out)
    return _trees.Tree(
        *torch.ops.treemla.build_tree(scores, budget, root_tokens, prefix_len, pad_token, bool(are_log_probs), bool(check))
    )


@torch.library.custom_op("treemla::build_tree_from_candidates", mutates_args=())
def build_tree_from_candidates_op(
    tokens: Tensor,
    parents: Tensor,
    log_probs: Tensor,
    budget: int,
    root_tokens: Optional[Tensor],
    prefix_len: Optional[Tensor],
    pad_token: int,
    check: bool,
) -> _Scored:
    return tuple(
        _trees.build_tree_from_candidates(
            tokens,
            parents,
            log_probs,
            budget,
            root_tokens=root_tokens,
            prefix_len=prefix_len,
            pad_token=pad_token,
            check=check,
        )
    )


@build_tree_from_candidates_op.register_fake
def _build_tree_from_candidates_fake(tokens, parents, log_probs, budget, *_):
    return _fake_scored_tree(tokens, tokens.shape[0], budget + 1)


def compiled_build_tree_from_candidates(
    tokens, parents, log_probs, budget, root_tokens, prefix_len, pad_token, out, check, stream
):  # fmt: skip
    """treemla.build_tree_from_candidates() as torch.compile sees it."""
    _current(stream, out)
    return _trees.Tree(
        *torch.ops.treemla.build_tree_from_candidates(
            tokens, parents, log_probs, budget, root_tokens, prefix_len, pad_token, bool(check)
        )
    )


@torch.library.custom_op("treemla::build_chain", mutates_args=())
def build_chain_op(
    tokens: Tensor, root_tokens: Optional[Tensor], prefix_len: Optional[Tensor], pad_token: int, check: bool
) -> _Unscored:
    return _without_scores(
        _trees.build_chain(tokens, root_tokens=root_tokens, prefix_len=prefix_len, pad_token=pad_token, check=check)
    )


@build_chain_op.register_fake
def _build_chain_fake(tokens, *_):
    return _fake_tree(tokens, tokens.shape[0], tokens.shape[1] + 1)


def compiled_build_chain(tokens, root_tokens, prefix_len, pad_token, out, check, stream):
    """treemla.build_chain() as torch.compile sees it."""
    _current(stream, out)
    return _with_none(torch.ops.treemla.build_chain(tokens, root_tokens, prefix_len, pad_token, bool(check)))


@torch.library.custom_op("treemla::build_tree_from_parents", mutates_args=())
def build_tree_from_parents_op(parents: Tensor, tokens: Optional[Tensor], prefix_len: Optional[Tensor], check: bool) -> _Unscored:
    return _without_scores(_trees.build_tree_from_parents(parents, tokens, prefix_len=prefix_len, check=check))


@build_tree_from_parents_op.register_fake
def _build_tree_from_parents_fake(parents, *_):
    return _fake_tree(parents, parents.shape[0], parents.shape[1])


def compiled_build_tree_from_parents(parents, tokens, prefix_len, out, check, stream):
    """treemla.build_tree_from_parents() as torch.compile sees it."""
    _current(stream, out)
    return _with_none(torch.ops.treemla.build_tree_from_parents(parents, tokens, prefix_len, bool(check)))


@torch.library.custom_op("treemla::expand_beam", mutates_args=())
def expand_beam_op(
    scores: Tensor, top_k: int, row_log_probs: Optional[Tensor], are_log_probs: bool, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(_trees.expand_beam(scores, top_k, row_log_probs=row_log_probs, are_log_probs=are_log_probs, check=check))


@expand_beam_op.register_fake
def _expand_beam_fake(scores, top_k, *_):
    b, rows, _ = scores.shape
    tokens = scores.new_empty((b, rows, top_k), dtype=torch.int32)
    log_probs = scores.new_empty((b, rows, top_k), dtype=torch.float32)
    return tokens, log_probs, scores.new_empty((b, top_k), dtype=torch.int32)


def compiled_expand_beam(scores, top_k, row_log_probs, are_log_probs, out, check, stream):
    """treemla.expand_beam() as torch.compile sees it."""
    _current(stream, out)
    return _trees.Beam(*torch.ops.treemla.expand_beam(scores, top_k, row_log_probs, bool(are_log_probs), bool(check)))


@torch.library.custom_op("treemla::accept_path", mutates_args=())
def accept_path_op(
    token_ids: Tensor,
    q_indptr: Tensor,
    parents: Optional[Tensor],
    retrieve_next_token: Optional[Tensor],
    retrieve_next_sibling: Optional[Tensor],
    target_argmax: Optional[Tensor],
    logits: Optional[Tensor],
    method: str,
    draft_probs: Optional[Tensor],
    temperature: Optional[Tensor],
    top_k: Optional[Tensor],
    top_p: Optional[Tensor],
    seeds: Optional[Tensor],
    offsets: Optional[Tensor],
    coins: Optional[Tensor],
    final_coins: Optional[Tensor],
    path_len: int,
    check: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(
        _trees.accept_path(
            token_ids,
            q_indptr=q_indptr,
            parents=parents,
            retrieve_next_token=retrieve_next_token,
            retrieve_next_sibling=retrieve_next_sibling,
            target_argmax=target_argmax,
            logits=logits,
            method=method,
            draft_probs=draft_probs,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seeds=seeds,
            offsets=offsets,
            coins=coins,
            final_coins=final_coins,
            path_len=path_len,
            check=check,
        )
    )


@accept_path_op.register_fake
def _accept_path_fake(token_ids, q_indptr, *arguments):
    b, path_len = q_indptr.shape[0] - 1, arguments[-2]

    def ints(*shape):
        return token_ids.new_empty(shape, dtype=torch.int32)

    return ints(b, path_len), ints(b), ints(b), ints(token_ids.shape[0])


def compiled_accept_path(
    token_ids, q_indptr, parents, retrieve_next_token, retrieve_next_sibling, target_argmax, logits, method, draft_probs,
    temperature, top_k, top_p, seeds, offsets, coins, final_coins, path_len, out, check, stream,
):  # fmt: skip
    """treemla.accept_path() as torch.compile sees it."""
    _current(stream, out)
    if path_len is None:
        path_len = max(token_ids.shape[0], 1)
    return _trees.Accepted(
        *torch.ops.treemla.accept_path(
            token_ids, q_indptr, parents, retrieve_next_token, retrieve_next_sibling, target_argmax, logits, method,
            draft_probs, temperature, top_k, top_p, seeds, offsets, coins, final_coins, path_len, bool(check),
        )
    )  # fmt: skip


@torch.library.custom_op("treemla::compact_cache", mutates_args=("cache",))
def compact_cache_op(
    cache: List[Tensor],  # noqa: UP006
    stacked: bool,
    q_indptr: Tensor,
    kv_len: Tensor,
    accept_index: Tensor,
    num_accepted: Tensor,
    total_q: int,
    page_table: Optional[Tensor],
    page_indptr: Optional[Tensor],
    page_indices: Optional[Tensor],
    page_size: int,
    check: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(
        _trees.compact_cache(
            cache[0] if stacked else cache,
            q_indptr=q_indptr,
            kv_len=kv_len,
            accept_index=accept_index,
            num_accepted=num_accepted,
            total_q=total_q,
            page_table=page_table,
            page_indptr=page_indptr,
            page_indices=page_indices,
            page_size=page_size,
            check=check,
        )
    )


@compact_cache_op.register_fake
def _compact_cache_fake(cache, stacked, q_indptr, kv_len, accept_index, num_accepted, total_q, *_):
    b = q_indptr.shape[0] - 1
    lengths, counts = (q_indptr.new_empty((b,), dtype=torch.int32) for _ in range(2))
    return lengths, q_indptr.new_empty((total_q,), dtype=torch.int64), counts


def compiled_compact_cache(
    cache, q_indptr, kv_len, accept_index, num_accepted, total_q, page_table, page_indptr, page_indices, page_size, out, check,
    stream,
):  # fmt: skip
    """treemla.compact_cache() as torch.compile sees it."""
    _current(stream, out)
    stacked = isinstance(cache, Tensor)
    return _trees.Compacted(
        *torch.ops.treemla.compact_cache(
            [cache] if stacked else list(cache), stacked, q_indptr, kv_len, accept_index, num_accepted, total_q, page_table,
            page_indptr, page_indices, page_size, bool(check),
        )
    )  # fmt: skip


@torch.library.custom_op("treemla::import_batch", mutates_args=())
def import_batch_op(
    token_table: Tensor,
    row_index: Tensor,
    seq_len: Tensor,
    q_len: int,
    seq_len_has_tree: bool,
    mask: Optional[Tensor],
    mask_layout: str,
    max_tokens: int,
    check: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(
        _trees.import_batch(
            token_table,
            row_index=row_index,
            seq_len=seq_len,
            q_len=q_len,
            seq_len_has_tree=seq_len_has_tree,
            mask=mask,
            mask_layout=mask_layout,
            max_tokens=max_tokens,
            check=check,
        )
    )


@import_batch_op.register_fake
def _import_batch_fake(token_table, row_index, seq_len, q_len, seq_len_has_tree, mask, mask_layout, max_tokens, check):
    b = row_index.shape[0]
    shapes = (b,), (b, max_tokens), (b * q_len, -(-q_len // 32))
    return tuple(token_table.new_empty(shape, dtype=torch.int32) for shape in shapes)


def compiled_import_batch(
    token_table, row_index, seq_len, q_len, seq_len_has_tree, mask, mask_layout, max_tokens, out, check, stream
):
    """treemla.import_batch() as torch.compile sees it."""
    _current(stream, out)
    max_tokens = token_table.shape[1] if max_tokens is None else max_tokens
    return _trees.Imported(
        *torch.ops.treemla.import_batch(
            token_table, row_index, seq_len, q_len, bool(seq_len_has_tree), mask, mask_layout, max_tokens, bool(check)
        )
    )
