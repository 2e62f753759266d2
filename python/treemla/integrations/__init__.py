"""TreeMLA inside serving engines: `sglang` and `vllm`. Each is found through the engine's plugin entry point once treemla is
installed beside it, and imports the engine only when asked. docs/SERVING.md is the manual.
"""
