"""Which versions of the engines the backends were tested with. An engine's interfaces move with every release, so another version
is refused when it is asked for, not somewhere in a forward pass."""

from __future__ import annotations

import os
import re
from importlib import metadata

from .._errors import Unsupported, make

__all__ = ["OVERRIDE", "TESTED", "check_version"]

#: Set to 1 to try another version.
OVERRIDE = "TREEMLA_ANY_ENGINE_VERSION"

#: The first and the last version of each engine that the tests have passed with.
TESTED = {"sglang": ("0.5.22", "0.5.23"), "vllm": ("0.32.0", "0.33.0")}


def _key(version: str) -> tuple[int, ...]:
    """The numbers of a version without zeros at their end. What follows them is of no account (post1, +cu130), but for what comes
    before a release (rc0, dev3): () then, which is less than any release."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    if numbers is None or re.search("[abc]|dev|pre", version.lower().partition("+")[0]):
        return ()
    key = [int(n) for n in numbers[0].split(".")]
    while key and key[-1] == 0:
        key.pop()
    return tuple(key)


def check_version(engine: str) -> Unsupported | None:
    """The error to raise where the backend is asked for; None where the installed version was tested."""
    first, last = TESTED[engine]
    try:
        installed = metadata.version(engine)
    except metadata.PackageNotFoundError:
        installed = "none"
    if os.environ.get(OVERRIDE) == "1" or _key(first) <= _key(installed) <= _key(last):
        return None
    allowed = first if first == last else f"{first} to {last}"
    return make(
        2,
        engine,
        f"{engine} = {installed}: treemla's backend is tested with {engine} {allowed}; {OVERRIDE}=1 tries it all the same",
    )
