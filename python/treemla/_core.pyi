# The extension module (python/binding). Not for users: everything here is wrapped, with keywords and documentation.
# An `array` is whatever speaks DLPack; `problem` is the tuple of _verify._problem(); a stream is a cudaStream_t as int.
from typing import Any

__version__: str

def verify(
    problem: tuple,
    out: Any,
    lse: Any,
    backend: str,
    num_threads: int,
    batch_invariant: bool,
    split_keys: int,
    stream: int,
    /,
) -> None: ...
def why_unsupported(backend: str, problem: tuple, stream: int, /) -> str: ...
def list_backends() -> list[tuple[str, str, bool, str]]: ...
def write_case(
    path: str,
    tensors: dict[str, Any],
    dtypes: dict[str, str],
    d_v: int,
    d_rope: int,
    sm_scale: float,
    page_size: int,
    mask: str,
    kv_scale: float,
    kv_packed: str,
    source: str,
    expected: bool,
    /,
) -> None: ...

class Planner:
    def __init__(self, backend: str, num_threads: int, batch_invariant: bool, split_keys: int, /) -> None: ...
    def plan(self, problem: tuple, stream: int, /) -> None: ...
    def update(self, stream: int, /) -> None: ...
    def run(self, q: Any, kv: Any, out: Any, lse: Any, stream: int, /) -> None: ...
    def check(self, stream: int, /) -> None: ...
    def describe(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def out_shape(self) -> tuple[int, int, int]: ...

def build_bytes(inputs: dict[str, Any], method: str, b: int, budget: int, are_log_probs: bool, stream: int, /) -> int: ...
def build(
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    method: str,
    b: int,
    budget: int,
    pad_token: int,
    are_log_probs: bool,
    check: bool,
    stream: int,
    /,
) -> None: ...
def beam_bytes(inputs: dict[str, Any], top_k: int, are_log_probs: bool, stream: int, /) -> int: ...
def beam(
    inputs: dict[str, Any], outputs: dict[str, Any], top_k: int, are_log_probs: bool, check: bool, stream: int, /
) -> None: ...
def accept_bytes(inputs: dict[str, Any], method: str, stream: int, /) -> int: ...
def accept(inputs: dict[str, Any], outputs: dict[str, Any], method: str, check: bool, stream: int, /) -> None: ...
def compact_bytes(inputs: dict[str, Any], layers: list, stacked: bool, page_size: int, total_q: int, stream: int, /) -> int: ...
def compact(
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    layers: list,
    stacked: bool,
    page_size: int,
    total_q: int,
    check: bool,
    stream: int,
    /,
) -> None: ...
def import_bytes(inputs: dict[str, Any], q_len: int, layout: str, seq_len_has_tree: bool, stream: int, /) -> int: ...
def import_batch(
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    q_len: int,
    layout: str,
    seq_len_has_tree: bool,
    check: bool,
    stream: int,
    /,
) -> None: ...
def parents_from_bits(bits: Any, out: Any, request: int, /) -> None: ...
