"""`cpuchat why`: proves which settings of a model work on this machine, and measures what each is worth."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpuchat.base.errors import Interrupted, UsageError
from cpuchat.cli.options import engine_options, file_option, model_path, overridden
from cpuchat.cli.output import print_json, write_output
from cpuchat.cli.terminal import TerminalOutput, columns, echo_paragraph, echo_table

if TYPE_CHECKING:
    from cpuchat.bench.why import SettingFacts, WhyReport, Worth
    from cpuchat.config.settings import Settings

_EPILOG = f"""\b
Examples:
  cpuchat why                          the model that was used last, as the app loads it
  cpuchat why qwen.gguf --measure      also what each setting is worth, at most 5 minutes at a time
  cpuchat why qwen.gguf --json > today.json
  cpuchat why qwen.gguf --against yesterday.json

Proofs are read after the load and a short test answer: from llama.cpp's buffers and log, and from /proc. "no effect" is
a setting that does nothing here. ✗ marks what does not work as set.

With --measure, each setting takes turns with its alternative, three rounds each. What was measured is saved: the same
command resumes after Ctrl+C, and later ones show it until the settings, the engine or the model change.

Exit codes: 1 a setting does not work, 2 wrong usage or settings, 3 no such model, 5 does not fit,
{Interrupted.exit_code} stopped by Ctrl+C."""


@click.command(epilog=_EPILOG)
@click.argument("model", required=False)
@click.option("--measure", is_flag=True, help="Measure what each setting is worth; resumes what was stopped.")
@click.option("--fresh", is_flag=True, help="Measure again what was measured before.")
@file_option("--against", metavar="OLD", help="List what differs from a report of --json: another machine, or day.")
@file_option("--markdown", help="Also write the report as a Markdown page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@engine_options()
def why(
    model: str | None, measure: bool, fresh: bool, against: Path | None, markdown: Path | None,
    as_json: bool, **values: Any,
) -> int:  # fmt: skip
    """Prove which settings of MODEL work on this machine, and what each is worth.

    MODEL is a GGUF file, a Hugging Face repository in the local cache, or `demo`; default: the one used last.
    """
    from cpuchat.bench.why import WhyReport, read_report, without_effect, worth_cache, worth_key
    from cpuchat.present.why import rows

    if fresh and not measure:
        raise UsageError("--fresh is for --measure.", "Add --measure.")
    old = read_report(against) if against is not None else None
    chosen = overridden(values)
    path = model_path(model, chosen)
    terminal = TerminalOutput()
    facts, environment = asyncio.run(_gather(path, chosen, terminal))
    terminal.clear_progress()
    key, settings = worth_key(facts, environment), rows(facts)
    if fresh:
        worth_cache().remove(key)
    worths, stopped = worth_cache().read().get(key, {}), False
    if measure:
        worths, stopped = _measure(facts, key, without_effect(settings), terminal)
    report = WhyReport(
        command=_command(model or str(path), values, measure=measure),
        model=facts.model.name or path.stem,
        quantization=facts.model.quantization,
        environment=environment,
        settings=tuple(msgspec.structs.replace(row, worth=worths.get(row.name)) for row in settings),
    )
    _print(report, old, as_json=as_json, markdown=markdown)
    if stopped:
        raise Interrupted("Stopped.", "The same command resumes.")
    return int(any(row.state == "fails" for row in settings))


async def _gather(path: Path, chosen: Settings, terminal: TerminalOutput) -> tuple[SettingFacts, Any]:
    """Load the model as a chat does, let it answer, and read what works. Raises CpuchatError."""
    from cpuchat.bench.why import prove
    from cpuchat.cli.session import Session

    chosen.hardware.probe = False
    async with Session(chosen, terminal) as session:
        await session.load(path)
        return await prove(session.conversation)


def _measure(
    facts: SettingFacts, key: str, without: frozenset[str], terminal: TerminalOutput
) -> tuple[dict[str, Worth], bool]:
    """Measure with the progress on stderr; returns the worths, and whether it was stopped. Raises CpuchatError."""
    from cpuchat.cli.session import run_stoppable
    from cpuchat.tune.worth import WorthMeasurer

    said = ""

    def tell(words: str) -> None:
        nonlocal said
        terminal.status(f"{words} · Ctrl+C stops")
        if not terminal.moves and words.partition(":")[0] != said:
            said = words.partition(":")[0]
            terminal.note(f"measuring: {said}")

    measurer = WorthMeasurer(facts, key, without=without, tell=tell)
    try:
        return asyncio.run(run_stoppable(measurer)), measurer.stopped
    finally:
        terminal.clear_progress()


def _command(model: str, values: dict[str, Any], *, measure: bool) -> str:
    from cpuchat.cli.options import given_options

    options = ["--measure"] if measure else []
    for key, option in given_options(values).items():
        options += [option, str(values[key.replace(".", "__")])]
    return shlex.join(["cpuchat", "why", model, *options])


def _print(report: WhyReport, old: WhyReport | None, *, as_json: bool, markdown: Path | None) -> None:
    from cpuchat.bench.why import differences
    from cpuchat.present import why as words

    if markdown is not None:
        write_output(markdown, words.markdown(report), 0o644)
    found = differences(old, report) if old is not None else []
    if as_json:
        print_json(msgspec.to_builtins(report) | ({"differences": found} if old is not None else {}))
    elif old is not None:
        echo_paragraph(f"Against {old.model} on {old.environment.machine}, {old.environment.date}:")
        echo_table([("WHAT", "THEN", "NOW"), *found] if found else [("Nothing differs.",)])
    else:
        for label, text in words.about(report):
            echo_paragraph(f"{label}: {text}", rest="  ")
        click.echo()
        echo_table([words.HEADINGS, *words.wrapped(words.table_rows(report), columns())])
        if any(row.worth is not None and not row.worth.skipped for row in report.settings):
            echo_paragraph(words.NOTE)
