"""Stored chats and recent models in the command palette."""

from __future__ import annotations

from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider

from cpuchat.errors import CpuchatError
from cpuchat.models.library.model import LocalModel
from cpuchat.telemetry import units
from cpuchat.text import clean_line
from cpuchat.tui.commands import highlighted
from cpuchat.tui.services import Services
from cpuchat.tui.threads import run_in_daemon_thread

MOST_RECENT = 3


def chat_provider(services: Services) -> type[Provider]:
    """Stored chats by title, once something is typed."""

    class ChatProvider(Provider):
        async def search(self, query: str) -> Hits:
            try:
                chats = await services.conversation.list_chats()
            except CpuchatError:
                return
            matcher = self.matcher(query)
            for chat in chats:
                title = clean_line(chat.title)
                if (score := matcher.match(title)) > 0:
                    shown = highlighted(matcher, title)
                    yield Hit(score, shown, partial(services.chat.open_chat, chat.id), help="Open this chat")

    return ChatProvider


def model_provider(services: Services) -> type[Provider]:
    """Models on this machine, those that were used last before anything is typed."""

    class ModelProvider(Provider):
        _models: list[LocalModel]

        async def startup(self) -> None:
            try:
                found = await run_in_daemon_thread(services.library.local_models)
            except (CpuchatError, OSError):
                found = []
            usable = [model for model in found if not model.damaged and model.path != services.loaded_path]
            self._models = sorted(usable, key=lambda model: -model.last_used)

        async def discover(self) -> Hits:
            for model in self._models[:MOST_RECENT]:
                if model.last_used:
                    load = partial(services.chat.load_model, model.path)
                    yield DiscoveryHit(_title(model), load, help="Recent model")

        async def search(self, query: str) -> Hits:
            matcher = self.matcher(query)
            for model in self._models:
                if (score := matcher.match(_title(model))) > 0:
                    shown = highlighted(matcher, _title(model))
                    yield Hit(score, shown, partial(services.chat.load_model, model.path), help=units.size(model.size))

    return ModelProvider


def _title(model: LocalModel) -> str:
    return clean_line(f"Models: Load {model.name} {model.quantization}")
