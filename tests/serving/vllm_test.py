"""The vLLM backend against vLLM's own classes: builder, impl and batch metadata are the engine's; configuration, which takes a
model, and compiled operators are stood in for."""

from __future__ import annotations

import contextlib
import importlib.util
import types
from importlib import metadata

import numpy as np
import pytest
import torch
from conftest import assert_close, attend

pytest.importorskip("vllm")

import vllm.platforms  # noqa: E402
from vllm.platforms.interface import UnspecifiedPlatform  # noqa: E402

if not any(importlib.util.find_spec(name) for name in ("vllm._C", "vllm._C_stable_libtorch")):
    # A GPU's platform asks its compiled operators what they can do. Of none of them is anything tested here.
    vllm.platforms._current_platform = UnspecifiedPlatform()

from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.model_executor.layers.attention import mla_attention  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

import treemla  # noqa: E402
from treemla.integrations import _vllm_backend  # noqa: E402
from treemla.integrations import vllm as integration  # noqa: E402

D_V, D_ROPE, SCALE, MAX_BLOCKS = 512, 64, 0.05, 420


class Worker:
    """A worker's worth of vLLM: a cache of shuffled blocks, two MLA layers, persistent batch tensors."""

    def __init__(self, device, monkeypatch, *, block_size=16, dtype=torch.bfloat16, kv_cache_dtype="auto", k_scale=1.0, heads=4,
                 num_spec=8, dcp=1, seed=0, max_reqs=4):  # fmt: skip
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.device, self.dtype, self.block_size, self.heads, self.k_scale = device, dtype, block_size, heads, k_scale
        self.config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(
                dtype=dtype, max_model_len=2048, get_num_attention_heads=lambda _: heads, get_head_size=lambda: D_V + D_ROPE
            ),
            parallel_config=types.SimpleNamespace(
                decode_context_parallel_size=dcp, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
            ),
            scheduler_config=types.SimpleNamespace(max_num_seqs=max_reqs),
            cache_config=types.SimpleNamespace(block_size=block_size, cache_dtype=kv_cache_dtype),
            attention_config=types.SimpleNamespace(use_prefill_query_quantization=False),
            speculative_config=types.SimpleNamespace(num_speculative_tokens=num_spec, method="eagle", parallel_drafting=False),
            compilation_config=types.SimpleNamespace(static_forward_context={}),
            use_v2_model_runner=True,
        )
        for name, value in {
            "get_current_vllm_config": lambda: self.config,
            "get_num_attention_heads_from_layers": lambda *_: heads,
        }.items():
            monkeypatch.setattr(mla_attention, name, value)
        monkeypatch.setattr(
            mla_attention.MLACommonMetadataBuilder, "determine_chunked_prefill_workspace_size", staticmethod(lambda _: 64)
        )
        backend = AttentionBackendEnum.CUSTOM.get_class()
        self.num_blocks = 4 * -(-MAX_BLOCKS // block_size) + 1
        self.order = self.rng.permutation(self.num_blocks)
        cache_dtype = torch.float8_e4m3fn if kv_cache_dtype == "fp8" else dtype
        self.layers = []
        for index in range(2):
            cache = torch.full((self.num_blocks, block_size, D_V + D_ROPE), torch.nan, device=device).to(cache_dtype)
            impl = backend.get_impl_cls()(
                heads, D_V + D_ROPE, SCALE, 1, None, None, kv_cache_dtype, None, AttentionType.DECODER, None, q_lora_rank=None,
                kv_lora_rank=D_V, qk_nope_head_dim=32, qk_rope_head_dim=D_ROPE, qk_head_dim=96, v_head_dim=32, kv_b_proj=None,
            )  # fmt: skip
            layer = types.SimpleNamespace(
                impl=impl, kv_cache=cache.view(torch.uint8) if kv_cache_dtype == "fp8" else cache, q_lora_rank=None,
                kv_lora_rank=D_V,
                qk_nope_head_dim=32, qk_rope_head_dim=D_ROPE, v_head_dim=32, layer_name=f"model.layers.{index}.attn",
                _k_scale_float=k_scale, _k_scale=torch.tensor(k_scale), non_causal_multi_token_decode=False, num_heads=heads,
                prefill_backend=types.SimpleNamespace(clone=lambda: None), cache=cache,
            )  # fmt: skip
            self.layers.append(layer)
            self.config.compilation_config.static_forward_context[layer.layer_name] = layer
        spec = types.SimpleNamespace(block_size=block_size)
        self.builder = backend.get_builder_cls()(
            spec, [layer.layer_name for layer in self.layers], self.config, torch.device(device)
        )
        self.block_table = torch.full((max_reqs, -(-MAX_BLOCKS // block_size)), 2147480000, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        self.query_start = torch.zeros(max_reqs + 1, dtype=torch.int32, device=device)

    def fill(self, seq_lens, q_lens):
        """Requests with cached rows; those of one batch share no block, unused entries hold garbage."""
        taken = 0
        self.block_table.fill_(2147480000)
        self.seq_lens.zero_()
        for layer in self.layers:
            layer.cache.copy_(torch.full_like(layer.cache.float(), torch.nan))
        for r, n in enumerate(seq_lens):
            blocks = self.order[taken : taken + -(-n // self.block_size)].copy()
            taken += len(blocks)
            self.block_table[r, : len(blocks)] = torch.from_numpy(blocks).int()
            for layer in self.layers:
                slots = self.slots(r, n)
                rows = torch.randn(n, D_V + D_ROPE, device=self.device) / self.k_scale
                self.store(layer, slots, rows.to(layer.cache.dtype))
        self.seq_lens[: len(seq_lens)] = torch.tensor(seq_lens, dtype=torch.int32)
        ends = np.cumsum([0, *q_lens])
        self.query_start[: len(ends)] = torch.from_numpy(ends).int()
        self.query_start[len(ends) :] = int(ends[-1])

    # Indexing goes by bytes: not every version of torch indexes FP8 on a GPU.
    def store(self, layer, slots, rows):
        layer.cache.view(torch.uint8).view(self.num_blocks * self.block_size, -1)[slots] = rows.view(torch.uint8)

    def cached(self, layer, slots):
        return layer.cache.view(torch.uint8).view(self.num_blocks * self.block_size, -1)[slots].view(layer.cache.dtype)

    def slots(self, r, n):
        t = torch.arange(n, device=self.device)
        return self.block_table[r, t // self.block_size].long() * self.block_size + t % self.block_size

    def common(self, num_reqs, num_tokens, max_query_len, **fields):
        query_start_cpu = self.query_start[: num_reqs + 1].cpu()
        return CommonAttentionMetadata(
            query_start_loc=self.query_start[: num_reqs + 1], query_start_loc_cpu=query_start_cpu,
            seq_lens=self.seq_lens[:num_reqs],
            num_reqs=num_reqs, num_actual_tokens=num_tokens, max_query_len=max_query_len, max_seq_len=MAX_BLOCKS,
            block_table_tensor=self.block_table[:num_reqs], slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            seq_lens_cpu_upper_bound=self.seq_lens[:num_reqs].cpu(), **fields,
        )  # fmt: skip

    def queries(self, num_tokens):
        return [torch.randn(num_tokens, self.heads, D_V + D_ROPE, device=self.device).to(self.dtype) for _ in self.layers]

    def forward(self, attn_metadata, queries, joined=True):
        out = []
        for layer, q in zip(self.layers, queries):
            given = q if joined else (q[..., :D_V].contiguous(), q[..., D_V:].contiguous())
            out.append(layer.impl.forward_mqa(given, layer.kv_cache, attn_metadata, layer))
        return out

    def check(self, results, queries, seq_lens, q_lens):
        for layer, (out, lse), q in zip(self.layers, results, queries):
            assert out.dtype == self.dtype and lse.dtype == torch.float32
            begin = 0
            for r, (n, k) in enumerate(zip(seq_lens, q_lens)):
                if n == 0:
                    assert (out[begin : begin + k] == 0).all() and torch.isneginf(lse[begin : begin + k]).all()
                    begin += k
                    continue
                rows = self.cached(layer, self.slots(r, n)).double() * self.k_scale
                visible = np.arange(n)[None, :] <= n - k + np.arange(k)[:, None]
                want, want_lse = attend(q[begin : begin + k], rows, visible, D_V, SCALE)
                assert_close(out[begin : begin + k], want, self.dtype)
                assert (lse[begin : begin + k].double() - want_lse).abs().max() <= 1e-4
                begin += k


@pytest.fixture(autouse=True)
def engine():
    integration.register()
    yield
    AttentionBackendEnum.CUSTOM.clear_override()


# ---- registration ----


def test_the_entry_point_registers_the_backend():
    AttentionBackendEnum.CUSTOM.clear_override()
    (entry,) = [e for e in metadata.entry_points(group="vllm.general_plugins") if e.name == "treemla"]
    assert entry.load() is integration.register
    entry.load()()
    entry.load()()
    backend = AttentionBackendEnum.CUSTOM.get_class()
    assert backend.get_name() == "CUSTOM" and backend.is_mla()
    assert backend.supports_block_size(1) and backend.supports_block_size(16) and backend.supports_block_size(64)
    assert (
        backend.supports_head_size(576)
        and backend.supports_kv_cache_dtype("fp8")
        and not backend.supports_kv_cache_dtype("fp8_ds_mla")
    )
    assert backend.supports_dcp() and backend.get_impl_cls().can_return_lse_for_decode
    assert backend.get_builder_cls()._cudagraph_support == AttentionCGSupport.UNIFORM_BATCH
    capability = types.SimpleNamespace(major=7, minor=5)
    assert not backend.supports_compute_capability(capability)


def test_the_tested_version_is_installed():
    from treemla.integrations._versions import TESTED

    assert metadata.version("vllm").partition("+")[0] in TESTED["vllm"]


def test_another_version_is_refused_when_it_is_chosen(monkeypatch, caplog):
    monkeypatch.delenv("TREEMLA_ANY_ENGINE_VERSION", raising=False)
    monkeypatch.setattr("treemla.integrations._versions.metadata.version", lambda name: "0.9.2")
    integration.register()  # must not stop those who use another backend
    assert "vllm = 0.9.2: treemla's backend is tested with vllm 0.32.0 to 0.33.0" in caplog.text
    with pytest.raises(treemla.Unsupported, match=r"vllm = 0\.9\.2"):
        AttentionBackendEnum.CUSTOM.get_class()


# ---- batches ----


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("q_len", [1, 2, 9, 33, 64])
def test_chains_of_any_length(device, monkeypatch, block_size, q_len):
    w = Worker(device, monkeypatch, block_size=block_size, num_spec=q_len - 1 or None, seed=q_len)
    for prefixes in ([200, 0, 1], [33, 5, 150, 2]):  # batch after batch
        seq_lens, q_lens = [p + q_len for p in prefixes], [q_len] * len(prefixes)
        w.fill(seq_lens, q_lens)
        metadata_ = w.builder.build(0, w.common(len(prefixes), sum(q_lens), q_len))
        assert metadata_.num_prefills == 0 and metadata_.decode.is_verify == (q_len > 1)
        queries = w.queries(sum(q_lens))
        w.check(w.forward(metadata_, queries, joined=False), queries, seq_lens, q_lens)


def test_requests_of_different_lengths(device, monkeypatch):
    w = Worker(device, monkeypatch, dtype=torch.float16)
    seq_lens, q_lens = [100, 9, 50, 7], [9, 9, 1, 4]
    w.fill(seq_lens, q_lens)
    metadata_ = w.builder.build(0, w.common(4, sum(q_lens), 9))
    assert metadata_.num_decodes == 4
    queries = w.queries(sum(q_lens))
    w.check(w.forward(metadata_, queries), queries, seq_lens, q_lens)


@pytest.mark.parametrize("k_scale", [1.0, 0.25])
def test_fp8_caches(device, monkeypatch, k_scale):
    w = Worker(device, monkeypatch, kv_cache_dtype="fp8", k_scale=k_scale)
    w.fill([100, 12], [9, 9])
    assert not w.layers[0].impl.supports_quant_query_input
    queries = w.queries(18)
    w.check(w.forward(w.builder.build(0, w.common(2, 18, 9)), queries), queries, [100, 12], [9, 9])


def test_ranks_of_decode_context_parallel_merge_by_their_lse(device, monkeypatch):
    """Token i lives on rank i % 2. What the ranks return, merged by vLLM's rule, is attention over all tokens."""
    total, ranks = [90, 31, 1], 2
    w = Worker(device, monkeypatch, dcp=1)  # the group's set-up needs processes; the impl sees one rank's lengths either way
    w.fill(total, [1, 1, 1])
    queries = w.queries(3)
    want = w.forward(w.builder.build(0, w.common(3, 3, 1)), queries)
    rows = [[w.cached(layer, w.slots(r, n)).clone() for layer in w.layers] for r, n in enumerate(total)]
    parts = []
    for rank in range(ranks):
        local = [len(range(rank, n, ranks)) for n in total]
        w.fill(local, [1, 1, 1])
        for r, n in enumerate(local):
            for layer, cached in zip(w.layers, rows[r]):
                w.store(layer, w.slots(r, n), cached[rank::ranks].contiguous())
        parts.append(w.forward(w.builder.build(0, w.common(3, 3, 1)), queries))
        w.check(parts[-1], queries, local, [1, 1, 1])  # the last request has no token on rank 1
    for layer in range(2):
        lse = torch.stack([parts[rank][layer][1] for rank in range(ranks)])
        merged = torch.logsumexp(lse, 0)
        out = sum(torch.exp(lse[rank] - merged)[..., None] * parts[rank][layer][0].float() for rank in range(ranks))
        assert (merged - want[layer][1]).abs().max() <= 1e-4
        assert_close(out.to(w.dtype), want[layer][0].double(), w.dtype)


def test_captured_plans_follow_the_engines_buffers(device, monkeypatch):
    w = Worker(device, monkeypatch)
    w.fill([20, 20, 20, 20], [9] * 4)
    captured = w.builder.build_for_cudagraph_capture(w.common(4, 36, 9))
    queries = w.queries(36)
    graph = None
    if device == "cuda":
        w.forward(captured, queries)  # the engine's warm-up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = w.forward(captured, queries)
        assert not captured.decode.records_update
    for seq_lens in ([100, 9, 30], [9], [300, 10, 9, 64]):
        n = len(seq_lens)
        w.fill(seq_lens, [9] * n)
        w.query_start[: 4 + 1] = torch.arange(0, 45, 9, dtype=torch.int32)  # padded requests keep their tokens, and have no rows
        w.builder.build(0, w.common(4, 36, 9))
        for q in queries:
            q.normal_()
        if graph is None:
            captured.decode.plans.update()
            results = w.forward(captured, queries)
        else:
            for out, lse in results:
                out.fill_(torch.nan)
                lse.fill_(torch.nan)
            graph.replay()
        w.check(results, queries, [*seq_lens, *[0] * (4 - n)], [9] * 4)


def test_plans_are_kept_of_captures_alone(monkeypatch):
    """A step of an idle data-parallel rank builds a capture's metadata, too, while serving."""
    w = Worker("cpu", monkeypatch)
    w.fill([20] * 4, [9] * 4)
    for _ in range(3):
        idle = w.builder.build_for_cudagraph_capture(w.common(4, 36, 9))
        w.forward(idle, w.queries(36))
    assert w.builder._captured_plans == []
    captured = w.builder.build_for_cudagraph_capture(w.common(4, 36, 9))
    monkeypatch.setattr(_vllm_backend._arrays, "is_capturing", lambda _: True)
    w.forward(captured, w.queries(36))
    assert w.builder._captured_plans == [captured.decode.plans] and not captured.decode.records_update


def test_prefills_keep_vllms_own_path(device, monkeypatch):
    w = Worker(device, monkeypatch)
    monkeypatch.setattr(mla_attention, "PIN_MEMORY", device == "cuda")
    seen = []
    w.builder._prefill_backend = types.SimpleNamespace(get_name=lambda: "X", prepare_metadata=seen.append)
    w.fill([40, 60], [9, 60])
    metadata_ = w.builder.build(0, w.common(2, 69, 60))
    assert (metadata_.num_decodes, metadata_.num_prefills) == (1, 1) and len(seen) == 1
    queries = w.queries(9)
    w.check(w.forward(metadata_, queries), queries, [40], [9])


def test_one_verify_call_is_recorded(device, monkeypatch, tmp_path):
    monkeypatch.setenv("TREEMLA_RECORD", f"{tmp_path},layer=1,call=1")
    w = Worker(device, monkeypatch)
    for q_len, seq_lens in ((1, [5, 6]), (9, [20, 9]), (9, [31, 12]), (9, [50, 60])):
        w.fill(seq_lens, [q_len] * 2)
        w.forward(w.builder.build(0, w.common(2, 2 * q_len, q_len)), w.queries(2 * q_len))
        w.forward(w.builder.build_for_cudagraph_capture(w.common(2, 2 * q_len, q_len)), w.queries(2 * q_len))  # no request's
    (path,) = tmp_path.iterdir()
    assert path.name == "layer1_call1.kdtr"
    case = pytest.importorskip("safetensors.numpy").load_file(path) if w.dtype != torch.bfloat16 else None
    assert case is None or case["kv_len"].tolist() == [31, 12]


@pytest.mark.parametrize("mode, is_refused", [("FULL_AND_PIECEWISE", True), ("PIECEWISE", False), ("NONE", False)])
def test_microbatches_in_full_graphs_are_refused(monkeypatch, mode, is_refused):
    w = Worker("cpu", monkeypatch)
    names = [layer.layer_name for layer in w.layers]
    w.config.parallel_config.use_ubatching = True
    w.config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    with pytest.raises(treemla.Unsupported, match="enable_dbo") if is_refused else contextlib.nullcontext():
        type(w.builder)(types.SimpleNamespace(block_size=16), names, w.config, torch.device("cpu"))


def test_what_the_impl_lacks(monkeypatch):
    w = Worker("cpu", monkeypatch)
    impl = AttentionBackendEnum.CUSTOM.get_class().get_impl_cls()
    rest = {"q_lora_rank": None, "kv_lora_rank": D_V, "qk_nope_head_dim": 32, "qk_rope_head_dim": D_ROPE, "qk_head_dim": 96,
            "v_head_dim": 32, "kv_b_proj": None}  # fmt: skip
    assert w.builder.query_len_support == mla_attention.QueryLenSupport.VARLEN
    with pytest.raises(treemla.Unsupported, match="logits_soft_cap = 30.0"):
        impl(4, D_V + D_ROPE, SCALE, 1, None, None, "auto", 30.0, AttentionType.DECODER, None, **rest)
    with pytest.raises(treemla.Unsupported, match="attn_type = encoder_only"):
        impl(4, D_V + D_ROPE, SCALE, 1, None, None, "auto", None, AttentionType.ENCODER_ONLY, None, **rest)
