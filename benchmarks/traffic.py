"""The estimate of the bytes that a pass reads, against the sum of the tensors that llama.cpp reads in that pass.

    python benchmarks/traffic.py [--quick]

Each node of the graph is looked at through llama.cpp's eval callback (tensor_reads.py). Nothing is timed, so load on
the machine does not matter. Of a mixture of experts the callback tells which experts were used; what several tokens
use together is an expectation, and is held against the mean of several draws.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from common import WORK, Row, Target, arguments, machine, report, run_main, say
from tensor_reads import Watched

from cpuchat.costs.model import bytes_read
from cpuchat.models.gguf.header import read_model
from cpuchat.models.synthetic.model import SHAPES, Shape, write_model
from cpuchat.models.synthetic.pair import write_pair
from cpuchat.models.traffic import model_work
from cpuchat.protocol.options import EngineOptions

FOLDER = WORK / "models"
WITHIN = Target(2.0, False)
Q8_0 = 8  # enum ggml_type
MOE = Shape(
    name="moe", architecture="qwen3moe", n_layer=4, n_embd=1024, n_head=16, n_head_kv=4, n_ff=384, n_vocab=8192,
    head=128, n_expert=64, n_expert_used=8,
)  # fmt: skip
TIED = msgspec.structs.replace(SHAPES["0.5b"], n_layer=4)
DRAWS = 12


@dataclass(frozen=True)
class Case:
    """A model and the passes that are looked at: `tokens` after `n_past` others, `draws` times with other tokens."""

    what: str
    file: str
    write: Callable[[Path], object]
    n_past: int
    tokens: int = 1
    draws: int = 1
    flash_attn: bool = True
    quantized_kv: bool = False


def _moe(path: Path) -> None:
    """Tokens of this one choose their experts independently of each other."""
    write_pair(path, None, 1.0, target=MOE)


def _cases(long: int) -> list[Case]:
    def dense(path: Path) -> None:
        write_model(path, "0.05b", "Q4_K_M")

    def tied(path: Path) -> None:
        write_model(path, TIED, "Q8_0")

    def small(path: Path) -> None:
        write_model(path, "tiny", "F16")

    return [
        Case("dense, Q4_K_M", "reads-dense", dense, 200),
        Case("dense, Q4_K_M, verify pass of 8", "reads-dense", dense, 200, tokens=8),
        Case("tied embeddings, Q8_0", "reads-tied", tied, 200),
        Case("mixture of experts, 8 of 64", "reads-moe", _moe, 200),
        Case("mixture of experts, verify pass of 4", "reads-moe", _moe, 200, tokens=4, draws=DRAWS),
        Case("mixture of experts, verify pass of 8", "reads-moe", _moe, 200, tokens=8, draws=DRAWS),
        Case(f"{long:,} tokens of context, F16", "reads-small", small, long),
        Case(f"{long:,} tokens of context, Q8_0 cache", "reads-small", small, long, quantized_kv=True),
        Case(f"{long:,} tokens of context, no flash attention", "reads-small", small, long, flash_attn=False),
    ]


def _measure(case: Case) -> Row:
    path = FOLDER / f"{case.file}.gguf"
    if not path.is_file():
        say(f"writing {path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        case.write(path)
    header = read_model(path)
    names = {"type_k": "q8_0", "type_v": "q8_0"} if case.quantized_kv else {}
    types = {"type_k": Q8_0, "type_v": Q8_0} if case.quantized_kv else {}
    work = model_work(header, EngineOptions(flash_attn="on" if case.flash_attn else "off", **names))
    rng = random.Random(1)
    read: list[int] = []
    estimated: list[float] = []
    n_ctx = -(-(case.n_past + case.tokens * case.draws) // 256) * 256
    with Watched(path, n_ctx, n_threads=2, flash_attn_type=int(case.flash_attn), **types) as model:
        model.fill(case.n_past)
        for draw in range(case.draws):
            tokens = [rng.randrange(512, header.n_vocab) for _ in range(case.tokens)]
            read.append(model.evaluate(tokens).total)
            estimated.append(bytes_read(work, case.tokens, case.n_past + draw * case.tokens))
    off = 100 * abs(statistics.mean(estimated) / statistics.mean(read) - 1)
    say(f"  {case.what}: {off:.4f} %")
    note = f"{statistics.mean(estimated) / 1e6:,.3f} MB estimated, {statistics.mean(read) / 1e6:,.3f} MB read"
    return Row(case.what, "% off", [off], target=WITHIN, note=note)


def main() -> None:
    options: argparse.Namespace = arguments(__doc__)
    where = machine()
    rows = [_measure(case) for case in _cases(1500 if options.quick else 12_000)]
    report("traffic", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
