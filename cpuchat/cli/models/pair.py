"""`cpuchat models pair`: which draft models fit a target, and the expected speed-up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpuchat import paths, settings
from cpuchat.cli.models.specs import specs_of
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import Terminal, echo_paragraph, echo_table, is_terminal
from cpuchat.errors import DraftMismatch, UsageError
from cpuchat.models.catalog import load_catalog
from cpuchat.models.drafts.pairing import PairCache, check_files, require_pair, suggestion
from cpuchat.models.gguf.header import read_model
from cpuchat.models.hub.client import Hub
from cpuchat.models.library.library import Library
from cpuchat.present.table import table
from cpuchat.telemetry.units import size
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.models.drafts.candidates import Candidate
    from cpuchat.models.drafts.gain import Expectation
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.settings import Settings

_PAIR_EPILOG = f"""\b
Examples:
  cpuchat models pair demo demo-draft
  cpuchat models pair ~/models/big.gguf
  cpuchat models pair ~/models/big.gguf --hub
  cpuchat models pair ~/models/big.gguf small.gguf --measure

TARGET and DRAFT are what --model takes. The speed-up is predicted from the pass costs of the target on this machine,
which are measured when it is loaded with drafting on.

--measure answers prompts of four kinds without drafts, with adaptive depth and with fixed depths, and reports
acceptance, tokens per pass, best depth and speed-up. --keep makes DRAFT the draft model in the settings if it is worth
keeping.

