"""The SGLang backend against SGLang's own classes: pools, layers, batches and verify inputs are the engine's; what is compiled or
comes from a server's start is stood in for."""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from importlib import metadata

import numpy as np
import pytest
import torch
from conftest import assert_close, attend, random_parents, sees_of

pytest.importorskip("sglang")

from sglang.srt.layers.attention import attention_registry  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES  # noqa: E402
from sglang.srt.speculative.dflash_info import DFlashVerifyInput  # noqa: E402
from sglang.srt.speculative.draft_utils import DraftBackendFactory  # noqa: E402
from sglang.srt.speculative.eagle_info import EagleVerifyInput  # noqa: E402
from sglang.srt.speculative.eagle_utils import TreeMaskMode  # noqa: E402
from sglang.srt.speculative.ngram_info import NgramVerifyInput  # noqa: E402

import treemla  # noqa: E402
from treemla.integrations import _plans, _sglang_backend  # noqa: E402
from treemla.integrations import sglang as integration  # noqa: E402
from treemla.integrations._versions import check_version  # noqa: E402

CONTEXT = 400


class Server:
    """A model runner's worth of SGLang: its pools, two MLA layers, requests whose slots are shuffled, pages kept whole."""

    def __init__(
        self, device, *, page_size=1, dtype=torch.float32, kv_dtype=None, heads=4, d_v=128, d_rope=64, seed=0, q_len=9,
        is_draft=False,
    ):  # fmt: skip
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.device, self.dtype, self.page_size, self.d_v, self.d_qk, self.q_len = (
            device,
            dtype,
            page_size,
            d_v,
            d_v + d_rope,
            q_len,
        )
        self.req_pool = ReqToTokenPool(8, CONTEXT, device, False)
        self.pool = MLATokenToKVPool(3200, page_size, kv_dtype or dtype, d_v, d_rope, 2, device, False)
        self.layers = torch.nn.ModuleList(
            RadixAttention(heads, self.d_qk, 0.1, 1, layer_id, v_head_dim=d_v) for layer_id in range(2)
        )
        nan = torch.tensor([torch.nan], device=device).to(self.pool.dtype).view(self.pool.store_dtype)
        for buffer in self.pool.kv_buffer:  # what nobody wrote must not reach a result; slot 0 is the engine's dummy
            buffer[1:] = nan
        pages = 1 + self.rng.permutation(3200 // page_size - 1)
        self.slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1).astype(np.int32)
        self.taken = 0
        self.runner = types.SimpleNamespace(
            device=device,
            is_draft_worker=is_draft,
            use_mla_backend=True,
            req_to_token_pool=self.req_pool,
            token_to_kv_pool=self.pool,
            kv_cache_dtype=self.pool.dtype,
            kv_index_translator=None,
            model=self.layers,
            model_config=types.SimpleNamespace(
                context_len=CONTEXT, kv_lora_rank=d_v, qk_rope_head_dim=d_rope, dtype=dtype, num_attention_heads=heads
            ),
        )

    def backend(self):
        return attention_registry.ATTENTION_BACKENDS["treemla"](self.runner)

    def requests(self, prefixes, q_len=None):
        """Requests with these prefixes cached in both layers and slots for what follows; rows of the pool in random order."""
        q_len = self.q_len if q_len is None else q_len
        rows = 1 + self.rng.permutation(8)[: len(prefixes)]
        for row, prefix in zip(rows, prefixes):
            need = -(-(prefix + q_len) // self.page_size) * self.page_size
            slots = torch.from_numpy(self.slots[self.taken : self.taken + need]).to(self.device)
            self.taken += need
            assert self.taken <= len(self.slots)
            self.req_pool.req_to_token[row, : prefix + q_len] = slots[: prefix + q_len]
            for layer in range(2):
                cached = self.random(prefix, self.d_qk).to(self.pool.dtype).view(self.pool.store_dtype)
                self.pool.kv_buffer[layer][slots[:prefix].long(), 0] = cached
        return rows

    def random(self, *shape):
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def slots_of(self, row, begin, end):
        return self.req_pool.req_to_token[row, begin:end].long()

    def cached(self, layer, slots):
        """float64 [n, d_qk] rows as stored."""
        return self.pool.kv_buffer[layer][slots, 0].view(self.pool.dtype).double()

    def forward_batch(self, mode, rows, seq_lens, out_cache_loc, **fields):
        ints = {"dtype": torch.int64, "device": self.device}
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=torch.zeros(len(out_cache_loc), **ints),
            req_pool_indices=torch.as_tensor(np.asarray(rows), **ints),
            seq_lens=torch.as_tensor(np.asarray(seq_lens), **ints),
            out_cache_loc=out_cache_loc,
            seq_lens_sum=-1,  # stale: nobody may read it
            **fields,
        )

    def run(self, backend, batch, tokens, form="joined"):
        """Both layers in turn; (outputs, queries)."""
        outputs, queries = [], []
        for layer in self.layers:
            q, k = self.random(tokens, layer.tp_q_head_num, self.d_qk), self.random(tokens, 1, self.d_qk)
            call = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
            if form == "joined":
                out = call(q, k, k[..., : self.d_v], layer, batch)
            else:  # as backends on SGLang's list of fused paths get it
                out = call(
                    q[..., : self.d_v].contiguous(), k[..., : self.d_v].contiguous(), None, layer, batch,
                    q_rope=q[..., self.d_v :].contiguous(), k_rope=k[..., self.d_v :].contiguous(),
                )  # fmt: skip
            assert out.shape == (tokens, layer.tp_q_head_num * self.d_v) and out.dtype == self.dtype
            outputs.append(out.view(tokens, layer.tp_q_head_num, self.d_v))
            queries.append(q)
        return outputs, queries

    def check(self, outputs, queries, rows, prefixes, q_lens, sees):
        """Every layer's output is attention over the prefix and what each node sees of its tree."""
        for layer, (out, q) in enumerate(zip(outputs, queries)):
            begin = 0
            for r, (row, prefix, n) in enumerate(zip(rows, prefixes, q_lens)):
                cached = self.cached(layer, self.slots_of(row, 0, prefix + n))
                visible = np.concatenate([np.ones((n, prefix), bool), sees[r]], 1)
                want, _ = attend(q[begin : begin + n], cached, visible, self.d_v, self.layers[layer].scaling)
                assert_close(out[begin : begin + n], want, self.dtype)
                begin += n


