"""What the sections of speculation.py share: loaded workers, the sides of a comparison in turn, and their figures."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from common import MeasureError, Row, alternate, say
from pairs import Shapes, Text
from product import GREEDY, PLAIN, Answer, answer, worker

from cpuchat.backend.local import LocalBackend
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.measure import store
from cpuchat.models.costs import ACCEPTED
from cpuchat.protocol.drafters import DrafterName
from cpuchat.protocol.messages import LoadOptions, Sampling, Speculation
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import SpeculationFigures

N_CTX = 2048
ADAPTIVE = Speculation(drafters=("draft",))


def adaptive(*drafters: DrafterName) -> Speculation:
    return Speculation(drafters=drafters)


def fixed(depth: int) -> Speculation:
    return Speculation(drafters=("draft",), depth=depth)


@dataclass(frozen=True)
class Setup:
    """How much is measured. `rounds`, `depths` (most fixed depths of a pair) 0: the section's choice; `quick`: only
    prove that it runs."""

    quick: bool
    rounds: int
    depths: int
    threads: int
    shapes: Shapes

    def choose(self, full: int, quick: int = 1) -> int:
        """Rounds: as asked for, else `full` or, in a quick run, `quick`."""
        return self.rounds or (quick if self.quick else full)


@dataclass
class Table:
    """Figures beside the judged rows."""

    title: str
    heads: Sequence[str]
    lines: list[list[str]] = field(default_factory=list)


@dataclass
class Section:
    """What one part of the benchmark found. `data` is for the file."""

    rows: list[Row] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


class Workers:
    """Worker processes that stay loaded for a whole comparison."""

    def __init__(self, runner: asyncio.Runner, stack: contextlib.AsyncExitStack, threads: int) -> None:
        self._runner = runner
        self._stack = stack
        self._threads = threads

    def load(
        self,
        model: Path,
        draft: Path | None = None,
        *,
        calibrate: bool = True,
    ) -> LocalBackend:
        """`calibrate`: adaptive depths need it, fixed ones do not.

        Raises:
            MeasureError: it did not load.
        """
        options = LoadOptions(
            n_ctx=N_CTX,
            draft_path=str(draft) if draft else "",
            calibrate=calibrate,
        )
        _forget_pairs()
        say(f"loading {model.name}" + (f" with {draft.name}" if draft else ""))
        spec = PlacementSpec(threads=self._threads)
        return self._runner.run(self._stack.enter_async_context(worker(model, options, spec)))

    def run(self, request: Any) -> Answer:
        """Wait for a coroutine of `product`."""
        return self._runner.run(request)


def _forget_pairs() -> None:
    """Begin each load with a pair about which nothing was learned, whatever ran before; its costs are kept."""
    for found in store.find_all(ACCEPTED, tuple[float, float]):
        store.forget(found.subject, ACCEPTED)


@contextlib.contextmanager
def workers(threads: int) -> Iterator[Workers]:
    """All workers that are loaded inside end with it."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            yield Workers(runner, stack, threads)
        finally:
            runner.run(stack.aclose())


@dataclass(frozen=True)
class Side:
    """One way to write the texts."""

    backend: LocalBackend
    speculation: Speculation = PLAIN
    sampling: Sampling = GREEDY


@dataclass
class Runs:
    """The answers of every side, by round; all wrote the same texts."""

    texts: Sequence[Text]
    answers: dict[str, list[Answer]]

    def rates(self, side: str) -> list[float]:
        return [done.rate for done in self.answers[side]]

    def ratios(self, side: str, to: str) -> list[float]:
        return [a / b for a, b in zip(self.rates(side), self.rates(to), strict=True)]

    def ratio(self, side: str, to: str = "plain") -> float:
        """Median over the rounds."""
        return statistics.median(self.ratios(side, to))

    def count(self) -> int:
        return sum(map(len, self.answers.values()))

    def wrong(self) -> int:
        """Answers that are not what the target is known to say (where that is not known: what plain decoding said)."""
        wrong = 0
        for side, answers in self.answers.items():
            for number, (text, done) in enumerate(zip(self.texts, answers, strict=True)):
                known = text.future_text if text.future else self.answers["plain"][number].text
                wrong += done.text != known
                if done.text != known:
                    say(f"  WRONG TEXT: {side}, round {number + 1}")
        return wrong


def compare(
    workers: Workers, sides: Mapping[str, Side], texts: Sequence[Text], n_tokens: int, *, to_the_end: bool = True
) -> Runs:
    """Every side writes every text, one text and one seed per round, in turn.

    `to_the_end` False: an answer may end before `n_tokens`.

    Raises:
        MeasureError: an answer failed, is too short or, of a side with drafters, has no figures of speculation.
    """
    runs = Runs(texts, {name: [] for name in sides})

    def once(name: str, side: Side) -> float:
        number = len(runs.answers[name])
        sampling = msgspec.structs.replace(side.sampling, seed=number + 1)
        prompt = texts[number].prompt_text
        workers.run(side.backend.forget(""))  # else drafts are copied from the answer of the side before
        done = workers.run(
            answer(
                side.backend,
                prompt,
                n_tokens,
                sampling=sampling,
                speculation=side.speculation,
                to_the_end=to_the_end,
            )
        )
        if side.speculation.drafters:
            figures(done)
        runs.answers[name].append(done)
        return done.rate

    alternate(len(texts), {name: (lambda name=name, side=side: once(name, side)) for name, side in sides.items()})
    return runs


def figures(done: Answer) -> SpeculationFigures:
    """Raises MeasureError when the worker sent none."""
    if done.timings.speculation is None:
        raise MeasureError("the answer has no figures of speculation")
    return done.timings.speculation


def model_info(backend: LocalBackend) -> ModelInfo:
    """Raises MeasureError when no model is loaded."""
    if backend.model is None:
        raise MeasureError("no model is loaded")
    return backend.model


def compared(found: SpeculationFigures, depth: int) -> int:
    """Drafted tokens that were held against the target in a whole answer at a fixed depth: those accepted, and one
    more for every pass that refused a token.

    The tokens after a wrong one tell nothing about the draft. A pass refused nothing when it accepted all `depth`
    tokens; so did the last one if it was shorter, or the answer would not have ended with it.
    """
    drafted, accepted = found.by_position[depth - 1] if len(found.by_position) >= depth else (0, 0)
    last_is_shorter = found.passes > drafted
    return found.draft_n_accepted + found.passes - accepted - last_is_shorter


def acceptance(answers: Iterable[Answer], depth: int) -> tuple[int, int]:
    """Accepted and compared tokens of answers at this fixed depth."""
    found = [figures(done) for done in answers]
    return sum(one.draft_n_accepted for one in found), sum(compared(one, depth) for one in found)


def tokens_per_pass(answers: Iterable[Answer]) -> float:
    """Tokens after the first (which comes out of reading the prompt) per evaluation of the target."""
    steps = [(one.timings.predicted_n - 1, figures(one).passes) for one in answers]
    # No passes are counted where drafting was left alone from the start: that is plain decoding.
    return sum(tokens for tokens, _ in steps) / max(sum(passes or tokens for tokens, passes in steps), 1)


def draft_token_ms(done: Answer) -> float:
    """What verification waited for a drafted token, on average."""
    found = figures(done)
    return found.draft_ms / max(found.draft_n, 1)
