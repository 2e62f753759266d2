"""What both engines' backends share: the plans of one batch, run by every layer."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import _arrays
from .._errors import make
from .._verify import Planner, Verified, _problem

__all__ = ["BatchPlans", "Scales"]


class Scales(NamedTuple):
    """What layers of a model may differ in. A model usually has one pair for all of them."""

    sm_scale: float
    kv_scale: float


class BatchPlans:
    """The planners of one batch's lengths, pages and trees: one for each Scales, made when the first layer with them runs.

    An eager batch is bound, then run by every layer; the next batch is bound to the same object, whose planners keep their
    memory. A captured graph has an object of its own: bound and planned before the capture, update() and run() recorded.
    """

    def __init__(self, *, backend: str = "best", batch_invariant: bool = False):
        self._backend, self._batch_invariant = backend, batch_invariant
        self._planners: dict[Scales, Planner] = {}
        self._current: set[Scales] = set()  # planned for what is bound
        self._arrays: tuple[Any, Any] = (None, None)
        self._problem: dict[str, Any] = {}

    def bind(self, q: Any, kv: Any, **problem: Any) -> None:
        """A batch: the arguments of Planner.plan() without the scales. `q` and `kv` stand for those of every layer, or are None:
        then the first layer's do."""
        self._arrays, self._problem = (q, kv), problem
        self._current.clear()

    def plan(self, scales: Scales, q: Any = None, kv: Any = None) -> Planner:
        """The planner for these scales, planned for what is bound."""
        planner = self._planners.get(scales)
        if planner is None:
            planner = self._planners[scales] = Planner(backend=self._backend, batch_invariant=self._batch_invariant)
        if scales not in self._current:
            q = q if self._arrays[0] is None else self._arrays[0]
            kv = kv if self._arrays[1] is None else self._arrays[1]
            if _arrays.is_capturing(q):
                raise make(
                    2,
                    "sm_scale",
                    f"sm_scale = {scales.sm_scale} with kv_scale = {scales.kv_scale} was not planned before this CUDA graph's "
                    f"capture: planned are {sorted(map(tuple, self._current))}",
                )
            planner.plan(q, kv, sm_scale=scales.sm_scale, kv_scale=scales.kv_scale, **self._problem)
            self._current.add(scales)
        return planner

    def update(self) -> None:
        """Plans again from the arrays that were bound, whose contents have changed. On a GPU: enqueued, may be captured."""
        for scales in self._current:
            self._planners[scales].update()

    def run(self, scales: Scales, q: Any, kv: Any, *, out: Any = None, lse: Any = False) -> Verified:
        return self.plan(scales, q, kv).run(q, kv, out=out, lse=lse)

    def check(self) -> None:
        """Waits, and raises for lengths, pages or trees that are out of range."""
        for scales in self._current:
            self._planners[scales].check()

    @property
    def workspace_bytes(self) -> int:
        return sum(planner.workspace_bytes for planner in self._planners.values())

    def problem_of(self, scales: Scales, q: Any, kv: Any) -> tuple:
        """The call of one layer as record() takes it."""
        return _problem(q, kv, sm_scale=scales.sm_scale, kv_scale=scales.kv_scale, **self._problem)
