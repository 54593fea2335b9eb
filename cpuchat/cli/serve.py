"""`cpuchat serve`: the engine for other programs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuchat.base.errors import UsageError
from cpuchat.cli.completion import MODEL
from cpuchat.cli.lazy import SectionedCommand
from cpuchat.cli.options import model_path, overridden, prepared_backend, require_draft_in_use, section_options, setting
from cpuchat.cli.terminal import TerminalOutput
from cpuchat.config.servers import RunningServer, is_loopback, recorded, running_servers
from cpuchat.config.settings import Settings
from cpuchat.present.answers import note, summary
from cpuchat.protocol.messages import MAX_PARALLEL
from cpuchat.telemetry import units

if TYPE_CHECKING:
    from cpuchat.backend.switching import SwitchingBackend
    from cpuchat.serving.service import RequestRecord


_EPILOG = """\b
Examples:
  cpuchat serve                      the model used last, on port 8080
  cpuchat serve ~/models/qwen.gguf --port 9000 --idle-unload 30
  CPUCHAT_SERVE_TOKEN="$(cat ~/.cpuchat-token)" cpuchat serve --host 0.0.0.0
  curl -s http://127.0.0.1:8080/v1/chat/completions \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

Requests beyond --parallel wait; clients take turns. Each answer at once takes a KV cache of --ctx tokens; beside others
only suffix decoding drafts. Models with a recurrent state or a draft head answer one at a time, and the log says why.

Ctrl+C ends the server, a second one ends it at once. `cpuchat docs agents` configures coding agents, `cpuchat docs
serve` has the paths, and editors.

