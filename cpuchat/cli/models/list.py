"""`cpuchat models list`: the models on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
import msgspec

from cpuchat.cli.models.specs import specs_of
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import echo_table
from cpuchat.telemetry.units import about, parameters, rate, size

if TYPE_CHECKING:
    from cpuchat.models.library.model import LocalModel
    from cpuchat.models.tuned_machine import TunedMachine

_LIST_EPILOG = """The last column is what --model takes. tok/s is the last measured plain decoding speed; ≈ marks a
prediction. To search more folders, name them in config.toml:

\b
  [model]
  folders = ["~/models"]"""
_HEADINGS = ("NAME", "ARCH", "PARAMS", "QUANT", "CONTEXT", "SIZE", "TOK/S", "USED", "--model")


@click.command("list", epilog=_LIST_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, sizes in bytes.")
def list_models(as_json: bool) -> int:
    """List the bundled models and those in the Hugging Face cache and your folders, last used first."""
    from cpuchat import settings
    from cpuchat.models.library.library import Library
    from cpuchat.models.machine import NOT_PROBED, this_machine
    from cpuchat.models.tuned_machine import TunedMachine

    chosen = settings.load()
    found = Library(chosen.model.folders).local_models()
    found.sort(key=lambda model: (model.damaged is not None, -model.last_used))
    specs = specs_of(found)
    if as_json:
        rows = [msgspec.to_builtins(model, enc_hook=str) for model in found]
        for row, spec in zip(rows, specs, strict=True):
            del row["work"]
            row["spec"] = spec
        print(json_line(rows))
        return 0
    if not found:
        click.echo("cpuchat: No models found. Search for some: cpuchat models search WORDS.", err=True)
        return 0
    machine = this_machine(chosen)
    tuned = TunedMachine(chosen, machine)
    rows = [_row(model, spec, tuned) for model, spec in zip(found, specs, strict=True)]
    echo_table([_HEADINGS, *rows], right=(2, 4, 5, 6))
    if machine.profile is None:
        click.echo(f"cpuchat: No predicted speed: {machine.peak_source}.", err=True)
    elif not machine.probed:
        click.echo(f"cpuchat: Predicted speeds are {NOT_PROBED}.", err=True)
    return 0


def _row(model: LocalModel, spec: str, tuned: TunedMachine) -> tuple[str, ...]:
    if model.damaged is not None:
        state = "unfinished" if model.unfinished is not None else "head" if model.kind == "head" else "damaged"
        return (
            model.name, model.architecture, _parameters(model), state, "", size(model.size), "", _day(model.last_used),
            f"{spec} ({model.damaged})",
        )  # fmt: skip
    return (
        model.name,
        model.architecture,
        _parameters(model),
        model.quantization,
        f"{model.n_ctx_train:,}" if model.n_ctx_train else "",
        size(model.size),
        _speed(model, tuned),
        _day(model.last_used),
        spec if model.has_template else f"{spec} (no chat template)",
    )


def _parameters(model: LocalModel) -> str:
    """Return `1.5B`; for a mixture of experts `30.5B/3.3B`: total and active."""
    if not model.n_params:
        return ""
    active = f"/{parameters(model.n_params_active)}" if model.n_params_active < model.n_params else ""
    return parameters(model.n_params) + active


def _speed(model: LocalModel, tuned: TunedMachine) -> str:
    """Return `31.2` as measured, `≈41` as predicted, `≈0.4 (too slow)`, `with RPC` or `too large`."""
    from cpuchat.models.prediction import estimate_local
    from cpuchat.present.prediction import verdict

    if model.measured_tok_s:
        return rate(model.measured_tok_s)
    expected = estimate_local(model, tuned.of(model.path))
    if expected.tok_s is not None:
        return f"≈{about(expected.tok_s)}" + (f" ({verdict(expected)})" if expected.too_slow else "")
    return expected.verdict if expected.verdict in ("with RPC", "too large") else ""


def _day(seconds: float) -> str:
    """Return `2026-11-21` in local time, "" for never."""
    return time.strftime("%Y-%m-%d", time.localtime(seconds)) if seconds else ""
