"""What each array library is asked for: new arrays beside a given one, its current stream, its device made current.

Reading arrays needs none of this: the extension takes torch tensors by their attributes and all others by DLPack.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from typing import Any

from ._errors import invalid, make

_NO_GUARD = contextlib.nullcontext()
_DTYPES = ("float32", "float16", "bfloat16")


def index(name: str, value: Any, low: int = 0) -> int:
    """`value` as an int of at least `low`, or an error that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise invalid(name, f"{name} = {value!r}: must be an integer") from None
    if not low <= number < 2**63:
        raise invalid(name, f"{name} = {number}: must be at least {low}")
    return number


def number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise invalid(name, f"{name} = {value!r}: must be a number") from None


def is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, getattr(torch, "Tensor", ()))


def is_compiling() -> bool:
    """Is torch.compile tracing this? Calls then become operators. torch may be imported after treemla, or never."""
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "compiler") and torch.compiler.is_compiling()


def library(x: Any) -> str:
    """ "torch", "numpy", "cupy", "jax", or "other"."""
    if is_torch(x):
        return "torch"
    root = type(x).__module__.partition(".")[0]
    return {"numpy": "numpy", "cupy": "cupy", "jax": "jax", "jaxlib": "jax"}.get(root, "other")


def on_device(x: Any) -> bool:
    """Is it in the memory of a GPU? False for what is no array: the extension says what is wrong with it."""
    if is_torch(x):
        return x.is_cuda
    device = getattr(x, "__dlpack_device__", None)
    return device is not None and device()[0] in (2, 13)


def dtype_name(dtype: Any) -> str:
    """ "float32" of torch.float32, numpy.float32, numpy.dtype("float32") or "float32"."""
    if isinstance(dtype, type):
        return dtype.__name__
    return str(dtype).rpartition(".")[2]


def _numpy_dtype(name: str) -> Any:
    import numpy

    if name in ("bfloat16", "float8_e4m3fn"):
        try:
            import ml_dtypes
        except ImportError:
            raise make(2, "out_dtype", f"NumPy has no {name}: install ml_dtypes, or ask for float32") from None
        return numpy.dtype(getattr(ml_dtypes, name))
    return numpy.dtype(name)


def empty(like: Any, shape: tuple[int, ...], dtype: str, name: str = "out") -> Any:
    """An uninitialised array of the library and on the device of `like`."""
    kind = library(like)
    if kind == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    if kind == "cupy":
        import cupy

        if dtype == "bfloat16":
            raise make(2, name, f"CuPy arrays of bfloat16 can't be made here: give {name}, or ask for float32")
        return cupy.empty(shape, dtype)
    if kind in ("numpy", "jax"):
        if on_device(like):
            raise make(2, name, f"arrays of JAX can't be written, and those on a GPU not be made here: give {name}")
        import numpy

        return numpy.empty(shape, _numpy_dtype(dtype))
    namespace = getattr(like, "__array_namespace__", None)
    if namespace is None:
        return None  # the extension says what is wrong with `like`, or that the output is missing
    xp = namespace()
    return xp.empty(shape, dtype=getattr(xp, dtype), device=like.device)


def zeros(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Like empty(), but all zero."""
    array = empty(like, shape, dtype)
    array[...] = 0
    return array


def finish(like: Any, made: Any) -> Any:
    """What `empty` made for a library whose arrays can't be written becomes one of its own."""
    if made is not None and library(like) == "jax":
        import jax

        return jax.device_put(made)
    return made


def default_dtype(q: Any) -> str:
    """Outputs have the dtype of q; where that can't be told, float32."""
    name = dtype_name(getattr(q, "dtype", "float32"))
    return name if name in _DTYPES else "float32"


def check_dtype(name: str, dtype: Any) -> str:
    text = dtype_name(dtype)
    if text not in _DTYPES:
        raise invalid(name, f"{name} = {text}: must be float32, float16 or bfloat16")
    return text


def stream_handle(like: Any, stream: Any = None) -> int:
    """The cudaStream_t to work on: the one given, else the current one of the array's library. 0 on the host."""
    if stream is None:
        if is_torch(like):
            if not like.is_cuda:
                return 0
            return sys.modules["torch"]._C._cuda_getCurrentRawStream(like.get_device())
        if library(like) == "cupy":
            import cupy

            return cupy.cuda.get_current_stream().ptr
        return 0
    for attribute in ("cuda_stream", "ptr"):  # of torch, of CuPy
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(handle)
    return index("stream", stream)


def device_guard(like: Any, stream: Any = None) -> Any:
    """A context in which the device of `like` is the current one, on which the library works; and a stream that is given, so that
    what is made meanwhile is not reused before that stream is done with it."""
    if is_torch(like):
        if like.is_cuda:
            cuda = sys.modules["torch"].cuda
            if stream is not None:
                handle = stream_handle(like, stream)
                return cuda.stream(cuda.ExternalStream(handle, like.device) if handle else cuda.default_stream(like.device))
            if like.get_device() != cuda.current_device():
                return cuda.device(like.get_device())
    elif library(like) == "cupy":
        if stream is not None:
            import cupy

            guard = contextlib.ExitStack()
            guard.enter_context(like.device)
            guard.enter_context(cupy.cuda.ExternalStream(stream_handle(like, stream)))
            return guard
        return like.device
    return _NO_GUARD


def is_capturing(x: Any) -> bool:
    """Is the current stream of the array's library being captured into a graph?"""
    if is_torch(x):
        return x.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing()
    if library(x) == "cupy":
        import cupy

        return cupy.cuda.get_current_stream().is_capturing()
    return False


def to_numpy(x: Any) -> Any:
    """A copy on the host as NumPy array; bf16 as uint16, e4m3 as uint8."""
    import numpy

    kind = library(x)
    if kind == "torch":
        torch = sys.modules["torch"]
        x = x.detach()
        name = dtype_name(x.dtype)
        if name == "bfloat16":
            return x.contiguous().view(torch.int16).cpu().numpy().view(numpy.uint16)
        if name == "float8_e4m3fn":
            return x.contiguous().view(torch.uint8).cpu().numpy()
        return x.cpu().numpy()
    if kind == "cupy":
        return x.get()
    x = numpy.asarray(x) if kind in ("numpy", "jax") else numpy.from_dlpack(x)
    view = {"bfloat16": numpy.uint16, "float8_e4m3fn": numpy.uint8}.get(str(x.dtype))
    return x if view is None else numpy.ascontiguousarray(x).view(view)


def take_rows(x: Any, rows: Any) -> Any:
    """x[rows] copied to the host, where rows is a NumPy array of int64: only these rows cross over."""
    kind = library(x)
    if kind == "torch":
        torch = sys.modules["torch"]
        name = dtype_name(x.dtype)
        view = {"bfloat16": torch.int16, "float8_e4m3fn": torch.uint8}.get(name)
        if view is not None:
            x = x.view(view)
        taken = x.index_select(0, torch.from_numpy(rows).to(x.device)).cpu().numpy()
        return taken.view("uint16") if name == "bfloat16" else taken
    if kind == "cupy":
        import cupy

        return x[cupy.asarray(rows)].get()
    if kind == "other":
        return to_numpy(x)[rows]
    return to_numpy(x[rows])
