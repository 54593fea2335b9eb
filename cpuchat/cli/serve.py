"""`cpuchat serve`: the tuned local engine for other programs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cpuchat import paths
from cpuchat.cli.options import (
    engine_options,
    file_option,
    model_path,
    overridden,
    require_draft_in_use,
    setting,
    stacked,
)
from cpuchat.cli.terminal import Terminal
from cpuchat.errors import UsageError
from cpuchat.rpc_workers import PORT
from cpuchat.servers import is_local, is_loopback
from cpuchat.telemetry import units

if TYPE_CHECKING:  # `--help` has no use for them
    from cpuchat.backend.switching import SwitchingBackend
    from cpuchat.serving.service import RequestRecord
    from cpuchat.serving.web.sessions import Sessions
    from cpuchat.settings import Settings

_EPILOG = """\b
Examples:
  cpuchat serve                                    the model used last, on http://127.0.0.1:8080/v1
  cpuchat serve ~/models/qwen.gguf --port 9000
  cpuchat serve --host 0.0.0.0 --token-file ~/.cpuchat-token
  curl -s http://127.0.0.1:8080/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello"}]}'
  curl -s http://127.0.0.1:8080/metrics
  cpuchat serve --web                              the app itself, on http://127.0.0.1:8080/
  cpuchat serve --rpc-worker --host 10.0.0.2       hold layers for `cpuchat --rpc 10.0.0.2` on another machine

One request is answered at a time, the others wait in the order of their arrival. Ctrl+C ends the server,
a second one ends it at once.

A token is read from --token-file, which is created with a random one if it does not exist, or from CPUCHAT_SERVE_TOKEN.
Programs send it as `Authorization: Bearer TOKEN` (the api_key of OpenAI clients). Any address but 127.0.0.1 needs one,
and sends it unencrypted: outside a network that you trust, put a TLS proxy or an SSH tunnel in front.

