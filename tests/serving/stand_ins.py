"""Modules that the engines import and that these tests have no use for: compiled kernels and parsers, hundreds of MB of them. What is
installed is never replaced. Nothing of the engines' own code is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

NAMES = (
    "compressed_tensors",
    "flashinfer",
    "gguf",
    "llguidance",
    "partial_json_parser",
    "sentencepiece",
    "sgl_kernel",
    "tvm_ffi",
    "xgrammar",
)


class _Meta(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class Anything(metaclass=_Meta):
    """Stands for any class, function or constant. As a decorator it leaves what it decorates as it is."""

    def __init__(self, *args, **kwargs):
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class _Module(types.ModuleType):
    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so only what nobody else finds."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def install() -> None:
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
