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
from functools import partial
from math import inf
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import RESULTS, arguments, run_main, table

from cpuchat.speculation.depth.constants import CONSTANTS
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.depth.costs import PassCosts
from tests.speculation.depth.simulator import (
    AMX,
    TARGETS,
    Noise,
    adaptive_answer,
    best_fixed,
    bursty,
    draft_traces,
    miscalibrated,
    oracle_answer,
    real_texts,
    text,
    text_answer,
    true_costs,
)

RATES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
STRETCHES = (((0.95, 0.3), 32), ((0.9, 0.1), 64))
LENGTHS = (41, 129, 257)
CURVES = (*TARGETS, "recorded Q4_K_M", "recorded Q8_0", "recorded F16", AMX)
AFTER_READ = 0.1
"""The plain step after a shadow draft is slower by this share: paired answers of 41 tokens lost one
token to shadow drafting, three times what its own time explains."""
PAYS = 1.02
"""Gain of the best fixed depth from which drafting pays in a cell."""


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


# --- free drafters --------------------------------------------------------------------------------------------------


def free_lines(curves: Iterable[str]) -> list[list[str]]:
    """Real texts with the free drafters: adaptive, the best fixed depth and the oracle, against plain decoding."""
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