Exit codes: 0 ended by Ctrl+C or SIGTERM, 2 wrong usage or settings, port in use, 3 no such model, 4 damaged or
unsupported model, 5 not enough memory, 8 worker crashed while loading, 9 llama.cpp is missing or unsupported,
12 draft model mismatch, 21 RPC worker not reached, 130 Ctrl+C while loading, or a second signal, 1 anything else."""
MOST_LINES = 20
"""Lines of refused requests in a second: a flood of them must not fill the disk."""
_FOR_RPC_WORKERS = frozenset(
    {"rpc_worker", "host", "port", "engine__cores", "engine__threads", "engine__memory", "quiet"}
)


@click.command(epilog=_EPILOG, short_help="Serve a model to other programs (OpenAI-compatible).")
@click.argument("model", required=False, metavar="[MODEL]")
@stacked(
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option(
        "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port; 0 = a free one."
    ),
    click.option(
        "--rpc-worker",
        is_flag=True,
        help="Hold layers of a model for another machine (its --rpc); default port: 50052.",
    ),
    file_option("--token-file", help="File with the bearer token that programs must send."),
    click.option(
        "--alias", multiple=True, metavar="NAME", help="Name of the model for programs; may be given several times."
    ),
    click.option(
        "--queue",
        type=click.IntRange(0, 1000),
        default=16,
        show_default=True,
        help="Queue length.",
        metavar="N",
    ),
    click.option("--cors-origin", multiple=True, metavar="URL", help="Allowed CORS origin, or *; default: none."),
    click.option("--web", is_flag=True, help="Also serve the app itself to browsers, a session for each tab."),
    click.option(
        "--sessions",
        type=click.IntRange(1, 100),
        default=8,
        show_default=True,
        help="Maximum number of browser sessions; 0.1 GB each.",
        metavar="N",
    ),
    setting("--max-tokens", "chat.max_tokens", "Limit of answers whose request sets none; 0 = no limit."),
    engine_options(),
    click.option("--quiet", "-q", is_flag=True, help="Print only the address, warnings and errors."),
)
def serve(
    model: str | None,
    host: str,
    port: int,
    rpc_worker: bool,
    token_file: Path | None,
    alias: tuple[str, ...],
    queue: int,
    cors_origin: tuple[str, ...],
    web: bool,
    sessions: int,
    quiet: bool,
    **values: Any,
) -> int:
    """Serve a model over HTTP to other programs, with the OpenAI interface and llama-server's timings.

    MODEL is a GGUF file, a Hugging Face repository in the local cache, or `demo`; default: the one used last.
    """
    chosen, strict = overridden(values), values["speculation__draft_model"] is not None
    if rpc_worker:
        return _serve_worker(host, port, chosen, quiet=quiet)
    if strict:
        require_draft_in_use(chosen)
    if web:
        _require_web()
    backend = _backend(chosen)
    try:
        from cpuchat.serving.guard import TOKEN_VARIABLE, read_token

        is_new = token_file is not None and not token_file.exists()
        token = read_token(token_file)
        path = model_path(model, chosen)
        listeners = _listen(host, port)
        local = all(is_loopback(one.getsockname()[0]) for one in listeners)  # the name of a host does not say it
        if not local and not token:
            raise UsageError(
                f"Listening on {host} needs a token: others could use this machine.",
                f"Add --token-file FILE or set {TOKEN_VARIABLE}.",
            )
    except BaseException:
        backend.kill()
        raise
    terminal = Terminal(quiet=quiet)
    if is_new:
        terminal.note(f"Token: {token_file} (created)")
    server = _Serve(chosen, backend, path, terminal, strict=strict)
    access = Access(token, local, cors_origin, sessions if web else 0)
    return asyncio.run(server.run(listeners, access, alias, max(queue, access.sessions)))  # each tab may wait


@dataclass(frozen=True)
class Access:
    """Who may use the server (see `Guard`), and how many browser sessions there may be."""

    token: str
    local: bool
    origins: tuple[str, ...]
    sessions: int


def _require_web() -> None:
    """Check that the extra is installed. Raises UsageError."""
    import importlib.util

    for name in ("textual_serve", "websockets"):
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                "--web needs the extra `web`.", 'Run `uv tool install ".[web]"` in the checkout of cpuchat.'
            )


def tab_address(listeners: list[socket.socket]) -> str:
    """Return an address on this machine, which the key of browser tabs does not leave; adds a listener if none is."""
    from cpuchat.serving.server import listen, url

    if not is_local(url(listeners[0])):
        listeners += listen("127.0.0.1", 0)
        return url(listeners[-1])
    return url(listeners[0])


@contextlib.asynccontextmanager
async def _watched_over(sessions: Sessions | None) -> AsyncIterator[None]:
    """End sessions that nobody uses inside the block, and all at its end."""
    if sessions is None:
        yield
        return
    watching = asyncio.create_task(sessions.watch_over())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait({watching})


def _serve_worker(host: str, port: int, chosen: Settings, *, quiet: bool) -> int:
    from cpuchat.cli.rpc_worker import serve_worker

    context = click.get_current_context()
    for param in context.command.params:
        name = param.name or ""
        if name not in _FOR_RPC_WORKERS and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            what = param.opts[0] if isinstance(param, click.Option) else "model"
            hint = "Its options are --host, --port, --cores, --threads, --memory-policy and --quiet."
            raise UsageError(f"--rpc-worker takes no {what}.", hint)
    port = PORT if context.get_parameter_source("port") is ParameterSource.DEFAULT else port
    return serve_worker(host, port, chosen, Terminal(quiet=quiet))


def _listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets. Raises UsageError; one that names the server if it is cpuchat's."""
    from cpuchat.running_servers import running_servers
    from cpuchat.serving.server import PortInUse, listen

    try:
        return listen(host, port)
    except PortInUse:
        for one in running_servers():
            if one.url.endswith(f":{port}"):
                message = f"{one.model} is already served on {one.url}."
                raise UsageError(message, "Use that server, or choose another port with --port.") from None
        raise


def _backend(chosen: Settings) -> SwitchingBackend:
    """Return a backend whose worker is starting already. Conversations of programs are kept in memory only."""
    from cpuchat.backend.local import LocalBackend
    from cpuchat.backend.switching import SwitchingBackend
    from cpuchat.hardware.placement.placement import PlacementSpec

    local = LocalBackend(state_dir=paths.kv_dir(), state_limit=int(chosen.engine.saved_kv_gb * 1e9))
    local.prepare(PlacementSpec.of(chosen))
    return SwitchingBackend(local)


