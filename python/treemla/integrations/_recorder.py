"""TREEMLA_RECORD: one verify call of a running engine as a case file, for `treemla verify` on any machine."""

from __future__ import annotations

import logging
import os
import pathlib
import re
from typing import Any

from .. import _arrays, _record
from .._errors import invalid

__all__ = ["VARIABLE", "VerifyRecorder"]

VARIABLE = "TREEMLA_RECORD"

logger = logging.getLogger(__name__)

_FORM = re.compile(r"(?P<folder>[^,]+)(?P<options>(,(layer|call|max_bytes)=\d+)*)")


class VerifyRecorder:
    """Counts the verify calls of one layer and writes the one asked for.

    TREEMLA_RECORD=FOLDER[,layer=L][,call=N][,max_bytes=B]: the call number N (from 0; 0 by default) of layer L (0 by default) to
    FOLDER/layer{L}_call{N}[_rank{R}].kdtr, unless that takes more than B bytes (1 GiB by default).
    """

    def __init__(self, text: str):
        match = _FORM.fullmatch(text)
        if match is None:
            raise invalid(VARIABLE, f"{VARIABLE} = {text!r}: must be FOLDER[,layer=L][,call=N][,max_bytes=B]")
        options = dict(option.split("=") for option in match["options"].split(",") if option)
        self.folder = pathlib.Path(match["folder"])
        self.layer, self.call = int(options.get("layer", 0)), int(options.get("call", 0))
        self.max_bytes = int(options.get("max_bytes", 1 << 30))
        self.seen = 0
        self.path: pathlib.Path | None = None  #: what was written

    @classmethod
    def from_environment(cls) -> VerifyRecorder | None:
        text = os.environ.get(VARIABLE, "")
        return cls(text) if text else None

    def wants(self, layer: int, q: Any) -> bool:
        """Is this verify call of `layer` the one? Counts it. A call that is being captured isn't one: nothing has run."""
        if layer != self.layer or _arrays.is_capturing(q):
            return False
        self.seen += 1
        return self.seen == self.call + 1

    def write(self, problem: tuple, note: str) -> None:
        """What can't be recorded must not stop the engine: it is warned of."""
        path = self.folder / f"layer{self.layer}_call{self.call}{_rank()}.kdtr"
        recorder = _record.Recorder(self.folder, False, self.max_bytes, 1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _record._record(recorder, path, problem, note)
        except Exception as error:
            logger.warning("%s: %s was not written: %s", VARIABLE, path, error)
            return
        self.path = path
        logger.warning("%s: wrote %s; replay it with `treemla verify %s`", VARIABLE, path, path)


def _rank() -> str:
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ""
    return f"_rank{torch.distributed.get_rank()}" if torch.distributed.get_world_size() > 1 else ""
