"""Scores the depth controller in simulated time: its speed against the best fixed depth and against plain decoding.

Nothing is measured: the times of passes and the acceptance are known (tests/speculation/depth/simulator.py), only the
controller is real. Two tables: every cell (pass times of a quantization, text, length of the answers), and what each
part of the controller is worth (--ablate).

    python benchmarks/simulate.py [--quick] [--rounds CHATS] [--ablate] [--cells] [--jobs N]

2 minutes for the cells on two cores, 15 with --ablate.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import RESULTS, arguments, run_main, table

from cpuchat.costs.calibrations import PassCosts, interpolate
from cpuchat.speculation.depth.constants import CONSTANTS
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Proposal
from cpuchat.speculation.drafters.suffix import NgramIndex, ScoredDrafter, SuffixDecoding
from cpuchat.speculation.stats import PassRecord
from tests.speculation.depth.simulator import (
    DRAFTS,
    TARGETS,
    Noise,
    adaptive_answer,
    best_fixed,
    miscalibrated,
    text,
    verified,
)
from tests.speculation.depth.simulator import true_costs as costs_of_target

AMX = "AMX"
"""Not recorded: a matrix unit that takes 16 rows at a time, so that a pass costs little more up to 16 tokens."""
_AMX = (20.0, {1: 1, 2: 1.04, 4: 1.08, 8: 1.15, 16: 1.30, 17: 1.9, 24: 2.05, 32: 2.2})

RATES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
STRETCHES = (((0.95, 0.3), 32), ((0.9, 0.1), 64))
LENGTHS = (41, 129, 257)
CURVES = (*TARGETS, "recorded Q4_K_M", "recorded Q8_0", "recorded F16", AMX)
AFTER_READ = 0.1
"""The plain step after a shadow draft is slower by this share: paired answers of 41 tokens lost one
token to shadow drafting, three times what its own time explains."""
PAYS = 1.02
"""Gain of the best fixed depth from which drafting pays in a cell."""


def true_costs(target: str, draft: str | None) -> PassCosts:
    """Return the costs of one of `CURVES` with one of `DRAFTS`: "recorded …" is of results/speculation.json."""
    draft_ms, read_ms = DRAFTS[draft] if draft else (0.0, 0.0)
    if target.startswith("recorded "):
        return PassCosts(_recorded()[target.removeprefix("recorded ")], draft_ms, read_ms)
    if target == AMX:
        t1, shape = _AMX
        return PassCosts(interpolate({n: t1 * ratio for n, ratio in shape.items()}), draft_ms, read_ms)
    return costs_of_target(target, draft)


@cache
def _recorded() -> dict[str, tuple[float, ...]]:
    results = json.loads((RESULTS / "speculation.json").read_text())
    return {one["quantization"]: tuple(one["pass_ms"]) for one in results["sections"]["adaptive"]["data"]["pairs"]}


@cache
def draft_traces() -> dict[str, list[list[bool]]]:
    """Recorded answers by name: whether the draft model says each token too (benchmarks/record_traces.py)."""
    traces = json.loads((Path(__file__).with_name("traces.json")).read_text())["draft"]
    return {name: [[c == "1" for c in answer] for answer in answers] for name, answers in traces.items()}


@cache
def real_texts() -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and answer of real texts by name, as token ids."""
    texts = json.loads((Path(__file__).with_name("traces.json")).read_text())["texts"]
    return {name: (one["prompt"], one["answer"]) for name, one in texts.items()}