CPUCHAT_SERVE_TOKEN is the token that programs must send as their API key, unencrypted (`cpuchat docs serve#access`);
any address but 127.0.0.1 needs one. `openssl rand -hex 32` makes one."""


class _Parallel(click.ParamType):
    """A number of answers at once; `auto` is 0."""

    name = "parallel"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value != "auto" and not str(value).isdecimal():
            self.fail("must be a number or auto", param, ctx)
        return 0 if value == "auto" else click.IntRange(1, MAX_PARALLEL).convert(value, param, ctx)


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model", required=False, type=MODEL, metavar="[MODEL]")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on. Default: 127.0.0.1.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, metavar="N", help="0 = a free one. Default: 8080.")
@click.option(
    "--alias", multiple=True, metavar="NAME", help="Name of the model for programs; may be given several times."
)
@click.option("--queue", type=click.IntRange(0, 1000), default=16, help="Queue length. Default: 16.", metavar="N")
@click.option(
    "--parallel", type=_Parallel(), default=1, metavar="N",
    help="Answers at once, each with a context of its own; auto: up to 4 if memory allows. Default: 1.",
)  # fmt: skip
@click.option(
    "--idle-unload", type=click.FloatRange(0, 100_000), default=0, metavar="MINUTES",
    help="Unload the model when it is idle for so long; the next request loads it again. Default: 0 = never.",
)  # fmt: skip
@click.option("--cors-origin", multiple=True, metavar="URL", help="Allowed CORS origin, or *; default: none.")
@setting("chat.max_tokens", "Limit of answers whose request sets none; 0 = no limit.")
@section_options("engine", "speculation")
@click.option("--quiet", "-q", is_flag=True, help="Print only the address, warnings and errors.")
def serve(
    model: str | None, host: str, port: int, alias: tuple[str, ...], queue: int, parallel: int, idle_unload: float,
    cors_origin: tuple[str, ...], quiet: bool, **values: Any,
) -> int:  # fmt: skip
    """Serve MODEL (or -m MODEL; default: the one used last) to other programs: OpenAI's and Anthropic's dialects."""
    chosen, strict = overridden(values), values["speculation__draft_model"] is not None
    if strict:
        require_draft_in_use(chosen)
    from cpuchat.backend.switching import SwitchingBackend

    local_backend = prepared_backend(chosen, keeps=True)
    local_backend.resumes = True
    backend = SwitchingBackend(local_backend)
    try:
        from cpuchat.serving.server import TOKEN_VARIABLE, PortInUse, listen, read_token

        token = read_token()
        path = model_path(model, chosen)
        try:
            listeners = listen(host, port)
        except PortInUse:
            for one in running_servers():
                if one.url.endswith(f":{port}"):
                    message = f"{one.model} is already served on {one.url}."
                    raise UsageError(message, "Use that server, or choose another port with --port.") from None
            raise
        local = all(is_loopback(one.getsockname()[0]) for one in listeners)  # the name of a host does not say it
        if not local and not token:
            raise UsageError(
                f"Listening on {host} needs a token: others could use this machine.", f"Set {TOKEN_VARIABLE}."
            )
    except BaseException:
        backend.kill()
        raise
    terminal = TerminalOutput(quiet=quiet)
    access = {"token": token, "local": local, "origins": cors_origin}
    options = {"aliases": alias, "limit": queue, "parallel": parallel, "idle_minutes": idle_unload}
    return asyncio.run(_serve(chosen, backend, path, terminal, listeners, access, options, strict=strict))


async def _serve(
    chosen: Settings, backend: SwitchingBackend, path: Path, terminal: TerminalOutput, listeners: list[socket.socket],
    access: dict[str, Any], options: dict[str, Any], *, strict: bool,
) -> int:  # fmt: skip
    """Load the model and serve it until a signal; `access` as `make_app` takes it, `options` as `InferenceService`.
    Returns the exit code."""
    from cpuchat.cli.session import Session, tell_notes
    from cpuchat.models.ollama import file_name
    from cpuchat.serving.app import make_app
    from cpuchat.serving.server import serving, url
    from cpuchat.serving.service import InferenceService

    loop = asyncio.get_running_loop()
    async with Session(chosen, terminal, backend) as session:
        # While the model loads, a signal stops that, as Ctrl+C does.
        loop.add_signal_handler(signal.SIGTERM, lambda: signal.raise_signal(signal.SIGINT))
        service = InferenceService(
            session.conversation,
            **options,
            on_done=lambda done: _log(done, terminal),
            on_note=lambda text: terminal.note(f"cpuchat: {text}"),
        )
        address = url(listeners[0])
        async with serving(make_app(service, **access), listeners):
            terminal.note(f"cpuchat: loading {file_name(path)} for {address}/v1")
            info = await session.load(path, strict=strict)
            service.loaded(info)
            tell_notes(session.conversation, info, terminal, "cpuchat: ")
            if info.parallel > 1:
                terminal.note(f"cpuchat: {info.parallel} answers at once, each with {info.n_ctx:,} tokens of context")
            with recorded(RunningServer(address, service.names[0], os.getpid())):
                terminal.line(f"Serving {service.names[0]} on {address}/v1")
                await _signal(backend)
            terminal.note("cpuchat: stopping")
            await service.close()
    return 0


async def _signal(backend: SwitchingBackend) -> None:
    """Return at SIGINT or SIGTERM; a second one ends this process at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def end_at_once(*_: object) -> None:
        backend.kill()
        os._exit(130)

    def on_signal() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):  # not by the loop, which may be what hangs
            loop.remove_signal_handler(number)
            signal.signal(number, end_at_once)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await stop.wait()


def _log(done: RequestRecord, terminal: TerminalOutput) -> None:
    """Print one line about a request, nothing of its content; what needs the user's attention also if quiet."""
    parts = [time.strftime("%H:%M:%S"), done.client or "-", done.endpoint]
    if done.result != "ok":
        parts.append(done.result.replace("_", " "))
    what = summary(done.timings, done.stop_reason if done.result == "ok" else "")
    more = [what, f"{done.n_at_once} at once" if done.n_at_once > 1 else ""]
    if done.queued_s >= 0.1:
        more.append(f"queued {' '.join(units.duration(done.queued_s))}")
    what = " · ".join(filter(None, more))
    line = "  ".join(filter(None, (*parts, what, done.message)))
    if done.hint:
        terminal.warn(f"{line}  {' '.join(done.hint.split())}")
    else:
        terminal.note(line)
    if told := note(done.timings):
        terminal.note(f"cpuchat: {told}")
