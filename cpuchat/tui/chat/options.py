"""What the open chat is answered with, and where each value comes from: a form that changes it for this chat."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static

from cpuchat.base.errors import CpuchatError, SettingsError
from cpuchat.base.setting import Setting
from cpuchat.base.text import clean_line
from cpuchat.chats.records import WhenFull
from cpuchat.config.settings import OF_CHAT, value_of, with_changes
from cpuchat.hardware.memory import available_bytes
from cpuchat.models.fit import largest_context, required_memory
from cpuchat.models.gguf.header import read_model
from cpuchat.present import answers
from cpuchat.present.tools import server_state
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.telemetry import units
from cpuchat.tools.config import load_servers
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.setting_rows import Field, FormScreen, SettingRow

_PROMPT, _CONTEXT = "chat.system_prompt", "engine.ctx"
_ABOUT = {_PROMPT: "instructions before the first message; empty for none"}
_FULL: dict[str, WhenFull] = {"ask": "", **{label.lower(): choice for choice, label in answers.WHEN_FULL.items()}}
_WHEN_FULL = Field(
    "chat", "when_full", "", str, "ask", Setting("Context full", "when a message does not fit any more"),
    kind="choice", choices=tuple(_FULL),
)  # fmt: skip
_APPROVED = Field(
    "tools", "approved", "", bool, False, Setting("Approved tools", "off: every call is asked for"), kind="switch"
)


@dataclass(frozen=True)
class ContextField(Field):
    """The context, whose largest value is what the model was trained for or what fits; `need` is the memory for one."""

    largest: int = 0
    trained: int = 0
    need: Callable[[int], int] = lambda n_ctx: 0

    @classmethod
    def of_model(cls, model: ModelInfo, options: LoadOptions) -> ContextField:
        """Read the model's header: call it in a thread. Raises CpuchatError."""
        header = read_model(Path(model.path))

        def need(n_ctx: int) -> int:
            return required_memory(header, options, n_ctx or model.n_ctx).min_bytes

        largest = largest_context(header, options, available_bytes() + need(model.n_ctx))
        return cls(**vars(Field.of(_CONTEXT)), largest=largest, trained=model.n_ctx_train, need=need)

    def parse(self, shown: Any) -> Any:
        if (value := super().parse(shown)) and value > self.largest:
            raise ValueError(f"needs {self.limits}")
        return value

    @property
    def limits(self) -> str:
        return f"0 to {self.largest:,}, " + ("as trained" if self.largest == self.trained else "as memory allows")


