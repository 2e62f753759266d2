"""Times Planner.run() over a grid of shapes, from Python, on random data: python -m treemla.bench --help

Rows are those of `treemla bench`, so treemla.plot draws either. On a GPU (with torch) a time is the median of replays of a
captured CUDA graph; "cold" with the L2 cache flushed before each. On the host it is a median of calls. Nothing is timed before
its result has been checked against another backend.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import treemla

COLUMNS = (
    "device backend dtype page_size mask tree b s_q h_q prefix warm_us cold_us noise gb_per_s tflop_per_s checked revision date "
    "not_run"
).split()
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


def cost(b: int, s_q: int, h_q: int, prefix: int, d_v: int, d_rope: int, kv_dtype: str) -> tuple[float, float]:
    """(FLOP, fewest bytes) of a call: 2 (d_qk + d_v) a row and key it sees, each cached row once. docs/MATH.md"""
    keys = prefix + s_q
    return 2.0 * b * s_q * h_q * keys * (2 * d_v + d_rope), float(b * keys * (d_v + d_rope) * _BYTES[kv_dtype])


def make_case(xp: Any, b: int, s_q: int, prefix: int, page_size: int, num_pages: int, seed: int) -> dict[str, Any]:
    """Random pages and random trees, in NumPy."""
    rng = xp.random.default_rng(seed)
    pages = -(-(prefix + s_q) // page_size)
    return {
        "q_indptr": xp.arange(0, b * s_q + 1, s_q, dtype="int32"),
        "kv_len": xp.full(b, prefix + s_q, "int32"),
        "page_table": rng.permutation(num_pages)[: b * pages].reshape(b, pages).astype("int32"),
        "tree": xp.array([[-1, *(rng.integers(0, i) for i in range(1, s_q))] for _ in range(b)], "int32").reshape(-1),
    }


def _median_and_noise(samples: list[float]) -> tuple[float, float]:
    middle = statistics.median(samples)
    return middle, statistics.median(abs(s - middle) for s in samples) / middle


def _time_on_host(call: Callable[[], Any], seconds: float) -> tuple[float, float]:
    samples, end = [], time.perf_counter() + seconds
    while len(samples) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        samples.append((time.perf_counter() - begin) * 1e6)
    return _median_and_noise(samples)


def _time_on_gpu(torch: Any, call: Callable[[], Any], seconds: float, flush: Any) -> tuple[float, float]:
    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    samples, end = [], time.perf_counter() + seconds
    while len(samples) < 20 or time.perf_counter() < end:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(20)]
        for start, stop in pairs:
            if flush is not None:
                flush.zero_()
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize()
        samples += [start.elapsed_time(stop) * 1e3 for start, stop in pairs]
    return _median_and_noise(samples)


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    import numpy

    torch = None
    if options.device == "cuda":
        import torch

        device = torch.cuda.get_device_name()
        flush = torch.empty(2 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device="cuda")
    else:
        device, flush = "cpu", None
    rows = []
    for b, s_q, h_q, prefix in itertools.product(options.b, options.s_q, options.h_q, options.prefix):
        row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
        row |= {"device": device, "dtype": options.dtype, "page_size": options.page_size, "mask": "tree", "tree": "random"}
        row |= {"b": b, "s_q": s_q, "h_q": h_q, "prefix": prefix, "revision": options.revision}
        row["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        rows.append(row)
        num_pages = b * -(-(prefix + s_q) // options.page_size)
        case = make_case(numpy, b, s_q, prefix, options.page_size, num_pages, seed=b + s_q + h_q + prefix)
        d_qk = options.d_v + options.d_rope
        rng = numpy.random.default_rng(1)
        q = rng.standard_normal((b * s_q, h_q, d_qk), numpy.float32)
        kv = rng.standard_normal((num_pages, options.page_size, d_qk), numpy.float32)
        if torch is not None:
            dtype = getattr(torch, options.dtype)
            q = torch.from_numpy(q).to("cuda", torch.bfloat16 if options.dtype == "float8_e4m3fn" else dtype)
            kv = torch.from_numpy(kv).to("cuda", dtype)
            case = {name: torch.from_numpy(array).cuda() for name, array in case.items()}
        else:
            narrow = treemla._arrays._numpy_dtype(options.dtype)
            q, kv = q.astype(treemla._arrays._numpy_dtype("bfloat16") if narrow.itemsize == 1 else narrow), kv.astype(narrow)
        keywords = {**case, "d_v": options.d_v, "sm_scale": d_qk**-0.5}
        try:
            planner = treemla.Planner(backend=options.backend).plan(q, kv, **keywords)
        except treemla.Unsupported as error:
            row["not_run"] = str(error)
            continue
        out, lse = planner.run(q, kv)
        row["backend"] = planner.backend
        row["checked"] = _check(torch, q, kv, keywords, out, planner.backend)
        call = lambda p=planner, q=q, kv=kv, o=out, s=lse: p.run(q, kv, out=o, lse=s)  # noqa: E731
        if torch is None:
            warm, noise = _time_on_host(call, options.seconds)
            cold = warm
            row["cold_us"] = ""
        else:
            warm, _ = _time_on_gpu(torch, call, options.seconds, None)
            cold, noise = _time_on_gpu(torch, call, options.seconds, flush)
            row["cold_us"] = round(cold, 3)
        flop, num_bytes = cost(b, s_q, h_q, prefix, options.d_v, options.d_rope, options.dtype)
        row |= {"warm_us": round(warm, 3), "noise": round(noise, 4)}
        row |= {"gb_per_s": round(num_bytes / cold / 1e3, 3), "tflop_per_s": round(flop / cold / 1e6, 5)}
        print(
            f"{row['backend']:>16} b {b:3} s_q {s_q:4} h_q {h_q:4} prefix {prefix:7}  {warm:10.1f} us warm  "
            f"{row['cold_us'] or '-':>10} cold  {row['gb_per_s']:9.1f} GB/s  {row['tflop_per_s']:8.3f} TFLOP/s  {row['checked']}",
            file=sys.stderr,
        )
    return rows


def _check(torch: Any, q: Any, kv: Any, keywords: dict[str, Any], out: Any, backend: str) -> str:
    """ "yes", or "no" with the reason: against the slow kernel of the same memory, within the rounding of out's dtype."""
    import numpy

    judge = "cuda_fp32_tiled" if torch is not None else "cpu_oracle"
    if backend == judge:
        judge = "cuda_warp_per_key" if torch is not None else "cpu_simd"
    try:
        want = treemla.verify(q, kv, backend=judge, out_dtype="float32", lse=False, **keywords).out
    except treemla.Unsupported as error:
        return f"no: {error}"
    if torch is not None:
        got, want = out.float().cpu().numpy(), want.cpu().numpy()
    else:
        got = out.astype(numpy.float32)
    error = numpy.linalg.norm(got - want) / numpy.linalg.norm(want)
    bound = 1e-5 if treemla._arrays.dtype_name(q.dtype) == "float32" else 8e-3
    if not error <= bound:
        raise SystemExit(f"{backend} is {error:.2g} from {judge}, relative: at most {bound:g} is right")
    return "yes"


