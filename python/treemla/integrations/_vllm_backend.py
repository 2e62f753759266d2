"""TreeMLA as an MLA backend of vLLM: decode and verification of chains. Prefill is vLLM's own, as for its other MLA backends.

vLLM keeps block tables, lengths (new tokens included) and query offsets on the device, at places that stay the same from step to
step; TreeMLA reads them there. Requests of one batch may have different numbers of query tokens.

The plan of a batch that is captured into a CUDA graph is made while its metadata is built; the first layer records update(), so
that each replay plans anew from what the engine has written by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

from .. import _arrays
from .._errors import make
from ._plans import BatchPlans, Scales
from ._recorder import VerifyRecorder

__all__ = ["TreeMLABackend", "TreeMLAImpl", "TreeMLAMetadata", "TreeMLAMetadataBuilder"]


@dataclass
class TreeMLADecodeMetadata(MLACommonDecodeMetadata):
    plans: BatchPlans
    is_verify: bool = False  #: some request has more than one query token
    #: The builder's list, where a capture was asked for, which may also be its warm-up or the step of an idle data-parallel rank.
    captured_plans: list[BatchPlans] | None = None
    records_update: bool = False  #: the first layer puts update() into the graph that is being captured


@dataclass
class TreeMLAMetadata(MLACommonMetadata[TreeMLADecodeMetadata]):
    pass


class TreeMLAMetadataBuilder(MLACommonMetadataBuilder[TreeMLAMetadata]):
    """Binds lengths, block tables and query offsets of a batch to a plan, which its layers run."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, TreeMLAMetadata)
        _refuse_microbatches_in_graphs(vllm_config)
        context = vllm_config.compilation_config.static_forward_context
        self._layers = [context[name] for name in layer_names]
        self._eager_plans = BatchPlans()
        self._captured_plans: list[BatchPlans] = []  # kept for as long as their graphs may be replayed
        self._captured_q: torch.Tensor | None = None
        self._is_capture = False

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> TreeMLAMetadata:
        self._is_capture = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._is_capture = False

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> TreeMLADecodeMetadata:
        plans = BatchPlans() if self._is_capture else self._eager_plans
        q = kv = None
        if self._is_capture:
            q, kv = self._stand_ins(num_decode_tokens)
        plans.bind(
            q, kv, q_indptr=query_start_loc_device, kv_len=seq_lens_device, page_table=block_table_tensor, tree="causal",
            page_size=self.kv_cache_spec.block_size, d_v=self.mla_dims.kv_lora_rank, max_q_len=max_query_len,
        )  # fmt: skip
        if self._is_capture:
            for scales in sorted({_scales_of(layer.impl, layer) for layer in self._layers}):
                plans.plan(scales)
        return TreeMLADecodeMetadata(
            block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, plans, max_query_len > 1,
            self._captured_plans if self._is_capture else None, self._is_capture,
        )  # fmt: skip

    def _stand_ins(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of every layer's queries and cache, for a plan that is made before any layer runs."""
        heads = self.num_heads * self.dcp_world_size
        width = self.mla_dims.kv_lora_rank + self.mla_dims.qk_rope_head_dim
        if self._captured_q is None or len(self._captured_q) < num_tokens:
            self._captured_q = torch.zeros(num_tokens, heads, width, dtype=self.model_config.dtype, device=self.device)
        return self._captured_q[:num_tokens], _cache_of(self._layers[0].kv_cache, self._layers[0].impl.kv_cache_dtype)


class TreeMLABackend(MLACommonBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TreeMLAImpl]:
        return TreeMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TreeMLAMetadataBuilder]:
        return TreeMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8


class TreeMLAImpl(MLACommonImpl[TreeMLAMetadata]):
    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        for name, value in {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
        }.items():
            if value:
                raise make(2, name, f"{name} = {value}: the treemla backend has none")
        if attn_type != AttentionType.DECODER:
            name = getattr(attn_type, "value", attn_type)
            raise make(2, "attn_type", f"attn_type = {name}: must be {AttentionType.DECODER.value}")
        # FP8 caches are read with 16-bit queries.
        self.supports_quant_query_input = False
        self._recorder = VerifyRecorder.from_environment()

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TreeMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends each query token to its request's cached rows up to its own.

        Args:
            q: [tokens, heads, d_v + d_rope], or its two parts.
            kv_c_and_k_pe_cache: [num_blocks, block_size, d_v + d_rope].
            attn_metadata: of the batch.
            layer: for its scales and name.

        Returns:
            out [tokens, heads, d_v] in the dtype of q, and lse [tokens, heads] float32, natural log. A token without cached rows
            on this rank has out 0 and lse -inf.
        """
        decode = attn_metadata.decode
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        kv = _cache_of(kv_c_and_k_pe_cache, self.kv_cache_dtype)
        scales = _scales_of(self, layer)
        if decode.records_update and _arrays.is_capturing(q):
            decode.plans.update()
            decode.captured_plans.append(decode.plans)
            decode.records_update = False
        out = torch.empty(*q.shape[:2], self.kv_lora_rank, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        decode.plans.run(scales, q, kv, out=out, lse=lse)
        is_request = decode.is_verify and decode.captured_plans is None
        if self._recorder is not None and is_request and self._recorder.wants(extract_layer_index(layer.layer_name), q):
            self._recorder.write(decode.plans.problem_of(scales, q, kv), "vLLM, verification")
        return out, lse


def _refuse_microbatches_in_graphs(vllm_config: Any) -> None:
    """Microbatches are captured by two threads into one graph, each with metadata of its own."""
    if not getattr(vllm_config.parallel_config, "use_ubatching", False):
        return
    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    if mode is None or mode.has_full_cudagraphs():
        raise make(
            2,
            "enable_dbo",
            "enable_dbo or ubatch_size is set: the treemla backend runs no microbatches in full CUDA graphs; leave them unset, "
            "or set cudagraph_mode to PIECEWISE or NONE",
        )


def _cache_of(cache: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """FP8 caches may come as bytes."""
    return cache.view(torch.float8_e4m3fn) if kv_cache_dtype.startswith("fp8") and cache.dtype == torch.uint8 else cache


def _scales_of(impl: Any, layer: Any) -> Scales:
    is_quantized = impl.kv_cache_dtype.startswith("fp8")
    return Scales(float(impl.scale), float(layer._k_scale_float) if is_quantized else 1.0)
