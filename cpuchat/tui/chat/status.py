"""The status line: model, draft, threads, memory policy, context."""

from __future__ import annotations

from rich.text import Text
from textual import events as textual_events
from textual.app import RenderResult
from textual.widget import Widget

from cpuchat.base.text import clean
from cpuchat.models.file_names import SIZE
from cpuchat.models.gguf.header import known_as
from cpuchat.present import answers
from cpuchat.protocol.messages import LoadProgress, ModelLoaded, Reconnecting
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.session import events
from cpuchat.session.activity import Activity
from cpuchat.session.chat import ChatSession
from cpuchat.session.events import SessionEvent
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import DraftingFigures

WARNING_SHARE = 0.8
"""Share of the context from which on it is almost full."""
_BEFORE = len(" cpuchat  ")
_SHORTEST = 8  # characters of a name
_PARTS = ("name", "model", "dim", "warn")
_Part = tuple[str, str]  # a text and its style


def short_name(model: str) -> str:
    """Return the size in a model's name (`0.5B` of `Qwen2.5-0.5B-Instruct`), or the name if it has none."""
    sizes = SIZE.findall(model)
    return sizes[0].upper() if sizes else model


class StatusLine(Widget):
    """One line that drops its least important parts first. A click on the model asks for another one."""

    COMPONENT_CLASSES = {f"status--{part}" for part in _PARTS}
    ALLOW_SELECT = False

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._name_end = 0  # of the model, in cells
        self._model: ModelInfo | None = None
        self._without_model = "no model"  # what is shown then: the one that the next message loads, if any
        self._state = self._progress = ""  # the latter is shown with the figures, which have the same share
        self._used = self._n_ctx = 0
        self._engine: EngineInfo | None = None
        self._drafting = DraftingFigures()
        self._n_tools = 0
        self._shown = self._words()
        self._noted: set[tuple[str, str]] = set()  # notes of models that were shown, with their paths
        self._warned: set[str] = set()  # chats whose context is almost full

    def follow(self, event: SessionEvent, session: ChatSession) -> None:
        match event:
            case events.LoadBegun():
                self.show_state(answers.load_begun(event.source))
            case Reconnecting() if session.activity is Activity.LOADING and session.source is not None:
                tried = f"attempt {event.attempt + 1} of {event.attempts + 1}"
                self.show_state(f"{answers.load_begun(session.source)} · {tried}")
            case LoadProgress() if event.phase != "connecting" or session.activity is not Activity.LOADING:
                name = "the server" if event.phase in answers.SERVER_PHASES else "the model"
                if session.activity is Activity.LOADING and session.source is not None:
                    name = known_as(session.source)
                words = answers.load_progress(name, event)
                if (over := len(words) + _BEFORE - self.size.width) > 0:  # the phase and the share stay
                    words = words.replace(name, f"{name[: max(_SHORTEST, len(name) - over - 1)]}…", 1)
                self._progress = clean(words)
            case ModelLoaded():
                self.show_state("")
                self.show_model(event.model)
                self._tell_notes(session, event.model)
            case events.LoadEnded() | events.AnswerEnded():
                self.show_state("")
                self.show_fill(session)
            case events.Changed("model" | "options"):
                self.show_fill(session)
                self._tell_notes(session, session.conversation.model)
            case events.Changed("tools"):
                self._n_tools = len(session.tools.toolbox.tools)
                self._redraw()

    def _tell_notes(self, session: ChatSession, model: ModelInfo | None) -> None:
        told = {(model.path, note) for note in model.notes} - self._noted if model is not None else set()
        self._noted |= told
        for _, note in sorted(told):
            session.tell(note, "warning")

    def show_fill(self, session: ChatSession) -> None:
        """Show the loaded model and how full its context is; warn once that it is almost full."""
        model, chat = session.conversation.model, session.conversation.chat
        used, n_ctx = session.conversation.figures().n_past.value or 0, session.conversation.n_ctx
        self._model, self._used, self._n_ctx = model, used, n_ctx
        self._without_model = f"{known_as(session.source)} · not loaded" if session.source is not None else "no model"
        self._redraw()
        if model is None or chat is None or not (used and n_ctx):
            return
        if used < WARNING_SHARE * n_ctx:
            self._warned.discard(chat.id)  # it may have been summarized
        elif chat.id not in self._warned:
            self._warned.add(chat.id)
            full = f"The context is {100 * used / n_ctx:.0f} % full."
            session.tell(f"{full} /compact summarizes the chat.", "warning")

    def show_model(self, model: ModelInfo | None) -> None:
        self._model, self._used, self._n_ctx = model, 0, model.n_ctx if model is not None else 0
        self._redraw()

    def show_state(self, state: str) -> None:
        """Show a passing state ("loading … 61 %") in place of the model's name; "" shows the name again."""
        self._state, self._progress = clean(state).replace("\n", " "), ""  # its columns stay
        self._redraw()

    def show_figures(self, used: int, engine: EngineInfo | None, drafting: DraftingFigures) -> None:
        """Show the tokens in the context, the worker's memory policy unless it is the default, and the draft depth; and
        how far a load is."""
        self._used, self._engine, self._drafting = used, engine, drafting
        self._state = self._progress or self._state
        self._redraw()

    def _redraw(self) -> None:
        if (words := self._words()) != self._shown:
            self._shown = words
            self.refresh()

    def _words(self) -> tuple[list[_Part], list[str], list[_Part]]:
        """Return what is at the left, wordings of the draft model (longest first), and all else, each with its style.
        While another model loads, there is nothing of the one before."""
        model = self._model
        if self._state or model is None:
            state = (f" {self._state}", "model") if self._state else (f" {clean(self._without_model)}", "warn")
            return [(" cpuchat ", "name"), state], [], []
        is_named = model.name.lower().startswith("cpuchat")  # the demo model says it already
        left = [("" if is_named else " cpuchat ", "name"), (f" {model.name} ", "model")]
        if model.quantization.lower() not in model.name.lower():
            left.append((model.quantization, "dim"))
        where: list[_Part] = [(model.server, "dim")]
        if not model.server:
            threads = units.plural(model.n_threads, "core" if len(model.cpus) == model.n_threads else "thread")
            policy = self._engine.memory_policy if self._engine is not None else ""
            named = ("" if policy == "local" else policy.replace(":", " ", 1)), "dim"
            if self._engine is not None and self._engine.policy_refused:
                named = "memory policy rejected", "warn"
            where = [(threads, "dim"), named]
        tools = units.plural(self._n_tools, "tool") if self._n_tools else ""
        context = f"{units.context(self._used, self._n_ctx)} ctx", "dim"
        if not self._n_ctx:  # of a server that does not report it
            context = (f"{units.tokens(self._used)} ctx" if self._used else ""), "dim"
        elif 0 < WARNING_SHARE * self._n_ctx <= self._used:
            context = f"! {context[0]}", "warn"
        return left, self._draft_words(), [part for part in (*where, (tools, "dim"), context) if part[0]]

    def render(self) -> RenderResult:
        styles = {part: self.get_component_rich_style(f"status--{part}", partial=True) for part in _PARTS}
        names, drafts, parts = self._shown
        left = Text.assemble(*((text, styles[part]) for text, part in names), no_wrap=True)
        self._name_end = left.cell_len
        # From the widest that fits: each wording of the draft model with all else, then less and less.
        for chosen in [*([(words, "dim"), *parts] for words in drafts), *(parts[n:] for n in range(len(parts)))]:
            right = Text(" · ", styles["dim"]).join(Text(text, styles[part]) for text, part in chosen)
            right.append(" ")
            gap = self.size.width - left.cell_len - right.cell_len
            if gap >= 1:
                return Text.assemble(left, " " * gap, right, no_wrap=True)
        left.truncate(self.size.width, overflow="ellipsis")
        return left

    async def on_click(self, event: textual_events.Click) -> None:
        if event.x < self._name_end:
            await self.run_action("screen.models")

    def _draft_words(self) -> list[str]:
        model, now = self._model, self._drafting
        if model is None or not model.draft:
            return []
        name = f"draft {short_name(model.draft)}"
        full = f"{name} {model.draft_quantization}".rstrip()
        if not now.wanted:
            return [f"{full} off", f"{name} off"]
        kind = "adaptive depth" if now.adaptive else "fixed depth"
        if now.off is not None and not now.is_off:  # the panel says why nothing is drafted now
            return [full, name]
        depth = "drafts off" if now.is_off else f"{kind} {now.depth or ''}".rstrip()
        return [f"{full} · {depth}", full, name]
