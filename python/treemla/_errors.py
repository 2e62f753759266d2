"""The exceptions of the package: one class for each code of the library, all with its own text."""

from __future__ import annotations

__all__ = [
    "BadFile",
    "DeviceError",
    "Error",
    "FileAccessError",
    "InternalError",
    "InvalidArgument",
    "OutOfMemory",
    "Unsupported",
]


class Error(Exception):
    """Base of all errors of TreeMLA. The text is one line: the argument, its value, and what is allowed.

    Attributes:
        argument: name of the argument or file field at fault, "" where there is none.
    """

    argument: str = ""


class InvalidArgument(Error, ValueError):
    """An argument breaks its documented contract."""


class Unsupported(Error, NotImplementedError):
    """Valid, but no backend (or not the one asked for) can run it; the text has every backend's reason."""


class BadFile(Error, ValueError):
    """A case file that lies, is truncated, or is no case file at all."""


class FileAccessError(Error, OSError):
    """The operating system refused to open, read or write a file."""


class OutOfMemory(Error, MemoryError):
    """Host or device memory ran out."""


class DeviceError(Error, RuntimeError):
    """A call to the device failed."""


class InternalError(Error, RuntimeError):
    """A bug in the library: please report it."""


# By treemla::ErrorCode.
_CLASSES = {
    1: InvalidArgument,
    2: Unsupported,
    3: BadFile,
    4: FileAccessError,
    5: OutOfMemory,
    6: DeviceError,
    7: InternalError,
}


def make(code: int, argument: str, message: str) -> Error:
    """The exception for an error of the library."""
    error = _CLASSES.get(code, InternalError)(message)
    error.argument = argument
    return error


def invalid(argument: str, message: str) -> Error:
    return make(1, argument, message)
