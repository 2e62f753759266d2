#!/usr/bin/env python3
"""Writes the seed corpora of the fuzzers: small valid cases, near misses of each kind, and trees in every encoding.

    python3 fuzz/make_corpus.py    # rewrites fuzz/corpus, findings excepted; needs nothing but Python

Deterministic, and written without the library or the safetensors package, so that the library's reader is fed by other hands.
"""
import json
import pathlib
import random
import struct

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus"
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8, "U8": 1, "BOOL": 1, "F64": 8}
RANK = ["BOOL", "U8", "F8_E4M3", "F16", "BF16", "I32", "F32", "F64", "I64"]


def container(metadata, tensors, order=None, pad=8):
    """tensors: {name: (dtype, shape, bytes)}."""
    names = order or sorted(tensors, key=lambda n: (-RANK.index(tensors[n][0]), n))
    header, buffer = {"__metadata__": metadata}, b""
    for name in names:
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(buffer), len(buffer) + len(data)]}
        buffer += data
    return header, buffer, pad


def pack(parts):
    header, buffer, pad = parts
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    raw = text.encode()
    raw += b" " * (-len(raw) % pad)
    return struct.pack("<Q", len(raw)) + raw + buffer


def ints(values):
    return struct.pack(f"<{len(values)}i", *values)