def chain(n):
    return np.tril(np.ones((n, n), bool))


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """What a server's start settles."""
    monkeypatch.setattr(
        _sglang_backend, "get_spec", lambda: types.SimpleNamespace(speculative_num_draft_tokens=settings.num_draft_tokens)
    )
    settings.num_draft_tokens = 9
    integration.register()
    with get_parallel().override(attn_tp_size=1, attn_dcp_size=1, dcp_enabled=False):
        yield


settings = types.SimpleNamespace(num_draft_tokens=9)


def eagle(mask, q_len):
    return EagleVerifyInput(
        draft_token=None, custom_mask=mask, positions=None, retrieve_index=None, retrieve_next_token=None,
        retrieve_next_sibling=None, retrieve_cum_len=None, spec_steps=3, topk=4, draft_token_num=q_len,
        capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=None, seq_lens_cpu=None,
    )  # fmt: skip


def ngram(mask, q_len):
    return NgramVerifyInput(draft_token=None, custom_mask=mask, draft_token_num=q_len)


def dflash(mask, q_len, device="cpu"):
    return DFlashVerifyInput(draft_token=None, positions=None, draft_token_num=q_len, custom_mask=mask)


def full_mask(sees, prefixes, device):
    """SGLang's FULL_MASK, with the prefix unset where the engine leaves it so."""
    cells = [np.concatenate([np.ones((len(s), prefix), bool), s], 1).reshape(-1) for s, prefix in zip(sees, prefixes)]
    return torch.from_numpy(np.concatenate(cells)).to(device)


def verify_batch(server, rows, prefixes, q_len, spec_info):
    loc = torch.cat([server.slots_of(row, prefix, prefix + q_len) for row, prefix in zip(rows, prefixes)])
    return server.forward_batch(ForwardMode.TARGET_VERIFY, rows, prefixes, loc, spec_info=spec_info)


# ---- registration ----


def test_the_entry_point_registers_the_name():
    (entry,) = [e for e in metadata.entry_points(group="sglang.srt.plugins") if e.name == "treemla"]
    assert entry.load() is integration.register
    entry.load()()  # SGLang may load plugins in every process, and twice is no harm
    assert ATTENTION_BACKEND_CHOICES.count("treemla") == 1
    assert attention_registry.ATTENTION_BACKENDS["treemla"] is integration.create_backend


def test_the_tested_version_is_installed():
    from treemla.integrations._versions import TESTED

    assert metadata.version("sglang") in TESTED["sglang"]


