"""Does llama.cpp see what PyTorch saw? python demo/verify.py F32.gguf FOLDER, in the project's environment.

Compares the token ids of every text of the corpus and the logits of one chat with what train.py left in FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from demo.llama import Engine

TOLERANCE = 0.02
"""Of the logits' standard deviation. llama.cpp keeps keys and values in 16 bits, PyTorch in 32."""


def main(model: Path, folder: Path) -> int:
    engine = Engine(model)
    pairs = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    different = [text for text, ids in pairs if engine.tokenize(text) != ids]
    print(f"tokens: {len(pairs) - len(different)} of {len(pairs)} texts give the same ids")
    for text in different[:5]:
        print("  differs:", repr(text))
    saved = np.load(folder / "logits.npz")
    ids = saved["ids"].tolist()
    error = np.abs(engine.logits(ids, len(ids)) - saved["logits"]).max() / saved["logits"].std()
    print(f"logits: largest difference {error:.4f} standard deviations (allowed {TOLERANCE})")
    return int(bool(different) or error > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
