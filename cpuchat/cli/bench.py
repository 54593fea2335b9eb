"""`cpuchat bench`: measures speed over a matrix of models and settings, and compares two measurements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from cpuchat.base.errors import Interrupted, MeasureFailed, UsageError
from cpuchat.cli.completion import MODEL
from cpuchat.cli.lazy import SectionedCommand
from cpuchat.cli.options import file_option, laid_over
from cpuchat.cli.output import print_json
from cpuchat.cli.terminal import TerminalOutput
from cpuchat.models.library.library import Library
from cpuchat.protocol.drafters import CHOICES
from cpuchat.protocol.messages import MAX_PARALLEL
from cpuchat.telemetry import units

if TYPE_CHECKING:
    from cpuchat.bench.matrix import Kind
    from cpuchat.bench.results import Report
    from cpuchat.bench.run import Bench

_EPILOG = """\b
Examples:
  cpuchat bench big.gguf --drafters off,auto,draft:4 --prompts code,chat
  cpuchat bench big-Q4_K_M.gguf big-Q8_0.gguf --pp 512 --tg 128 --depth 0,4096
  cpuchat bench big.gguf --users 1,2,4,8 --prompts chat
  cpuchat bench big.gguf --tg 64 --json > today.json
  cpuchat bench --diff yesterday.json today.json

Lists are separated by commas; an option may be repeated.

Each cell is warmed up and measured in at least 3 rounds; every other round runs in reverse order. Ctrl+C ends it, and
prints what was measured. Markdown goes to standard output, progress to standard error.

