"""The steps around verification: import an engine's batch, build the tree, accept a path, compact the cache. docs/TREES.md tells
them as one story."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _arrays, _core
from ._errors import invalid

__all__ = [
    "Accepted",
    "Beam",
    "Compacted",
    "Imported",
    "Tree",
    "accept_path",
    "build_chain",
    "build_tree",
    "build_tree_from_candidates",
    "build_tree_from_parents",
    "compact_cache",
    "expand_beam",
    "import_batch",
]


class Tree(NamedTuple):
    """Draft trees of b requests with q_len nodes each, in the library and on the device of the arrays they were built from.

    Node 0 is the root, parents come first. Reshaped to [b * q_len], the arrays are what verify() and accept_path() take.
    """

    token_ids: Any  #: int32 [b, q_len]
    parents: Any  #: int32 [b, q_len], -1 for the root
    depth: Any  #: int32 [b, q_len], steps to the root
    positions: Any  #: int32 [b, q_len], prefix_len + depth
    ancestor_bits: Any  #: int32 [b, q_len, words], bit j of row i: node i sees node j
    retrieve_next_token: Any  #: int32 [b, q_len], first child, -1 for a leaf
    retrieve_next_sibling: Any  #: int32 [b, q_len], next child of the same parent, -1 for the last
    log_probs: Any  #: float32 [b, q_len] of the path from the root; -inf for padding. None from chains and parents
    num_nodes: Any  #: int32 [b], nodes that are no padding, root included


def _given(**arrays: Any) -> dict[str, Any]:
    return {name: array for name, array in arrays.items() if array is not None}


def _shape(name: str, array: Any, ndim: int, symbols: str) -> tuple[int, ...]:
    shape = getattr(array, "shape", None)
    if shape is None or len(shape) != ndim:
        what = "None" if array is None else type(array).__name__ if shape is None else f"of shape {list(shape)}"
        raise invalid(name, f"{name} is {what}: must be {symbols}")
    return tuple(int(extent) for extent in shape)


def _outputs(like: Any, made: type, out: Any, shapes: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, Any]:
    """The arrays to write: those of `out`, new ones where it has none."""
    given = {}
    if out is not None:
        if not isinstance(out, made):
            article = "an" if made.__name__[0] in "AI" else "a"
            raise invalid("out", f"out is {type(out).__name__}: must be {article} {made.__name__}")
        given = _given(**out._asdict())
    return {n: given[n] if n in given else _arrays.empty(like, shape, dtype) for n, (shape, dtype) in shapes.items()}


def _finish(like: Any, made: type, out: Any, arrays: dict[str, Any]) -> Any:
    """The result; what was made becomes the library's own, what was given stays what it is."""
    given = {} if out is None else _given(**out._asdict())
    return made(**{n: array if n in given else _arrays.finish(like, array) for n, array in arrays.items()})


def _workspace(like: Any, num_bytes: int) -> dict[str, Any]:
    """Kept by the caller for as long as work may be enqueued: the allocators of torch and CuPy follow the stream."""
    return {"workspace": _arrays.empty(like, (num_bytes,), "uint8")} if num_bytes else {}