class LineLimit:
    """Lets `MOST_LINES` through in a second and counts the others."""

    _second = _n = 0

    def take(self, now: float) -> tuple[bool, int]:
        """Return whether a line may be printed `now` (seconds), and how many were left out in the second before."""
        left_out = 0
        if int(now) != self._second:
            left_out, self._second, self._n = max(0, self._n - MOST_LINES), int(now), 0
        self._n += 1
        return self._n <= MOST_LINES, left_out


class _Serve:
    """Loads the model, serves it, and ends in order on a signal; a second one ends it at once."""

    def __init__(
        self, chosen: Settings, backend: SwitchingBackend, path: Path, terminal: Terminal, *, strict: bool
    ) -> None:
        self._settings = chosen
        self._backend = backend
        self._path = path
        self._terminal = terminal
        self._strict = strict
        self._refused = LineLimit()

    async def run(
        self,
        listeners: list[socket.socket],
        access: Access,
        aliases: tuple[str, ...],
        limit: int,
    ) -> int:
        from cpuchat.cli.session import Session
        from cpuchat.running_servers import RunningServer, recorded
        from cpuchat.serving.app import make_app
        from cpuchat.serving.server import serving, url
        from cpuchat.serving.service import Service
        from cpuchat.serving.web.sessions import Sessions

        loop, terminal = asyncio.get_running_loop(), self._terminal
        async with Session(self._settings, terminal, self._backend) as session:
            # While the model loads, a signal stops that, as Ctrl+C does.
            loop.add_signal_handler(signal.SIGTERM, lambda: signal.raise_signal(signal.SIGINT))
            service = Service(session.conversation, aliases=aliases, limit=limit, on_done=self._log)
            address, web = url(listeners[0]), access.sessions > 0
            key = secrets.token_urlsafe(32) if access.token else ""  # of the apps in browser tabs
            sessions = Sessions(tab_address(listeners), key, access.sessions, terminal.warn) if web else None
            app = make_app(service, token=access.token, local=access.local, origins=access.origins, sessions=sessions)
            async with serving(app, listeners, sockets=web), _watched_over(sessions):
                info = await session.load(self._path, strict=self._strict)
                service.loaded(info)
                for note in filter(None, (session.conversation.draft_problem, *info.notes)):
                    terminal.note(f"cpuchat: {note}")
                with recorded(RunningServer(address, service.name, os.getpid())):
                    terminal.line(f"Serving {service.name} on {address}/v1")
                    if web:
                        terminal.note(f"Chat in a browser: {address}/{'?token=…' if access.token else ''}")
                    await self._stop()
                terminal.note("cpuchat: stopping")
                await service.close()
        return 0

    async def _stop(self) -> None:
        """Wait for a signal."""
        stop = asyncio.Event()

        loop = asyncio.get_running_loop()

        def end_at_once(*_: object) -> None:
            self._backend.kill()
            os._exit(130)

        def on_signal() -> None:
            stop.set()
            for number in (signal.SIGINT, signal.SIGTERM):  # not by the loop, which may be what hangs
                loop.remove_signal_handler(number)
                signal.signal(number, end_at_once)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        await stop.wait()

    def _log(self, done: RequestRecord) -> None:
        """Print one line about a request, nothing of its content; what needs the user's attention also if quiet."""
        from cpuchat.present import reuse
        from cpuchat.present.answers import summary

        if done.result in ("refused", "queue_full"):
            may_print, left_out = self._refused.take(time.monotonic())
            if left_out:
                self._terminal.note(f"cpuchat: {left_out:,} more requests were refused")
            if not may_print:
                return
        parts = [time.strftime("%H:%M:%S"), done.client or "-", done.endpoint]
        if done.result != "ok":
            parts.append(done.result.replace("_", " "))
        what = summary(done.timings, done.stop_reason if done.result == "ok" else "")
        if done.queued_s >= 0.1:
            what = " · ".join(filter(None, (what, f"queued {' '.join(units.duration(done.queued_s))}")))
        line = "  ".join(filter(None, (*parts, what, done.message)))
        if done.hint:
            self._terminal.warn(f"{line}  {' '.join(done.hint.split())}")
        else:
            self._terminal.note(line)
        if note := reuse.note(done.timings):
            self._terminal.note(f"cpuchat: {note}")