@pytest.mark.parametrize(
    "version, is_tested",
    [("0.5.22", True), ("0.5.23.0", True), ("0.5.23.post1", True), ("0.5.23+cu130", True), ("0.5.23rc0", False),
     ("0.5.22.dev3+gabc", False), ("0.5.23.1", False), ("0.5.21.post4", False), ("main", False)],
)  # fmt: skip
def test_which_versions_are_tested(monkeypatch, version, is_tested):
    monkeypatch.delenv("TREEMLA_ANY_ENGINE_VERSION", raising=False)
    monkeypatch.setattr("treemla.integrations._versions.metadata.version", lambda name: version)
    assert (check_version("sglang") is None) == is_tested


def test_another_version_is_refused_when_it_is_chosen(monkeypatch, caplog):
    monkeypatch.delenv("TREEMLA_ANY_ENGINE_VERSION", raising=False)
    monkeypatch.setattr("treemla.integrations._versions.metadata.version", lambda name: "0.4.9.post2")
    integration.register()  # must not stop those who use another backend
    assert "sglang = 0.4.9.post2: treemla's backend is tested with sglang 0.5.22 to 0.5.23" in caplog.text
    assert "treemla" in ATTENTION_BACKEND_CHOICES
    with pytest.raises(treemla.Unsupported, match="TREEMLA_ANY_ENGINE_VERSION=1"):
        attention_registry.ATTENTION_BACKENDS["treemla"](None)
    monkeypatch.setenv("TREEMLA_ANY_ENGINE_VERSION", "1")
    integration.register()
    assert attention_registry.ATTENTION_BACKENDS["treemla"] is integration.create_backend


def test_draft_models_find_their_backends(monkeypatch):
    HookRegistry.apply_hooks()
    server = Server("cpu", is_draft=True)
    factory = types.SimpleNamespace(draft_model_runner=server.runner, draft_attn_backend="treemla")
    monkeypatch.setattr("sglang.srt.speculative.draft_utils.attention_backends", lambda: ("treemla", "treemla"))
    monkeypatch.setattr("sglang.srt.layers.attention.attention_registry.attn_backend_wrapper_for_draft_decode", lambda _, b: b)
    loop = types.SimpleNamespace(attn_backends=[])
    choose = DraftBackendFactory._create_backend
    backend_map = {"triton": lambda: ("triton", loop)}
    assert choose(factory, "decode_attention_backend", backend_map, "no {backend_type}", stamps_children=True) is loop
    extend = choose(factory, "decode_attention_backend", backend_map, "no {backend_type}")
    assert isinstance(extend, _sglang_backend.TreeMLAAttnBackend) and extend.decode_attention_backend_str == "treemla"
    factory.draft_attn_backend = "other"
    with pytest.raises(ValueError, match="no other"):
        choose(factory, "decode_attention_backend", backend_map, "no {backend_type}")


def test_models_without_mla():
    runner = Server("cpu").runner
    runner.use_mla_backend = False
    runner.model_config.hf_config = types.SimpleNamespace(architectures=["LlamaForCausalLM"])
    with pytest.raises(ValueError, match="LlamaForCausalLM.* has no Multi-head Latent Attention"):
        integration.create_backend(runner)


# ---- eager ----


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("q_len", [2, 9, 33, 64])
@pytest.mark.parametrize("kind", ["eagle", "ngram"])
def test_trees_eager(device, page_size, q_len, kind):
    settings.num_draft_tokens = q_len
    server = Server(device, page_size=page_size, q_len=q_len, seed=q_len + page_size)
    prefixes = [37, 0, 1, 130]
    rows = server.requests(prefixes)
    sees = [sees_of(random_parents(server.rng, q_len)) for _ in rows]
    backend = server.backend()
    batch = verify_batch(
        server, rows, prefixes, q_len, {"eagle": eagle, "ngram": ngram}[kind](full_mask(sees, prefixes, device), q_len)
    )
    backend.init_forward_metadata(batch)
    server.check(*server.run(backend, batch, 4 * q_len), rows, prefixes, [q_len] * 4, sees)


