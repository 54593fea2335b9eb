"""Rows of lists and of the command palette: presets, stored chats, models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from textual.command import Hit, Hits, Provider
from textual.content import Content

from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.config.presets import Preset
from cpuchat.config.servers import ServerModel, Source, host
from cpuchat.models.library.places import LocalModel
from cpuchat.telemetry import units
from cpuchat.tui.commands import RECENT, Listed, PaletteRow, highlighted, line, load_hit, matches
from cpuchat.tui.services import Services

MAX_RECENT = 3
_WIDEST = 36  # of what a preset sets, in cells


def gist(preset: Preset) -> str:
    """Return what a preset sets, in short: `temperature 0.2 · reasoning off · Qwen3-8B-Q4_K_M`."""
    options = [f"{name.replace('_', ' ')} {value:g}" for name, value in preset.options.items()]
    reasoning = [f"reasoning {preset.reasoning}"] if preset.reasoning in ("on", "off") else []
    model = [preset.model.rpartition("/")[2].removesuffix(".gguf")] if preset.model else []
    return clean_line(" · ".join((*options, *reasoning, *model)))


def shortened(about: str) -> str:
    return about if len(about) <= _WIDEST else f"{about[: _WIDEST - 1]}…"


# In the command palette


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
                open_chat = partial(self.app.run_action, ("", "open", (chat.id,)), self.screen)
                yield Hit(score, shown, open_chat, text=title)

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
            for number, model in enumerate(recent[:MAX_RECENT]):
                shown = line(self.app, "" if number else RECENT, Content(_title(model)), units.size(model.size))
                load = partial(services.session.load, model.path)
                yield Listed(shown, load, text=_title(model), group=RECENT)

        async def search(self, query: str) -> Hits:
            matcher = self.matcher(query)
            rows = [(_title(one), "Model", (one.path, units.size(one.size))) for one in self._models]
            served = [source for source in services.served if source != services.loaded]
            rows += [(_served_title(one), "Model", (one, "")) for one in served]
            for score, title, (source, size) in matches(matcher, rows):
                shown = line(self.app, "Model", highlighted(matcher, title), size)
                yield load_hit(score, shown, partial(services.session.load, source), text=title)

    return ModelProvider


async def model_rows(services: Services, load: Callable[[Source], object]) -> list[PaletteRow]:
    """Return the models that can be loaded without a download: those on this machine, the last used first, then those
    that servers listed.
    """
    here = [(_title(one), one.path, units.size(one.size)) for one in await _other_models(services)]
    served = [(_served_title(one), one, "") for one in services.served if one != services.loaded]
    return [PaletteRow(title, partial(load, one), about=about) for title, one, about in here + served]


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
