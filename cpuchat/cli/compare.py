"""`cpuchat compare`: one prompt, two models or one with two settings, side by side."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuchat.cli.options import file_option, overridden, setting
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import Terminal, paragraph
from cpuchat.errors import CpuchatError, Interrupted, UsageError, from_code
from cpuchat.files import write_atomically
from cpuchat.hardware.topology import read_topology
from cpuchat.models.library.library import Library
from cpuchat.present.table import table
from cpuchat.protocol import LoadProgress, PrefillProgress, TextDelta

if TYPE_CHECKING:
    from cpuchat.compare.comparison import Comparison
    from cpuchat.compare.side import Side
    from cpuchat.protocol import AnyEvent
    from cpuchat.settings import Settings

_SAMPLE_SECONDS = 0.5
_EPILOG = f"""\b
Examples:
  cpuchat compare demo demo-q4                              in the app
  cpuchat compare demo demo-q4 "What is quantization?"      both answers, the table and why
  cpuchat compare owner/repo:Q8_0 owner/repo:Q4_K_M --rounds 3 --export report.md "Hello"
  cpuchat compare demo,threads=1 demo,threads=2 "Hello"
  cpuchat compare demo demo,drafters=draft --json "Hello"

A and B are values for --model, each optionally followed by its own settings: drafters, draft-model, draft-depth,
threads, cores, memory, kv (cache type), flash-attn, temperature. Both answer greedily and without drafters unless their
settings say otherwise. One answers after the other, each on the whole machine; where memory is too small for both, they
are loaded in turn. Each round swaps the order; from three rounds on, medians and ranges are shown.

