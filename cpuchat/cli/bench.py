"""`cpuchat bench`: measures speed over a matrix of models and settings, and compares two measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import Interrupted, MeasureFailed, SpeechFailed, UsageError
from cpuchat.base.files import write_atomically
from cpuchat.base.paths import shown
from cpuchat.cli.options import file_option, laid_over
from cpuchat.cli.output import print_json
from cpuchat.models.library.library import Library
from cpuchat.protocol.drafters import CHOICES

if TYPE_CHECKING:
    from cpuchat.bench.matrix import BenchCell
    from cpuchat.bench.results import Report
    from cpuchat.bench.run import Bench
    from cpuchat.config.settings import Settings

_EPILOG = f"""\b
Examples:
  cpuchat bench demo demo-q4
  cpuchat bench big.gguf --drafters off,auto,draft:4 --prompts code,chat
  cpuchat bench big.gguf --quantizations Q4_K_M,Q8_0 --pp 512 --tg 128 --depth 0,4096
  cpuchat bench big.gguf --threads 4,8,16 --tg 64 --svg threads.svg
  cpuchat bench big.gguf --quantizations Q4_K_M,Q8_0 --speech --prompts chat --drafters off
  cpuchat bench --matrix matrix.toml --json > today.json
  cpuchat bench --diff yesterday.json today.json
  cpuchat bench --diff yesterday.json

Lists are separated by commas; an option may be repeated. --matrix reads the same names from a TOML file:

\b
  models = ["demo", "demo-q4"]
  kv_types = ["f16", "q8_0/f16"]

Each cell is warmed up and measured in at least 3 rounds; every other round runs in reverse order. The first cell is
measured again after every four measurements; if it drifted by over 10 %, these four are repeated. Progress is saved:
the same command resumes after Ctrl+C or a crash. Markdown goes to standard output, progress to standard error.

With --diff, NEW is a file that --json wrote; without NEW, the cells of OLD are measured again. A difference counts if
it exceeds 2 % and the spread of the rounds.

Exit codes: 1 slower than before (--diff), 2 wrong usage or settings, 3 no such model, {MeasureFailed.exit_code} some
cells were not measured, {SpeechFailed.exit_code} no voice (--speech), {Interrupted.exit_code} stopped by Ctrl+C."""


def _listed(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def _list(flag: str, metavar: str, help: str) -> Any:
    return click.option(flag, multiple=True, callback=_listed, metavar=metavar, help=help)


@click.command("bench", epilog=_EPILOG)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@file_option("--matrix", "file", help="Read the matrix from a TOML file; options replace its lists.")
@_list("--quantizations", "LIST", "Quantizations of each model, from this machine.")
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
@click.option(
    "--speech", is_flag=True, help="Also measure with answers read aloud: first audio, real-time factor, decode."
)
@_list("--pp", "LIST", "Prefill of N random tokens, as llama-bench's -p.")
@_list("--tg", "LIST", "Decoding of N random tokens, as llama-bench's -n.")
@_list("--depth", "LIST", "Tokens in the KV cache before --pp and --tg. Default: 0.")
@click.option("--rounds", type=int, metavar="N", help="Rounds, at least 3. Default: 3.")
@click.option(
    "--price-per-hour",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    help="Price of the machine per hour, to show the cost per million tokens.",
)
@file_option(
    "-o", "--output", "journal", help="Save each measurement to this file, to resume from; default: in the cache."
)
@click.option("--fresh", is_flag=True, help="Ignore the results of earlier runs.")
@file_option("--svg", help="Write plots as SVG.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with llama-bench's field names.")
@file_option(
    "--diff", metavar="OLD [NEW]", help="Compare with an earlier --json file; exit code 1 if a figure is slower."
)
def bench(
    models: tuple[str, ...],
    file: Path | None,
    journal: Path | None,
    fresh: bool,
    price_per_hour: float | None,
    svg: Path | None,
    as_csv: bool,
    as_json: bool,
    diff: Path | None,
    **values: Any,
) -> int:
    """Measure time to first token, prefill and decoding of MODEL (default: the one used last) over a matrix of
    settings.
    """
    from cpuchat.bench.matrix import check_placements, located
    from cpuchat.bench.results import read_report
    from cpuchat.bench.run import Bench

    if as_csv and as_json:
        raise UsageError("--csv and --json are mutually exclusive.", "Omit one of them.")
    old = read_report(diff) if diff is not None else None
    chosen = laid_over({})
    if old is not None and len(models) == 1:
        return _print_diff(old, read_report(Path(models[0])), as_json=as_json)
    if old is not None:
        if models or file or any(value not in (None, (), False) for value in values.values()):
            raise UsageError("--diff takes at most one other file and no list.", _DIFF_HINT)
        cells = located((one.cell for one in old.results), Library(chosen.model.folders))
        rounds = old.rounds
        check_placements(cells, chosen)
    else:
        cells, rounds = _cells(models, file, chosen, values)
    found, failed = run_bench(
        lambda tell: Bench(cells, rounds, chosen, folder=paths.bench_dir(), file=journal, fresh=fresh, tell=tell)
    )
    if svg is not None:
        _write_plots(svg, found)
    if old is not None:
        return _print_diff(old, found, as_json=as_json) or failed
    _print(found, price_per_hour, as_csv=as_csv, as_json=as_json)
    return failed


_DIFF_HINT = "Run `cpuchat bench --diff OLD.json NEW.json`, or without NEW to measure the cells of OLD again."


def _cells(
    models: tuple[str, ...], file: Path | None, chosen: Settings, values: dict[str, Any]
) -> tuple[list[BenchCell], int]:
    from cpuchat.bench.matrix import cells_of, check_placements, read_matrix

    given = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value}
    matrix = read_matrix({"models": list(models), **given} if models else given, file)
    cells = cells_of(matrix, chosen, Library(chosen.model.folders))
    check_placements(cells, chosen)
    return cells, matrix.rounds


def run_bench(make: Callable[[Callable[[], None]], Bench]) -> tuple[Report, int]:
    """Run a benchmark with its progress on stderr; returns what was measured, and the exit code.

    Args:
        make: makes it; it is to call the function that it is given.

    Raises:
        Interrupted: Ctrl+C; the journal has what was measured.
        MeasureFailed: no cell was measured.
    """
    from cpuchat.bench.results import report_of
    from cpuchat.cli.live import LiveTable
    from cpuchat.cli.session import run_stoppable

    live = LiveTable()
    running = make(lambda: live.show(running))
    try:
        asyncio.run(run_stoppable(running))
    except Interrupted:
        raise Interrupted("Stopped.", "The same command resumes.") from None
    finally:
        live.clear()
    if running.failed and len(running.failed) == len(running.cells):
        raise MeasureFailed(next(iter(running.failed.values())))
    return report_of(running.journal, running.failed), MeasureFailed.exit_code if running.failed else 0


def _write_plots(file: Path, found: Report) -> None:
    from cpuchat.present.bench import plots

    try:
        write_atomically(file, plots(found), mode=0o644)
    except OSError as error:
        raise UsageError(f"Cannot write {shown(file)}: {error.strerror}.", "Choose another file.") from None


def _print(found: Report, price_per_hour: float | None, *, as_csv: bool, as_json: bool) -> None:
    from cpuchat.bench import results
    from cpuchat.present.bench import markdown

    if as_json:
        print_json(results.as_json(found, price_per_hour))
    elif as_csv:
        click.echo(results.as_csv(found, price_per_hour), nl=False)
    else:
        click.echo("\n".join(markdown(found, price_per_hour)))


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
