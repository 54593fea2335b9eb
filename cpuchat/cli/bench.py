"""`cpuchat bench`: measures speed over a matrix of models and settings, and compares two measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpuchat.base.errors import Interrupted, MeasureFailed, UsageError
from cpuchat.cli.options import file_option, laid_over
from cpuchat.cli.output import print_json
from cpuchat.models.library.library import Library
from cpuchat.protocol.drafters import CHOICES

if TYPE_CHECKING:
    from cpuchat.bench.results import Report
    from cpuchat.bench.run import Bench

_EPILOG = f"""\b
Examples:
  cpuchat bench demo demo-q4
  cpuchat bench big.gguf --drafters off,auto,draft:4 --prompts code,chat
  cpuchat bench big-Q4_K_M.gguf big-Q8_0.gguf --pp 512 --tg 128 --depth 0,4096
  cpuchat bench big.gguf --threads 4,8,16 --tg 64
  cpuchat bench big.gguf --tg 64 --json > today.json
  cpuchat bench --diff yesterday.json today.json
  cpuchat bench --diff yesterday.json

Lists are separated by commas; an option may be repeated.

Each cell is warmed up and measured in at least 3 rounds; every other round runs in reverse order. Ctrl+C ends it, and
prints what was measured. Markdown goes to standard output, progress to standard error.

With --diff, NEW is a file that --json wrote; without NEW, the cells of OLD are measured again. A difference counts if
it exceeds 2 % and the spread of the rounds.

Exit codes: 1 slower than before (--diff), 2 wrong usage or settings, 3 no such model, {MeasureFailed.exit_code} some
cells were not measured, {Interrupted.exit_code} stopped by Ctrl+C."""


def _listed(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def _list(flag: str, metavar: str, help: str) -> Any:
    return click.option(flag, multiple=True, callback=_listed, metavar=metavar, help=help)


@click.command("bench", epilog=_EPILOG)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@_list("--drafters", "LIST", f"{', '.join(CHOICES)}; with a fixed draft depth: draft:4. Default: off,auto.")
@_list("--draft-models", "LIST", "Draft models; default: the one that belongs to the model.")
@_list("--threads", "LIST", "Compute threads; 0 = automatic.")
@click.option("--cores", multiple=True, metavar="LIST", help="Compute cores, repeatable: auto, all, 0-7, l3:0, 4/l3.")
@click.option(
    "--memory-policies",
    multiple=True,
    metavar="POLICY",
    help="NUMA memory policies, repeatable: auto, local, interleave, bind:0.",
)
@_list("--kv-types", "LIST", "KV cache types: f16, q8_0; K and V apart: q8_0/f16.")
@_list("--flash-attn", "LIST", "auto, on, off.")
@_list("--prompts", "LIST", "Kinds of built-in prompts: code, summary, maths, chat. Default: all.")
@click.option("--tokens", type=int, metavar="N", help="Tokens of each answer. Default: 128.")
@_list("--pp", "LIST", "Prefill of N random tokens, as llama-bench's -p.")
@_list("--tg", "LIST", "Decoding of N random tokens, as llama-bench's -n.")
@_list("--depth", "LIST", "Tokens in the KV cache before --pp and --tg. Default: 0.")
@click.option("--rounds", type=int, metavar="N", help="Rounds, at least 3. Default: 3.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with llama-bench's field names.")
@file_option(
    "--diff", metavar="OLD [NEW]", help="Compare with an earlier --json file; exit code 1 if a figure is slower."
)
def bench(models: tuple[str, ...], as_json: bool, diff: Path | None, **values: Any) -> int:
    """Measure time to first token, prefill and decoding of MODEL (default: the one used last) over a matrix of
    settings.
    """
    from cpuchat.bench.matrix import cells_of, check_placements, located, read_matrix
    from cpuchat.bench.results import read_report
    from cpuchat.bench.run import Bench

    old = read_report(diff) if diff is not None else None
    chosen = laid_over({})
    library = Library(chosen.model.folders)
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value}
    if old is not None and len(models) == 1:
        return _print_diff(old, read_report(Path(models[0])), as_json=as_json)
    if old is not None:
        if models or given:
            raise UsageError("--diff takes at most one other file and no list.", _DIFF_HINT)
        cells, rounds = located((one.cell for one in old.results), library), old.rounds
    else:
        matrix = read_matrix({"models": list(models), **given})
        cells, rounds = cells_of(matrix, chosen, library), matrix.rounds
    check_placements(cells, chosen)
    found, failed = run_bench(lambda tell: Bench(cells, rounds, chosen, tell=tell))
    if old is not None:
        return _print_diff(old, found, as_json=as_json) or failed
    _print(found, as_json=as_json)
    return failed


_DIFF_HINT = "Run `cpuchat bench --diff OLD.json NEW.json`, or without NEW to measure the cells of OLD again."


def run_bench(make: Callable[[Callable[[], None]], Bench]) -> tuple[Report, int]:
    """Run a benchmark with its progress on stderr; returns what was measured, and the exit code.

    Args:
        make: makes it; it is to call the function that it is given.

    Raises:
        Interrupted: Ctrl+C before anything was measured.
        MeasureFailed: no cell was measured.
    """
    from cpuchat.cli.live import LiveBench
    from cpuchat.cli.session import run_stoppable

    live = LiveBench()
    running = make(lambda: live.show(running))
    try:
        asyncio.run(run_stoppable(running))
    except Interrupted:
        if not running.measured:
            raise
        return running.report(), Interrupted.exit_code
    finally:
        live.clear()
    if running.failed and len(running.failed) == len(running.cells):
        raise MeasureFailed(next(iter(running.failed.values())))
    return running.report(), MeasureFailed.exit_code if running.failed else 0


def _print(found: Report, *, as_json: bool) -> None:
    from cpuchat.present.bench import markdown

    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        click.echo("\n".join(markdown(found)))


def _print_diff(old: Report, new: Report, *, as_json: bool) -> int:
    from cpuchat.bench.results import REGRESSION, compare_reports
    from cpuchat.present.bench import diff_lines

    found = compare_reports(old, new)
    if as_json:
        facts = [
            {**msgspec.to_builtins(one), "change": one.change, "verdict": one.verdict} for one in found.differences
        ]
        rest = {name: msgspec.to_builtins(getattr(found, name)) for name in ("only_old", "only_new")}
        print_json({"regressed": found.regressed, "differences": facts, **rest})
    else:
        click.echo("\n".join(diff_lines(found, old.environment, new.environment)))
    return REGRESSION if found.regressed else 0
