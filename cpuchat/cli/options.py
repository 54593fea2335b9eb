"""Command-line options for settings; `settings` defines the allowed values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import click
import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import UsageError
from cpuchat.cli.completion import MODEL
from cpuchat.config import settings
from cpuchat.config.servers import KeyRing, ServerModel, is_url, last_here, last_on_server, normalized
from cpuchat.config.settings import Settings
from cpuchat.protocol.options import UNQUANTIZED

if TYPE_CHECKING:
    from cpuchat.backend.local import LocalBackend

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def setting(key: str, help: str = "") -> Decorator:
    """Make the option of a setting ("engine.threads"), which overrides config.toml; `help` if it means something else
    to this command.

    The value reaches the command as `engine__threads`, to be handed to `overridden`."""
    declared = settings.DECLARED[key]
    name, words, default = f"{declared.section}__{declared.name}", declared.words, declared.default
    is_switch = isinstance(default, bool)
    shown = ("on" if default else "off") if is_switch else default
    help = help or declared.help
    if " to " in declared.limits:
        help = f"{help.removesuffix('.')} ({declared.limits})."
    help += f" Default: {shown}." if shown not in (None, "") else ""
    if is_switch:
        flags = f"{declared.option}/--no-{declared.option.removeprefix('--')}"
        return click.option(flags, name, is_flag=True, default=None, help=help)
    hint = declared.type
    while get_origin(hint) is Annotated or NoneType in get_args(hint):  # None: not set, as the model has it
        hint = next(one for one in get_args(hint) if one is not NoneType)
    # Its bounds are checked with those of config.toml.
    kind = {int: click.INT, float: click.FLOAT}.get(hint, click.STRING)
    kind = click.Choice(get_args(hint)) if get_origin(hint) is Literal else kind
    kind = MODEL if key == "speculation.draft_model" else kind
    many = isinstance(kind, click.Choice) and len(kind.choices) > 4  # the error for a wrong one lists them
    metavar = words.metavar or ("TYPE" if many else {click.INT: "N", click.FLOAT: "X"}.get(kind))
    return click.option(declared.option, name, type=kind, default=None, help=help, metavar=metavar)


def section_options(*sections: str) -> Decorator:
    """Make the options of all settings of these sections that have one."""
    declared = settings.DECLARED.items()
    options = [setting(key) for key, one in declared if one.section in sections and one.words.is_option]

    def apply(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


def file_option(*names: str, help: str, metavar: str = "FILE") -> Decorator:
    """Make an option for a file, which is handed to the command as a path."""
    return click.option(*names, type=click.Path(dir_okay=False, path_type=Path), metavar=metavar, help=help)


def with_preset(name: str | None, model: str | None, server: str | None) -> tuple[Settings | None, str | None]:
    """Return the settings with a preset laid over them (None: without one), and the model: the given one, else that
    of the preset. Raises UsageError and SettingsError as `find_preset`."""
    if not name:
        return None, model
    from cpuchat.config.presets import find_preset

    preset = find_preset(name)
    chosen = settings.with_changes(settings.load(), preset.changes)
    return chosen, preset.model if preset.model and not (model or server) else model


def server_model(
    server: str | None, model: str | None, values: Mapping[str, Any], last: str = ""
) -> ServerModel | None:
    """Return the model of `--server` (and `--model`, its name there), of a `--model` that is an address, or without
    both the one used `last` if it is on a server; None for a model on this machine. Raises UsageError: not an address,
    or with options that only a model on this machine has."""
    if server is not None:
        chosen = ServerModel(ServerModel.of(server).server, model or ServerModel.of(server).name)
    elif model is not None:
        chosen = ServerModel.of(model) if is_url(model) else None
    else:
        chosen = last_on_server(last)
    if chosen is not None and (name := worker_option(values)) is not None:
        raise UsageError(
            f"{name} has no effect on a model on a server.", "Leave the option out, and start the server with its own."
        )
    return chosen


def worker_option(values: Mapping[str, Any]) -> str | None:
    """Return an option that is given and that only a model on this machine has, as `engine.threads`."""
    for name, value in values.items():
        section, _, key = name.partition("__")
        if value is not None and section in ("engine", "speculation"):
            return f"{section}.{key}"
    return None


def key_ring(chosen: Settings, named: ServerModel | None) -> KeyRing:
    """Return the API keys. `CPUCHAT_API_KEY` is for the server that was `named`, or for the only one of the settings;
    never for the one used last, which may have been tried once."""
    if named is not None:
        return KeyRing(named.server)
    urls = chosen.servers.urls
    return KeyRing(normalized(urls[0]) if len(urls) == 1 else "")


def overridden(values: Mapping[str, Any], base: Settings | None = None) -> Settings:
    """Return the settings with the given options laid over them. Raises SettingsError: config.toml is not valid;
    UsageError: values that do not go together, or cores, threads and nodes that are not allowed here."""
    chosen = laid_over(values, base)
    engine = chosen.engine
    if engine.flash_attn == "off" and engine.type_v not in UNQUANTIZED:
        raise UsageError(
            f"A V cache of type {engine.type_v} needs flash attention, which is off.",
            "Drop --flash-attn off, or use --cache-type-v f16.",
        )
    placed = "cores", "threads", "memory_policy"
    if given := [name for name in placed if values.get(f"engine__{name}") not in (None, "auto", 0)]:
        from cpuchat.hardware.placement.placement import PlacementSpec, check_given
        from cpuchat.hardware.topology import read_topology

        check_given(read_topology(), PlacementSpec.of(chosen), given)
    return chosen


def laid_over(values: Mapping[str, Any], base: Settings | None = None) -> Settings:
    """Return the same as `overridden` for commands that do not compute, without checks against this machine."""
    tables = msgspec.to_builtins(base or settings.load())
    for name, value in values.items():
        table, separator, key = name.partition("__")
        if isinstance(value, float) and not math.isfinite(value):  # which no bound excludes
            raise UsageError(f"{table}.{key}: {value} is not a finite number.")
        if separator and value is not None:
            tables[table][key] = value
    try:
        return msgspec.convert(tables, prepared(Settings))
    except msgspec.ValidationError as error:
        key, reason = settings.explained(error)
        is_given = values.get(key.replace(".", "__")) is not None
        raise UsageError(f"{settings.DECLARED[key].option if is_given else key}: {reason}.") from None


def given_options(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that were given, by the setting that each overrides: `{"engine.threads": "--threads"}`; of a
    preset by all that it sets: `preset review`. Raises UsageError and SettingsError as `find_preset`."""
    keys = [name.replace("__", ".") for name, value in values.items() if "__" in name and value is not None]
    found: dict[str, str] = {}
    if name := values.get("preset"):
        from cpuchat.config.presets import find_preset

        changes = find_preset(name).changes
        found = {f"{section}.{key}": f"preset {name}" for section, set_ in changes.items() for key in set_}
    return found | {key: settings.DECLARED[key].option for key in keys}