def bursty(rng: random.Random, rates: Sequence[float], stretch: int, n: int) -> list[bool]:
    """The same with a rate that changes every `stretch` tokens, as where code and prose alternate."""
    return [rng.random() < rates[i // stretch % len(rates)] for i in range(n)]


def _scored(worth: Callable[[Proposal], int], prompt: Sequence[int]) -> ScoredDrafter:
    index = NgramIndex()
    index.set_text(prompt)
    return ScoredDrafter(index, SuffixDecoding(index), worth)


def _hits(tokens: Sequence[int], written: Sequence[int]) -> int:
    return next(
        (j for j, (a, b) in enumerate(zip(tokens, written, strict=False)) if a != b), min(len(tokens), len(written))
    )


def text_answer(
    worth: Callable[[Proposal], int],
    costs: PassCosts,
    prompt: Sequence[int],
    text: Sequence[int],
    controller: DepthController | None = None,
    noise: Noise | None = None,
) -> float:
    """Return the ms to write a real text with suffix decoding, as deep as `worth` or a controller decides."""
    noise, ms, at = noise or Noise(), 0.0, 0
    scored = _scored(controller.free_depth if controller else worth, prompt)
    if controller:
        controller.begin_answer()
    while at < len(text):
        proposal = scored.propose(min(MAX_DEPTH, len(text) - at - 1)) if at < len(text) - 1 else Proposal("suffix")
        accepted = _hits(proposal.tokens, text[at:])
        took = costs.verify_ms[len(proposal)]
        ms += took
        if controller:
            controller.record(verified(proposal, accepted, noise(took)) if proposal else PassRecord(noise(took)))
        scored.append(text[at : at + accepted + 1])
        for buckets, right in scored.take_scores():
            if controller:
                controller.record_scores("suffix", buckets, right)
        at += accepted + 1
    return ms


def oracle_answer(costs: PassCosts, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Return the ms of one who knows which proposed tokens are right and verifies exactly these, where it pays."""
    at = 0

    def worth(proposal: Proposal) -> int:
        right = _hits(proposal.tokens, text[at:])
        return max(range(right + 1), key=lambda n: n + 1 - costs.verify_ms[n] / costs.verify_ms[0])

    scored, ms = _scored(worth, prompt), 0.0
    while at < len(text):
        n = len(scored.propose(min(MAX_DEPTH, len(text) - at - 1))) if at < len(text) - 1 else 0
        ms += costs.verify_ms[n]
        scored.append(text[at : at + n + 1])
        scored.take_scores()
        at += n + 1
    return ms


@dataclass(frozen=True)
class Case:
    """Chats over one kind of text. `name`: an acceptance rate, the index of `STRETCHES`, or a recorded trace."""

    curve: str
    draft: str
    name: float | int | str
    n: int
    busy: bool
    chats: int

    @property
    def title(self) -> str:
        if isinstance(self.name, int):
            (easy, hard), length = STRETCHES[self.name]
            return f"stretches of {length}, α {easy} and {hard}, {self.n}"
        return self.name if isinstance(self.name, str) else f"α {self.name:g}, {self.n}"

    def write(self, rng: random.Random) -> list[bool]:
        """Return the next text: whether the draft model is right at each position."""
        if isinstance(self.name, str):
            return rng.choice([one for one in draft_traces()[self.name] if len(one) > 32])
        if isinstance(self.name, int):
            rates, length = STRETCHES[self.name]
            return bursty(rng, rates, length, self.n)
        return text(rng, self.name, self.n)


@dataclass
class Speed:
    """Times in ms: of the controller, at the best fixed depth of all these answers, and plain."""

    ms: float
    fixed: float
    plain: float

    @property
    def of_best(self) -> float:
        return self.fixed / self.ms

    @property
    def of_plain(self) -> float:
        return self.plain / self.ms


@dataclass
class Cell:
    """The first answer of a new pair, those after it, and the first after a restart."""

    case: Case
    first: Speed
    later: Speed
    restarted: Speed

    @property
    def pays(self) -> bool:
        """Whether any fixed depth is clearly faster than plain decoding."""
        return self.later.plain / self.later.fixed > PAYS


def score(case: Case) -> Cell:
    """Chats of a first answer, a few more, and one after a restart. `busy`: times scatter, pause, and were calibrated
    under other conditions."""
    costs = true_costs(case.curve, case.draft)
    answers: list[list[tuple[list[bool], float]]] = [[], [], []]
    for seed in range(case.chats):
        rng = random.Random(7919 * seed)
        noise = Noise(random.Random(seed), 0.07, 0.03) if case.busy else None
        calibrated = miscalibrated(costs, rng, 0.15, 0.05) if case.busy else costs
        one = DepthController(calibrated, has_draft_model=True)
        for turn in range(9 if case.n == 41 else 4):
            right = case.write(rng)
            took = adaptive_answer(one, costs, right, noise, after_read=AFTER_READ).ms
            answers[min(turn, 1)].append((right, took))
        one = DepthController(calibrated, has_draft_model=True, known=one.learned)
        right = case.write(rng)
        answers[2].append((right, adaptive_answer(one, costs, right, noise, after_read=AFTER_READ).ms))
    return Cell(case, *(_speed(costs, done) for done in answers))


def _speed(costs: PassCosts, done: Sequence[tuple[list[bool], float]]) -> Speed:
    texts = [right for right, _ in done]
    plain = sum(map(len, texts)) * costs.verify_ms[0]
    return Speed(sum(ms for _, ms in done), best_fixed(costs, texts)[0], plain)


def cases(curves: Iterable[str], draft: str, busy: bool, chats: int, lengths: Sequence[int] = LENGTHS) -> list[Case]:
    """Every text of every length for each curve."""
    names: list[float | int] = [*RATES, *range(len(STRETCHES))]
    found = []
    for curve in curves:
        found += [Case(curve, draft, name, n, busy, chats) for n in lengths for name in names]
        found += [Case(curve, draft, name, 0, busy, chats) for name in draft_traces()]
    return found


HEADS = (
    "times", "cells", "α: mean", "worst", "first answer", "stretches", "recorded: mean", "worst",
    "cannot pay, of plain", "first answer", "after a restart", "41 tokens", "41, first", "α: after a restart",
)  # fmt: skip


def summary(name: str, cells: Sequence[Cell]) -> list[str]:
    """One line: speed relative to the best fixed depth, and to plain decoding where no depth pays."""
    alphas = [one for one in cells if isinstance(one.case.name, float) and one.case.n != 41]
    stretches = [one.later.of_best for one in cells if isinstance(one.case.name, int)]
    recorded = [one.later.of_best for one in cells if isinstance(one.case.name, str)]
    idle = [one for one in cells if not one.pays]
    long, short = [one for one in idle if one.case.n != 41], [one for one in idle if one.case.n == 41]
    figures = (
        statistics.fmean(one.later.of_best for one in alphas), min(one.later.of_best for one in alphas),
        statistics.fmean(one.first.of_best for one in alphas),
        statistics.fmean(stretches or [inf]), statistics.fmean(recorded or [inf]), min(recorded, default=inf),
        min((one.later.of_plain for one in long), default=inf), min((one.first.of_plain for one in long), default=inf),
        min((one.restarted.of_plain for one in long), default=inf),
        min((one.later.of_plain for one in short), default=inf),
        min((one.first.of_plain for one in short), default=inf),
        statistics.fmean(one.restarted.of_best for one in alphas),
    )  # fmt: skip
    return [name, str(len(cells)), *("–" if figure == inf else f"{figure:.3f}" for figure in figures)]


def cell_line(one: Cell) -> list[str]:
    speeds = (one.later.of_best, one.later.of_plain, one.first.of_best, one.first.of_plain, one.restarted.of_best)
    return [one.case.curve, one.case.title, *(f"{speed:.3f}" for speed in speeds)]


CELL_HEADS = ("times", "text", "of best", "of plain", "first, of best", "first, of plain", "restarted, of best")


# --- what each part is worth ----------------------------------------------------------------------------------------

Change = Callable[[], None]


def _set(**values: object) -> Change:
    def change() -> None:
        for name, value in values.items():
            getattr(CONSTANTS, name)
            object.__setattr__(CONSTANTS, name, value)  # frozen for all but this process of one ablation

    return change


ABLATIONS: dict[str, Change] = {
    "all parts": lambda: None,
    "no budget": _set(budget_start=1e6, max_budget=1e6, budget_share=1.0),
    "nothing for a new pair": _set(budget_start=0.0, budget_loan=0.0),
    "no loan for shadow drafting": _set(budget_loan=0.0),
    "gains fill the budget to one step only": _set(max_budget=1.0),
    "bad luck leaves a debt": _set(min_budget=-1e6),
    "what a draft accepted is booked": _set(expected_share=0.0),
    "what a draft promised is booked": _set(expected_share=1.0),
    "nothing kept of the last answer": _set(max_tokens_kept=0.0),
    "all texts count alike": _set(draft_window_tokens=1000.0, max_tokens_kept=1000.0),
    "losses and shadow drafting do not shorten the memory": _set(max_tokens_after_loss=inf),
    "every loss shortens it": _set(max_gain_before_loss=0.0),
    "costs as calibrated": _set(follow_share=0.0, quick_follow_share=0.0),
}


def ablation(name: str, listed: Sequence[Case]) -> list[str]:
    """One line of the table, in a process of its own."""
    ABLATIONS[name]()
    return summary(name, [score(case) for case in listed])


# --- suffix decoding --------------------------------------------------------------------------------------------------


def free_lines(curves: Iterable[str]) -> list[list[str]]:
    """Real texts with suffix decoding: adaptive, the best fixed depth and the oracle, against plain decoding."""
    lines = []
    for curve in curves:
        costs = true_costs(curve, None)
        for name, (prompt, answer) in real_texts().items():
            plain = len(answer) * costs.verify_ms[0]
            one = DepthController(costs, has_draft_model=False)
            times = (
                text_answer(len, costs, prompt, answer, one),
                min(
                    text_answer(lambda offer, d=d: min(d, len(offer)), costs, prompt, answer)
                    for d in (0, 1, 2, 3, 5, 7, 11, 15, 23, 31)
                ),
                oracle_answer(costs, prompt, answer),
            )
            lines.append([curve, name, *(f"{plain / ms:.2f}×" for ms in times)])
    return lines


FREE_HEADS = ("times", "text", "adaptive", "best fixed depth", "oracle")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--curves", default=",".join(CURVES))
    parser.add_argument("--draft", default="0.05B")
    parser.add_argument("--ablate", action="store_true", help="what each part of the controller is worth")
    parser.add_argument("--cells", action="store_true", help="show every cell")
    parser.add_argument("--jobs", type=int, default=2)


def main() -> None:
    options = arguments(__doc__, _options)
    chats = options.rounds or (1 if options.quick else 4)
    curves = options.curves.split(",")
    # Each ablation changes the modules of a process of its own.
    tasks = 1 if options.ablate else None
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), max_tasks_per_child=tasks) as pool:
        if options.ablate:
            listed = [one for busy in (False, True) for one in cases(TARGETS, options.draft, busy, chats, (41, 129))]
            lines = list(pool.map(partial(ablation, listed=listed), ABLATIONS))
            print(table(lines, HEADS))
            return
        lines, cells = [], []
        for busy in (False, True):
            listed = cases(curves, options.draft, busy, chats)
            found = list(pool.map(score, listed, chunksize=4))
            for curve in curves:
                name = f"{curve}, {'noisy' if busy else 'exact'}"
                lines.append(summary(name, [one for one in found if one.case.curve == curve]))
            lines.append(summary(f"all, {'noisy' if busy else 'exact'}", found))
            cells += found
    print(table(lines, HEADS))
    if options.cells:
        print(table([cell_line(one) for one in cells], CELL_HEADS))
    print(table(free := free_lines(curves), FREE_HEADS))
    if not options.quick:
        content = {"summary": [HEADS, *lines], "cells": [cell_line(one) for one in cells], "free": free}
        (RESULTS / "simulate.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_main(main)
