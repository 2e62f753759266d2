"""TreeMLA as an attention backend of SGLang.

One batch, one plan; every layer runs it. What the engine keeps (req_to_token, req_pool_indices, seq_lens, the tree mask) becomes
a page table, lengths and ancestor bits by one kernel (treemla.import_batch), of page size 1 whatever the engine's page size is:
req_to_token leads to slots.

    mode              q_len of a request           cached rows                    mask
    DECODE            1                            seq_lens                       -
    TARGET_VERIFY     num_draft_tokens             seq_lens + q_len               custom_mask; none: a chain
    DRAFT_EXTEND_V2   num_draft_tokens             eager: seq_lens - extend_seq_lens + q_len; graphs: seq_lens   a chain
    EXTEND            extend_seq_lens, ragged      seq_lens                       a chain

Layers in the form with one K and V a head, as prefill without a cached prefix runs them, go to SGLang's Triton backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt import runtime_context
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode

from .._errors import make
from .._trees import Imported, import_batch
from ._plans import BatchPlans, Scales
from ._recorder import VerifyRecorder

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = ["TreeMLAAttnBackend"]

_LAYOUTS = {TreeMaskMode.FULL_MASK: "full", TreeMaskMode.QLEN_ONLY: "qlen_only"}
_CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@dataclass(eq=False)
class _Batch:
    """What one forward pass attends to."""

    q_len: int  # of every request; 0: ragged
    plans: BatchPlans
    imported: Imported
    q_indptr: torch.Tensor
    is_verify: bool = False
    is_captured: bool = False  # its plans' update() is part of a CUDA graph
    inputs: tuple = ()  # row_index, seq_len, seq_len_has_tree of the last import


class _Buffers:
    """Arrays that outlive a batch, so that captured graphs find them again."""

    def __init__(self, max_bs: int, max_tokens: int, row_width: int, q_len: int, device: Any):
        self.max_bs = max_bs
        self.kv_len = torch.zeros(max_bs, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(max_bs, row_width, dtype=torch.int32, device=device)
        self.bits = torch.zeros(max(max_tokens, max_bs * q_len), -(-q_len // 32), dtype=torch.int32, device=device)

    def imported(self, bs: int, q_len: int) -> Imported:
        words = -(-q_len // 32)
        flat = self.bits.view(-1)[: bs * q_len * words]
        return Imported(self.kv_len[:bs], self.page_table[:bs], flat.view(bs * q_len, words))


class TreeMLAAttnBackend(AttentionBackend):
    """Decode, target verification of trees and chains, draft extend and absorbed prefill of MLA models on TreeMLA.

    Args:
        runner: SGLang's ModelRunner of an MLA model.

    Raises:
        Unsupported: the runner asks for what the backend lacks: decode context parallelism, the unified memory pool, an fp8_e5m2
            or packed cache, layers with a k_scale other than 1.
    """

    # Lengths are read by kernels alone.
    needs_cpu_seq_lens: bool = False
    # So does the Triton backend, which EXTEND goes to as well.
    extend_dummy_seqs_capped_by_req_pool: bool = True

    def __init__(self, runner: ModelRunner):
        super().__init__()
        config = runner.model_config
        self.device = runner.device
        self.is_draft_runner = runner.is_draft_worker
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.max_context_len = config.context_len
        self.d_v = config.kv_lora_rank
        self.d_qk = config.kv_lora_rank + config.qk_rope_head_dim
        self.data_type = self.kv_cache_dtype = runner.kv_cache_dtype
        self.q_dtype = config.dtype
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.num_draft_tokens = get_spec().speculative_num_draft_tokens or 0
        self._refuse_what_is_missing(runner)

        layers = [
            module
            for module in getattr(runner, "model", torch.nn.Module()).modules()
            if isinstance(module, RadixAttention) and self._is_absorbed(module)
        ]
        self.num_heads = layers[0].tp_q_head_num if layers else config.num_attention_heads // get_parallel().attn_tp_size
        for layer in layers:
            self._refuse_k_scale(layer)
        self._scales = sorted({_scales_of(layer) for layer in layers})
        self._layer_id = layers[0].layer_id if layers else getattr(self.token_to_kv_pool, "start_layer", 0)

        self._runner = runner
        self._fallback: AttentionBackend | None = None  # made when a layer asks for it
        self._fallback_is_ready = False
        self._batch_invariant = _is_deterministic()
        self._eager_plans = BatchPlans(batch_invariant=self._batch_invariant)
        self._eager_buffers: _Buffers | None = None
        self._graph_buffers: _Buffers | None = None
        self._graphs: dict[tuple[str, int, int], _Batch] = {}
        self._earlier_graphs: list[_Batch] = []  # of a size captured again, with and without LoRA say: both are replayed
        self._graph_q: torch.Tensor | None = None
        self._verify_mask: VerifyMask | None = None
        self._recorder = VerifyRecorder.from_environment()
        self.forward_metadata: _Batch | None = None

    def _refuse_what_is_missing(self, runner: ModelRunner) -> None:
        dcp = get_parallel().attn_dcp_size
        if dcp > 1:
            raise make(2, "dcp_size", f"dcp_size = {dcp}: the treemla backend has no decode context parallelism; must be 1")
        if getattr(self.kv_index_translator, "is_translating", False):
            raise make(2, "unified_memory_pool", "the unified memory pool translates slots: the treemla backend doesn't")
        if self.kv_cache_dtype not in _CACHE_DTYPES:
            raise make(
                2, "kv_cache_dtype", f"kv_cache_dtype = {self.kv_cache_dtype}: must be bfloat16, float16, float32 or fp8_e4m3"
            )
        width = getattr(self.token_to_kv_pool, "kv_cache_dim", self.d_qk)
        if width != self.d_qk:
            raise make(2, "kv_cache_dim", f"kv_cache_dim = {width}: the treemla backend takes rows of {self.d_qk} numbers")

    def _make_fallback(self) -> AttentionBackend:
        if torch.device(self.device).type != "cuda":
            raise make(
                2,
                "device",
                f"device = {self.device}: attention with K and V for each head goes to the Triton backend, of cuda only",
            )
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        return TritonAttnBackend(self._runner)

    def _is_absorbed(self, layer: RadixAttention) -> bool:
        return layer.qk_head_dim == self.d_qk and layer.v_head_dim == self.d_v and layer.tp_k_head_num == 1

    # ---- what a batch attends to ----

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        self._fallback_is_ready = False
        if mode.is_idle() or forward_batch.batch_size == 0:
            self.forward_metadata = None
            return
        bs = forward_batch.batch_size
        if mode.is_extend() and not (mode.is_target_verify() or mode.is_draft_extend_v2()):
            self._init_extend(forward_batch, bs)
            return
        q_len = self._q_len(forward_batch)
        has_mask = mode.is_target_verify() and q_len > 1 and forward_batch.spec_info.custom_mask is not None
        imported = self._eager(bs, q_len).imported(bs, q_len)
        seq_lens, has_tree = forward_batch.seq_lens, mode.is_decode_or_idle()
        if mode.is_draft_extend_v2():
            seq_lens = seq_lens - forward_batch.extend_seq_lens
        inputs = self._import(forward_batch, imported, seq_lens, has_tree, q_len)
        self.forward_metadata = self._batch(bs, q_len, self._eager_plans, imported, mode.is_target_verify())
        self.forward_metadata.inputs = inputs
        self._bind(self.forward_metadata, None, None, tree=imported.ancestor_bits if has_mask else "causal")

    def _init_extend(self, forward_batch: ForwardBatch, bs: int) -> None:
        """Ragged requests, each a chain behind its prefix."""
        imported = self._eager(bs, 1).imported(bs, 1)
        self._import(forward_batch, imported, forward_batch.seq_lens, True, 1)
        q_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=self.device)
        torch.cumsum(forward_batch.extend_seq_lens[:bs], 0, out=q_indptr[1:])
        self.forward_metadata = _Batch(0, self._eager_plans, imported, q_indptr)
        lens_cpu = forward_batch.extend_seq_lens_cpu
        self._bind(self.forward_metadata, None, None, tree="causal", max_q_len=max(lens_cpu) if lens_cpu else 0)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        mode = forward_batch.forward_mode
        if self._graph_buffers is None:
            raise RuntimeError("init_cuda_graph_state() comes before init_forward_metadata_out_graph()")
        if mode.is_idle():
            return
        bs, q_len = forward_batch.batch_size, self._q_len(forward_batch)
        if not (mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()):
            raise ValueError(f"forward_mode = {mode.name}: only decode, verify and draft extend are captured into CUDA graphs")
        kind = "verify" if mode.is_target_verify() else "extend" if mode.is_draft_extend_v2() else "decode"
        imported = self._graph_buffers.imported(bs, q_len)
        # A graph is captured before there are trees: it reads bits in any case, and the mask of a chain is made into bits too.
        inputs = self._import(forward_batch, imported, forward_batch.seq_lens, kind != "verify", q_len, with_mask=not in_capture)
        batch = self._graphs.get((kind, bs, q_len))
        if batch is None or in_capture:
            if batch is not None:
                self._earlier_graphs.append(batch)
            batch = self._batch(bs, q_len, BatchPlans(batch_invariant=self._batch_invariant), imported, kind == "verify")
            tree = imported.ancestor_bits if kind == "verify" and q_len > 1 else "causal"
            self._bind(batch, self._graph_q[: bs * q_len], self._kv_buffer(self._layer_id), tree=tree)
            for scales in self._scales:
                batch.plans.plan(scales)
            batch.is_captured = True
            self._graphs[kind, bs, q_len] = batch
        batch.inputs = inputs
        self.forward_metadata = batch

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if self.forward_metadata is not None:
            self.forward_metadata.plans.update()

    def _q_len(self, forward_batch: ForwardBatch) -> int:
        mode, spec_info = forward_batch.forward_mode, forward_batch.spec_info
        if getattr(spec_info, "ragged_verify_layout", None) is not None:
            raise make(
                2,
                "ragged_verify_layout",
                "ragged_verify_layout is given: the treemla backend takes the same number of draft tokens of every request; "
                "SGLANG_RAGGED_VERIFY_MODE must be static",
            )
        if mode.is_decode_or_idle():
            if getattr(spec_info, "kv_indptr", None) is not None:
                raise make(
                    2,
                    "speculative_draft_attention_backend",
                    "speculative_draft_attention_backend = treemla: runs no steps of the draft loop; must be triton, say",
                )
            return 1
        if mode.is_draft_extend_v2():
            return self.num_draft_tokens
        q_len = getattr(spec_info, "num_tokens_per_req", -1)
        return q_len if q_len > 0 else getattr(spec_info, "draft_token_num", self.num_draft_tokens)

    def _import(
        self, forward_batch: ForwardBatch, imported: Imported, seq_lens: Any, has_tree: bool, q_len: int, *,
        with_mask: bool = True,
    ) -> tuple:  # fmt: skip
        bs = forward_batch.batch_size
        mask, layout = None, "full"
        if with_mask and q_len > 1 and forward_batch.forward_mode.is_target_verify():
            mask, layout = self._mask_of(forward_batch.spec_info, bs, q_len)
        inputs = forward_batch.req_pool_indices[:bs], seq_lens[:bs], has_tree
        import_batch(
            self.req_to_token, row_index=inputs[0], seq_len=inputs[1], q_len=q_len, seq_len_has_tree=has_tree, mask=mask,
            mask_layout=layout, out=imported,
        )  # fmt: skip
        return inputs

    def _mask_of(self, spec_info: Any, bs: int, q_len: int) -> tuple[Any, str]:
        """The tree mask of a verify input and its layout, which differs by who made it."""
        mask = getattr(spec_info, "custom_mask", None)
        if mask is None or mask.numel() == 0:
            return None, "full"
        if type(spec_info).__name__ == "NgramVerifyInput":
            from sglang.srt.speculative import ngram_worker

            full = ngram_worker.USE_FULL_MASK and not ngram_worker._is_cpu
            mode = TreeMaskMode.FULL_MASK if full else TreeMaskMode.QLEN_ONLY
        else:  # EAGLE and its kin build it in the layout of our buffer, or where there is none, in the default one
            mode = default_tree_mask_mode() if self._verify_mask is None else self._verify_mask.mode
        is_ours = self._verify_mask is not None and mask.data_ptr() == self._verify_mask.buffer.data_ptr()
        if mode == TreeMaskMode.QLEN_ONLY and not is_ours and mask.numel() != bs * q_len**2:
            mode = TreeMaskMode.FULL_MASK  # of a backend beside ours, which has its own buffer
        return mask, _LAYOUTS[mode]

    def _batch(self, bs: int, q_len: int, plans: BatchPlans, imported: Imported, is_verify: bool) -> _Batch:
        q_indptr = torch.arange(0, (bs + 1) * q_len, q_len, dtype=torch.int32, device=self.device)
        return _Batch(q_len, plans, imported, q_indptr, is_verify)

    def _bind(self, batch: _Batch, q: Any, kv: Any, *, tree: Any, max_q_len: int = 0) -> None:
        batch.plans.bind(
            q, kv, q_indptr=batch.q_indptr, kv_len=batch.imported.kv_len, page_table=batch.imported.page_table, page_size=1,
            tree=tree, d_v=self.d_v, max_q_len=batch.q_len or max_q_len,
        )  # fmt: skip

    def _eager(self, bs: int, q_len: int) -> _Buffers:
        buffers = self._eager_buffers
        words = -(-q_len // 32)
        if buffers is None or buffers.max_bs < bs or buffers.bits.numel() < bs * q_len * words:
            rows = max(bs, buffers.max_bs if buffers else 0)
            buffers = self._eager_buffers = _Buffers(
                rows, rows * q_len, self.req_to_token.shape[1], max(q_len, self.num_draft_tokens, 1), self.device
            )
        return buffers

    # ---- CUDA graphs ----

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        q_len = max(self.num_draft_tokens, 1)
        self._graph_buffers = _Buffers(max_bs, max_num_tokens, self.req_to_token.shape[1], q_len, self.device)
        # Stands for the queries of every layer while graphs are planned, before there are any.
        self._graph_q = torch.zeros(max_num_tokens, self.num_heads, self.d_qk, dtype=self.q_dtype, device=self.device)
        self._graphs.clear()
        self._earlier_graphs.clear()
        if self.num_draft_tokens and not self.is_draft_runner:
            # QLEN_ONLY: the engine then fills no mask over the prefix, which is hundreds of MB at long contexts.
            numel = tree_mask_numel(TreeMaskMode.QLEN_ONLY, max_bs, self.num_draft_tokens, self.max_context_len)
            buffer = torch.zeros(numel, dtype=torch.bool, device=self.device)
            self._verify_mask = VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """The mask is there now; lengths and slots are those of init_forward_metadata()."""
        batch = self.forward_metadata
        if batch is None or not batch.is_verify or batch.q_len == 1:
            return
        row_index, seq_len, has_tree = batch.inputs
        mask, layout = self._mask_of(spec_info, len(row_index), batch.q_len)
        if mask is None:
            return
        import_batch(
            self.req_to_token, row_index=row_index, seq_len=seq_len, q_len=batch.q_len, seq_len_has_tree=has_tree, mask=mask,
            mask_layout=layout, out=batch.imported,
        )  # fmt: skip
        if not batch.is_captured:
            batch.plans.update()

    # ---- layers ----

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if not self._is_absorbed(layer):
            return self._forward_fallback(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _forward(
        self, q: Any, k: Any, v: Any, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        self._refuse_layer(layer, kwargs)
        q_rope, k_rope = kwargs.get("q_rope"), kwargs.get("k_rope")
        heads = layer.tp_q_head_num
        if save_kv_cache and k is not None:
            self._save(layer, forward_batch, k, v, k_rope)
        if q_rope is not None:
            q = torch.cat([q.reshape(-1, heads, self.d_v), q_rope.reshape(-1, heads, self.d_qk - self.d_v)], dim=-1)
        batch = self.forward_metadata
        q = q.reshape(-1, heads, self.d_qk)
        if batch.is_captured:
            q = q.contiguous()  # as planned
        kv = self._kv_buffer(layer.layer_id)
        scales = _scales_of(layer)
        out = torch.empty(q.shape[0], heads * self.d_v, dtype=q.dtype, device=q.device)
        batch.plans.run(scales, q, kv, out=out.view(-1, heads, self.d_v))
        # With a captured batch Python runs in the warm-up before the capture and during it: neither is a request's.
        is_request = batch.is_verify and not batch.is_captured
        if self._recorder is not None and is_request and self._recorder.wants(layer.layer_id, q):
            self._recorder.write(batch.plans.problem_of(scales, q, kv), "SGLang, TARGET_VERIFY")
        return out

    def _refuse_layer(self, layer: RadixAttention, kwargs: dict[str, Any]) -> None:
        if not self._is_absorbed(layer):
            raise ValueError(
                f"layer {layer.layer_id}: q of {layer.qk_head_dim} and v of {layer.v_head_dim} is not the absorbed form "
                f"({self.d_qk} and {self.d_v})"
            )
        self._refuse_k_scale(layer)
        if layer.logit_cap:
            raise make(2, "logit_cap", f"logit_cap = {layer.logit_cap} of layer {layer.layer_id}: must be 0")
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            raise make(2, "sliding_window_size", f"sliding_window_size = {layer.sliding_window_size}: the backend has no windows")
        for name in ("sinks", "attn_sink", "topk_indices", "cos_sin_cache"):
            if kwargs.get(name) is not None:
                raise make(2, name, f"{name} of layer {layer.layer_id} is given: the treemla backend has none")

    def _refuse_k_scale(self, layer: RadixAttention) -> None:
        """SGLang's prefill without a cached prefix stores rows as they are, its backends store k / k_scale: in one cache they
        can't be told apart."""
        k_scale = layer.k_scale if layer.k_scale_float is None else layer.k_scale_float
        if k_scale is not None and float(k_scale) != 1:
            raise make(
                2,
                "k_scale",
                f"k_scale = {float(k_scale)} of layer {layer.layer_id}: must be 1, since SGLang's prefill without a cached "
                "prefix stores rows unscaled",
            )

    def _save(self, layer: RadixAttention, forward_batch: ForwardBatch, k: Any, v: Any, k_rope: Any) -> None:
        loc = KVWriteLoc.for_batch(forward_batch)
        if k_rope is not None:
            k = torch.cat([k.reshape(-1, 1, self.d_v), k_rope.reshape(-1, 1, self.d_qk - self.d_v)], dim=-1)
        self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)

    def _kv_buffer(self, layer_id: int) -> torch.Tensor:
        return self.token_to_kv_pool.get_key_buffer(layer_id).view(-1, 1, self.d_qk)

    def _forward_fallback(
        self, q: Any, k: Any, v: Any, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:  # fmt: skip
        if self._fallback is None:
            self._fallback = self._make_fallback()
        if not self._fallback_is_ready:
            self._fallback.init_forward_metadata(forward_batch)
            self._fallback_is_ready = True
        return self._fallback.forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


def _scales_of(layer: RadixAttention) -> Scales:
    return Scales(float(layer.scaling), 1.0)


def _is_deterministic() -> bool:
    """Is --enable-deterministic-inference on? False where the engine can't say."""
    try:
        return bool(runtime_context.get_exec().deterministic.enable_deterministic_inference)
    except (AttributeError, ValueError):  # no such setting; or no server that has one
        return False
