"""Opens the terminal app; the only command-line module that imports the user interface."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuchat.base import paths
from cpuchat.base.errors import ModelNotFound, UsageError
from cpuchat.base.text import clean
from cpuchat.cli import options
from cpuchat.cli.output import is_terminal
from cpuchat.config.servers import KeyRing, RunningServer, Source, last_on_server, recorded
from cpuchat.config.settings import Settings, SettingSources

if TYPE_CHECKING:
    from cpuchat.compare.runner import Side
    from cpuchat.models.library.library import Library
    from cpuchat.tui.app import ChatApp


def open_app(
    model: str | None, values: Mapping[str, Any], *, sides: tuple[Side, Side] | None = None, server: str | None = None,
) -> int:  # fmt: skip
    """Run the app until it exits; returns the exit code.

    `model` is loaded first, on `server` if given; None is the model used last, or the demo model. `values`: options as
    `options.overridden` takes them, for this run only. `sides` opens the compare screen. Raises UsageError,
    SettingsError: no terminal, no such MCP server, or values that are not acceptable; ModelNotFound, DraftMismatch: a
    model or draft model that was given is not there, or does not fit."""
    for stream, name in ((sys.stdin, "input"), (sys.stdout, "output")):
        if not is_terminal(stream) and not os.environ.get("TEXTUAL_DRIVER"):  # of textual-serve, in place of a terminal
            raise UsageError(
                f"The chat app needs a terminal, but standard {name} is not a terminal.",
                'In scripts and pipes, use `cpuchat ask "question"` or `cpuchat --plain`.',
            )
    gc.disable()  # until the first paint: importing makes next to no garbage

    chosen, library, initial, keys = opening(model, values, server)
    sources, tools = SettingSources(options.given_options(values)), dict[str, Any]()
    if names := values.get("tool_servers"):
        from cpuchat.cli.tools import servers_wanted

        tools["tool_servers"] = servers_wanted(names)

    from cpuchat.backend.switching import SwitchingBackend

    # Importing the engine takes the worker as long as importing Textual takes this process.
    prepared = [options.prepared_backend(chosen, keeps=True)] if sides is None and isinstance(initial, Path) else []

    from cpuchat.chats.store import ChatStore
    from cpuchat.session.conversation import Conversation
    from cpuchat.tui.launch import run

    def make() -> ChatApp:
        backend = SwitchingBackend(prepared.pop() if prepared else options.keeping_backend(chosen), keys)
        store = ChatStore(paths.chats_db(), or_in_memory=True)
        conversation = Conversation(settings=chosen, backend=backend, store=store)
        from cpuchat.tui.app import ChatApp

        return ChatApp(conversation, library, initial, sides=sides, key_ring=keys, sources=sources, **tools)

    with recorded(RunningServer(url="", model="", pid=os.getpid())):
        return run(make)


def opening(
    model: str | None, values: Mapping[str, Any], server: str | None
) -> tuple[Settings, Library, Source, KeyRing]:
    """Return the settings of a run, its library, the model to open, and the API keys. Raises as `open_app`."""
    from cpuchat.models.library.library import Library

    base, model = options.with_preset(values.get("preset"), model, server)
    served, chosen = options.server_model(server, model, values), options.overridden(values, base)
    library = Library(chosen.model.folders)
    initial = served or initial_model(library, model, chosen, values)
    if isinstance(initial, Path) and values.get("speculation__draft_model") is not None:
        from cpuchat.models.drafts.choice import choose_draft

        options.require_draft_in_use(chosen)
        choose_draft(initial, chosen.speculation.wanted_draft, library)  # here the command can be corrected
    return chosen, library, initial, options.key_ring(chosen, served)


def initial_model(library: Library, wanted: str | None, chosen: Settings, values: Mapping[str, Any]) -> Source:
    """Return the model to open: the given one, else the last used one if it still exists, else the demo model. Raises
    ModelNotFound: `wanted` is not there, or not even the demo model is."""
    if wanted:
        return library.resolve(wanted, options.tell_choice)
    last = chosen.model.last
    if (served := last_on_server(last)) is not None:
        if (option := options.worker_option(values)) is not None:
            print(f"cpuchat: {option} has no effect on the model used last, which is on a server.", file=sys.stderr)
        return served
    if last:
        try:
            return library.resolve(last)
        except ModelNotFound:
            print(f"cpuchat: {clean(last)} was not found; opening the demo model instead.", file=sys.stderr)
    return library.resolve(options.DEMO)
