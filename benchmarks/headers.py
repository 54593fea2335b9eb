"""Reading GGUF headers: a vocabulary of 150k tokens against the gguf package, and headers made to harm.

    python benchmarks/headers.py [--quick] [--rounds N]

The large header is that of a model of today: 151,936 tokens, their types, 151,387 merges, 399 tensors, written by the
gguf package. It is in the page cache. The mutated ones are read in one process; its memory and its CPU time per header
are the system's figures.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import gguf
import numpy as np
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main, say

from cpuchat.base.errors import CpuchatError
from cpuchat.models.gguf.header import check_header, read_header
from cpuchat.models.inspect import inspect
from tests.models.gguf.fields import fields, patched
from tests.models.gguf.test_header import write_reference

N_TOKENS, N_MERGES, N_LAYERS = 151_936, 151_387, 36
N_MUTATED = 300
LIMIT_MS, LIMIT_MUTATED_MS, LIMIT_MB = 150, 1000, 200
_EXTREMES = (0, 1, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)


def write_large(path: Path) -> Path:
    """A header of a real size; its weights are one value each."""
    rng = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyzĠ"
    words = sorted({"".join(rng.choices(letters, k=rng.randrange(2, 12))) for _ in range(2 * N_TOKENS)})[:N_TOKENS]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(40_960)
    writer.add_embedding_length(4096)
    writer.add_head_count(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * N_TOKENS)
    writer.add_token_merges([f"{word[:1]} {word[1:]}" for word in words[:N_MERGES]])
    for layer in range(N_LAYERS):
        for part in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones(1, np.float32))
        for part in ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ones(1, np.float32))
    for name in ("token_embd", "output_norm", "output"):
        writer.add_tensor(f"{name}.weight", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One to four fields replaced by extremes, or bytes cut out."""
    places = [place for kind, places in fields(content).items() if kind != "string" for place in places]
    for _ in range(rng.randint(1, 4)):
        at, size = rng.choice(places)
        if rng.random() < 0.8:
            content = patched(content, at, size, rng.choice(_EXTREMES))
        else:
            content = content[:at] + content[at + rng.randint(1, 64) :]
    return content


def read_all(folder: Path) -> None:
    """Read every file of `folder`, and print what it took: what the process that is measured does."""
    slowest, refused = 0.0, 0
    for path in sorted(folder.iterdir()):
        began = time.process_time()
        try:
            inspect(read_header(path))
        except CpuchatError:
            refused += 1
        slowest = max(slowest, time.process_time() - began)
    # Not ru_maxrss: that is no less than what the process that started this one had.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024
    print(json.dumps({"ms": 1e3 * slowest, "mb": peak / 1e6, "refused": refused}))


def measure_mutated(folder: Path, seed: int) -> dict[str, float]:
    """{"ms": CPU time of the slowest, "mb": memory of the whole process, "refused": how many were}."""
    rng = random.Random(seed)
    folder.mkdir()
    sound = write_reference(folder.parent / "sound.gguf").read_bytes()
    for number in range(N_MUTATED):
        (folder / f"{number:03}.gguf").write_bytes(mutated(sound, rng))
    done = subprocess.run([sys.executable, __file__, "--read", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise MeasureError(f"reading ended with status {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)

    options = arguments(__doc__, add)
    if options.read is not None:
        read_all(options.read)
        return
    where = machine()
    rounds = options.rounds or (1 if options.quick else 9)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("writing the files")
        large = write_large(folder / "large.gguf")
        header = read_header(large)
        times = alternate(
            rounds,
            {
                "cpuchat": lambda: milliseconds(lambda: read_header(large)),
                "gguf": lambda: milliseconds(lambda: gguf.GGUFReader(large)),
                "texts": lambda: milliseconds(lambda: list(read_header(large).metadata["tokenizer.ggml.tokens"])),
                "check": lambda: milliseconds(lambda: check_header(header)),
                "inspect": lambda: milliseconds(lambda: inspect(header)),
            },
            settle=0.0,
        )
        harmful = [measure_mutated(folder / f"mutated-{i}", i) for i in range(1 if options.quick else 3)]
    ours, theirs = times["cpuchat"], times["gguf"]
    rows = [
        Row("header of 150k tokens", "ms", ours, target=Target(LIMIT_MS, at_least=False)),
        Row("the same, against gguf.GGUFReader", "ms", ours, theirs, target=Target(1.0, at_least=False)),
        Row("with the texts of all tokens", "ms", times["texts"], theirs),
        Row("checks before a load", "ms", times["check"]),
        Row("inspection", "ms", times["inspect"]),
        Row(
            f"slowest of {N_MUTATED} mutated headers, CPU time", "ms", [one["ms"] for one in harmful],
            target=Target(LIMIT_MUTATED_MS, at_least=False),
        ),
        Row(
            "memory of the process that reads them", "MB", [one["mb"] for one in harmful],
            target=Target(LIMIT_MB, at_least=False),
        ),
    ]  # fmt: skip
    refused = ", ".join(str(one["refused"]) for one in harmful)
    remarks = [
        f"The header has {header.data_offset / 1e6:.1f} MB.",
        f"Refused of the mutated: {refused} of {N_MUTATED}; the others are sound headers of another model.",
    ]
    report("headers", where, rows, quick=options.quick, remarks=remarks)


if __name__ == "__main__":
    run_main(main)
