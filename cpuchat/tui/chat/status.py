"""The status line: model, draft, threads, memory policy, context."""

from __future__ import annotations

import re

from rich.text import Text
from textual import events as textual_events
from textual.app import RenderResult
from textual.widget import Widget

from cpuchat.base.text import clean
from cpuchat.present import answers
from cpuchat.protocol.messages import LoadProgress, ModelLoaded
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.session import events
from cpuchat.session.activity import Activity
from cpuchat.session.chat import ChatSession
from cpuchat.session.events import SessionEvent
from cpuchat.telemetry import units
from cpuchat.telemetry.speculation import DraftingFigures

WARNING_SHARE = 0.8
"""Share of the context from which on it is almost full."""
_SIZE = re.compile(r"(?<![A-Za-z0-9.])\d+(?:\.\d+)?[BbMm](?![A-Za-z0-9])")


def short_name(model: str) -> str:
    """Return the size in a model's name (`0.5B` of `Qwen2.5-0.5B-Instruct`), or the name if it has none."""
    sizes = _SIZE.findall(model)
    return sizes[0].upper() if sizes else model


class StatusLine(Widget):
    """One line that drops its least important parts first. A click on the model asks for another one."""

    COMPONENT_CLASSES = {"status--name", "status--model", "status--dim", "status--warn"}
    ALLOW_SELECT = False

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._name_end = 0  # of the model, in cells
        self._model: ModelInfo | None = None
        self._state = ""
        self._used = 0
        self._drafting = DraftingFigures()
        self._memory = ""
        self._n_tools = 0
        self._noted: set[tuple[str, str]] = set()  # notes of models that were shown, with their paths
        self._warned: set[str] = set()  # chats whose context is almost full

    def follow(self, event: SessionEvent, session: ChatSession) -> None:
        """Show an event of the session."""
        match event:
            case events.LoadBegun():
                self.show_state(f"loading {event.source.stem}")
            case LoadProgress():
                name = "the server" if event.phase in answers.SERVER_PHASES else "the model"
                if session.activity is Activity.LOADING and session.source is not None:
                    name = session.source.stem
                self.show_state(answers.load_progress(name, event, skips=not session.queue))
            case ModelLoaded():
                self.show_state("")
                self.show_model(event.model)
                self._tell_notes(session, event.model)
            case events.LoadEnded():
                self.show_state("")
                self.show_model(session.conversation.model)
            case events.AnswerEnded():
                self.show_state("")
                self.show_fill(session)
            case events.Changed("model"):
                self.show_fill(session)
                self._tell_notes(session, session.conversation.model)
            case events.Changed("tools"):
                self._n_tools = len(session.tools.box.tools)
                self.refresh()

    def _tell_notes(self, session: ChatSession, model: ModelInfo | None) -> None:
        told = {(model.path, note) for note in model.notes} - self._noted if model is not None else set()
        self._noted |= told
        for _, note in sorted(told):
            session.tell(note, "warning")

    def show_fill(self, session: ChatSession) -> None:
        """Show the loaded model and how full its context is; warn once that it is almost full."""
        model, chat = session.conversation.model, session.conversation.chat
        used = session.figures().n_past.value or 0
        if model is not self._model:
            self.show_model(model)
        self.show_context(used)
        if model is None or chat is None or not (used and model.n_ctx):
            return
        if used < WARNING_SHARE * model.n_ctx:
            self._warned.discard(chat.id)  # it may have been summarized
        elif chat.id not in self._warned:
            self._warned.add(chat.id)
            full = f"The context is {100 * used / model.n_ctx:.0f} % full."
            session.tell(f"{full} /compact summarizes the chat.", "warning")

    def show_model(self, model: ModelInfo | None) -> None:
        self._model = model
        self._used = 0
        self.refresh()

    def show_state(self, state: str) -> None:
        """Show a passing state ("loading … 61 %") in place of the model's name; "" shows the name again."""
        state = clean(state).replace("\n", " ")  # its columns stay
        if state != self._state:
            self._state = state
            self.refresh()

    def show_context(self, used: int) -> None:
        """Show the number of tokens in the context."""
        before, self._used = (self._context_words(), self._almost_full), used
        if before != (self._context_words(), self._almost_full):
            self.refresh()

    @property
    def _almost_full(self) -> bool:
        return self._model is not None and 0 < WARNING_SHARE * self._model.n_ctx <= self._used

    def show_engine(self, engine: EngineInfo | None) -> None:
        """Show the worker's memory policy, unless it is the default."""
        policy = engine.memory if engine is not None else ""
        words = "" if policy in ("", "local") else policy.replace(":", " ", 1)
        if engine is not None and engine.memory_refused:
            words = "memory policy rejected"
        if words != self._memory:
            self._memory = words
            self.refresh()

    def show_drafting(self, drafting: DraftingFigures) -> None:
        """Show the draft depth."""
        shown = self._draft_words()
        self._drafting = drafting
        if shown != self._draft_words():
            self.refresh()

    def render(self) -> RenderResult:
        width = self.size.width
        name, strong, dim, warn = (
            self.get_component_rich_style(f"status--{part}", partial=True) for part in ("name", "model", "dim", "warn")
        )
        model = None if self._state else self._model  # while another loads, nothing of the one before
        named = model is not None and model.name.lower().startswith("cpuchat")  # the demo model says it already
        left = Text("" if named else " cpuchat ", name, no_wrap=True)
        if self._state:
            left.append(" " + self._state, strong)
        elif model is None:
            left.append(" no model", warn)
        else:
            left.append(f" {model.name} ", strong)
            if model.quantization.lower() not in model.name.lower():
                left.append(model.quantization, dim)
        self._name_end = left.cell_len
        parts: list[tuple[str, str]] = []
        drafts = self._draft_words() if model is not None else []
        if model is not None:
            what = "core" if len(model.cpus) == model.n_threads else "thread"
            threads = units.plural(model.n_threads, what)
            memory = [("rejected" if "rejected" in self._memory else "", self._memory)] if self._memory else []
            engine = [("", model.engine)] if model.engine else []
            where = [("", model.server)] if model.server else [*engine, ("", threads), *memory]
            context = self._context_words()
            tools = [("", units.plural(self._n_tools, "tool"))] if self._n_tools else []
            parts = [
                *where,
                *tools,
                *([("full", f"! {context}") if self._almost_full else ("", context)] if context else []),
            ]
        # From the widest that fits: each wording of the draft model with all else, then less and less.
        for chosen in [*([("", words), *parts] for words in drafts), *(parts[n:] for n in range(len(parts)))]:
            right = Text(" · ", dim).join(Text(text, warn if kind else dim) for kind, text in chosen)
            right.append(" ")
            gap = width - left.cell_len - right.cell_len
            if gap >= 1:
                return Text.assemble(left, " " * gap, right, no_wrap=True)
        left.truncate(width, overflow="ellipsis")
        return left

    async def on_click(self, event: textual_events.Click) -> None:
        if event.x < self._name_end:
            await self.run_action("screen.switch_model")

    def _context_words(self) -> str:
        if self._model is None:
            return ""
        if not self._model.n_ctx:  # of a server that does not report it
            return f"{units.tokens(self._used)} ctx" if self._used else ""
        return f"{units.context(self._used, self._model.n_ctx)} ctx"

    def _draft_words(self) -> list[str]:
        """Wordings of the draft model, longest first; [] without one."""
        model, now = self._model, self._drafting
        if model is None or not model.draft:
            return []
        name = f"draft {short_name(model.draft)}"
        full = f"{name} {model.draft_quantization}".rstrip()
        if not now.wanted:
            return [f"{full} off", f"{name} off"]
        if not now.adaptive:
            depth = "fixed depth" if now.depth is None else f"fixed depth {now.depth}"
        elif now.depth:
            depth = f"adaptive depth {now.depth}"
        else:
            depth = "drafts off" if now.off is not None and now.off.is_verdict else "adaptive depth"
        return [f"{full} · {depth}", full, name]
