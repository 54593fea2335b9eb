"""Stored chats and recent models in the command palette."""

from __future__ import annotations

from functools import partial

from textual.command import Hit, Hits, Provider
from textual.content import Content

from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.config.servers import ServerModel, host
from cpuchat.models.library.places import LocalModel
from cpuchat.telemetry import units
from cpuchat.tui.commands import RECENT, Listed, Row, highlighted, line, load_hit, matches
from cpuchat.tui.services import Services

MOST_RECENT = 3


def chat_provider(services: Services) -> type[Provider]:
    """Stored chats by title, once something is typed."""

    class ChatProvider(Provider):
        async def search(self, query: str) -> Hits:
            try:
                chats = await services.conversation.history.list_chats()
            except CpuchatError:
                return
            matcher = self.matcher(query)
            rows = [(f"Open {clean_line(chat.title)}", "Chat", chat) for chat in chats]
            for score, title, chat in matches(matcher, rows, fuzzy=False):  # there may be thousands
                shown = line(self.app, "Chat", highlighted(matcher, title))
                yield Hit(score, shown, partial(services.chat.open_chat, chat.id), text=title)

    return ChatProvider


def model_provider(services: Services) -> type[Provider]:
    """Models on this machine, those that were used last before anything is typed; and those that servers listed."""

    class ModelProvider(Provider):
        _models: list[LocalModel]

        async def startup(self) -> None:
            self._models = await _other_models(services)

        async def discover(self) -> Hits:
            loaded = services.conversation.model
            draft = loaded.draft if loaded is not None else ""  # in use as it should be
            recent = [model for model in self._models if model.last_used and model.name != draft]
            for number, model in enumerate(recent[:MOST_RECENT]):
                shown = line(self.app, "" if number else RECENT, Content(_title(model)), units.size(model.size))
                load = partial(services.chat.load_model, model.path)
                yield Listed(shown, load, text=_title(model), group=RECENT)

        async def search(self, query: str) -> Hits:
            matcher = self.matcher(query)
            rows = [(_title(one), "Model", (one.path, units.size(one.size))) for one in self._models]
            served = [source for source in services.served if source != services.loaded]
            rows += [(_served_title(one), "Model", (one, "")) for one in served]
            for score, title, (source, size) in matches(matcher, rows):
                shown = line(self.app, "Model", highlighted(matcher, title), size)
                yield load_hit(score, shown, partial(services.chat.load_model, source), text=title)

    return ModelProvider


async def other_models(services: Services) -> list[Row]:
    """Return a row for each model that can be loaded in place of the loaded one without a download: those on this
    machine, the last used first, then those that servers listed.
    """
    here = [(_title(one), one.path, units.size(one.size)) for one in await _other_models(services)]
    served = [(_served_title(one), one, "") for one in services.served if one != services.loaded]
    return [
        Row(title, partial(services.chat.load_model, source), about=about) for title, source, about in here + served
    ]


async def _other_models(services: Services) -> list[LocalModel]:
    """Return the models on this machine that are not loaded, the last used first."""
    try:
        found = await run_in_daemon_thread(services.library.local_models)
    except (CpuchatError, OSError):
        found = []
    usable = [model for model in found if not model.damaged and model.path != services.loaded_path]
    return sorted(usable, key=lambda model: -model.last_used)


def _title(model: LocalModel) -> str:
    return clean_line(f"Load {model.name} {model.quantization}")


def _served_title(source: ServerModel) -> str:
    return clean_line(f"Load {source.stem} on {host(source.server)}")