def _build(
    like: Any, inputs: dict[str, Any], method: str, b: int, budget: int, pad_token: int, log_probs: bool, out: Any, check: bool,
    stream: Any,
) -> Tree:  # fmt: skip
    if not 1 <= budget <= 1024:
        raise invalid("budget", f"budget = {budget}: must be from 1 to 1024")
    q_len = budget + 1
    per_node = ((b, q_len), "int32")
    shapes = dict.fromkeys(Tree._fields, per_node)
    shapes["ancestor_bits"] = ((b, q_len, -(-q_len // 32)), "int32")
    shapes["num_nodes"] = ((b,), "int32")
    if method in ("ddtree", "candidates"):
        shapes["log_probs"] = ((b, q_len), "float32")
    else:
        del shapes["log_probs"]
    with _arrays.device_guard(like, stream):
        handle = _arrays.stream_handle(like, stream)
        made = _outputs(like, Tree, out, shapes)
        inputs = inputs | _workspace(like, _core.build_bytes(inputs, method, b, budget, log_probs, handle))
        outputs = {f"out_{name}": array for name, array in made.items() if array is not None}
        _core.build(inputs, outputs, method, b, budget, pad_token, log_probs, check, handle)
    return _finish(like, Tree, out, {"log_probs": None} | made)


def build_tree(
    scores: Any,
    budget: int,
    *,
    root_tokens: Any = None,
    prefix_len: Any = None,
    pad_token: int = -1,
    are_log_probs: bool = False,
    out: Tree | None = None,
    check: bool = False,
    stream: Any = None,
) -> Tree:
    """DDTree (arXiv 2604.12989): of all trees with `budget` drafted nodes, one with the largest sum of path probabilities.

    Args:
        scores: float32 or bfloat16 [b, num_depths, vocab]; row d scores the tokens at depth d + 1. Logits, which are
            normalised on the fly, or log-probabilities.
        budget: drafted nodes besides the root, 1 to 1024; q_len is budget + 1.
        root_tokens: int32 [b], the last token emitted; -1 if None.
        prefix_len: int32 [b], cached tokens before the tree; 0 if None.
        pad_token: token of nodes that the scores don't fill; they are children of the root.
        are_log_probs: scores are log-probabilities.
        out: a Tree of arrays to write into, those of an earlier call, say; what is None in it is made.
        check: on a GPU, wait and raise for scores that are NaN or +inf. On the host that always raises.
        stream: as in verify().
    """
    if _arrays.is_compiling():
        from . import torch_ops

        return torch_ops.compiled_build_tree(
            scores, budget, root_tokens, prefix_len, pad_token, are_log_probs, out, check, stream
        )
    b, _, _ = _shape("scores", scores, 3, "[b, num_depths, vocab]")
    inputs = _given(scores=scores, root_tokens=root_tokens, prefix_len=prefix_len)
    budget, pad_token = _arrays.index("budget", budget), _arrays.index("pad_token", pad_token, -(2**31))
    return _build(scores, inputs, "ddtree", b, budget, pad_token, bool(are_log_probs), out, check, stream)


def build_tree_from_candidates(
    tokens: Any,
    parents: Any,
    log_probs: Any,
    budget: int,
    *,
    root_tokens: Any = None,
    prefix_len: Any = None,
    pad_token: int = -1,
    out: Tree | None = None,
    check: bool = False,
    stream: Any = None,
) -> Tree:
    """EAGLE-2 (arXiv 2406.16858): the `budget` best by path log-probability of the candidates of a beam search.

    Args:
        tokens, parents: int32 [b, num_candidates]; a candidate's parent is an earlier candidate, or -1, the root.
        log_probs: float32 [b, num_candidates], of the whole path.
        budget, root_tokens, prefix_len, pad_token, out, check, stream: as in build_tree().
    """
    if _arrays.is_compiling():
        from . import torch_ops

        return torch_ops.compiled_build_tree_from_candidates(
            tokens, parents, log_probs, budget, root_tokens, prefix_len, pad_token, out, check, stream
        )
    b, _ = _shape("tokens", tokens, 2, "[b, num_candidates]")
    inputs = _given(tokens=tokens, parents=parents, log_probs=log_probs, root_tokens=root_tokens, prefix_len=prefix_len)
    budget, pad_token = _arrays.index("budget", budget), _arrays.index("pad_token", pad_token, -(2**31))
    return _build(tokens, inputs, "candidates", b, budget, pad_token, False, out, check, stream)


def build_chain(
    tokens: Any,
    *,
    root_tokens: Any = None,
    prefix_len: Any = None,
    pad_token: int = -1,
    out: Tree | None = None,
    check: bool = False,
    stream: Any = None,
) -> Tree:
    """Drafted tokens in a row, int32 [b, budget], behind the root; a negative token ends a chain, the rest is padding."""
    if _arrays.is_compiling():
        from . import torch_ops

        return torch_ops.compiled_build_chain(tokens, root_tokens, prefix_len, pad_token, out, check, stream)
    b, budget = _shape("tokens", tokens, 2, "[b, budget]")
    inputs = _given(tokens=tokens, root_tokens=root_tokens, prefix_len=prefix_len)
    pad_token = _arrays.index("pad_token", pad_token, -(2**31))
    return _build(tokens, inputs, "chain", b, budget, pad_token, False, out, check, stream)


def build_tree_from_parents(
    parents: Any,
    tokens: Any = None,
    *,
    prefix_len: Any = None,
    out: Tree | None = None,
    check: bool = False,
    stream: Any = None,
) -> Tree:
    """Trees of one's own, checked: parents and, if there are any, tokens int32 [b, q_len], the root's included."""
    if _arrays.is_compiling():
        from . import torch_ops

        return torch_ops.compiled_build_tree_from_parents(parents, tokens, prefix_len, out, check, stream)
    b, q_len = _shape("parents", parents, 2, "[b, q_len]")
    inputs = _given(parents=parents, tokens=tokens, prefix_len=prefix_len)
    return _build(parents, inputs, "parents", b, q_len - 1, -1, False, out, check, stream)


class Beam(NamedTuple):
    """One depth of a beam search."""

    token_ids: Any  #: int32 [b, rows, top_k], best first within a row; -1 where there are fewer
    log_probs: Any  #: float32 [b, rows, top_k] of the path; -inf where there are fewer
    beam: Any  #: int32 [b, top_k] of a request's rows * top_k continuations the best, with which the beam goes on


def expand_beam(
    scores: Any,
    top_k: int,
    *,
    row_log_probs: Any = None,
    are_log_probs: bool = False,
    out: Beam | None = None,
    check: bool = False,
    stream: Any = None,
) -> Beam:
    """Of each node of a beam its top_k continuations, and of all these the top_k best.

    Args:
        scores: float32 or bfloat16 [b, rows, vocab] of the beam's nodes: rows is 1 at the root, then top_k.
        top_k: 1 to 64.
        row_log_probs: float32 [b, rows] of the path to each node; 0 if None.
        are_log_probs, check, stream: as in build_tree(). out: a Beam to write into.
    """
    if _arrays.is_compiling():
        from . import torch_ops

        return torch_ops.compiled_expand_beam(scores, top_k, row_log_probs, are_log_probs, out, check, stream)
    b, rows, _ = _shape("scores", scores, 3, "[b, rows, vocab]")
    top_k = _arrays.index("top_k", top_k, 1)
    if top_k > 64:
        raise invalid("top_k", f"top_k = {top_k}: must be from 1 to 64")
    inputs = _given(scores=scores, row_log_probs=row_log_probs)
    with _arrays.device_guard(scores, stream):
        handle = _arrays.stream_handle(scores, stream)
        per_row = (b, rows, top_k)
        shapes = {"token_ids": (per_row, "int32"), "log_probs": (per_row, "float32"), "beam": ((b, top_k), "int32")}
        made = _outputs(scores, Beam, out, shapes)
        inputs |= _workspace(scores, _core.beam_bytes(inputs, top_k, bool(are_log_probs), handle))
        outputs = {f"out_{name}": array for name, array in made.items()}
        _core.beam(inputs, outputs, top_k, bool(are_log_probs), check, handle)
    return _finish(scores, Beam, out, made)


class Accepted(NamedTuple):
    """The accepted paths of b requests."""

    accept_index: Any  #: int32 [b, path_len] the path as rows q_indptr[r] + node, root first, -1 past its end
    num_accepted: Any  #: int32 [b] drafted tokens on the path, the root not counted; -1 after a fault on a GPU
    bonus_token: Any  #: int32 [b] emitted after the path: the next root; -1 where there is none
    predicts: Any  #: int32 [total_q] the token emitted after node i if i is on the path, else -1


def accept_path(
    token_ids: Any,
    *,
    q_indptr: Any,
    parents: Any = None,
    retrieve_next_token: Any = None,
    retrieve_next_sibling: Any = None,
    target_argmax: Any = None,
    logits: Any = None,
    method: str = "greedy",
    draft_probs: Any = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    seeds: Any = None,
    offsets: Any = None,
    coins: Any = None,
    final_coins: Any = None,
    path_len: int | None = None,
    out: Accepted | None = None,
    check: bool = False,
    stream: Any = None,
) -> Accepted:
    """From the root down while drafted tokens are what the target model emits.

    Args:
        token_ids: int32 [total_q].
        q_indptr: int32 [b + 1].
        parents: int32 [total_q]; or retrieve_next_token and retrieve_next_sibling, int32 [total_q], whose order of
            siblings is the order of judging.
        target_argmax: int32 [total_q], what the target says at each node; "greedy" takes this or logits.
        logits: float32 or bfloat16 [total_q, vocab] of the target.
        method: "greedy"; or lossless sampling: "deterministic" for children that a search picked, "independent" for
            children drawn i.i.d. from draft_probs, "without_replacement" for such without repetition.
        draft_probs: float32 [total_q, vocab]; row i is the distribution that node i's children were drawn from.
        temperature, top_p: float32 [b], top_k: int32 [b]; none if None. Temperature 0 keeps the argmax alone.
        seeds, offsets: uint64 or int64 [b], 0 if None. A pair is never to be used twice.
        coins, final_coins: float32 [total_q], [b] in [0, 1): one's own in place of the generator's.
        path_len: width of accept_index; by default the longest that a tree of total_q nodes could need.
        out: an Accepted of arrays to write into; what is None in it is made.
        check: on a GPU, wait and raise for malformed trees and logits. On the host that always raises.
        stream: as in verify().
    """
    if _arrays.is_compiling():
        from . import torch_ops

        return torch_ops.compiled_accept_path(
            token_ids, q_indptr, parents, retrieve_next_token, retrieve_next_sibling, target_argmax, logits, method,
            draft_probs, temperature, top_k, top_p, seeds, offsets, coins, final_coins, path_len, out, check, stream,
        )  # fmt: skip
    (total_q,) = _shape("token_ids", token_ids, 1, "[total_q]")
    (indptr_len,) = _shape("q_indptr", q_indptr, 1, "[b + 1]")
    b = max(indptr_len - 1, 0)
    width = max(total_q, 1) if path_len is None else _arrays.index("path_len", path_len, 1)
    if not isinstance(method, str):
        raise invalid("method", f"method = {method!r}: must be a text")
    inputs = _given(
        token_ids=token_ids,
        q_indptr=q_indptr,
        parents=parents,
        retrieve_next_token=retrieve_next_token,
        retrieve_next_sibling=retrieve_next_sibling,
        target_argmax=target_argmax,
        logits=logits,
        draft_probs=draft_probs,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seeds=seeds,
        offsets=offsets,
        coins=coins,
        final_coins=final_coins,
    )
    with _arrays.device_guard(token_ids, stream):
        handle = _arrays.stream_handle(token_ids, stream)
        shapes = {
            "accept_index": ((b, width), "int32"),
            "num_accepted": ((b,), "int32"),
            "bonus_token": ((b,), "int32"),
            "predicts": ((total_q,), "int32"),
        }
        outputs = _outputs(token_ids, Accepted, out, shapes)
        inputs |= _workspace(token_ids, _core.accept_bytes(inputs, method, handle))
        _core.accept(inputs, outputs, method, check, handle)
    return _finish(token_ids, Accepted, out, outputs)


class Compacted(NamedTuple):
    """The caches of b requests after compaction."""

    kv_len: Any  #: int32 [b] prefix_len + 1 + num_accepted
    freed_pages: Any  #: int64 [total_q], request r's from element q_indptr[r] on, num_freed[r] of them
    num_freed: Any  #: int32 [b]


def compact_cache(
    cache: Any,
    *,
    q_indptr: Any,
    kv_len: Any,
    accept_index: Any,
    num_accepted: Any,
    total_q: int,
    page_table: Any = None,
    page_indptr: Any = None,
    page_indices: Any = None,
    page_size: int = 1,
    out: Compacted | None = None,
    check: bool = False,
    stream: Any = None,
) -> Compacted:
    """Moves the accepted rows to consecutive places behind the prefix, in place, in every layer.

    Args:
        cache: a list of layers, each [num_pages, page_size, d] or [rows, d], or one array of [num_layers, ...] of these.
            Any dtype: rows are moved as bytes. The arrays are written.
        q_indptr: int32 [b + 1]. kv_len: int32 [b], tree rows included.
        accept_index, num_accepted: as accept_path() gives them.
        total_q: nodes of all requests, q_indptr[b] or more.
        page_table, page_indptr, page_indices: as in verify().
        page_size: tokens a page.
        out: a Compacted of arrays to write into; what is None in it is made.
        check: on a GPU, wait and raise for malformed paths and tables. On the host that always raises.
        stream: as in verify().
    """
    if _arrays.is_compiling():
        from . import torch_ops

        return torch_ops.compiled_compact_cache(
            cache, q_indptr, kv_len, accept_index, num_accepted, total_q, page_table, page_indptr, page_indices,
            page_size, out, check, stream,
        )  # fmt: skip
    stacked = not isinstance(cache, Sequence)
    layers = [cache] if stacked else list(cache)
    if not layers:
        raise invalid("cache", "cache is empty: must have a layer")
    (indptr_len,) = _shape("q_indptr", q_indptr, 1, "[b + 1]")
    b = max(indptr_len - 1, 0)
    total_q = _arrays.index("total_q", total_q)
    page_size = _arrays.index("page_size", page_size, 1)
    inputs = _given(
        q_indptr=q_indptr,
        kv_len=kv_len,
        accept_index=accept_index,
        num_accepted=num_accepted,
        page_table=page_table,
        page_indptr=page_indptr,
        page_indices=page_indices,
    )
    for name in ("kv_len", "accept_index", "num_accepted"):
        if name not in inputs:
            raise invalid(name, f"{name} is None: must be an array")
    with _arrays.device_guard(q_indptr, stream):
        handle = _arrays.stream_handle(q_indptr, stream)
        shapes = {"kv_len": ((b,), "int32"), "freed_pages": ((total_q,), "int64"), "num_freed": ((b,), "int32")}
        made = _outputs(q_indptr, Compacted, out, shapes)
        outputs = {f"out_{name}": array for name, array in made.items()}
        # A GPU wants the layers' addresses in its own memory; a launch a layer needs none and can be captured.
        separate = _arrays.on_device(q_indptr) and not stacked
        for group in [[layer] for layer in layers] if separate else [layers]:
            num_bytes = _core.compact_bytes(inputs, group, stacked, page_size, total_q, handle)
            _core.compact(inputs | _workspace(q_indptr, num_bytes), outputs, group, stacked, page_size, total_q, check, handle)
    return _finish(q_indptr, Compacted, out, made)


class Imported(NamedTuple):
    """An engine's batch as verify() takes it: kv_len, page_table (of page size 1) and tree."""

    kv_len: Any  #: int32 [b] tree rows included; 0 for inert requests
    page_table: Any  #: int32 [b, max_tokens] slots; entries past kv_len are whatever was there
    ancestor_bits: Any  #: int32 [b * q_len, words], bit j of row i: node i sees node j


def import_batch(
    token_table: Any,
    *,
    row_index: Any,
    seq_len: Any,
    q_len: int = 1,
    seq_len_has_tree: bool = False,
    mask: Any = None,
    mask_layout: str = "full",
    max_tokens: int | None = None,
    out: Imported | None = None,
    check: bool = False,
    stream: Any = None,
) -> Imported:
    """Gathers what a serving engine keeps about a batch: lengths, slots of every token, tree masks as ancestor bits.

    On a GPU one kernel, which may be captured: nothing is read back.

    Args:
        token_table: int32 [num_rows, row_width], the slot of each token of each request the engine serves (SGLang:
            req_to_token). Rows may be strided.
        row_index: int32 or int64 [b], the batch's rows of it (SGLang: req_pool_indices).
        seq_len: int32 or int64 [b] cached tokens.
        q_len: tree nodes of every request.
        seq_len_has_tree: seq_len counts the q_len tree rows; a request with fewer is padding and comes out inert. By
            default they follow: kv_len = seq_len + q_len.
        mask: uint8 or bool, nonzero = attend; None: chains, node i sees nodes 0..i. A request whose cells reach past its
            end is padding too. The prefix is always seen.
        mask_layout: "full": request after request q_len rows of kv_len cells (SGLang: FULL_MASK). "qlen_only": q_len
            rows of q_len cells.
        max_tokens: extent of the page table that is made: by default row_width.
        out: an Imported of arrays to write into; what is None in it is made.
        check: on a GPU, wait and raise for indices and lengths out of range. On the host that always raises.
        stream: as in verify().
    """
    if _arrays.is_compiling():
        from . import torch_ops

        return torch_ops.compiled_import_batch(
            token_table, row_index, seq_len, q_len, seq_len_has_tree, mask, mask_layout, max_tokens, out, check, stream
        )
    (b,) = _shape("row_index", row_index, 1, "[b]")
    _, row_width = _shape("token_table", token_table, 2, "[num_rows, row_width]")
    q_len = _arrays.index("q_len", q_len, 1)
    if q_len > 2**20:
        raise invalid("q_len", f"q_len = {q_len}: must be at most {2**20}")
    if not isinstance(mask_layout, str) or mask_layout not in ("full", "qlen_only"):
        shown = f'"{mask_layout}"' if isinstance(mask_layout, str) else repr(mask_layout)
        raise invalid("mask_layout", f"mask_layout = {shown}: must be full or qlen_only")
    max_tokens = row_width if max_tokens is None else _arrays.index("max_tokens", max_tokens)
    inputs = _given(token_table=token_table, row_index=row_index, seq_len=seq_len, mask=mask)
    with _arrays.device_guard(token_table, stream):
        handle = _arrays.stream_handle(token_table, stream)
        shapes = {
            "kv_len": ((b,), "int32"),
            "page_table": ((b, max_tokens), "int32"),
            "ancestor_bits": ((b * q_len, -(-q_len // 32)), "int32"),
        }
        made = _outputs(token_table, Imported, out, shapes)
        outputs = {f"out_{name}": array for name, array in made.items()}
        num_bytes = _core.import_bytes(inputs, q_len, mask_layout, bool(seq_len_has_tree), handle)
        _core.import_batch(
            inputs | _workspace(token_table, num_bytes), outputs, q_len, mask_layout, bool(seq_len_has_tree), check, handle
        )
    return _finish(token_table, Imported, out, made)
