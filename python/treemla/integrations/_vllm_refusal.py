"""What vLLM resolves CUSTOM to where its version was not tested: the error."""

from ._versions import check_version

_error = check_version("vllm")
if _error is not None:
    raise _error

from ._vllm_backend import TreeMLABackend  # noqa: E402, F401