class ChatOptionsScreen(FormScreen[dict[str, bool]], keys="options"):
    """Returns the MCP servers to start (True) and to end; None when nothing was saved."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._session = services.session
        self._servers: dict[str, Any] = {}
        with contextlib.suppress(SettingsError):  # a damaged file; `--tools` says so
            self._servers = load_servers()

    # Rows

    def compose(self) -> ComposeResult:
        options, settings, session = self._services.conversation.options, self._services.settings, self._session
        used = options.applied_to(settings)
        with Vertical(id="form") as form:
            form.border_title, form.border_subtitle = "This chat", "from the next message on"
            with VerticalScroll(can_focus=False):
                yield self._row(Field.of(_PROMPT), session.system_prompt)
                for key in OF_CHAT:
                    if key != _CONTEXT or not self._is_served:
                        yield self._row(Field.of(key), value_of(used, key))
                yield self._row(_WHEN_FULL, next(words for words, one in _FULL.items() if one == options.when_full))
                for number, name in enumerate(self._servers):
                    words = Setting(clean_line(name), "MCP server: the model may call its tools, with your approval")
                    field = Field("tools", f"server-{number}", "", bool, False, words, kind="switch")
                    yield self._row(field, name in session.tool_servers)
                if session.tools.approved:
                    yield self._row(_APPROVED, True)
        yield Static(id="hint", markup=False)
        yield KeyFooter()

    async def on_mount(self) -> None:
        model = self._services.conversation.model
        if model is None or model.server:
            return
        options = self._services.conversation.in_effect.load_options()
        with contextlib.suppress(CpuchatError):  # the file is gone: the load says so
            field = await asyncio.to_thread(ContextField.of_model, model, options)
            next(row for row in self.rows if row.field.key == _CONTEXT).field = field

    def _row(self, field: Field, value: Any) -> SettingRow:
        return SettingRow(field, value, [], self._source(field, value), self._unset(field))

    def _source(self, field: Field, value: Any) -> str:
        """Return where a value comes from, or what is known of it."""
        if field.section == "tools":
            return self._state(field)
        if field is _WHEN_FULL:
            return "default" if value == field.default else "this chat"
        set_by, model = self._sources.get(field.key, "") or self._of_model(field), self._services.conversation.model
        if value is not None and value != value_of(self._services.settings, field.key):
            set_by = "this chat"
        in_use = f"{model.n_ctx:,} in use · " if field.key == _CONTEXT and model is not None else ""
        return f"{in_use}{set_by or 'default'}"

    def _state(self, field: Field) -> str:
        if field is _APPROVED:
            return "run without asking"
        name = self._server(field)
        if (server := self._session.tool_servers.get(name)) is not None:
            return server_state(server, self._session.tools.toolbox.offered(server))
        return str(self._servers[name]) if isinstance(self._servers[name], SettingsError) else "MCP server"

    def _server(self, field: Field) -> str:
        return [*self._servers][int(field.name.removeprefix("server-"))]

    def _unset(self, field: Field) -> str:
        if field.default is None and (beneath := value_of(self._services.settings, field.key)) is not None:
            return field.shown(beneath)
        return super()._unset(field)

    def reset_value(self, row: SettingRow) -> Any:
        is_own = row.field.key in (_PROMPT, *OF_CHAT)
        return value_of(self._services.settings, row.field.key) if is_own else row.field.default

    def facts(self, row: SettingRow) -> list[str]:
        beside = row.text_beside if self.has_class("-tiny") else ""  # it may be cut there
        about, model = _ABOUT.get(row.field.key, row.field.words.about), self._services.conversation.model
        if row.field.key == _CONTEXT and model is not None:
            about = f"loads again, ≈{max(model.load_ms / 1e3, 1):.0f} s"
            if isinstance(field := row.field, ContextField):
                with contextlib.suppress(ValueError):
                    about = f"needs {units.size(field.need(field.parse(row.content)))} of memory · {about}"
        return [*filter(None, (beside, about, row.field.limits))]

    def edited(self, row: SettingRow) -> None:
        with contextlib.suppress(ValueError):  # what is wrong with it stands there then
            row.note = self._source(row.field, row.field.parse(row.content))

    # Saving

    def may_save(self) -> bool:
        return not self._session.refuse_while_writing("change this chat")  # a queued message was sent meanwhile

    async def save(self) -> dict[str, bool]:
        values = {row.field.key: row.field.parse(row.content) for row in self.rows}
        changed = {row.field.key: row.field for row in self.rows if row.changed}
        if changed.keys() & {_PROMPT, *OF_CHAT}:
            beneath, before = self._services.settings, self._services.conversation.options.own
            values = {**before, **values}  # a server has no row for the context
            own = {key: values[key] for key in OF_CHAT if values.get(key) not in (None, value_of(beneath, key))}
            try:
                with_changes(beneath, {"engine": {"ctx": own.get(_CONTEXT, 0)}})
            except ValueError as error:
                raise SettingsError(f"{error}.", "Choose another value.") from None
            await self._session.set_options(own, values[_PROMPT])
        if _WHEN_FULL.key in changed:
            await self._services.conversation.options.set(when_full=_FULL[values[_WHEN_FULL.key]])
        if _APPROVED.key in changed:
            self._session.tools.approved.clear()
        if _CONTEXT in changed and self._session.source is not None and not self._session.busy:
            self._session.load(self._session.source)
        return {self._server(field): values[key] for key, field in changed.items() if "server-" in key}
