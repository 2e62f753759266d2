#!/usr/bin/env python3
"""Opens case files with Hugging Face's safetensors package and checks them against docs/KDTR.md, independently of the library.

    pip install safetensors numpy
    python3 tests/python/safetensors_check.py cases/*.kdtr

The package's numpy side knows neither bf16 nor fp8, so dtypes and shapes are asked from slices, which converts nothing;
tensors that numpy has are loaded as well. Exit status 0: every file is a case.
"""
import sys

import numpy as np
from safetensors import safe_open

# name: (allowed dtypes, shape by symbol, required)
TENSORS = {
    "q": ({"F32", "F16", "BF16"}, ["total_q", "h_q", "d_qk"], True),
    "kv": ({"F32", "F16", "BF16", "F8_E4M3"}, ["rows", "d_qk"], True),
    "q_indptr": ({"I32"}, ["b+1"], True),
    "kv_len": ({"I32"}, ["b"], True),
    "page_indptr": ({"I32"}, ["b+1"], True),
    "page_indices": ({"I32"}, ["n"], True),
    "parents": ({"I32"}, ["total_q"], False),
    "positions": ({"I32"}, ["total_q"], False),
    "token_ids": ({"I32"}, ["total_q"], False),
    "expected_out": ({"F32"}, ["total_q", "h_q", "d_v"], False),
    "expected_lse": ({"F32"}, ["total_q", "h_q"], False),
}
NUMPY = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "U8": np.uint8}


def check(path):
    with safe_open(path, framework="numpy") as f:
        meta = f.metadata() or {}
        keys = set(f.keys())

        def require(ok, what):
            if not ok:
                raise ValueError(f"{path}: {what}")

        require(meta.get("format") == "kdtr" and meta.get("version") == "1", f"format and version are {meta}")
        require(meta.get("lse_base") == "e", f"lse_base is {meta.get('lse_base')}")
        require(meta.get("mask") in ("tree", "causal", "none"), f"mask is {meta.get('mask')}")
        d_v, d_rope, page_size = (int(meta[k]) for k in ("d_v", "d_rope", "page_size"))
        require(np.isfinite(float(meta["sm_scale"])) and float(meta.get("kv_scale", "1")) > 0, "scales")

        sizes = {"d_v": d_v, "d_qk": d_v + d_rope}
        tensors = dict(TENSORS)
        if "kv_layout" in meta:
            require(meta["kv_layout"] in ("e4m3_packed", "q8_0"), f"kv_layout is {meta['kv_layout']}")
            if meta["kv_layout"] == "q8_0":
                require(d_v % 32 == 0 and d_rope % 32 == 0, f"q8_0 rows of d_v {d_v}, d_rope {d_rope}")
                sizes["row_bytes"] = (d_v + d_rope) // 32 * 34
            else:
                require(d_v % 128 == 0 and d_rope % 2 == 0, f"packed rows of d_v {d_v}, d_rope {d_rope}")
                sizes["row_bytes"] = d_v + d_v // 128 * 4 + d_rope * 2
            tensors["kv"] = ({"U8"}, ["rows", "row_bytes"], True)
        loaded = {}
        for name, (dtypes, symbols, required) in tensors.items():
            if name not in keys:
                require(not required and not (name == "parents" and meta["mask"] == "tree"), f"{name} is missing")
                continue
            tensor = f.get_slice(name)
            dtype, shape = tensor.get_dtype(), list(tensor.get_shape())
            require(dtype in dtypes, f"{name} is {dtype}, must be {' or '.join(sorted(dtypes))}")
            require(len(shape) == len(symbols), f"{name} has shape {shape}, must be {symbols}")
            for symbol, extent in zip(symbols, shape):
                symbol, extent = ("b", extent - 1) if symbol == "b+1" else (symbol, extent)
                require(sizes.setdefault(symbol, extent) == extent, f"{name} {shape}: {symbol} must be {sizes[symbol]}")
            if dtype in NUMPY:
                loaded[name] = f.get_tensor(name)
                require(loaded[name].dtype == NUMPY[dtype] and list(loaded[name].shape) == shape, f"{name} as numpy")
        require(sizes["rows"] % page_size == 0, f"{sizes['rows']} rows in pages of {page_size}")

        # Every request finds its rows, and its tree is a tree.
        for r in range(sizes["b"]):
            begin, end = loaded["q_indptr"][r : r + 2]
            length = loaded["kv_len"][r]
            pages = loaded["page_indices"][loaded["page_indptr"][r] : loaded["page_indptr"][r + 1]]
            if begin == end or length == 0:
                continue  # padding
            needed = int(-(-length // page_size))
            require(length >= end - begin and len(pages) >= needed, f"request {r}: kv_len {length}, {len(pages)} pages")
            require((pages[:needed] >= 0).all() and (pages[:needed] < sizes["rows"] // page_size).all(), f"request {r}: pages")
            if "kv_layout" in meta:
                tokens = np.arange(length)
                rows = loaded["kv"][pages[tokens // page_size] * page_size + tokens % page_size]
                if meta["kv_layout"] == "q8_0":
                    scales = np.ascontiguousarray(rows.reshape(length, -1, 34)[:, :, :2]).view("<f2")
                else:
                    scales = np.ascontiguousarray(rows[:, d_v : d_v + d_v // 32]).view("<f4")
                positive = meta["kv_layout"] == "q8_0" or (scales > 0).all()
                require(positive and np.isfinite(scales).all(), f"request {r}: scales")
            if meta["mask"] == "tree":
                parents = loaded["parents"][begin:end]
                require(parents[0] == -1 and all(0 <= p < i for i, p in enumerate(parents) if i), f"request {r}: parents")
        extra = sorted(keys - set(TENSORS))
        print(f"{path}: ok, b {sizes['b']}, total_q {sizes['total_q']}, h_q {sizes['h_q']}, d_qk {sizes['d_qk']}, "
              f"q {f.get_slice('q').get_dtype()}, kv {f.get_slice('kv').get_dtype()}, mask {meta['mask']}"
              + (f", extra {', '.join(extra)}" if extra else ""))


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    failed = 0
    for path in sys.argv[1:]:
        try:
            check(path)
        except Exception as error:  # the package has exceptions of its own
            failed += 1
            print(f"{path}: {error}" if not str(error).startswith(path) else error, file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