@pytest.mark.parametrize("form", ["joined", "split"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_caches(device, kv_dtype, form):
    server = Server(device, dtype=torch.bfloat16, kv_dtype=kv_dtype, d_v=512, heads=8, page_size=16)
    if form == "split":
        server.pool.set_mla_kv_buffer = None  # compiled: the backend joins the parts
    prefixes = [200, 1, 0]
    rows = server.requests(prefixes)
    sees = [sees_of(random_parents(server.rng, 9)) for _ in rows]
    backend = server.backend()
    batch = verify_batch(server, rows, prefixes, 9, eagle(full_mask(sees, prefixes, device), 9))
    backend.init_forward_metadata(batch)
    outputs, queries = server.run(backend, batch, 27, form)
    server.check(outputs, queries, rows, prefixes, [9] * 3, sees)
    stored = server.cached(1, batch.out_cache_loc)  # what the layer stored is k
    assert torch.isfinite(stored).all() and 0.75 < stored.std() < 1.25


def test_layers_with_different_scales(device):
    server = Server(device, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, d_v=512)  # as CUDA kernels take it
    server.layers[1].scaling = 0.02
    rows = server.requests([50, 3])
    batch = verify_batch(server, rows, [50, 3], 9, dflash(None, 9))
    backend = server.backend()
    backend.init_forward_metadata(batch)
    server.check(*server.run(backend, batch, 18), rows, [50, 3], [9] * 2, [chain(9)] * 2)


def test_deterministic_inference_is_batch_invariant(device, monkeypatch):
    deterministic = types.SimpleNamespace(enable_deterministic_inference=True)
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: types.SimpleNamespace(deterministic=deterministic))
    server = Server(device)
    asked = []
    planner = _plans.Planner
    monkeypatch.setattr(_plans, "Planner", lambda **options: asked.append(options["batch_invariant"]) or planner(**options))
    prefixes = [300, 5, 77]
    rows = server.requests(prefixes)
    q, k = server.random(27, 4, server.d_qk), server.random(27, 1, server.d_qk)
    backend = server.backend()

    def run(begin, end):
        batch = verify_batch(server, rows[begin:end], prefixes[begin:end], 9, dflash(None, 9))
        backend.init_forward_metadata(batch)
        part = slice(9 * begin, 9 * end)
        return backend.forward_extend(q[part], k[part], k[part, :, : server.d_v], server.layers[0], batch)

    together = run(0, 3)
    assert torch.equal(together, torch.cat([run(r, r + 1) for r in range(3)]))
    backend.init_cuda_graph_state(4, 36)
    Graph(server, backend, ForwardMode.TARGET_VERIFY, 4, 9, dflash(None, 9))
    assert len(asked) == 2 and all(asked)
    deterministic.enable_deterministic_inference = False
    backend = server.backend()
    backend.init_cuda_graph_state(4, 36)
    Graph(server, backend, ForwardMode.TARGET_VERIFY, 4, 9, dflash(None, 9))
    assert asked[2:] == [False]


@pytest.mark.parametrize("q_len", [1, 9])
def test_chains_without_a_mask(device, q_len):
    server = Server(device, q_len=q_len)
    prefixes = [5, 0, 77]
    rows = server.requests(prefixes)
    backend = server.backend()
    batch = verify_batch(server, rows, prefixes, q_len, dflash(None, q_len))
    backend.init_forward_metadata(batch)
    server.check(*server.run(backend, batch, 3 * q_len), rows, prefixes, [q_len] * 3, [chain(q_len)] * 3)


def test_decode(device):
    server = Server(device, q_len=1)
    prefixes = [0, 1, 63, 200]
    rows = server.requests(prefixes)
    backend = server.backend()
    loc = torch.cat([server.slots_of(row, prefix, prefix + 1) for row, prefix in zip(rows, prefixes)])
    batch = server.forward_batch(ForwardMode.DECODE, rows, [p + 1 for p in prefixes], loc)
    backend.init_forward_metadata(batch)
    server.check(*server.run(backend, batch, 4), rows, prefixes, [1] * 4, [chain(1)] * 4)


def test_draft_extend(device):
    server = Server(device)
    prefixes, accepted = [12, 40], [3, 9]  # tokens that count of the nine, all of which are attended
    rows = server.requests(prefixes)
    loc = torch.cat([server.slots_of(row, prefix, prefix + 9) for row, prefix in zip(rows, prefixes)])
    batch = server.forward_batch(
        ForwardMode.DRAFT_EXTEND_V2, rows, [p + a for p, a in zip(prefixes, accepted)], loc,
        extend_seq_lens=torch.tensor(accepted, device=device),
    )  # fmt: skip
    backend = server.backend()
    backend.init_forward_metadata(batch)
    server.check(*server.run(backend, batch, 18), rows, prefixes, [9] * 2, [chain(9)] * 2)


def test_absorbed_prefill_of_ragged_requests(device):
    server = Server(device, q_len=70, page_size=16)
    prefixes, news = [0, 33, 128], [70, 1, 20]
    rows = server.requests(prefixes)
    loc = torch.cat([server.slots_of(row, p, p + n) for row, p, n in zip(rows, prefixes, news)])
    batch = server.forward_batch(
        ForwardMode.EXTEND, rows, [p + n for p, n in zip(prefixes, news)], loc,
        extend_seq_lens=torch.tensor(news, device=device), extend_prefix_lens=torch.tensor(prefixes, device=device),
        extend_seq_lens_cpu=news, extend_prefix_lens_cpu=prefixes,
    )  # fmt: skip
    backend = server.backend()
    backend.init_forward_metadata(batch)
    server.check(*server.run(backend, batch, sum(news)), rows, prefixes, news, [chain(n) for n in news])


def test_heads_may_be_shared_out_over_ranks(device):
    server = Server(device, heads=8)
    rows = server.requests([60, 2])
    sees = [sees_of(random_parents(server.rng, 9)) for _ in rows]
    batch = verify_batch(server, rows, [60, 2], 9, eagle(full_mask(sees, [60, 2], device), 9))
    q, k = server.random(18, 8, server.d_qk), server.random(18, 1, server.d_qk)
    outputs = []
    for heads in (slice(0, 8), slice(0, 4), slice(4, 8)):
        for layer in server.layers:
            layer.tp_q_head_num = heads.stop - heads.start
        backend = server.backend()
        backend.init_forward_metadata(batch)
        outputs.append(
            backend.forward_extend(q[:, heads], k, k[..., : server.d_v], server.layers[0], batch).view(18, -1, server.d_v)
        )
    assert_close(torch.cat(outputs[1:], 1), outputs[0].double(), torch.float32)


def test_batch_after_batch_and_idle_ones(device):
    server = Server(device)
    backend = server.backend()
    for prefixes in ([9, 30], [300], [1, 1, 1, 1, 1]):
        rows = server.requests(prefixes)
        sees = [sees_of(random_parents(server.rng, 9)) for _ in rows]
        batch = verify_batch(server, rows, prefixes, 9, eagle(full_mask(sees, prefixes, device), 9))
        backend.init_forward_metadata(batch)
        server.check(*server.run(backend, batch, 9 * len(rows)), rows, prefixes, [9] * len(rows), sees)
        idle = server.forward_batch(ForwardMode.IDLE, [], [], torch.zeros(0, dtype=torch.int64, device=device))
        backend.init_forward_metadata(idle)
        q = server.random(0, 4, server.d_qk)
        assert backend.forward(q, None, None, server.layers[0], idle).shape == (0, 4 * server.d_v)


# ---- graphs ----


class Graph:
    """Captures as SGLang's decode runner does: over static buffers, padded; on the CPU the same calls without a graph."""

    def __init__(self, server, backend, mode, bs, q_len, spec_info):
        self.server, self.backend, self.mode, self.bs, self.q_len = server, backend, mode, bs, q_len
        device = server.device
        fill = backend.get_cuda_graph_seq_len_fill_value()
        self.rows = torch.zeros(bs, dtype=torch.int64, device=device)
        self.seq_lens = torch.full((bs,), fill, dtype=torch.int64, device=device)
        self.loc = torch.zeros(bs * q_len, dtype=torch.int64, device=device)
        self.q = [server.random(bs * q_len, 4, server.d_qk) for _ in range(2)]
        self.k = [server.random(bs * q_len, 1, server.d_qk) for _ in range(2)]
        batch = self.batch(spec_info)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.graph = None
        for _ in range(2):  # the engine's warm-up
            self.outputs = self.record(batch)
        if device == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self.record(batch)

    def batch(self, spec_info):
        return ForwardBatch(
            forward_mode=self.mode, batch_size=self.bs, input_ids=self.loc, req_pool_indices=self.rows, seq_lens=self.seq_lens,
            out_cache_loc=self.loc, seq_lens_sum=-1, spec_info=spec_info,
        )  # fmt: skip

    def record(self, batch):
        self.backend.init_forward_metadata_in_graph(batch)
        call = self.backend.forward_decode if self.mode.is_decode() else self.backend.forward_extend
        return [
            call(q, k, k[..., : self.server.d_v], layer, batch).view(self.bs * self.q_len, 4, self.server.d_v)
            for layer, q, k in zip(self.server.layers, self.q, self.k)
        ]

    def replay(self, rows, seq_lens, loc, spec_info):
        n = len(rows)
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        self.rows.zero_()
        self.rows[:n] = torch.as_tensor(np.asarray(rows))
        self.seq_lens.fill_(fill)
        self.seq_lens[:n] = torch.as_tensor(np.asarray(seq_lens))
        self.loc.zero_()
        self.loc[: len(loc)] = loc
        for a in (*self.q, *self.k):
            a.copy_(self.server.random(*a.shape))
        batch = self.batch(spec_info)
        self.backend.init_forward_metadata_out_graph(batch)
        if self.graph is None:
            self.outputs = self.record(batch)
        else:
            for out in self.outputs:
                out.fill_(torch.nan)
            self.graph.replay()
        return self.outputs, self.q


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("q_len", [2, 9, 33, 64])
@pytest.mark.parametrize("kind", ["eagle", "ngram", "dflash"])
def test_trees_in_graphs_with_padded_batches(device, page_size, q_len, kind):
    graphs_with_padded_batches(Server(device, page_size=page_size, q_len=q_len, seed=q_len), q_len, kind)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("q_len", [9, 33])
def test_graphs_of_a_models_shape(device, q_len, kv_dtype):
    """512/64 and 16-bit queries: the tensor cores' kernels on a GPU."""
    graphs_with_padded_batches(Server(device, dtype=torch.bfloat16, kv_dtype=kv_dtype, d_v=512, q_len=q_len), q_len, "eagle")


def graphs_with_padded_batches(server, q_len, kind):
    settings.num_draft_tokens, device = q_len, server.device
    backend = server.backend()
    backend.init_cuda_graph_state(4, 4 * q_len)
    assert backend.verify_mask.mode == TreeMaskMode.QLEN_ONLY and backend.verify_mask.fits(4)
    runner_mask = torch.ones((4 + 4 * q_len) * q_len, dtype=torch.bool, device=device)
    captured = {"eagle": eagle, "ngram": ngram, "dflash": dflash}[kind](runner_mask, q_len)
    graph = Graph(server, backend, ForwardMode.TARGET_VERIFY, 4, q_len, captured)
    small = Graph(server, backend, ForwardMode.TARGET_VERIFY, 1, q_len, captured)
    for prefixes in ([30, 1, 7], [150], [0, 25, 1, 11]):
        rows = server.requests(prefixes)
        sees = [chain(q_len) if kind == "dflash" else sees_of(random_parents(server.rng, q_len)) for _ in rows]
        if kind == "eagle":  # built in the backend's buffer, whose end is of an earlier batch
            mask = backend.verify_mask.buffer
            mask[: len(rows) * q_len**2] = torch.from_numpy(np.concatenate([s.reshape(-1) for s in sees])).to(device)
        else:
            mask = full_mask(sees, prefixes, device) if kind == "ngram" else None
        spec_info = {"eagle": eagle, "ngram": ngram, "dflash": dflash}[kind](mask, q_len)
        loc = torch.cat([server.slots_of(row, p, p + q_len) for row, p in zip(rows, prefixes)])
        for g in (graph, small)[: 1 + (len(rows) == 1)]:
            outputs, queries = g.replay(rows, prefixes, loc, spec_info)
            server.check(outputs, queries, rows, prefixes, [q_len] * len(rows), sees)
            assert all(torch.isfinite(out).all() for out in outputs)  # padding reaches the layers behind


def test_decode_and_draft_extend_in_graphs(device):
    server = Server(device)
    backend = server.backend()
    backend.init_cuda_graph_state(4, 36)
    decode = Graph(server, backend, ForwardMode.DECODE, 4, 1, None)
    extend = Graph(server, backend, ForwardMode.DRAFT_EXTEND_V2, 4, 9, None)
    for prefixes in ([30, 1, 7], [150, 0]):
        n = len(prefixes)
        rows = server.requests(prefixes)
        loc = torch.cat([server.slots_of(row, p, p + 1) for row, p in zip(rows, prefixes)])
        outputs, queries = decode.replay(rows, [p + 1 for p in prefixes], loc, None)
        server.check(outputs, queries, rows, prefixes, [1] * n, [chain(1)] * n)
        loc = torch.cat([server.slots_of(row, p, p + 9) for row, p in zip(rows, prefixes)])
        outputs, queries = extend.replay(rows, [p + 9 for p in prefixes], loc, None)
        server.check(outputs, queries, rows, prefixes, [9] * n, [chain(9)] * n)
        assert all((out[9 * n :] == 0).all() for out in outputs)


def test_a_size_captured_twice_keeps_both_graphs(device):
    server = Server(device)
    backend = server.backend()
    backend.init_cuda_graph_state(2, 18)
    first = Graph(server, backend, ForwardMode.TARGET_VERIFY, 2, 9, dflash(None, 9))
    plans = weakref.ref(backend.forward_metadata.plans)
    second = Graph(server, backend, ForwardMode.TARGET_VERIFY, 2, 9, dflash(None, 9))
    gc.collect()
    assert plans() is not None and plans() is not backend.forward_metadata.plans
    for graph, prefixes in ((first, [40, 2]), (second, [7, 90]), (first, [1, 1])):
        rows = server.requests(prefixes)
        loc = torch.cat([server.slots_of(row, p, p + 9) for row, p in zip(rows, prefixes)])
        outputs, queries = graph.replay(rows, prefixes, loc, dflash(None, 9))
        server.check(outputs, queries, rows, prefixes, [9] * 2, [chain(9)] * 2)
    backend.init_cuda_graph_state(2, 18)
    backend.forward_metadata = None
    gc.collect()
    assert plans() is None


def test_a_mask_of_another_backends_layout(device):
    """Our buffer says QLEN_ONLY; a mask that is neither in it nor of that size is FULL_MASK."""
    server = Server(device)
    backend = server.backend()
    backend.init_cuda_graph_state(4, 36)
    prefixes = [30, 4]
    rows = server.requests(prefixes)
    sees = [sees_of(random_parents(server.rng, 9)) for _ in rows]
    exact = torch.from_numpy(np.concatenate([s.reshape(-1) for s in sees])).to(device)
    for mask in (full_mask(sees, prefixes, device), exact):
        batch = verify_batch(server, rows, prefixes, 9, eagle(mask, 9))
        backend.init_forward_metadata(batch)
        server.check(*server.run(backend, batch, 18), rows, prefixes, [9] * 2, sees)
        backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, None)
        server.check(*server.run(backend, batch, 18), rows, prefixes, [9] * 2, sees)


