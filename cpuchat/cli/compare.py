"""`cpuchat compare` and `cpuchat quality`: two models or settings side by side, and what smaller files lose."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from cpuchat.base.errors import CpuchatError, Disturbed, Interrupted, UsageError, from_code
from cpuchat.cli.completion import MODEL
from cpuchat.cli.options import file_option, overridden, setting, tell_choice
from cpuchat.cli.output import is_terminal, json_line, print_json
from cpuchat.cli.question import TextCommand, compose, file_text, standard_input
from cpuchat.cli.terminal import TerminalOutput, paragraph
from cpuchat.config.settings import Settings
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.models.library.library import Library
from cpuchat.present import quality as words
from cpuchat.present.table import table
from cpuchat.protocol.messages import AnyEvent, GenerationFinished, LoadProgress, PrefillProgress, TextDelta
from cpuchat.quality.measure import QualityMeasurement
from cpuchat.quality.messages import Text
from cpuchat.telemetry.units import plural, time_left

if TYPE_CHECKING:
    from cpuchat.compare.runner import Side


_EPILOG = """\b
Examples:
  cpuchat compare demo demo-q4                              in the app
  cpuchat compare demo demo-q4 "What is quantization?"      answers and why
  cpuchat compare qwen:q8_0 qwen:q4_k_m --rounds 3 "Hello" > report.txt
  cpuchat compare demo,threads=1 demo,threads=2 "Hello"

A and B are values for --model, each optionally followed by its own settings: drafters, draft-model, draft-depth,
threads, cores, memory-policy, kv (cache type), flash-attn, temperature; else both answer greedily without drafters, one
after the other. Each round swaps the order; from three rounds on, medians and ranges are shown. Then each side predicts
both answers: how many of A's words B would have written. Exit code 27, verdict.caveat in --json: no verdict, because
other programs were using the cores."""


@click.command(cls=TextCommand, n_before=2, epilog=_EPILOG)
@click.argument("a", type=MODEL)
@click.argument("b", type=MODEL)
@click.argument("prompt", nargs=-1)
@click.option("--rounds", type=click.IntRange(1, 100), default=1, metavar="N", help="Rounds. Default: 1.")
@setting("chat.max_tokens")
@click.option("--no-agreement", is_flag=True, help="Do not let each side predict both answers, token by token.")
@click.option("--system", metavar="TEXT", help="System prompt; empty = none.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when all rounds are complete.")
def compare(
    a: str, b: str, prompt: tuple[str, ...], rounds: int, no_agreement: bool, system: str | None, as_json: bool,
    **values: Any,
) -> int:  # fmt: skip
    """Let A and B answer the same prompt, and say which is faster and why.

    PROMPT may also come from standard input. Without one, the app opens on the comparison."""
    from cpuchat.compare.runner import parse_side

    chosen = overridden(values)
    if system is not None:
        chosen.chat.system_prompt = system
    resolve = functools.partial(Library(chosen.model.folders).resolve, tell=tell_choice)
    sides = parse_side(a, resolve), parse_side(b, resolve)
    for side in sides:
        side.settings(chosen)  # refuses wrong values before anything is loaded
    text = " ".join(prompt)
    if not text and is_terminal(sys.stdin):
        if as_json or rounds > 1:
            raise UsageError("No prompt given.", 'Give one, as in: cpuchat compare demo demo-q4 "Hello".')
        from cpuchat.cli.app import open_app

        return open_app(None, values, sides=sides)
    text = compose(text, standard_input(as_json), raw=False)
    running = ComparisonRun(sides, chosen, rounds, as_json=as_json)
    code = asyncio.run(running.run(text, agrees=not no_agreement))
    noisy = running.show()
    return code or noisy


class ComparisonRun:
    """All rounds of one prompt."""

    def __init__(self, sides: tuple[Side, Side], settings: Settings, rounds: int, *, as_json: bool) -> None:
        from cpuchat.compare.comparison import Comparison

        self._rounds, self._as_json = rounds, as_json
        self._comparison = Comparison(sides, settings, library=Library(settings.model.folders))
        self._comparison.tell = self._show
        self._terminal = TerminalOutput(quiet=as_json)
        self._stream = not as_json
        self._shown: int | None = None  # whose text is being printed

    async def run(self, prompt: str, *, agrees: bool) -> int:
        """Returns the exit code."""
        from cpuchat.cli.session import each_interrupt, workers_stop_too

        comparison = self._comparison
        try:
            with each_interrupt(self._interrupt), workers_stop_too(*comparison.conversations):
                await comparison.ask(prompt)
                self._end_text()  # of a side that failed
                self._stream = False
                for _ in range(1, self._rounds):
                    if not comparison.stopped and comparison.turns[-1].rounds[-1].complete:
                        await comparison.repeat()
                if agrees and not comparison.stopped and comparison.turns[-1].rounds[-1].complete:
                    self._began = monotonic()
                    with contextlib.suppress(CpuchatError):  # the comparison says why
                        await comparison.agree(self._show_agreement)
                await comparison.learn_files()
        finally:
            self._terminal.clear_progress()
            await comparison.close()
        if comparison.stopped:
            return Interrupted.exit_code
        answers = comparison.turns[-1].rounds[-1].answers
        failed = next((answer.failed for answer in answers if answer.failed is not None), None)
        return from_code(failed.code, failed.message, failed.hint).exit_code if failed is not None else 0

    def _interrupt(self, presses: int) -> None:
        from cpuchat.cli.session import begin

        if presses > 1:
            for runner in self._comparison.runners:
                runner.conversation.backend.kill()
        begin(self._comparison.stop())

    def _show(self, side: int, event: AnyEvent) -> None:
        name = f"{'AB'[side]} {self._comparison.names[side]}"
        match event:
            case TextDelta():
                if self._stream:
                    self._print(side, name, event)
                if not (self._stream and is_terminal(sys.stdout)):
                    number, left = len(self._comparison.turns[-1].rounds), self._comparison.seconds_left(self._rounds)
                    said = f"round {number} of {self._rounds} · {name} · {plural(event.predicted_n, 'token')}"
                    self._terminal.status(said if left is None else f"{said} · {time_left(left)}")
            case GenerationFinished():
                self._end_text()  # before the progress of the other side takes its last line
            case LoadProgress() | PrefillProgress():
                meter = self._comparison.runners[side].conversation.meter
                self._terminal.progress(event, meter.prefill_left_s())

    def _print(self, side: int, name: str, event: TextDelta) -> None:
        if self._shown != side:
            self._end_text()
            self._terminal.line(f"── {name} ──")
            self._shown = side
        if event.channel == "reasoning":
            self._terminal.reasoning(event.text)
        else:
            self._terminal.answer(event.text)

    def _show_agreement(self, share: float) -> None:
        left = (monotonic() - self._began) * (1 / share - 1)
        self._terminal.status(f"each side reads both answers · {100 * share:.0f} % · {time_left(left)}")

    def _end_text(self) -> None:
        if self._shown is not None:
            self._terminal.end_answer()
            self._terminal.line()
        self._shown = None

    def show(self) -> int:
        """Print what was measured; returns the exit code where other programs disturbed it, else 0."""
        from cpuchat.compare.figures import MIN_ROUNDS, figures_of
        from cpuchat.present import compare as words

        comparison, terminal = self._comparison, self._terminal
        turn = comparison.turns[-1]
        figures = figures_of(turn.counted())
        found = figures.verdict
        is_short = found.kind == "noisy" and found.n_rounds < min(len(turn.rounds), MIN_ROUNDS)  # of quiet rounds
        code = Disturbed.exit_code if found.kind == "disturbed" or is_short else 0
        if self._as_json:
            terminal.line(json_line(words.as_json(comparison)))
            return code
        above, below = words.sentences(comparison, turn)
        rows = [*table(words.rows(figures, comparison.names), right=(1, 2, 3)), ""] if figures.rows else []
        said = [[line for sentence in part for line in paragraph(sentence)] for part in (above, below)]
        lines = [*said[0], *rows, *said[1]]
        if turn.agreement is not None:
            lines += [f"  {line}" for line in words.places(turn.agreement, comparison.names)]
        if (choice := words.choice(comparison, turn)) is not None:
            lines += ["", *(line for one in choice[1] for line in paragraph(one))]
        for line in lines:
            terminal.line(line)
        return code


_MAX_TEXT = 64 << 20
_QUALITY_EPILOG = """\b
Examples:
  cpuchat quality big-F16.gguf big-Q4_K_M.gguf --text notes.txt

