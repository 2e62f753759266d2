"""Modules that the engines import and that these tests have no use for: compiled kernels, parsers, web servers. What is
installed is never replaced, and of the engines' own code nothing is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

NAMES = (
    "aiohttp",
    "cbor2",
    "cloudpickle",
    "compressed_tensors",
    "cpuinfo",
    "einops",
    "fastapi",
    "flashinfer",
    "gguf",
    "httpx2",
    "IPython",
    "llguidance",
    "openai_harmony",
    "orjson",
    "partial_json_parser",
    "prometheus_client",
    "psutil",
    "pybase64",
    "requests",
    "sentencepiece",
    "setproctitle",
    "sgl_kernel",
    "starlette",
    "tvm_ffi",
    "urllib3",
    "uvicorn",
    "uvloop",
    "xgrammar",
    "zmq",
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