def test_a_mask_that_comes_after_the_metadata(device):
    server = Server(device)
    backend = server.backend()
    prefixes = [30, 4]
    rows = server.requests(prefixes)
    sees = [sees_of(random_parents(server.rng, 9)) for _ in rows]
    spec_info = eagle(full_mask([np.eye(9, dtype=bool)] * 2, prefixes, device), 9)
    batch = verify_batch(server, rows, prefixes, 9, spec_info)
    backend.init_forward_metadata(batch)
    spec_info.custom_mask = full_mask(sees, prefixes, device)
    backend.update_verify_buffers_to_fill_after_draft(spec_info, None)
    server.check(*server.run(backend, batch, 18), rows, prefixes, [9] * 2, sees)


# ---- the recorder ----


def test_one_verify_call_is_recorded(device, monkeypatch, tmp_path):
    monkeypatch.setenv("TREEMLA_RECORD", f"{tmp_path / 'calls'},layer=1,call=1")
    server = Server(device)
    backend = server.backend()
    for prefixes in ([9, 30], [50, 3], [1, 1]):
        rows = server.requests(prefixes)
        sees = [sees_of(random_parents(server.rng, 9)) for _ in rows]
        batch = verify_batch(server, rows, prefixes, 9, eagle(full_mask(sees, prefixes, device), 9))
        backend.init_forward_metadata(batch)
        server.run(backend, batch, 18)
    (path,) = (tmp_path / "calls").iterdir()
    assert path.name == "layer1_call1.kdtr"
    safetensors = pytest.importorskip("safetensors.numpy")
    case = safetensors.load_file(path)
    assert case["kv_len"].tolist() == [59, 12] and case["q"].shape == (18, 4, server.d_qk)
    assert np.isfinite(case["kv"]).all()