With --diff, OLD and NEW are files that --json wrote. A difference counts if it exceeds 2 % and what such rounds differ
by; where that cannot be told, it says what the rounds could have shown, and how many show 5 %."""


def _list(flag: str, help: str, kind: click.ParamType = click.STRING) -> Any:
    """Make an option whose values are lists of a `kind`."""

    def listed(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[Any]:
        parts = [part.strip() for value in values for part in value.split(",") if part.strip()]
        return [kind.convert(part, option, context) for part in parts]

    return click.option(flag, multiple=True, callback=listed, metavar="LIST", help=help)


_SHOWN_SECONDS = 0.1
_TOKENS = click.IntRange(1, 1_000_000)
_KINDS = click.Choice(["code", "summary", "maths", "chat"])


@click.command("bench", cls=SectionedCommand, epilog=_EPILOG)
@click.argument("models", nargs=-1, type=MODEL, metavar="[MODEL]...")
@_list("--drafters", f"{', '.join(CHOICES)}; with a fixed draft depth: draft:4. Default: off,auto.")
@_list("--draft-models", "Draft models; default: the one that belongs to the model.")
@_list("--threads", "Compute threads; 0 = automatic.")
@click.option("--cores", multiple=True, metavar="LIST", help="Compute cores, repeatable: auto, all, 0-7, l3:0, 4/l3.")
@click.option(
    "--memory-policies", multiple=True, metavar="POLICY",
    help="NUMA memory policies, repeatable: auto, local, interleave, bind:0.",
)  # fmt: skip
@_list("--kv-types", "KV cache types: f16, q8_0; K and V apart: q8_0/f16.")
@_list("--flash-attn", "auto, on, off.")
@_list("--prompts", "Kinds of built-in prompts: code, summary, maths, chat. Default: all.", _KINDS)
@click.option("--tokens", type=_TOKENS, default=128, metavar="N", help="Tokens of each answer. Default: 128.")
@_list("--users", "Users at once, each with a prompt of its own. Default: 1.", click.IntRange(1, MAX_PARALLEL))
@_list("--pp", "Prefill of N random tokens, as llama-bench's -p.", _TOKENS)
@_list("--tg", "Decoding of N random tokens, as llama-bench's -n.", _TOKENS)
@_list("--depth", "Tokens in the KV cache before --pp and --tg. Default: 0.", click.IntRange(0, 10_000_000))
@click.option("--rounds", type=click.IntRange(3, 1000), default=3, metavar="N", help="Rounds. Default: 3.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; tests and rates have llama-bench's field names.")
@file_option(
    "--diff", metavar="OLD NEW", help="Compare with an earlier --json file; exit code 1 if a figure is slower."
)
def bench(
    models: tuple[str, ...], as_json: bool, diff: Path | None, rounds: int, tokens: int, prompts: list[Kind],
    pp: list[int], tg: list[int], depth: list[int], users: list[int], **lists: Sequence[str],
) -> int:  # fmt: skip
    """Measure time to first token, prefill and decoding of MODEL (default: the one used last) over a matrix of
    settings."""
    from cpuchat.bench import results
    from cpuchat.bench.matrix import cells_of, check_placements, workloads
    from cpuchat.bench.run import Bench
    from cpuchat.present import bench as words

    given = {name: values for name, values in lists.items() if values}
    source = click.get_current_context().get_parameter_source
    numbers = any(source(name) is ParameterSource.COMMANDLINE for name in ("tokens", "rounds"))
    if diff is not None:
        if len(models) != 1 or given or prompts or pp or tg or depth or users or numbers:
            raise UsageError("--diff takes two files and no option but --json.", "As in `--diff OLD.json NEW.json`.")
        return _print_diff(results.read_report(diff), results.read_report(Path(models[0])), as_json=as_json)
    chosen = laid_over({})
    library = Library(chosen.model.folders)
    cells = cells_of(models, workloads(prompts, tokens, pp, tg, depth or [0], users), chosen, library, **given)
    check_placements(cells, chosen)
    found, failed = _run(Bench(cells, rounds, chosen))
    if as_json:
        print_json(results.as_json(found))
        told = results.compare_reports(found, found).resolution
        if told is not None and told.smallest > results.GAIN:
            TerminalOutput().note(f"Compared with --diff, {words.resolution(told)}.")
    else:
        click.echo("\n".join(words.markdown(found)))
    return failed


def _run(running: Bench) -> tuple[Report, int]:
    """Run a benchmark with its progress on stderr; returns what was measured, and the exit code. Raises Interrupted:
    Ctrl+C before anything was measured; MeasureFailed: no cell was measured."""
    from cpuchat.cli.session import stoppable
    from cpuchat.present.bench import progress_bar

    terminal, told, due = TerminalOutput(), 0, 0.0

    def show() -> None:
        nonlocal told, due
        for one in running.measured[told:]:
            told += 1
            of = len(running.cells) * running.rounds
            terminal.note(f"{told} of {of}: {one.cell.words}: {units.rate(one.sample.rate)} tok/s")
        if time.monotonic() >= due:
            progress, due = running.progress, time.monotonic() + _SHOWN_SECONDS
            terminal.status(progress_bar(progress.done, progress.total, progress.seconds_left, progress.what))

    running.tell = show
    try:
        asyncio.run(stoppable(running.run(), running.stop))
    except Interrupted:
        if not running.measured:
            raise
        return running.report(), Interrupted.exit_code
    finally:
        terminal.clear_progress()
    if running.failed and len(running.failed) == len(running.cells):
        raise MeasureFailed(next(iter(running.failed.values())))
    return running.report(), MeasureFailed.exit_code if running.failed else 0


def _print_diff(old: Report, new: Report, *, as_json: bool) -> int:
    from cpuchat.bench.results import REGRESSION, compare_reports
    from cpuchat.present.bench import diff_lines

    found = compare_reports(old, new)
    if as_json:
        facts = [
            {**msgspec.to_builtins(one), "change": one.difference.gain, "verdict": one.verdict}
            for one in found.differences
        ]
        rest = {name: msgspec.to_builtins(getattr(found, name)) for name in ("only_old", "only_new")}
        rest["resolution"] = found.resolution._asdict() if found.resolution is not None else None
        print_json({"regressed": found.regressed, "differences": facts, **rest})
    else:
        click.echo("\n".join(diff_lines(found, old.environment, new.environment)))
    return REGRESSION if found.regressed else 0
