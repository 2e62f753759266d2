"""vLLM: `--attention-backend CUSTOM` for MLA models. docs/SERVING.md has the flags, what is replaced and the troubleshooting.

register() is the entry point in the group `vllm.general_plugins`; vLLM calls it in every process.
"""

from __future__ import annotations

import logging

from ._versions import check_version

__all__ = ["CLASS_PATH", "register"]

logger = logging.getLogger(__name__)

CLASS_PATH = "treemla.integrations._vllm_backend.TreeMLABackend"
_REFUSAL_PATH = "treemla.integrations._vllm_refusal.TreeMLABackend"


def register() -> None:
    """Registers the backend as vLLM's CUSTOM.

    With a version of vLLM that was not tested CUSTOM raises Unsupported when it is chosen, and a warning is logged: vLLM lets no
    plugin fail, and whoever uses another backend should not be stopped.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    error = check_version("vllm")
    if error is not None:
        logger.warning("%s", error)
    register_backend(AttentionBackendEnum.CUSTOM, CLASS_PATH if error is None else _REFUSAL_PATH)
