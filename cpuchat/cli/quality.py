"""`cpuchat quality`: what smaller files of a model cost."""

from __future__ import annotations

import asyncio
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpuchat import paths
from cpuchat.cli.options import cores_option, file_option, memory_option, overridden, stacked, threads_option
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import Terminal
from cpuchat.errors import Interrupted, MeasureFailed, UsageError, VocabularyMismatch
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.models.library.library import Library
from cpuchat.paths import read_text, shown
from cpuchat.present import quality as words
from cpuchat.present.quality import status
from cpuchat.present.table import table

if TYPE_CHECKING:
    from cpuchat.quality.flips import Answered, Flips
    from cpuchat.quality.measure import QualityMeasurement
    from cpuchat.quality.questions import Question
    from cpuchat.settings import Settings

_MAX_TEXT = 64 << 20
_EPILOG = f"""\b
Examples:
  cpuchat quality demo demo-q4
  cpuchat quality owner/repo:Q8_0 owner/repo:Q6_K owner/repo:Q4_K_M
  cpuchat quality big-F16.gguf big-Q4_K_M.gguf --text notes.txt
  cpuchat quality big-Q8_0.gguf big-Q4_K_M.gguf --questions built-in

BASE and OTHER are values for --model; BASE is the best file of the model that you have. All must have the same
vocabulary. Both models read the same windows of text, and their predictions of each next token are compared.
Ctrl+C stops and prints the estimate so far; the same command resumes.

Exit codes: 2 wrong usage or settings, 3 no such model, 5 not enough memory, {MeasureFailed.exit_code} not measured,
{VocabularyMismatch.exit_code} different vocabularies, {Interrupted.exit_code} stopped by Ctrl+C."""


@click.command("quality", epilog=_EPILOG)
@click.argument("base")
@click.argument("others", nargs=-1, required=True, metavar="OTHER...")
@file_option("--text", "text", help="Measure on this text (UTF-8); default: built-in prose, code and dialogue.")
@click.option(
    "--questions", metavar="FILE|built-in",
    help="Also ask questions with known answers (JSON lines), and count the answers that change.",
)  # fmt: skip
@click.option("--ctx", "n_ctx", type=int, default=512, metavar="N", help="Window size in tokens; default: 512.")
@click.option("--fresh", is_flag=True, help="Ignore the results of earlier runs.")
@stacked(threads_option(), cores_option(), memory_option())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def quality(
    base: str,
    others: tuple[str, ...],
    text: Path | None,
    questions: str | None,
    n_ctx: int,
    fresh: bool,
    as_json: bool,
    **values: Any,
) -> int:
    """Measure the quality loss of quantized models: how often OTHER predicts the same next token as BASE, and how far
    their distributions diverge (KLD).
    """
    from cpuchat.quality.measure import QualityMeasurement
    from cpuchat.quality.questions import load
    from cpuchat.quality.texts import builtin_texts

    chosen = overridden(values)
    asked = load(None if questions == "built-in" else Path(questions)) if questions else []
    library = Library(chosen.model.folders)
    measurement = QualityMeasurement(
        library.resolve(base),
        [library.resolve(other) for other in others],
        builtin_texts() if text is None else _own_text(text),
        engine=metadata.version("llama-cpp-python"),
        n_ctx=n_ctx,
        folder=paths.quality_dir(),
    )
    if fresh:
        measurement.forget()
    measurement.restore()
    terminal = Terminal(quiet=as_json)
    stopped, flips = _measure(measurement, chosen, terminal), {}
    if asked and not stopped:
        answers = [
            asyncio.run(_answers(path, asked, chosen, terminal))
            for path in (measurement.base, *(one.path for one in measurement.comparisons))
        ]
        flips = {
            str(one.path): (answers[0], found) for one, found in zip(measurement.comparisons, answers[1:], strict=True)
        }
    _print(measurement, asked, flips, terminal, as_json=as_json)
    if stopped:
        terminal.warn("cpuchat: stopped; the same command resumes.")
        return Interrupted.exit_code
    return 0


def _own_text(file: Path) -> Any:
    from cpuchat.quality.messages import Text

    try:
        return (Text(kind="text", content=read_text(file, _MAX_TEXT)),)
    except OSError as error:
        raise UsageError(f"Cannot read {shown(file)}: {error.strerror}.", "Give a text file.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{shown(file)} is not UTF-8 text.", "Convert it, for example with iconv.") from None


def _measure(measurement: QualityMeasurement, chosen: Settings, terminal: Terminal) -> bool:
    """Returns whether Ctrl+C stopped it."""
    placement = place(read_topology(), PlacementSpec.of(chosen))
    noted = False

    def tell(_: object) -> None:
        nonlocal noted
        if measurement.progress.note and not noted:
            noted = True
            terminal.note(measurement.progress.note)
        terminal.status(status(measurement))

    try:
        asyncio.run(measurement.run(placement, tell))
    except KeyboardInterrupt:
        return True
    finally:
        terminal.clear_progress()
    return False


async def _answers(path: Path, questions: list[Question], chosen: Settings, terminal: Terminal) -> list[Answered]:
    """Load a model and ask it everything. Raises Interrupted, CpuchatError."""
    from cpuchat.cli.session import Session
    from cpuchat.quality.flips import ask_all

    chosen.hardware.probe = False
    async with Session(chosen, terminal) as session:
        await session.load(path, calibrate=False)

        def tell(done: int) -> None:
            terminal.status(f"{path.stem}: {done} of {len(questions)} questions")

        try:
            return await ask_all(session.conversation.generate_detached, questions, tell)
        except MeasureFailed:
            if session.interrupted:
                raise Interrupted("Stopped.") from None
            raise


def _print(
    measurement: QualityMeasurement,
    questions: list[Question],
    answers: dict[str, tuple[list[Answered], list[Answered]]],
    terminal: Terminal,
    *,
    as_json: bool,
) -> None:
    from cpuchat.quality.flips import count_flips

    flips = {path: count_flips(*pair) for path, pair in answers.items()}
    if as_json:
        found = words.as_json(measurement)
        for one in found["others"]:
            if (counted := flips.get(one["path"])) is not None:
                one["questions"] = _flips_json(counted, questions, answers[one["path"]])
        click.echo(json_line(found))
        return
    rows = words.rows(measurement)
    if rows:
        for line in table([words.HEADINGS, *rows]):
            terminal.line(line)
        terminal.line()
    for sentence in words.verdicts(measurement):
        terminal.line(sentence)
    for comparison in measurement.comparisons:
        if comparison.worst:
            terminal.line(f"\nLargest disagreements of {words.label(comparison)} (text ▸ next token):")
            for one in comparison.worst:
                terminal.line(f"  {words.disagreement(one)}")
        if (counted := flips.get(str(comparison.path))) is not None:
            terminal.line(f"\n{words.label(comparison)}: {words.flips(counted)}")
            for line in words.changed_answers(questions, *answers[str(comparison.path)]):
                terminal.line(f"  {line}")


def _flips_json(found: Flips, questions: list[Question], pair: tuple[list[Answered], list[Answered]]) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(found),
        "p": found.p,
        "answers": [
            {
                "id": question.id,
                "answer": question.answer,
                "base": msgspec.to_builtins(a),
                "other": msgspec.to_builtins(b),
            }
            for question, a, b in zip(questions, *pair, strict=True)
        ],
    }