def test_captures_and_their_warm_up_are_not_recorded(device, monkeypatch, tmp_path):
    monkeypatch.setenv("TREEMLA_RECORD", str(tmp_path / "calls"))
    server = Server(device)
    backend = server.backend()
    backend.init_cuda_graph_state(2, 18)
    Graph(server, backend, ForwardMode.TARGET_VERIFY, 2, 9, dflash(None, 9))
    assert backend._recorder.seen == 0 and not (tmp_path / "calls").exists()


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), treemla.Unsupported("no"), OSError(28, "No space left on device")])
def test_what_cannot_be_recorded_is_a_warning(monkeypatch, tmp_path, caplog, error):
    def fail(*args):
        raise error

    monkeypatch.setenv("TREEMLA_RECORD", str(tmp_path))
    monkeypatch.setattr("treemla._record._record", fail)
    server = Server("cpu")
    backend = server.backend()
    rows = server.requests([4])
    batch = verify_batch(server, rows, [4], 9, dflash(None, 9))
    backend.init_forward_metadata(batch)
    server.check(*server.run(backend, batch, 9), rows, [4], [9], [chain(9)])
    assert f"layer0_call0.kdtr was not written: {error}" in caplog.text


def test_a_recorder_that_makes_no_sense(monkeypatch):
    monkeypatch.setenv("TREEMLA_RECORD", "calls,layers=1")
    with pytest.raises(treemla.InvalidArgument, match=r"TREEMLA_RECORD = 'calls,layers=1': must be FOLDER\[,layer=L\]"):
        Server("cpu").backend()