BASE and OTHER are values for --model; BASE is the best file of the model that you have. All must have the same
vocabulary. Both models read the same windows of text, and their predictions of each next token are compared.
Ctrl+C stops and prints the estimate so far; the same command resumes."""


@click.command("quality", epilog=_QUALITY_EPILOG)
@click.argument("base", type=MODEL)
@click.argument("others", nargs=-1, required=True, type=MODEL, metavar="OTHER...")
@file_option("--text", "text", help="Measure on this text (UTF-8); default: built-in prose, code and dialogue.")
@setting("engine.threads")
@setting("engine.cores")
@setting("engine.memory_policy")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def quality(base: str, others: tuple[str, ...], text: Path | None, as_json: bool, **values: Any) -> int:
    """Measure the quality loss of quantized models: how often OTHER predicts the same next token as BASE, and how far
    their distributions diverge (KLD)."""
    chosen = overridden(values)
    resolve = functools.partial(Library(chosen.model.folders).resolve, tell=tell_choice)
    texts = () if text is None else (Text(kind="text", content=file_text(text, _MAX_TEXT)),)
    measurement = QualityMeasurement(resolve(base), [resolve(other) for other in others], texts)
    terminal, stopped = TerminalOutput(quiet=as_json), False
    placement = place(read_topology(), PlacementSpec.of(chosen))
    try:
        asyncio.run(measurement.run(placement, lambda _: terminal.status(words.status(measurement))))
    except KeyboardInterrupt:
        stopped = True
    finally:
        terminal.clear_progress()
    if as_json:
        print_json(words.as_json(measurement))
    else:
        for line in words.report(measurement):
            terminal.line(line)
    if stopped:
        terminal.warn("cpuchat: stopped; the same command resumes.")
        return Interrupted.exit_code
    return 0
