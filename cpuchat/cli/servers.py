"""`cpuchat servers`: the servers of the settings with their models, and their API keys."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from cpuchat import paths, settings
from cpuchat.cli.options import key_ring
from cpuchat.cli.output import error_json, json_line
from cpuchat.errors import CpuchatError, UsageError
from cpuchat.servers import ServerModel, normalized
from cpuchat.telemetry import units

if TYPE_CHECKING:
    from cpuchat.backend.remote.adapter import ListedModel

_EPILOG = """\b
Examples:
  cpuchat servers                                  those of the settings and running `cpuchat serve`, with their models
  cpuchat servers list http://127.0.0.1:8080       this one
  cpuchat servers key https://api.example.com      store its API key (asked for, or from standard input)

Put the addresses of servers into the settings (F2, or servers.urls in config.toml).

Exit codes: 0 reached, 2 wrong usage, 21 a server failed or was not reached, 22 API key refused,
1 anything else."""


@click.group(epilog=_EPILOG, invoke_without_command=True)
@click.pass_context
def servers(ctx: click.Context) -> int:
    """List inference servers and their models; store API keys."""
    if ctx.invoked_subcommand is None:
        return ctx.invoke(listing, urls=(), as_json=False)
    return 0


@servers.command("list", short_help="List servers with their models.")
@click.argument("urls", metavar="[URL]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def listing(urls: tuple[str, ...], as_json: bool) -> int:
    """List servers with their models: those of the settings and running `cpuchat serve` processes, or URL."""
    import asyncio

    from cpuchat.backend.remote.backend import RemoteBackend
    from cpuchat.running_servers import running_servers

    chosen = settings.load()
    named = [normalized(url) for url in urls or chosen.servers.urls]
    wanted = list(dict.fromkeys((*named, *(() if urls else (one.url for one in running_servers())))))
    if not wanted:
        message = "No servers in the settings, and no `cpuchat serve` is running."
        raise UsageError(message, "Give one: cpuchat servers list http://127.0.0.1:8080.")
    only = ServerModel(named[0]) if len(set(named)) == 1 else None

    async def ask(url: str) -> tuple[str, tuple[ListedModel, ...]] | CpuchatError:
        try:
            return await RemoteBackend(key_ring(chosen, only)).models(url)
        except CpuchatError as error:
            return error

    async def ask_all() -> list[tuple[str, tuple[ListedModel, ...]] | CpuchatError]:
        return list(await asyncio.gather(*(ask(url) for url in wanted)))

    found = dict(zip(wanted, asyncio.run(ask_all()), strict=True))
    if as_json:
        rows = [
            {"server": url, **error_json(one)}
            if isinstance(one, CpuchatError)
            else {"server": url, "kind": one[0], "models": [_fields(model) for model in one[1]]}
            for url, one in found.items()
        ]
        print(json_line({"servers": rows}))
    else:
        for url, one in found.items():
            _show(url, one)
    return next((one.exit_code for one in found.values() if isinstance(one, CpuchatError)), 0)


def _fields(model: ListedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "quantization": model.quantization or None,
        "size": model.size or None,
        "n_params": model.n_params or None,
        "n_ctx": model.n_ctx or None,
        "loaded": model.loaded,
    }


def _show(url: str, found: tuple[str, tuple[ListedModel, ...]] | CpuchatError) -> None:
    if isinstance(found, CpuchatError):
        print(f"{url}: {found}")
        return
    kind, models = found
    print(f"{url}: {kind}, {units.plural(len(models), 'model')}")
    for model in models:
        facts = (
            model.quantization,
            units.size(model.size) if model.size else "",
            f"{units.tokens(model.n_ctx)} context" if model.n_ctx else "",
            "loaded" if model.loaded else "",
        )
        print("  " + "  ".join(filter(None, (model.name, *facts))))


@servers.command("key", short_help="Store the API key of a server, in the system's keyring or a file.")
@click.argument("url")
@click.option("--delete", is_flag=True, help="Delete the stored key.")
def key(url: str, delete: bool) -> int:
    """Store the API key of the server URL: in the system's keyring with the extra cpuchat[keyring], else in a file that
    only you may read.
    """
    from cpuchat.backend.remote.keys import KeyRing

    server = ServerModel.of(url).server
    entered = ""
    if not delete:
        if sys.stdin is not None and sys.stdin.isatty():
            entered = click.prompt("API key", hide_input=True, err=True)
        elif sys.stdin is not None:
            entered = sys.stdin.readline()
        entered = entered.strip()
        if not entered:
            raise UsageError("No key given.", "Type one, or pipe it in. --delete removes a stored key.")
    try:
        place = KeyRing().store(server, entered)
    except OSError as error:
        raise CpuchatError(f"Cannot write {paths.shown(paths.keys_file())}: {error.strerror}.") from None
    print(f"Deleted the key of {server}." if delete else f"Stored the key of {server} in {place}.")
    return 0
