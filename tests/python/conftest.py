"""Cases that several tests share, with everything unreachable poisoned, and the definition of the result in float64."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class CaseParam:
    """Prints itself: copy it to get a failure back."""

    seed: int = 1
    lengths: tuple = ((40, 5), (0, 1), (17, 9))  # (prefix_len, q_len) of each request
    h_q: int = 4
    d_v: int = 32
    d_rope: int = 16
    page_size: int = 1
    tree: str = "parents"  # or causal, none
    index: str = "int32"


class Case:
    """NumPy arrays of a case; `keywords` are the arguments of verify() besides q and kv."""

    def __init__(self, p: CaseParam):
        rng = np.random.default_rng(p.seed)
        self.param = p
        q_lens = [q for _, q in p.lengths]
        total_q, d_qk = sum(q_lens), p.d_v + p.d_rope
        self.q_indptr = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        self.kv_len = np.array([prefix + q if q else 0 for prefix, q in p.lengths], np.int32)
        counts = [-(-int(n) // p.page_size) for n in self.kv_len]
        num_pages = sum(counts) + 3
        order = rng.permutation(num_pages)[: sum(counts)]
        self.page_table = np.full((len(p.lengths), max([*counts, 1]) + 2), 2147480000, p.index)
        begin = 0
        for r, n in enumerate(counts):
            self.page_table[r, :n] = order[begin : begin + n]
            begin += n
        self.q = rng.standard_normal((total_q, p.h_q, d_qk)).astype(np.float32)
        self.kv = np.full((num_pages, p.page_size, d_qk), np.nan, np.float32)
        self.rows = [
            [self.page_table[r, t // p.page_size] * p.page_size + t % p.page_size for t in range(n)]
            for r, n in enumerate(self.kv_len)
        ]
        flat = self.kv.reshape(-1, d_qk)
        for rows in self.rows:
            flat[rows] = rng.standard_normal((len(rows), d_qk))
        self.parents = np.concatenate([[-1, *(rng.integers(0, i) for i in range(1, q))][:q] for q in q_lens] + [[]]).astype(
            np.int32
        )
        self.sm_scale = 0.2
        tree = self.parents if p.tree == "parents" else p.tree
        self.keywords = {
            "q_indptr": self.q_indptr,
            "kv_len": self.kv_len,
            "page_table": self.page_table,
            "tree": tree,
            "sm_scale": self.sm_scale,
            "d_v": p.d_v,
        }

    def csr(self):
        """The same pages as (page_indptr, page_indices)."""
        counts = [-(-int(n) // self.param.page_size) for n in self.kv_len]
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return indptr, np.concatenate([self.page_table[r, :n] for r, n in enumerate(counts)])

    def sees(self, r):
        """bool [q_len, q_len] of request r."""
        begin, end = self.q_indptr[r : r + 2]
        n = end - begin
        if self.param.tree != "parents":
            return np.tril(np.ones((n, n), bool)) if self.param.tree == "causal" else np.ones((n, n), bool)
        sees = np.zeros((n, n), bool)
        for i, parent in enumerate(self.parents[begin:end]):
            sees[i] = sees[parent] if i else False
            sees[i, i] = True
        return sees

    def reference(self, q=None, kv=None):
        """(out, lse) in float64, straight from the definition."""
        q = self.q if q is None else q
        flat = (self.kv if kv is None else kv).reshape(-1, q.shape[-1]).astype(np.float64)
        d_v = self.param.d_v
        out, lse = np.zeros((*q.shape[:2], d_v)), np.full(q.shape[:2], -np.inf)
        for r, rows in enumerate(self.rows):
            keys, begin, end = flat[rows], *self.q_indptr[r : r + 2]
            for i in range(begin, end):
                visible = np.ones(len(rows), bool)
                visible[len(rows) - (end - begin) :] = self.sees(r)[i - begin]
                if not visible.any():
                    continue
                s = self.sm_scale * q[i].astype(np.float64) @ keys[visible].T
                top = s.max(axis=1, keepdims=True)
                weights = np.exp(s - top)
                total = weights.sum(axis=1, keepdims=True)
                out[i] = weights / total @ keys[visible][:, :d_v]
                lse[i] = (np.log(total) + top)[:, 0]
        return out, lse


@pytest.fixture
def make_case():
    return lambda **fields: Case(CaseParam(**fields))


@pytest.fixture
def assert_close():
    """The bounds of docs/MATH.md; `dtype` is that of the outputs."""

    def check(got, want, dtype="float32"):
        (out, lse), (want_out, want_lse) = got, want
        out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
        assert np.array_equal(np.isfinite(out), np.isfinite(want_out))
        assert np.array_equal(np.isneginf(lse), np.isneginf(want_lse)) and not np.isnan(lse).any()
        scale = np.maximum(1, np.abs(np.where(np.isfinite(want_lse), want_lse, 0)) / 32)
        absolute = np.abs(want_out)
        bound, frobenius, lse_bound = {
            "float32": (3e-5 * scale[..., None] * np.maximum(1, absolute), 5e-6, 2e-5),
            "bfloat16": (1e-2 * (1 + absolute), 4e-3, 5e-5),
            "float16": (1.5e-3 * (1 + absolute), 6e-4, 5e-5),
        }[dtype]
        worst = np.unravel_index(np.argmax(np.abs(out - want_out) - bound), out.shape) if out.size else ()
        assert out.size == 0 or abs(out[worst] - want_out[worst]) <= np.broadcast_to(bound, out.shape)[worst], (
            f"out{list(worst)} = {out[worst]}, must be {want_out[worst]}"
        )
        if want_out.any():
            assert np.linalg.norm(out - want_out) <= frobenius * np.linalg.norm(want_out)
        seen = np.isfinite(want_lse)
        assert (np.abs(lse - want_lse)[seen] <= (lse_bound * scale)[seen]).all()

    return check


@pytest.fixture
def random_value():
    def make(rng, old):
        """An array that is wrong in some way: its dtype, shape, strides or contents; or no array at all."""
        kind = rng.integers(7)
        if kind == 0 or not isinstance(old, np.ndarray):
            return [None, 3, -1.5, "text", [1, 2], 2**70, float("inf")][rng.integers(7)]
        if kind == 1:
            return old.astype(
                rng.choice(["float64", "float16", "int8", "int64", "uint8", "bool", "float32", "complex64", "uint32"])
            )
        if kind == 2:
            return rng.integers(-3, 70, size=tuple(rng.integers(0, 9, size=rng.integers(0, 5)))).astype(old.dtype)
        if kind == 3:
            axis = rng.integers(old.ndim)
            return np.take(old, range(rng.integers(0, old.shape[axis] + 1)), axis=axis)
        if kind == 4:
            return old[tuple(slice(None, None, rng.choice([-1, 2, 3])) for _ in range(old.ndim))]
        if kind == 5:
            return np.broadcast_to(old[:1], (old.shape[0], *old.shape[1:]))
        noisy = old.copy()
        noisy.reshape(-1)[rng.integers(noisy.size)] = rng.choice([-1, -(2**31), 2**31 - 1, 7, 0]) if noisy.size else 0
        return noisy

    return make


@pytest.fixture(scope="session")
def treemla_command():
    """The command, for replaying recorded cases; TREEMLA_COMMAND names it, ./test does."""
    import os
    import shutil

    command = os.environ.get("TREEMLA_COMMAND") or shutil.which("treemla") or ROOT / "build" / "treemla"
    if not pathlib.Path(command).is_file():
        pytest.skip("no treemla command here: set TREEMLA_COMMAND")
    return str(command)