Exit codes: 0 both answered, 2 wrong usage or settings, 3 no such model, {Interrupted.exit_code} stopped by Ctrl+C;
if one side failed, its exit code as in `cpuchat ask --help`, and the other side is still shown."""


@click.command(epilog=_EPILOG, short_help="Compare two models, or two settings, on one prompt.")
@click.argument("a")
@click.argument("b")
@click.argument("prompt", nargs=-1)
@click.option(
    "--concurrent", is_flag=True,
    help="Race: both answer at the same time, each on half of the cores, sharing the memory bus.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1, 100), default=1, metavar="N", help="Rounds, 1 to 100. Default: 1.")
@setting("--max-tokens", "chat.max_tokens", "Stop after N tokens; 0 = no limit.")
@click.option("--system", metavar="TEXT", help="System prompt; empty = none.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when all rounds are complete.")
@file_option("--export", help="Write a Markdown report.")
def compare(
    a: str,
    b: str,
    prompt: tuple[str, ...],
    concurrent: bool,
    rounds: int,
    system: str | None,
    as_json: bool,
    export: Path | None,
    **values: Any,
) -> int:
    """Let A and B answer the same prompt, and say which is faster and why.

    PROMPT may also come from standard input. Without one, the app opens on the comparison.
    """
    from cpuchat.cli.question import compose, standard_input
    from cpuchat.compare.side import parse_side

    chosen = overridden(values)
    if system is not None:
        chosen.chat.system_prompt = system
    library = Library(chosen.model.folders)
    sides = parse_side(a, library.resolve), parse_side(b, library.resolve)
    for side in sides:
        side.settings(chosen)  # refuses wrong values before anything is loaded
    text = " ".join(prompt)
    if not text and sys.stdin is not None and sys.stdin.isatty():
        if as_json or export is not None or rounds > 1 or concurrent:
            raise UsageError("No prompt given.", 'Give one, as in: cpuchat compare demo demo-q4 "Hello".')
        from cpuchat.cli.app import open_app

        return open_app(None, values, sides=sides)
    text = compose(text, standard_input(as_json), raw=False)
    terminal = Terminal(quiet=as_json)
    return asyncio.run(_Run(sides, chosen, terminal, stream=not (as_json or concurrent)).run(
        text, rounds, race=concurrent, as_json=as_json, export=export
    ))  # fmt: skip


class _Run:
    """All rounds of one prompt."""

    def __init__(self, sides: tuple[Side, Side], settings: Settings, terminal: Terminal, *, stream: bool) -> None:
        from cpuchat.compare.comparison import Comparison

        self._comparison: Comparison = Comparison(sides, settings, library=Library(settings.model.folders))
        self._comparison.tell = self._show
        self._terminal = terminal
        self._stream = stream
        self._shown: int | None = None  # whose text is being printed
        self._interrupts = 0
        self._stopping: asyncio.Task[None] | None = None

    async def run(self, prompt: str, rounds: int, *, race: bool, as_json: bool, export: Path | None) -> int:
        comparison = self._comparison
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        watching = asyncio.ensure_future(self._watch())
        try:
            await comparison.ask(prompt, race=race)
            self._end_text()
            self._stream = False
            for _ in range(1, rounds):
                if not comparison.stopped and comparison.turns[-1].rounds[-1].complete:
                    await comparison.repeat(race=race)
        finally:
            watching.cancel()
            self._terminal.clear_progress()
            loop.remove_signal_handler(signal.SIGINT)
            await comparison.close()
        self._print(as_json, streamed=not race)
        if export is not None:
            _export(comparison, export)
        if comparison.stopped:
            return Interrupted.exit_code
        return self._failure()

    async def _watch(self) -> None:
        """Read the counters of energy and memory traffic while one side answers."""
        from cpuchat.hardware.monitor import Monitor

        comparison = self._comparison
        if not comparison.runners[0].settings.hardware.counters:
            return
        monitor = await asyncio.to_thread(lambda: Monitor(read_topology()))
        try:
            while True:
                sample = await asyncio.to_thread(monitor.sample)
                if len(comparison.writing) == 1:
                    (side,) = comparison.writing
                    comparison.runners[side].conversation.meter.machine(sample)
                await asyncio.sleep(_SAMPLE_SECONDS)
        finally:
            monitor.close()

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            for runner in self._comparison.runners:
                runner.conversation.backend.kill()
        self._stopping = asyncio.ensure_future(self._comparison.stop())

    def _show(self, side: int, event: AnyEvent) -> None:
        name = f"{'AB'[side]} {self._comparison.names[side]}"
        match event:
            case TextDelta() if self._stream:
                if self._shown != side:
                    self._end_text()
                    self._terminal.line(f"── {name} ──")
                    self._shown = side
                if event.channel == "reasoning":
                    self._terminal.reasoning(event.text)
                else:
                    self._terminal.answer(event.text)
            case TextDelta():
                number = len(self._comparison.turns[-1].rounds)
                self._terminal.status(f"round {number} · {name} · {event.predicted_n:,} tokens")
            case LoadProgress() | PrefillProgress():
                self._terminal.progress(event)
            case _:
                pass

    def _end_text(self) -> None:
        if self._shown is not None:
            self._terminal.end_answer()
            self._terminal.line()
        self._shown = None

    def _print(self, as_json: bool, *, streamed: bool) -> None:
        from cpuchat.compare.figures import figures_of
        from cpuchat.present import compare as words

        comparison, terminal = self._comparison, self._terminal
        if as_json:
            terminal.line(json_line(words.as_json(comparison)))
            return
        turn = comparison.turns[-1]
        if not streamed and turn.rounds:
            for letter, name, answer in zip("AB", comparison.names, turn.rounds[0].answers, strict=True):
                terminal.line(f"── {letter} {name} ──")
                terminal.answer(answer.content)
                terminal.end_answer()
                terminal.line()
        figures = figures_of(turn.comparable() or turn.rounds[-1:])
        for line in table(words.rows(figures, comparison.names), right=(1, 2, 3)):
            terminal.line(line)
        terminal.line()
        for sentence in words.sentences(comparison, turn):
            for line in paragraph(sentence):
                terminal.line(line)

    def _failure(self) -> int:
        """Return the exit code of the first side that failed."""
        answers = self._comparison.turns[-1].rounds[-1].answers
        failed = next((answer.failed for answer in answers if answer.failed is not None), None)
        return from_code(failed.code, failed.message, failed.hint).exit_code if failed is not None else 0


def _export(comparison: Comparison, file: Path) -> None:
    from cpuchat.present.compare_export import markdown

    try:
        write_atomically(file, markdown(comparison), mode=0o644)
    except OSError as error:
        raise CpuchatError(f"Cannot write {file}: {error.strerror}.", "Choose another file.") from None
