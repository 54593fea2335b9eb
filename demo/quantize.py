"""F32 GGUF to Q4_K_M with llama.cpp's own quantizer: python demo/quantize.py IN OUT, in the project's environment."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp


def quantize(source: str, target: str) -> None:
    """Writes `source` as Q4_K_M to `target`."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    params.nthread = 2
    code = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama.cpp could not quantize {source} (code {code})")


if __name__ == "__main__":
    quantize(sys.argv[1], sys.argv[2])
