"""What the tests of both engines share: stand-ins, random trees, and the definition of attention in float64."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import stand_ins  # noqa: E402

stand_ins.install()
torch = pytest.importorskip("torch")

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def random_parents(rng, q_len):
    return [-1, *(int(rng.integers(0, i)) for i in range(1, q_len))]


def sees_of(parents):
    """bool [q_len, q_len]: who sees whom in a tree."""
    sees = np.zeros((len(parents), len(parents)), bool)
    for i, parent in enumerate(parents):
        sees[i] = sees[parent] if i else False
        sees[i, i] = True
    return sees


def attend(q, rows, visible, d_v, scale):
    """float64 (out [q, h, d_v], lse [q, h]) of q [q, h, d] over rows [n, d]; visible bool [q, n]."""
    q, rows = q.double(), rows.double()
    scores = scale * torch.einsum("ihd,nd->ihn", q, rows)
    scores = scores.masked_fill(~torch.as_tensor(visible, device=q.device)[:, None, :], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(torch.isfinite(lse), lse, 0.0)[..., None])
    return torch.einsum("ihn,nd->ihd", weights, rows[:, :d_v]), lse


def assert_close(got, want, dtype):
    """The bounds of docs/MATH.md. NaN is never close."""
    got = got.double()
    absolute, relative = {torch.float32: (3e-5, 5e-6), torch.bfloat16: (1e-2, 4e-3), torch.float16: (1.5e-3, 6e-4)}[dtype]
    assert torch.isfinite(got).all(), "NaN or inf where a number must be"
    worst = ((got - want).abs() - absolute * (1 + want.abs())).argmax()
    assert ((got - want).abs() <= absolute * (1 + want.abs())).all(), (
        f"element {int(worst)}: {got.flatten()[worst]} must be {want.flatten()[worst]}"
    )
    assert (got - want).norm() <= relative * want.norm()