def overhead(device: str, count: int = 20000) -> dict[str, float]:
    """Host microseconds of a Planner.run() call: without any row, so that nothing is launched, and with rows."""
    import torch

    result = {}
    for name, total_q in (("no rows", 0), ("with rows", 9)):
        q = torch.zeros(total_q, 8, 576, device=device)
        kv = torch.zeros(16, 1, 576, device=device)
        ints = {"dtype": torch.int32, "device": device}
        planner = treemla.Planner(num_threads=1).plan(
            q,
            kv,
            q_indptr=torch.tensor([0, total_q], **ints),
            kv_len=torch.tensor([total_q], **ints),
            page_table=torch.arange(16, **ints)[None],
            tree=torch.arange(-1, total_q - 1, **ints),
            sm_scale=0.1,
        )
        out, lse = planner.run(q, kv)
        for what, keywords in (("out and lse given", {"out": out, "lse": lse}), ("out and lse made", {})):
            best = math.inf
            for _ in range(5):
                for _ in range(200):
                    planner.run(q, kv, **keywords)
                if device == "cuda":
                    torch.cuda.synchronize()
                # Few enough that the launches never wait for a full queue.
                calls = count if total_q == 0 else 100
                begin = time.perf_counter()
                for _ in range(calls):
                    planner.run(q, kv, **keywords)
                best = min(best, (time.perf_counter() - begin) / calls * 1e6)
                if device == "cuda":
                    torch.cuda.synchronize()
            result[f"{name}, {what}"] = round(best, 3)
    return result


def write(rows: list[dict[str, Any]], path: str) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.endswith(".json"):
            json.dump(rows, file, indent=1)
        else:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


def main(arguments: list[str] | None = None) -> int:
    def ints(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m treemla.bench", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", default="best")
    parser.add_argument("--b", type=ints, default=[1])
    parser.add_argument("--s_q", type=ints, default=[9])
    parser.add_argument("--h_q", type=ints, default=[8, 64])
    parser.add_argument("--prefix", type=ints, default=[256, 1024, 4096])
    parser.add_argument("--page_size", type=int, default=1)
    parser.add_argument("--dtype", choices=tuple(_BYTES), default="float32", help="of the cache")
    parser.add_argument("--d_v", type=int, default=512)
    parser.add_argument("--d_rope", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.3, help="of samples a shape")
    parser.add_argument("--revision", default=os.environ.get("TREEMLA_REVISION", ""), help="goes into the record")
    parser.add_argument("--out", metavar="FILE", help="a record, .csv or .json")
    parser.add_argument("--overhead", action="store_true", help="host time of a call instead, with torch")
    parser.add_argument(
        "--limit", type=float, metavar="US", help="exit code 1 if a call with out and lse given costs the host more"
    )
    options = parser.parse_args(arguments)
    if options.overhead:
        result = overhead(options.device)
        for name, microseconds in result.items():
            print(f"{name:32} {microseconds:8.3f} us a call")
        if options.out:
            with open(options.out, "w", encoding="utf-8") as file:
                json.dump(result, file, indent=1)
        given = result["no rows, out and lse given"]
        if options.limit is not None and given > options.limit:
            print(f"{given} us a call: must be at most {options.limit:g}")
            return 1
        return 0
    rows = bench(options)
    if options.out:
        write(rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
