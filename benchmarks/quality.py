"""Quality figures and their speed, against llama-perplexity and against the prefills that they need.

    python benchmarks/base_model.py && python benchmarks/build_llama.py     # once
    python benchmarks/quality.py [--quick]

llama-perplexity keeps the base's log-probabilities as 16-bit integers and clips them 16 below the largest
(tools/perplexity/perplexity.cpp). For the comparison the same is done to the base's logits here; the exact figures,
those that users see, stand beside it. Both evaluate the same windows of the same text and score the second half of
each.
"""

from __future__ import annotations

import io
import re
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
from base_model import SMALLER, base_model, smaller
from build_llama import tool
from common import WORK, MeasureError, Row, Target, alternate, arguments, machine, report, run_main

from cpuchat.base.line_process import LineOutput
from cpuchat.engine import lockstep
from cpuchat.engine.lockstep import Lockstep
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.quality.measure import scores_of
from cpuchat.quality.messages import Answer, RowComparer, Scored, Start, Text, Tops
from cpuchat.quality.statistics import Scores, Summary, summarize
from cpuchat.quality.texts import code, prose

N_CTX = 512
ONE_PERCENT = 0.01
SPEED = Target(0.9)
FIGURES = {
    "PPL(Q)": (r"Mean PPL\(Q\) +: +([\d.]+)", lambda s: s.ppl_other),
    "PPL(base)": (r"Mean PPL\(base\) +: +([\d.]+)", lambda s: s.ppl_base),
    "KLD mean": (r"Mean +KLD: +([-\d.]+)", lambda s: s.kld.value),
    "same top %": (r"Same top p: +([\d.]+)", lambda s: 100 * s.same_top.value),
}


class SixteenBits(RowComparer):
    """Compares with the base's log-probabilities as llama-perplexity stores them, and sums as it does: terms whose
    stored log-probability is not above -16 are left out, and nothing is normalized again."""

    def compare(
        self, base: Sequence[np.ndarray], other: Sequence[np.ndarray], tokens: Sequence[int]
    ) -> tuple[Scores, Tops]:
        scores, tops = super().compare(base, other, tokens)
        for i, (p, q, token) in enumerate(zip(base, other, tokens, strict=True)):
            stored = _stored(p)
            log_q = q - (q.max() + np.log(np.exp(q - q.max(), dtype=np.float64).sum()))
            counted = stored > -16
            scores.kld[i] = (np.exp(stored[counted]) * (stored[counted] - log_q[counted])).sum(dtype=np.float64)
            scores.base_nll[i] = -stored[token]
            scores.same_top[i] = stored.argmax() == q.argmax()
        return scores, tops


class Skipping(RowComparer):
    """Compares nothing: what is left is the two prefills."""

    def compare(
        self, base: Sequence[np.ndarray], other: Sequence[np.ndarray], tokens: Sequence[int]
    ) -> tuple[Scores, Tops]:
        n = len(tokens)
        return Scores(*np.ones((4, n), np.float32)), Tops(*(np.zeros(n, kind) for kind in ("i4", "i4", "f4", "f4")))


def _stored(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities after a round trip through `log_softmax` of perplexity.cpp; not normalized, as there."""
    top = logits.max()
    low = max(logits.min(), top - 16)
    scale = np.float32((top - low) / 65535)
    steps = np.where(logits > low, np.rint((logits - low) / scale), 0)
    log_sum = np.log(np.exp(logits - top, dtype=np.float64).sum())
    return (scale * steps + np.float32(low - top - log_sum)).astype(np.float32)


def ours(
    base: Path, other: Path, text: str, comparer: type[RowComparer], cpus: tuple[int, ...]
) -> tuple[Summary, float]:
    """The summary, and tokens per second of both models together, without loading."""
    lockstep.RowComparer = comparer  # type: ignore[misc]
    start = Start(
        base=str(base), others=(str(other),), cpus=cpus, texts=(Text(kind="text", content=text),), n_ctx=N_CTX
    )
    times: list[float] = []

    class Timed(LineOutput):
        def send(self, answer: msgspec.Struct) -> None:
            times.append(time.perf_counter())
            super().send(answer)

    stream = io.BytesIO()
    with closing(Lockstep(start, Timed(stream))) as run:
        run.run()
    answers = [msgspec.json.decode(line, type=Answer) for line in stream.getvalue().splitlines()]
    scored = [(one, at) for one, at in zip(answers, times, strict=True) if isinstance(one, Scored)]
    # From the first window on: before it threads and caches are cold.
    rate = 2 * N_CTX * (len(scored) - 1) / (scored[-1][1] - scored[0][1]) if len(scored) > 1 else 0.0
    return summarize([scores_of(one) for one, _ in scored]), rate


def theirs(base: Path, other: Path, text: Path, threads: int) -> dict[str, float]:
    """What llama-perplexity prints."""
    kept = WORK / "base.kld"
    common = ["-c", str(N_CTX), "-t", str(threads), "--kl-divergence-base", str(kept)]
    program = str(tool("llama-perplexity"))
    _run([program, "-m", str(base), "-f", str(text), *common])
    printed = _run([program, "-m", str(other), *common, "--kl-divergence"])
    kept.unlink(missing_ok=True)
    found = {name: re.search(pattern, printed) for name, (pattern, _) in FIGURES.items()}
    missing = [name for name, match in found.items() if match is None]
    if missing:
        raise MeasureError(f"llama-perplexity prints no {', '.join(missing)}")
    return {name: float(match[1]) for name, match in found.items() if match}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise MeasureError(f"{command[0]} ended with {done.returncode}: {done.stdout[-400:]}")
    return done.stdout


def main() -> None:
    options = arguments(__doc__)
    where = machine()
    cpus = place(read_topology(), PlacementSpec()).cpus
    text = (prose() + "\n" + code()).strip()[: 6_000 if options.quick else None]
    file = WORK / "quality.txt"
    file.write_text(text, encoding="utf-8")
    base, rows, remarks = base_model(), [], []
    for kind in SMALLER[:1] if options.quick else SMALLER:
        other = smaller(kind)
        exact, _ = ours(base, other, text, RowComparer, cpus)
        stored, _ = ours(base, other, text, SixteenBits, cpus)
        peer = theirs(base, other, file, len(cpus))
        for name, (_, figure) in FIGURES.items():
            off = abs(figure(stored) / peer[name] - 1)
            note = f"{figure(stored):.5f}, llama-perplexity {peer[name]:.5f}, exact {figure(exact):.5f}"
            rows.append(Row(f"{kind} {name}: off by", "", [off], target=Target(ONE_PERCENT, False), note=note))
    rates = alternate(
        1 if options.quick else options.rounds or 5,
        {
            "quality": lambda: ours(base, smaller(SMALLER[0]), text[:12_000], RowComparer, cpus)[1],
            "prefills": lambda: ours(base, smaller(SMALLER[0]), text[:12_000], Skipping, cpus)[1],
        },
    )
    rows.append(Row("speed against the two prefills", "tok/s", rates["quality"], rates["prefills"], SPEED))
    remarks.append(f"{N_CTX} tokens a window; median {statistics.median(rates['quality']):.0f} tok/s of both models")
    report("quality", where, rows, quick=options.quick, remarks=remarks)


if __name__ == "__main__":
    run_main(main)