Exit codes: 0 the draft fits (without DRAFT: at least one does), {DraftMismatch.exit_code} it does not, 3 no such model,
4 damaged model, 13 not measured, 130 stopped by Ctrl+C."""


@click.command("pair", epilog=_PAIR_EPILOG)
@click.argument("target")
@click.argument("draft", required=False)
@click.option("--hub", "ask_hub", is_flag=True, help="Also check those on Hugging Face: reads a few MB of each.")
@click.option("--measure", is_flag=True, help="Measure acceptance and speed-up of the pair; takes minutes.")
@click.option("--keep", is_flag=True, help="With --measure: use DRAFT from now on if it is worth keeping.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pair(target: str, draft: str | None, ask_hub: bool, measure: bool, keep: bool, as_json: bool) -> int:
    """Check whether DRAFT can draft for TARGET; without DRAFT, list all draft models that can, including the catalog's.

    A draft model must have the target's vocabulary. Without --measure only headers are read.
    """
    chosen = settings.load()
    library = Library(chosen.model.folders)
    path = library.resolve(target)
    if measure and draft is None:
        raise UsageError("--measure needs a DRAFT.", "`cpuchat models pair TARGET` lists those that fit.")
    if keep and not measure:
        raise UsageError("--keep needs --measure.", "To use DRAFT without measuring: `cpuchat --draft-model DRAFT`.")
    if measure and draft is not None:
        return _measure(path, library.resolve(draft), library, chosen, keep=keep, as_json=as_json)
    if draft is None:
        return _print_candidates(path, library, chosen, ask_hub=ask_hub, as_json=as_json)
    return _print_verdict(path, library.resolve(draft), library, chosen, as_json=as_json)


def _print_verdict(target: Path, draft: Path, library: Library, chosen: Settings, *, as_json: bool) -> int:
    verdict = check_files(target, draft, library=library)
    expected = _expectation(target, draft, chosen) if verdict.ok else None
    if as_json:
        facts = {"target": str(target), "draft": str(draft), **msgspec.structs.asdict(verdict)}
        click.echo(json_line({**facts, "expected": msgspec.to_builtins(expected)}))
    elif verdict.ok:
        click.echo(f"{clean_line(draft.name)} can draft for {clean_line(target.name)}.")
    else:
        click.echo(f"{clean_line(draft.name)} cannot draft for {clean_line(target.name)}: {verdict.reason}.")
    for line in (verdict.note, verdict.hint, f"Expected: {expected.words}." if expected is not None else ""):
        if line and not as_json:
            click.echo(f"  {line}")
    return 0 if verdict.ok else DraftMismatch.exit_code


def _measure(target: Path, draft: Path, library: Library, chosen: Settings, *, keep: bool, as_json: bool) -> int:
    """Measure a pair and offer to keep the draft model.

    Raises:
        DraftMismatch, Interrupted, MeasureFailed: as their names say.
    """
    from cpuchat.bench.pair import pair_bench, pair_result
    from cpuchat.cli.bench import run_bench
    from cpuchat.models.drafts.chosen import ChosenDrafts
    from cpuchat.present import bench as words

    require_pair(target, draft, library)
    report, _ = run_bench(lambda tell: pair_bench(target, draft, chosen, paths.bench_dir(), tell))
    found = pair_result(report)
    kept = found.worth_keeping and (keep or (not as_json and _asked(draft)))
    if kept:
        ChosenDrafts().put(target, str(draft))
        settings.update({"speculation": {"draft_model": "", "depth": found.depth, "drafters": "auto"}})
    if as_json:
        facts = {**msgspec.to_builtins(found), "depth": found.depth, "speed_up": found.speed_up}
        facts["worth_keeping"] = found.worth_keeping
        click.echo(json_line({"target": str(target), "draft": str(draft), **facts, "kept": kept}))
        return 0
    for line in table([words.PAIR_HEADINGS, *words.pair_rows(found)], right=(1, 2, 3, 4, 5, 6)):
        click.echo(line)
    click.echo(f"\n{words.pair_verdict(found)}")
    if kept:
        depth = f", with draft depth {found.depth}" if found.depth else ""
        click.echo(f"{draft.name} is now the draft model of {target.name}{depth}.")
    elif found.worth_keeping:
        click.echo(f"Add --keep to make it the draft model of {target.name}.")
    return 0


def _asked(draft: Path) -> bool:
    """Ask on a terminal whether to keep the draft model; False elsewhere."""
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        return False
    return click.confirm(f"Make {draft.name} the draft model?", err=True)


def _expectation(target: Path, draft: Path, chosen: Settings) -> Expectation:
    from cpuchat.models.drafts.calibrations import target_costs
    from cpuchat.models.drafts.candidates import expected_pair
    from cpuchat.models.tuned_machine import machine_for

    machine = machine_for(target, chosen)
    return expected_pair(read_model(target), read_model(draft), target_costs(target), machine)


def _print_candidates(target: Path, library: Library, chosen: Settings, *, ask_hub: bool, as_json: bool) -> int:
    from cpuchat.models.drafts.calibrations import target_costs
    from cpuchat.models.drafts.candidates import candidates, recommended
    from cpuchat.models.tuned_machine import machine_for

    header, costs, models = read_model(target), target_costs(target), library.local_models(beside=target)
    found = candidates(header, models, load_catalog(), costs, machine_for(target, chosen))
    found = _checked(found, header, ask_hub=ask_hub)
    best = recommended(found)
    specs = dict(zip((model.path for model in models), specs_of(models), strict=True))
    here = {specs[one.path]: one for one in found if one.path is not None and one.fits}
    on_hub = {one.spec: one for one in found if one.path is None}
    if as_json:
        _print_json(target, here, on_hub, best)
    else:
        _print_tables(target, here, on_hub, best)
    return 0 if here else DraftMismatch.exit_code


def _checked(found: list[Candidate], target: GGUFHeader, *, ask_hub: bool) -> list[Candidate]:
    from cpuchat.models.drafts.candidates import check

    cache, hub, terminal = PairCache(), Hub() if ask_hub else None, Terminal()
    checked: list[Candidate] = []
    try:
        for one in found:
            terminal.status(f"comparing {clean_line(one.name)}")
            checked.append(check(one, target, hub=hub, cache=cache))
    finally:
        terminal.clear_progress()
        cache.save()
    return checked


def _print_tables(
    target: Path, here: dict[str, Candidate], on_hub: dict[str, Candidate], best: Candidate | None
) -> None:
    headings = ("DRAFT MODEL", "SIZE", "EXPECTED", "")
    if here:
        rows = [(spec, size(one.size), _gain(one), _mark(one, best)) for spec, one in here.items()]
        echo_table([headings, *rows], right=(1,))
    else:
        click.echo(f"cpuchat: No smaller local model can draft for {clean_line(target.name)}.", err=True)
        if not on_hub:
            click.echo(f"  {suggestion(target, [])}", err=True)
    if on_hub:
        if here:
            click.echo()
        click.echo("On Hugging Face, recommended by the catalog:")
        rows = [(spec, _size(one), _gain(one), f"{_state(one)} {_mark(one, best)}") for spec, one in on_hub.items()]
        echo_table([headings, *rows], right=(1,))
    notes = [_note(spec, one) for spec, one in on_hub.items()]
    shown = [one for one in (*here.values(), *on_hub.values()) if one.fits is not False]
    notes += [f"No speed-up predicted: {one.expected.why}." for one in shown if not one.expected.gains]
    for note in dict.fromkeys(filter(None, notes)):
        click.echo()
        echo_paragraph(clean_line(note))


def _size(candidate: Candidate) -> str:
    """Return the size of one on the hub: from its repository, before that approximately from the catalog."""
    if not candidate.size:
        return ""
    return f"{'≈ ' if candidate.verdict is None else ''}{size(candidate.size)}"


def _gain(candidate: Candidate) -> str:
    """Return the speed-up; "" where it is not known, or the model does not fit."""
    return candidate.expected.words if candidate.expected.gains and candidate.fits is not False else ""


def _mark(candidate: Candidate, best: Candidate | None) -> str:
    return "← recommended" if candidate is best else ""


def _state(candidate: Candidate) -> str:
    if candidate.verdict is None:
        return "not checked"
    return "fits" if candidate.verdict.ok else "does not fit"


def _note(spec: str, candidate: Candidate) -> str:
    """Return why it does not fit or was not checked; "" when it fits."""
    if candidate.failed:
        return f"Not checked: {candidate.failed}"
    if candidate.verdict is None:
        return "Not checked: add --hub to read a few MB of each."
    return "" if candidate.verdict.ok else f"{spec} does not fit: {candidate.verdict.reason}."


def _print_json(target: Path, here: dict[str, Candidate], on_hub: dict[str, Candidate], best: Candidate | None) -> None:
    def row(spec: str, one: Candidate) -> dict[str, Any]:
        return {
            "spec": spec,
            "path": str(one.path) if one.path is not None else None,
            "size": one.size,
            "name": one.name,
            "named_by_catalog": one.named,
            "fits": one.fits,
            "reason": one.verdict.reason if one.verdict is not None else one.failed,
            "expected": msgspec.to_builtins(one.expected),
            "recommended": one is best,
        }

    rows = [[row(spec, one) for spec, one in group.items()] for group in (here, on_hub)]
    click.echo(json_line({"target": str(target), "drafts": rows[0], "hub": rows[1]}))