DEMO = "demo"


def model_path(spec: str | None, chosen: Settings) -> Path:
    """Return the file of `--model`, else the model that was used last, else the demo model. Raises ModelNotFound: no
    such file, repository or name; UsageError: none is given, and the one used last is on a server."""
    from cpuchat.models.library.library import Library

    return Library(chosen.model.folders).resolve(spec or last_here(chosen.model.last) or DEMO, tell_choice)


def tell_choice(words: str) -> None:
    """Say which file of a model was taken."""
    click.echo(f"cpuchat: {words}", err=True)


def keeping_backend(chosen: Settings) -> LocalBackend:
    """Return a backend that keeps the KV caches of chats, as many as the settings allow."""
    from cpuchat.backend.local import LocalBackend
    from cpuchat.base import paths

    return LocalBackend(state_dir=paths.kv_dir(), state_limit=int(chosen.engine.saved_kv_gb * 1e9))


def prepared_backend(chosen: Settings, *, keeps: bool = False) -> LocalBackend:
    """Return a backend whose worker is starting already, beside what the caller has yet to import and to check.
    `keeps`: as `keeping_backend`."""
    from cpuchat.backend.local import LocalBackend
    from cpuchat.hardware.placement.placement import PlacementSpec

    backend = keeping_backend(chosen) if keeps else LocalBackend()
    backend.prepare(PlacementSpec.of(chosen), chosen.engine.cpu_module)
    return backend


def require_draft_in_use(chosen: Settings) -> None:
    """Check that the chosen drafters use the given draft model. Raises UsageError if not."""
    section = chosen.speculation
    if section.wanted_draft == "none" != section.draft_model:
        raise UsageError(
            f"The draft model {section.draft_model} would not be used: --drafters is {section.drafters}.",
            "Add --drafters auto or --drafters draft.",
        )
