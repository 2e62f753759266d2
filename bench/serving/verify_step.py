"""The verify step as SGLang calls it, on the same tensors: its Triton backend and TreeMLA's.

    python bench/serving/verify_step.py --out verify_step.csv      # a GPU, with SGLang or its unpacked wheel importable
    python bench/serving/verify_step.py --device cpu --tiny       # a dry run of TreeMLA's side: output compared, no times

Both backends are the engine-facing classes, called as the engine's decode runner calls them at a replay: metadata outside the
graph (init_forward_metadata_out_graph), then a captured graph of the in-graph metadata and the layers, each of which writes its K
and attends. page_size 1, slots in random order, random trees, bf16, d 512/64. Triton's object is made without its __init__, which
asks for a running server; every method that is timed is SGLang's own.

Rows: metadata_us (on the stream) and metadata_host_us (of the thread that enqueues it), in_graph_us (what the graph does once a
step), layer_warm_us and layer_cold_us (one layer; L2 flushed before it), step_us = the larger metadata time + in_graph_us +
--layers x layer_cold_us, and step1_us the same for one layer. Nothing is timed before its output is within the bf16 bounds of a
float32 reference.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import pathlib
import statistics
import sys
import time
import types

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "serving"))

import stand_ins  # noqa: E402

stand_ins.install()  # what a user's SGLang has installed stays as it is

from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd  # noqa: E402
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend  # noqa: E402
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.speculative.eagle_info import EagleVerifyInput  # noqa: E402
from sglang.srt.speculative.eagle_utils import TreeMaskMode  # noqa: E402

from treemla.integrations import _sglang_backend  # noqa: E402

D_V, D_ROPE, SCALE = 512, 64, 0.1447
D_QK = D_V + D_ROPE
COLUMNS = (
    "engine b q_len h_q prefix metadata_us metadata_host_us in_graph_us layer_warm_us layer_cold_us step1_us step_us max_error "
    "workspace_mb versus"
).split()


class Problem:
    """One shape: pools, a batch, its trees in both mask layouts, and what the result must be."""

    def __init__(self, b: int, q_len: int, heads: int, prefix: int, device: str, dtype: torch.dtype):
        torch.manual_seed(b * 1000 + q_len)
        self.b, self.q_len, self.heads, self.prefix, self.device, self.dtype = b, q_len, heads, prefix, device, dtype
        tokens = prefix + q_len
        self.req_pool = ReqToTokenPool(b, tokens + 64, device, False)
        self.pool = MLATokenToKVPool(b * tokens + 64, 1, dtype, D_V, D_ROPE, 1, device, False)
        slots = (torch.randperm(b * tokens, device=device) + 1).view(b, tokens).int()
        self.req_pool.req_to_token[1 : b + 1, :tokens] = slots
        self.pool.kv_buffer[0].normal_()
        self.layer = RadixAttention(heads, D_QK, SCALE, 1, 0, v_head_dim=D_V)
        self.q = torch.randn(b * q_len, heads, D_QK, device=device).to(dtype)
        self.k = torch.randn(b * q_len, 1, D_QK, device=device).to(dtype)
        sees = torch.zeros(b, q_len, q_len, dtype=torch.bool)
        for r in range(b):
            for i in range(q_len):
                if i:
                    sees[r, i] = sees[r, int(torch.randint(0, i, ()))]
                sees[r, i, i] = True
        self.sees = sees.to(device)
        ones = torch.ones(b, q_len, prefix, dtype=torch.bool, device=device)
        self.masks = {
            TreeMaskMode.QLEN_ONLY: self.sees.reshape(-1),
            TreeMaskMode.FULL_MASK: torch.cat([ones, self.sees], 2).reshape(-1),
        }
        ints = {"dtype": torch.int64, "device": device}
        self.batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY, batch_size=b, input_ids=torch.zeros(b * q_len, **ints),
            req_pool_indices=torch.arange(1, b + 1, **ints), seq_lens=torch.full((b,), prefix, **ints),
            out_cache_loc=slots[:, prefix:].reshape(-1).long(), seq_lens_sum=b * prefix,
        )  # fmt: skip

    def verify_input(self, mask: torch.Tensor) -> EagleVerifyInput:
        return EagleVerifyInput(
            draft_token=None, custom_mask=mask, positions=None, retrieve_index=None, retrieve_next_token=None,
            retrieve_next_sibling=None, retrieve_cum_len=None, spec_steps=8, topk=4, draft_token_num=self.q_len,
            capture_hidden_mode=CaptureHiddenMode.FULL, seq_lens_sum=None, seq_lens_cpu=None,
        )  # fmt: skip

    def runner(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            device=self.device, is_draft_worker=False, use_mla_backend=True, req_to_token_pool=self.req_pool,
            token_to_kv_pool=self.pool, kv_cache_dtype=self.dtype, kv_index_translator=None,
            model=torch.nn.ModuleList([self.layer]),
            model_config=types.SimpleNamespace(
                context_len=self.prefix + self.q_len, kv_lora_rank=D_V, qk_rope_head_dim=D_ROPE, dtype=self.dtype,
                num_attention_heads=self.heads,
            ),
        )  # fmt: skip

    def reference(self) -> torch.Tensor:
        """float32 [b * q_len, heads, d_v]: the definition, request by request."""
        out = torch.empty(self.b, self.q_len, self.heads, D_V, device=self.device)
        for r in range(self.b):
            slots = self.req_pool.req_to_token[r + 1, : self.prefix + self.q_len].long()
            rows = self.pool.kv_buffer[0][slots, 0].float()
            scores = SCALE * torch.einsum("ihd,nd->ihn", self.q.view(self.b, self.q_len, self.heads, D_QK)[r].float(), rows)
            scores[:, :, self.prefix :].masked_fill_(~self.sees[r][:, None, :], -torch.inf)
            out[r] = torch.einsum("ihn,nd->ihd", scores.softmax(-1), rows[:, :D_V])
        return out.view(-1, self.heads, D_V)


def treemla_backend(p: Problem):
    backend = _sglang_backend.TreeMLAAttnBackend(p.runner())
    backend.init_cuda_graph_state(p.b, p.b * p.q_len)
    mask = backend.verify_mask.buffer
    mask[: p.b * p.q_len**2] = p.masks[TreeMaskMode.QLEN_ONLY]
    return backend, p.verify_input(mask)


def triton_backend(p: Problem):
    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    ints = {"dtype": torch.int64, "device": p.device}
    mask = VerifyMask(
        buffer=torch.zeros(
            tree_mask_numel(TreeMaskMode.FULL_MASK, p.b, p.q_len, p.prefix), dtype=torch.uint8, device=p.device
        ),
        mode=TreeMaskMode.FULL_MASK, max_bs=p.b,
    )  # fmt: skip
    mask.buffer[:] = p.masks[TreeMaskMode.FULL_MASK]
    translator = KVIndexTranslator(
        req_to_token=p.req_pool.req_to_token,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=p.pool,
        page_size=1,
        device=p.device,
    )
    vars(backend).update(
        dllm_attention=None, kv_index_translator=translator, device=p.device, sliding_window_size=None, window_kv_indptr=None,
        kv_indptr=torch.zeros(p.b + 1, dtype=torch.int32, device=p.device), qo_indptr=torch.zeros(p.b + 1, **ints),
        mask_indptr=torch.zeros(p.b + 1, **ints), cuda_graph_kv_indices=torch.zeros(p.b * (p.prefix + p.q_len), **ints),
        _verify_mask=mask, target_verify_num_tokens_per_req=p.q_len, use_sliding_window_kv_pool=False, use_mla=True, dcp_size=1,
        token_to_kv_pool=p.pool, req_to_token_pool=p.req_pool, enable_deterministic=False, use_verify_shared_kv=False,
        use_verify_splitkv=False, page_size=1, allow_bidirectional_attention_in_extend=False, num_draft_tokens=p.q_len,
        extend_attention_fwd=extend_attention_fwd, skip_prefill=False, use_dense_fp8_chunked_prefill=False,
        _dense_one_shot_kv_indptr=None, cuda_graph_swa_out_cache_loc=None,
    )  # fmt: skip
    return backend, p.verify_input(mask.buffer)


def forward(p: Problem, backend, batch) -> torch.Tensor:
    return backend.forward_extend(p.q, p.k, p.k[..., :D_V], p.layer, batch)


class Flush:
    """Writes over the L2 cache."""

    def __init__(self, device: str):
        self.bytes = torch.empty(256 << 20, dtype=torch.int8, device=device) if device == "cuda" else None

    def __call__(self) -> None:
        if self.bytes is not None:
            self.bytes.zero_()


def busy() -> None:
    """Keeps the stream occupied, so that what is enqueued behind is there in time: launching is not what is timed."""
    torch.cuda._sleep(400_000)


def host_time(call, repeats: int) -> float:
    """Median microseconds until `call` has enqueued its work."""
    samples = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        samples.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(samples[3:])


def timed(call, before, repeats: int) -> float:
    """Median microseconds between events around `call`."""
    samples = []
    for _ in range(repeats + 3):
        before()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1000)
    return statistics.median(samples[3:])


def capture(call) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def measure(name: str, p: Problem, make, want: torch.Tensor, args) -> dict:
    backend, spec_info = make(p)
    batch = p.batch
    batch.spec_info = spec_info
    if name == "triton":
        KVIndexTranslator.bind_own_plan(backend.kv_index_translator, batch)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_out_graph(batch)  # a replay's: with the mask
    backend.init_forward_metadata_in_graph(batch)
    out = forward(p, backend, batch).view(-1, p.heads, D_V).float()
    want = p.reference() if want is None else want
    error = (out - want).abs()
    bound = 1e-2 * (1 + want.abs())
    row = {"engine": name, "b": p.b, "q_len": p.q_len, "h_q": p.heads, "prefix": p.prefix, "max_error": f"{error.max():.2e}"}
    if not bool((error <= bound).all()) or bool(torch.isnan(out).any()):
        row["versus"] = "WRONG"
        return row
    if p.device != "cuda":
        return row
    flush = Flush(p.device)
    metadata = lambda: backend.init_forward_metadata_out_graph(batch)  # noqa: E731
    meta, host = timed(metadata, busy, args.repeats), host_time(metadata, args.repeats)
    layer = capture(lambda: forward(p, backend, batch))
    warm, cold = timed(layer.replay, busy, args.repeats), timed(layer.replay, flush, args.repeats)
    in_graph = 0.0
    if name == "treemla":
        row["workspace_mb"] = backend.forward_metadata.plans.workspace_bytes / 1e6  # a captured batch size keeps one
        in_graph = timed(capture(lambda: backend.init_forward_metadata_in_graph(batch)).replay, busy, args.repeats)
    row |= {"metadata_us": meta, "metadata_host_us": host, "in_graph_us": in_graph, "layer_warm_us": warm, "layer_cold_us": cold}
    once = max(meta, host) + in_graph
    row |= {"step1_us": once + cold, "step_us": once + args.layers * cold}
    return row


def parse() -> argparse.Namespace:
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--b", type=numbers, default=[1, 8])
    parser.add_argument("--q_len", type=numbers, default=[9, 33])
    parser.add_argument("--h_q", type=numbers, default=[8, 64])
    parser.add_argument("--prefix", type=numbers, default=[1024, 16384])
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="one small shape, to see that everything runs")
    parser.add_argument("--out", type=pathlib.Path, help="CSV to write")
    parser.add_argument("--require", type=float, help="fail unless b 8, q_len 9, h_q 8, prefix 16384 is this many times faster")
    args = parser.parse_args()
    if args.tiny:
        args.b, args.q_len, args.h_q, args.prefix = [2], [5], [2], [40]
    return args


def main() -> int:
    args = parse()
    rows, bad = [], 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(get_parallel().override(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False))
        for b, q_len, heads, prefix in [(b, q, h, n) for n in args.prefix for h in args.h_q for q in args.q_len for b in args.b]:
            _sglang_backend.get_spec = lambda q=q_len: types.SimpleNamespace(speculative_num_draft_tokens=q)
            dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
            p = Problem(b, q_len, heads, prefix, args.device, dtype)
            want, pair = None, {}
            engines = {"treemla": treemla_backend} | ({"triton": triton_backend} if args.device == "cuda" else {})
            for name, make in engines.items():
                try:
                    row = measure(name, p, make, want, args)
                except Exception as error:  # a shape that one of them can't run is a row, too
                    row = {
                        "engine": name,
                        "b": b,
                        "q_len": q_len,
                        "h_q": heads,
                        "prefix": prefix,
                        "versus": f"{type(error).__name__}: {error}",
                    }
                    bad += 1
                bad += row.get("versus") == "WRONG"
                pair[name] = row
                rows.append(row)
            if all("step_us" in row for row in pair.values()):
                one, all_layers = (pair["triton"][c] / pair["treemla"][c] for c in ("step1_us", "step_us"))
                pair["treemla"]["versus"] = f"{one:.1f}x with 1 layer, {all_layers:.1f}x with {args.layers}"
                if args.require and (b, q_len, heads, prefix) == (8, 9, 8, 16384):
                    print(f"required {args.require}x, measured {one:.1f}x with one layer, {all_layers:.1f}x with {args.layers}")
                    bad += all_layers < args.require
            for row in pair.values():
                print(
                    "  ".join(f"{c} {row[c]:.1f}" if isinstance(row[c], float) else f"{c} {row[c]}" for c in COLUMNS if c in row),
                    flush=True,
                )
            del p
            if args.device == "cuda":
                torch.cuda.empty_cache()
    if args.out:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    return min(bad, 100)


if __name__ == "__main__":
    sys.exit(main())