# ---- what is refused ----


@contextlib.contextmanager
def refused(argument):
    with pytest.raises(treemla.Unsupported) as caught:
        yield
    assert caught.value.argument == argument and argument in str(caught.value)


def test_what_the_backend_lacks_is_said_at_the_start():
    with refused("dcp_size"), get_parallel().override(attn_dcp_size=2):
        Server("cpu").backend()
    with refused("kv_cache_dtype"):
        server = Server("cpu")
        server.runner.kv_cache_dtype = torch.float8_e5m2
        server.backend()
    with refused("k_scale"):
        server = Server("cpu", dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
        server.layers[1].k_scale, server.layers[1].k_scale_float = torch.tensor(0.25), 0.25
        server.backend()


def test_layers_that_are_refused():
    server = Server("cpu")
    rows = server.requests([4])
    batch = verify_batch(server, rows, [4], 9, dflash(None, 9))
    backend = server.backend()
    backend.init_forward_metadata(batch)
    q, k = server.random(9, 4, server.d_qk), server.random(9, 1, server.d_qk)
    layer = server.layers[0]
    with refused("sinks"):
        backend.forward_extend(q, k, k, layer, batch, sinks=torch.zeros(4))
    layer.k_scale, layer.k_scale_float = torch.tensor(0.25), 0.25
    with refused("k_scale"):
        backend.forward_extend(q, k, k, layer, batch)
    layer.k_scale, layer.k_scale_float = torch.tensor(1.0), 1.0
    backend.forward_extend(q, k, k, layer, batch)
    layer.logit_cap = 30.0
    with refused("logit_cap"):
        backend.forward_extend(q, k, k, layer, batch)
    with refused("device"):  # K and V for each head: the Triton backend's
        wide = RadixAttention(4, 192, 0.1, 4, 0, v_head_dim=128)
        backend.forward_extend(server.random(9, 4, 192), server.random(9, 4, 192), server.random(9, 4, 128), wide, batch)


def test_k_and_v_for_each_head_go_to_the_fallback(monkeypatch):
    server = Server("cpu", q_len=20)
    rows, calls = server.requests([0, 0]), []
    fallback = types.SimpleNamespace(
        init_forward_metadata=lambda batch: calls.append(batch),
        forward_extend=lambda q, k, v, layer, batch, save_kv_cache: calls.append((layer.layer_id, save_kv_cache)) or q[..., :128],
    )
    backend = server.backend()
    monkeypatch.setattr(backend, "_make_fallback", lambda: fallback)
    wide = [RadixAttention(4, 192, 0.1, 4, layer_id, v_head_dim=128) for layer_id in range(2)]
    q, v = server.random(40, 4, 192), server.random(40, 4, 128)
    loc = torch.cat([server.slots_of(row, 0, 20) for row in rows])
    for _ in range(2):
        batch = server.forward_batch(
            ForwardMode.EXTEND, rows, [20, 20], loc, extend_seq_lens=torch.tensor([20, 20]), extend_seq_lens_cpu=[20, 20],
        )  # fmt: skip
        backend.init_forward_metadata(batch)
        calls.clear()
        for layer in wide:
            assert torch.equal(backend.forward_extend(q, q, v, layer, batch, save_kv_cache=False), q[..., :128])
        assert calls == [batch, (0, False), (1, False)]


def test_ragged_verification_is_refused():
    server = Server("cpu")
    rows = server.requests([4])
    spec_info = dflash(None, 9)
    spec_info.ragged_verify_layout = object()
    backend = server.backend()
    backend.init_cuda_graph_state(1, 9)
    with refused("ragged_verify_layout"):
        backend.init_forward_metadata(verify_batch(server, rows, [4], 9, spec_info))
    with refused("ragged_verify_layout"):
        backend.init_forward_metadata_out_graph(verify_batch(server, rows, [4], 9, spec_info), in_capture=True)


def test_steps_of_the_draft_loop_are_refused():
    server = Server("cpu", q_len=1)
    rows = server.requests([4])
    batch = server.forward_batch(ForwardMode.DECODE, rows, [5], server.slots_of(rows[0], 4, 5))
    batch.spec_info = types.SimpleNamespace(kv_indptr=torch.zeros(2))
    with refused("speculative_draft_attention_backend"):
        server.backend().init_forward_metadata(batch)