def case(rng, trees, prefixes, d_v=4, d_rope=2, h_q=2, page_size=1, mask="tree", q="BF16", kv="BF16", expected=True, spare=1):
    """One batch: trees[r] is the parents array of request r; an empty one is a padded request."""
    d_qk = d_v + d_rope
    q_len = [len(t) for t in trees]
    kv_len = [p + n if n else 0 for p, n in zip(prefixes, q_len)]
    pages = [-(-n // page_size) for n in kv_len]
    num_pages = sum(pages) + spare
    page_ids = rng.sample(range(num_pages), sum(pages))
    total_q = sum(q_len)
    offsets = lambda lengths: [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    noise = lambda dtype, n: bytes(rng.randrange(0x38, 0x48) if BYTES[dtype] == 1 or i % BYTES[dtype] == BYTES[dtype] - 1
                                   else rng.randrange(256) for i in range(n * BYTES[dtype]))
    tensors = {
        "q": (q, [total_q, h_q, d_qk], noise(q, total_q * h_q * d_qk)),
        "kv": (kv, [num_pages * page_size, d_qk], noise(kv, num_pages * page_size * d_qk)),
        "q_indptr": ("I32", [len(trees) + 1], ints(offsets(q_len))),
        "kv_len": ("I32", [len(trees)], ints(kv_len)),
        "page_indptr": ("I32", [len(trees) + 1], ints(offsets(pages))),
        "page_indices": ("I32", [sum(pages)], ints(page_ids)),
    }
    if mask == "tree":
        tensors["parents"] = ("I32", [total_q], ints([p for t in trees for p in t]))
    if expected:
        tensors["expected_out"] = ("F32", [total_q, h_q, d_v], noise("F32", total_q * h_q * d_v))
        tensors["expected_lse"] = ("F32", [total_q, h_q], noise("F32", total_q * h_q))
    metadata = {"format": "kdtr", "version": "1", "d_v": str(d_v), "d_rope": str(d_rope), "sm_scale": "0.14467962580268923",
                "page_size": str(page_size), "mask": mask, "lse_base": "e", "source": "fuzz/make_corpus.py"}
    return metadata, tensors


def tree(rng, n):
    return [-1] + [rng.randrange(i) for i in range(1, n)]


def case_files():
    rng = random.Random(20)
    files = {}
    small = lambda **kw: case(rng, [[-1, 0, 0]], [3], **kw)

    files["tree"] = pack(container(*small()))
    files["tree_no_expected"] = pack(container(*small(expected=False)))
    files["causal"] = pack(container(*small(mask="causal")))
    files["none_f16"] = pack(container(*small(mask="none", q="F16", kv="F16")))
    files["f32"] = pack(container(*small(q="F32", kv="F32")))
    files["prefix_0"] = pack(container(*case(rng, [[-1]], [0])))
    files["no_rope"] = pack(container(*small(d_rope=0, d_v=8)))
    files["ragged_page_4"] = pack(container(*case(rng, [tree(rng, 4), tree(rng, 1), tree(rng, 6)], [5, 0, 2], page_size=4)))
    files["padded_request"] = pack(container(*case(rng, [tree(rng, 3), [], tree(rng, 2)], [1, 0, 4], page_size=2)))
    files["words_2"] = pack(container(*case(rng, [tree(rng, 33)], [1], h_q=1, d_v=2, d_rope=0)))
    files["empty_batch"] = pack(container(*case(rng, [], [])))
    m, t = small(kv="F8_E4M3")
    files["fp8"] = pack(container({**m, "kv_scale": "0.5"}, t))
    m, t = small()
    t["positions"], t["token_ids"] = ("I32", [3], ints([3, 4, 4])), ("I32", [3], ints([7, 8, 9]))
    t["extra"], t["flags"] = ("I64", [2], bytes(16)), ("BOOL", [3], b"\1\0\1")
    files["extras"] = pack(container({**m, "note": "kept \u00e9 \" \\ \n"}, t))
    files["misaligned"] = pack(container(m, t, order=["flags", *[n for n in t if n != "flags"]]))
    files["pad_1"] = pack(container(*small(), pad=1))
    files["pad_64"] = pack(container(*small(), pad=64))

    # Near misses: each one step from valid.
    def meta(name, **changes):
        m, t = small()
        m.update(changes)
        files["bad_" + name] = pack(container({k: v for k, v in m.items() if v is not None}, t))

    meta("version_2", version="2")
    meta("format", format="kdtx")
    meta("no_mask", mask=None)
    meta("mask_dense", mask="dense")
    meta("d_v_junk", d_v="4x")
    meta("d_v_huge", d_v="4294967300")
    meta("sm_scale_nan", sm_scale="nan")
    meta("sm_scale_0", sm_scale="0")
    meta("page_size_0", page_size="0")
    meta("page_size_5", page_size="5")
    meta("kv_scale_neg", kv_scale="-1")
    meta("lse_base_2", lse_base="2")

    def tensor(name, **changes):
        m, t = small()
        t.update(changes)
        files["bad_" + name] = pack(container(m, {k: v for k, v in t.items() if v is not None}))

    tensor("no_parents", parents=None)
    tensor("parents_cycle", parents=("I32", [3], ints([-1, 2, 1])))
    tensor("parents_two_roots", parents=("I32", [3], ints([-1, -1, 0])))
    tensor("page_index_huge", page_indices=("I32", [6], ints([2147480000] * 6)))
    tensor("page_index_negative", page_indices=("I32", [6], ints([-1] * 6)))
    tensor("kv_len_short", kv_len=("I32", [1], ints([2])))
    tensor("kv_len_long", kv_len=("I32", [1], ints([2147483647])))
    tensor("q_indptr_falls", q_indptr=("I32", [2], ints([3, 0])))
    tensor("q_indptr_empty", q_indptr=("I32", [0], b""))
    tensor("q_indptr_i64", q_indptr=("I64", [2], bytes(16)))
    tensor("lse_without_out", expected_out=None)

    def text(name, change):
        header, buffer, pad = container(*small())
        files["bad_" + name] = pack((change(json.dumps(header, separators=(",", ":"))), buffer, pad))

    def offsets(name, which, change):
        header, buffer, pad = container(*small())
        header[which]["data_offsets"] = change(*header[which]["data_offsets"])
        files["bad_" + name] = pack((header, buffer, pad))

    text("duplicate_key", lambda s: s.replace('"kv_len"', '"q_indptr"'))
    text("metadata_number", lambda s: s.replace('"d_v":"4"', '"d_v":4'))
    text("unknown_dtype", lambda s: s.replace("BF16", "F4_E2"))
    text("negative_extent", lambda s: s.replace('"shape":[3,2,6]', '"shape":[-3,2,6]'))
    text("overflow_shape", lambda s: s.replace('"shape":[3,2,6]', '"shape":[4294967296,4294967296,6]'))
    text("nested", lambda s: s.replace('"shape":[3,2,6]', '"shape":' + "[" * 40 + "]" * 40))
    text("cut_json", lambda s: s[:-20])
    text("bom", lambda s: "\ufeff" + s)
    offsets("offsets_swapped", "q", lambda a, b: [b, a])
    offsets("offsets_past_end", "q", lambda a, b: [a, b + 1000])
    offsets("overlap", "q", lambda a, b: [a - 4, b - 4])
    offsets("hole", "kv", lambda a, b: [a + 4, b])
    header, buffer, pad = container(*small())
    files["bad_trailing"] = pack((header, buffer + b"\0\0", pad))
    files["bad_truncated"] = files["tree"][:-7]
    files["bad_length_huge"] = struct.pack("<Q", 2**63) + files["tree"][8:]
    files["bad_length_only"] = struct.pack("<Q", 2)

    # Packed rows: 128 latents, a scale, 2 rope. They come last: the seeds above keep their random numbers.
    def packed(name, kv="U8", row_bytes=128 + 4 + 4, d_v=128, **changes):
        m, t = case(rng, [[-1, 0]], [1], h_q=1, d_v=d_v, expected=False)
        rows = t["kv"][1][0]
        scale = struct.pack("<f", 0.3)
        row = bytes(rng.randrange(0x38, 0x48) for _ in range(128)) + scale + b"\x80\x3f" * 2
        t["kv"] = (kv, [rows, row_bytes], row[:row_bytes] * rows)
        m.update({"kv_layout": "e4m3_packed", **changes})
        files[name] = pack(container({k: v for k, v in m.items() if v is not None}, t))

    packed("packed")
    packed("packed_scaled", kv_scale="0.5")
    packed("bad_packed_layout", kv_layout="packed")
    packed("bad_packed_plain", kv_layout=None)
    packed("bad_packed_dtype", kv="F8_E4M3")
    packed("bad_packed_row", row_bytes=130)
    packed("bad_packed_d_v", d_v=64, row_bytes=66)

    # q8_0 rows: two blocks of latents and one of rope, each a scale and 32 int8.
    def q8(name, row_bytes=3 * 34, d_rope=32, **changes):
        m, t = case(rng, [[-1, 0]], [1], h_q=1, d_v=64, d_rope=d_rope, expected=False)
        rows = t["kv"][1][0]
        row = b"".join(struct.pack("<e", 0.3) + bytes(rng.randrange(256) for _ in range(32)) for _ in range(3))
        t["kv"] = ("U8", [rows, row_bytes], row[:row_bytes] * rows)
        m.update({"kv_layout": "q8_0", **changes})
        files[name] = pack(container(m, t))

    q8("q8")
    q8("q8_scaled", kv_scale="0.5")
    q8("bad_q8_row", row_bytes=96)
    q8("bad_q8_d_rope", d_rope=16)
    return files


def bits(values):
    values = list(values) + [0] * (-len(values) % 8)
    return bytes(sum(values[i + j] << j for j in range(8)) for i in range(0, len(values), 8))


def dense(parents, prefix=0):
    rows = []
    for i, p in enumerate(parents):
        row = list(rows[p]) if i else [0] * len(parents)
        row[i] = 1
        rows.append(row)
    return [x for row in rows for x in [1] * prefix + row]


def tree_inputs():
    """Byte 0: encoding, byte 1: size; see run_tree() in fuzz/entries.hpp."""
    rng = random.Random(21)
    files = {}
    for n in (1, 2, 9, 33, 65):
        parents = tree(rng, n)
        files[f"parents_{n}"] = bytes([0, n]) + bytes(p & 255 for p in parents)
        words = -(-n // 32)
        row_bits = dense(parents)
        rows = b"".join(bits(row_bits[i * n:(i + 1) * n] + [0] * (32 * words - n)) for i in range(n))
        files[f"bits_{n}"] = bytes([1, n]) + rows
        first, sibling = [-1] * n, [-1] * n
        for i in range(n - 1, 0, -1):
            sibling[i], first[parents[i]] = first[parents[i]], i
        links = bytes(x & 255 for x in first + sibling)
        files[f"links_{n}"] = bytes([4, n]) + links
        files[f"batch_{n}"] = bytes([4, 2 * n & 254 if n < 64 else 1]) + bytes(p & 255 for p in parents * 2) + bytes([0, n, 2 * n])
        if n < 32:
            files[f"dense_{n}"] = bytes([2, n]) + bits(row_bits)
            files[f"full_{n}"] = bytes([3, n + 64]) + bits(dense(parents, 2))
    files["links_cycle"] = bytes([4, 3, 1, 2, 1, 255, 255, 255])
    files["links_orphan"] = bytes([4, 3, 1, 255, 255, 255, 255, 255])
    files["parents_forward"] = bytes([0, 3, 255, 2, 0])
    files["parents_huge"] = bytes([0, 3, 255, 127, 128])
    return files


def main():
    for folder, files in (("case_file", case_files()), ("tree", tree_inputs())):
        target = CORPUS / folder
        target.mkdir(parents=True, exist_ok=True)
        for old in target.iterdir():
            if not old.name.startswith("finding_"):
                old.unlink()
        for name, data in files.items():
            (target / name).write_bytes(data)
        print(f"{target}: {len(files)} files, {sum(map(len, files.values()))} bytes")


if __name__ == "__main__":
    main()
