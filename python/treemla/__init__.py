"""TreeMLA: draft-tree verification attention for models with Multi-head Latent Attention.

verify() and Planner attend draft trees to paged caches; build_tree() and its kin make trees, accept_path() walks them,
compact_cache() keeps the accepted rows; import_batch() reads a serving engine's tables and masks; record() writes calls to case
files. Arrays come from NumPy, torch, CuPy, JAX, or whatever else speaks DLPack, on the host or on one NVIDIA GPU.
"""

from __future__ import annotations

import sys as _sys

from ._core import __version__
from ._errors import (
    BadFile,
    DeviceError,
    Error,
    FileAccessError,
    InternalError,
    InvalidArgument,
    OutOfMemory,
    Unsupported,
)
from ._record import Recorder, record
from ._trees import (
    Accepted,
    Beam,
    Compacted,
    Imported,
    Tree,
    accept_path,
    build_chain,
    build_tree,
    build_tree_from_candidates,
    build_tree_from_parents,
    compact_cache,
    expand_beam,
    import_batch,
)
from ._verify import Backend, Planner, Verified, list_backends, verify, why_unsupported

__all__ = [
    "Accepted",
    "Backend",
    "BadFile",
    "Beam",
    "Compacted",
    "DeviceError",
    "Error",
    "FileAccessError",
    "Imported",
    "InternalError",
    "InvalidArgument",
    "OutOfMemory",
    "Planner",
    "Recorder",
    "Tree",
    "Unsupported",
    "Verified",
    "__version__",
    "accept_path",
    "build_chain",
    "build_tree",
    "build_tree_from_candidates",
    "build_tree_from_parents",
    "compact_cache",
    "expand_beam",
    "import_batch",
    "list_backends",
    "record",
    "verify",
    "why_unsupported",
]

# Inside torch.compile the calls above are operators. Registering them here keeps that out of the first compilation.
if hasattr(_sys.modules.get("torch"), "compiler"):  # torch >= 2.4
    from . import torch_ops  # noqa: F401
