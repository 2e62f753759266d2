"""SGLang: `--attention-backend treemla` for MLA models. docs/SERVING.md has the flags, what falls back and the troubleshooting.

register() is the entry point in the group `sglang.srt.plugins`; SGLang calls it in every process before it reads its arguments.
"""

from __future__ import annotations

import logging
from typing import Any

from ._versions import check_version

__all__ = ["NAME", "create_backend", "register"]

logger = logging.getLogger(__name__)

NAME = "treemla"

_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
_is_hooked = False


def register() -> None:
    """Makes `--attention-backend treemla`, and the same for prefill and decode alone, known to SGLang.

    With a version of SGLang that was not tested the name raises Unsupported when it is chosen, and a warning is logged: whoever
    uses another backend should not be stopped.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    error = check_version("sglang")
    if error is not None:
        logger.warning("%s", error)

        def refuse(runner: Any) -> None:
            raise error

        register_attention_backend(NAME)(refuse)
        return
    register_attention_backend(NAME)(create_backend)

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    global _is_hooked
    if not _is_hooked:  # a second hook would wrap the first
        HookRegistry.register(_FACTORY, _with_draft_backends, HookType.AROUND)
        _is_hooked = True


def create_backend(runner: Any) -> Any:
    """What SGLang calls for the name. Draft models without MLA get SGLang's Triton backend."""
    if not runner.use_mla_backend:
        if runner.is_draft_worker:
            return _triton(runner)
        raise ValueError(
            f"attention_backend = {NAME}: model {runner.model_config.hf_config.architectures} has no Multi-head Latent "
            f"Attention; use another backend"
        )
    from ._sglang_backend import TreeMLAAttnBackend

    return TreeMLAAttnBackend(runner)


def _triton(runner: Any) -> Any:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS["triton"](runner)


def _with_draft_backends(
    original: Any, factory: Any, backend_name: str, backend_map: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """SGLang picks the draft model's backends from fixed tables by name. Steps of the draft loop go to Triton's multi-step
    backend, the extend over accepted tokens to ours."""
    backend_map = dict(backend_map)
    stamps_children = kwargs.get("stamps_children", args[1] if len(args) > 1 else False)  # of the table with the draft loop
    if stamps_children or not factory.draft_model_runner.use_mla_backend:
        backend_map[NAME] = backend_map["triton"]
    else:
        backend_map[NAME] = lambda: (NAME, create_backend(factory.draft_model_runner))
    return original(factory, backend_name, backend_map, *args, **kwargs)
