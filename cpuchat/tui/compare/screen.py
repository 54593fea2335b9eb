"""The compare screen: one prompt, two sides, and how they differ in speed, memory and quality."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.events import DescendantFocus
from textual.widgets import Static
from textual.worker import Worker

from cpuchat.base.errors import CpuchatError
from cpuchat.base.text import clean_line
from cpuchat.compare.comparison import Comparison, KeptComparison, Opened, Sides
from cpuchat.compare.recording import Recording
from cpuchat.compare.runner import Round
from cpuchat.hardware.placement.cores import MAX_BUSY_CORES, BusyCores
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.present import compare
from cpuchat.protocol.messages import AnyEvent, ModelLoaded
from cpuchat.telemetry import units
from cpuchat.tui import keys
from cpuchat.tui.compare.agreement import PlacesList
from cpuchat.tui.compare.pane import SidePane, TablePane
from cpuchat.tui.compare.stage import Stage
from cpuchat.tui.services import SPARE, Services, pace_beside
from cpuchat.tui.terminal.painter import Painter, TypingScreen
from cpuchat.tui.threads import result_of, yield_to_inference
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.prompt import PromptInput

_NOISY_MS = 3000
"""From when on it is said that an answer gets no verdict."""
_QUIET_SECONDS = 3
_SAMPLE = "Write a Python function that merges two sorted lists."


class CompareScreen(TypingScreen, Dismissable[Path | None], keys="compare"):
    """Owns the comparison and closes it. Returns the file to use for chats, if the user takes one: that of the side in
    front, where a verdict puts the better one.
    `prompt` is asked at once; "" asks the user for one. `kept`: one that was saved, to continue."""

    CSS_PATH = "compare.tcss"
    AUTO_FOCUS = ""
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-tiny"), (60, "-narrow"), (100, "-wide")]

    def __init__(self, services: Services, sides: Sides, prompt: str = "", kept: Opened | None = None) -> None:
        super().__init__()
        self._compositor = Painter()
        self._services = services
        self._sides = sides
        self.comparison = Comparison(sides, services.settings, backend=services.new_backend, library=services.library)
        self.comparison.tell = self._told
        services.comparison = self.comparison
        chat_id, turns, self._first_shown = kept or ("", [], None)
        self._kept = KeptComparison(services.conversation.history.store, sides, chat_id, len(turns))
        if turns:
            self.comparison.restore(turns)
        self._first_prompt = prompt
        self._panes = SidePane(0, sides[0].label), SidePane(1, sides[1].label)
        self._stage, self._table = Stage(*self._keys, id="stage"), TablePane()
        self._places = PlacesList(self.comparison.names, id="places")
        self._prompt = PromptInput(self.submit, id="prompt")
        self._prompt.border_title = "Prompt for both · Enter sends"
        self._prompt.suggestions = (_SAMPLE,)
        self._prompt.placeholder = f"1  {_SAMPLE}"
        came_with = str(services.loaded_path)
        self._chosen = int(came_with == sides[1].path != sides[0].path)  # the side that Enter takes
        self._left = False
        self._waits = False  # for quiet cores
        self._agreeing: Worker[bool] | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="tabs")
        with Horizontal(id="sides"):
            yield from self._panes
        yield from (self._stage, self._table, self._places, self._prompt, KeyFooter())

    def on_mount(self) -> None:
        self._timer = self.set_interval(SPARE.figures, self._show_live, pause=True)
        self._show_front(self._chosen)
        for pane in self._panes:
            pane.show_turns(self.comparison.turns, self._first_shown)
        self._show_result()

        def start() -> None:
            if self._first_prompt:
                self.submit(self._first_prompt)
            elif self.comparison.turns:
                self._panes[self._chosen].focus()
            else:
                self.action_next()

        self.call_after_refresh(start)

    # Running

    @property
    def busy(self) -> bool:
        is_agreeing = self._agreeing is not None and self._agreeing.is_running
        return self.comparison.busy and not is_agreeing

    def submit(self, text: str) -> None:
        """Send `text` to both sides."""
        if self._refuse_while_busy():
            return
        self._prompt.accept()
        self._hide_prompt()
        self._run(text, lambda: self.comparison.ask(text))

    def action_repeat(self) -> None:
        if self._refuse_while_busy():
            return
        if not (turns := self.comparison.turns):
            self.notify("Nothing to repeat yet. Write a prompt first.")
            return
        self._run(turns[-1].prompt, self.comparison.repeat, repeats=True)

    @work(exclusive=True, group="round")
    async def _run(self, prompt: str, start: Callable[[], Awaitable[Round]] | None, repeats: bool = False) -> None:
        """Run a round; None: repeat the last one once the cores are quiet."""
        done = await self._one_round(prompt, start, repeats) if start is not None else None
        while self._waits and await self._is_quiet():
            done = await self._one_round(prompt, self.comparison.repeat, repeats=True)
        if done is not None and done.complete and self.has_widgets:
            if self.comparison.in_turn:
                self._choose()
            else:
                self._agreeing = self._agree()

    async def _is_quiet(self) -> bool:
        """Wait until other programs leave the cores alone; False when the user stops that."""
        cores, model = BusyCores(), self.comparison.runners[0].model
        cpus = (model.cpus if model is not None else ()) or own_cpus()
        n_quiet = 0
        self.refresh_bindings()
        while self._waits and n_quiet < _QUIET_SECONDS:
            busy = cores.since_last(cpus) or 0.0
            n_quiet = n_quiet + 1 if busy < MAX_BUSY_CORES else 0
            said = f"Waiting for quiet: other programs take {busy:.1f} of {units.plural(len(cpus), 'core')}. Esc stops."
            self._stage.conclude(None, said)
            await asyncio.sleep(1)
        if not self._waits and self.has_widgets:
            self._show_result()
        return self._waits

    @work(exclusive=True, group="agreement")
    async def _agree(self) -> bool:
        """Show where both sides disagree; False where that is not known. Gives way to whatever the user begins."""
        comparison = self.comparison
        if await asyncio.to_thread(comparison.agreement_refused):
            return False
        self.refresh_bindings()
        subtitle = self._stage.border_subtitle

        def tell(share: float) -> None:
            if self.has_widgets:
                said = f"each side reads both answers: {100 * share:.0f} %"
                self._stage.border_subtitle = self._places.border_subtitle = said

        try:
            found = await comparison.agree(tell)
        except CpuchatError as error:
            self.notify(clean_line(str(error)), severity="warning", timeout=10, markup=False)
            found = None
        if self.has_widgets:
            self._stage.border_subtitle, self._places.border_subtitle = subtitle, ""
            self.refresh_bindings()
            if found is not None:
                self._show_agreement()
                await self._keep(comparison.turns[-1].rounds[-1])
        return found is not None

    def _show_agreement(self) -> None:
        """Tint both answers, fill the list of places, and say it on the stage; nothing where it is not known."""
        last = self.comparison.turns[-1].rounds[-1]
        if (found := last.agreement) is None:
            return
        for pane, answer in zip(self._panes, last.answers, strict=True):
            pane.show_agreement(found, answer)
        self._places.show(found)
        self._stage.conclude(found)
        self._choose()

    @work(exclusive=True, group="choice")
    async def _choose(self) -> None:
        """Say which of two files of one model to use, once all is known."""
        comparison = self.comparison
        await comparison.learn_files()
        if comparison.running is not None or not self.has_widgets:
            return
        turn = comparison.turns[-1]
        self._table.show(comparison, *self._keys)
        if (found := compare.choice(comparison, turn)) is not None:
            self._stage.conclude(turn.rounds[-1].agreement, "\n".join(map(clean_line, found[1])))
            self._go_to(found[0])

    async def _one_round(self, prompt: str, start: Callable[[], Awaitable[Round]], repeats: bool) -> Round | None:
        """Returns the round unless it could not begin, or the screen is gone."""
        if self._agreeing is not None and self._agreeing.is_running:
            await self.comparison.stop()
            await result_of(self._agreeing)
        if self._left:
            return None
        turns = self.comparison.turns
        before = list(turns[:-1] if repeats else turns)
        self._waits = False
        self.remove_class("-places")
        for pane in self._panes:
            pane.begin(before, prompt)
        if not repeats:
            self._table.begin()
        self._timer.resume()
        self.call_later(self._show_use)
        try:
            done = await start()
        except CpuchatError as error:
            self.notify(clean_line(str(error)), severity="warning", timeout=10, markup=False)
            for pane in self._panes:
                pane.show_turns(turns)
            self._show_front(self._chosen)
            self._show_result()
            return None
        finally:
            self._timer.pause()
            if self.has_widgets:
                self.call_later(self._show_use)
        if not self.has_widgets:
            return None
        stays = done not in turns[-1].rounds  # it was stopped, and there is a complete one
        for pane in self._panes:
            pane.show_turns(turns) if stays else pane.end()
        self._show_live()
        self._show_front(self._chosen)
        self._show_result(replay=not stays)
        if stays:
            self.notify("Stopped. The complete answers stay.")
        else:
            await self._keep(done)
        return done

    async def _keep(self, done: Round) -> None:
        if not any(answer.content for answer in done.answers):
            return
        try:
            await asyncio.to_thread(self._kept.keep, self.comparison.turns)
        except CpuchatError as error:
            self.notify(clean_line(str(error)), title="Not saved", severity="error", timeout=10, markup=False)

    def _told(self, side: int, event: AnyEvent) -> None:
        if not self.has_widgets:
            return
        pane = self._panes[side]
        pane.show_event(event, self.comparison.runners[side].conversation.meter.prefill_left_s())
        if len(self.comparison.writing) == 1:
            self._show_front(side)
        if isinstance(event, ModelLoaded):
            yield_to_inference()
            pace = pace_beside(event.model.n_threads)
            pane.min_interval = pace.interval
            self.comparison.runners[side].conversation.set_pace(pace.text)
            self._timer.stop()
            self._timer = self.set_interval(pace.figures, self._show_live)

    async def interrupt(self) -> bool:
        """Stop the round; False when nothing runs."""
        if not self.comparison.busy:
            return False
        await self.comparison.stop()
        return True

    async def action_close(self) -> None:
        if self.busy and await self.interrupt():
            return
        if self._waits:
            self._waits = False
            return
        if self.has_class("-asking") and self.comparison.turns:
            self._hide_prompt()
        elif self.has_class("-places"):
            self.action_agreement()
        elif self.has_class("-table"):
            self.action_table()
        else:
            self._leave()

    def action_use(self) -> None:
        self._leave(Path(self._sides[self._chosen].path))

    @work
    async def _leave(self, chosen: Path | None = None) -> None:
        if not self._left:
            self._left = True
            await self._services.close_comparison()
            await self.dismiss_when_on_top(chosen)

    def _refuse_while_busy(self) -> bool:
        if self.busy:
            self.notify("An answer is still being written. Stop it with Esc first.", severity="warning")
        return self.busy

    # Showing

    def _show_live(self) -> None:
        comparison = self.comparison
        watch, counting = self._services.machine_watch, self._services.settings.hardware.counters
        for pane in self._panes:
            pane.set_class(pane.index in comparison.writing, "-writing")
        for side in comparison.writing:
            if counting and (sample := watch.sample()) is not None:
                comparison.runners[side].conversation.meter.machine(sample)
        if (running := comparison.running) is not None:
            self.add_class("-staged")
            status, names = "Preparing…", comparison.names
            recording = Recording.of(comparison, comparison.turns[-1], running)
            shares = [answer.timings.cores_share for answer in running.answers if answer.timings is not None]
            for side in comparison.writing:
                figures = comparison.runners[side].conversation.figures()
                self._panes[side].show_reading(figures.prefill_left_s)
                status = compare.waiting(figures, names[side])
                if running.answers[side].written.n_tokens:
                    waits = running.answers[1 - side].timings is None
                    status = f"{names[side]} answers{f'; {names[1 - side]} waits' if waits else ''}."
                shares.append(figures.cores_share if recording.sides[side].end_ms >= _NOISY_MS else None)
            if lost := [1 - share for share in shares if share is not None]:
                status = f"No verdict from this run: other programs take {100 * max(lost):.0f} % of the cores. "
                status += f"Esc stops, {self._key('wait')} waits for quiet."
            self._stage.live(recording, status)
            self._stage.border_subtitle = ""

    def _show_result(self, replay: bool = False) -> None:
        """Show the last turn on the stage and in the table; a round that has just ended is replayed."""
        turns = self.comparison.turns
        measured = bool(turns and turns[-1].rounds)
        self.set_class(measured, "-measured", "-staged")
        self._table.show(self.comparison, *self._keys)
        if not measured:
            return
        recording = Recording.of(self.comparison, turns[-1])
        self._stage.show(recording)
        hints = ("table", "table"), ("replay", "replay"), ("repeat", "repeat swapped")
        self._stage.border_subtitle = Content(" · ".join(f"{self._key(name)} {what}" for name, what in hints))
        self._show_agreement()
        if replay and self.app.animation_level != "none":
            self._stage.replay()

    @property
    def _keys(self) -> tuple[str, str]:
        return self._key("repeat"), self._key("wait")

    def _key(self, action: str) -> str:
        """Return how the key of an action is written, also if the user has moved it."""
        (key,) = (key for key in keys.moved(self._services.keymap) if key.id == f"compare.{action}")
        return keys.display(key.keys.partition(",")[0])

    @property
    def _can_use(self) -> bool:
        """Return whether the side in front can be taken: the sides are two files, with the user's settings."""
        (a, b), turns = self._sides, self.comparison.turns
        are_files = a.path != b.path and not a.changes and not b.changes
        is_told = bool(turns and turns[-1].rounds) and not self.comparison.running
        return are_files and is_told and not self.has_class("-asking") and not self.has_class("-places")

    def _show_use(self) -> None:
        """Say at the side in front that Enter takes it."""
        for pane in self._panes:
            is_offered = self._can_use and pane.has_class("-front")
            pane.border_subtitle = f"{self._key('use')} uses it for chats" if is_offered else ""
        self.refresh_bindings()

    def _go_to(self, side: int) -> None:
        """Bring a side to the front, and the focus to it unless a prompt is being written."""
        self.action_front(side)
        if not self.has_class("-asking") and not self.has_class("-places"):
            self._panes[side].focus()

    @on(DescendantFocus)
    def _pane_focused(self, event: DescendantFocus) -> None:
        if isinstance(event.widget, SidePane) and not self.busy:  # else it goes from a hidden side to the other
            self.action_front(event.widget.index)

    def action_front(self, side: int) -> None:
        """Choose a side: it is in front, but for the one that answers."""
        self._chosen = side
        self._show_front(side)

    def _show_front(self, side: int) -> None:
        if self._panes[side].has_class("-front"):
            self._show_use()
            return
        for pane in self._panes:
            pane.set_class(pane.index == side, "-front")
        parts = [
            Content.from_markup(
                f"[@click=screen.front({pane.index})]{'[b reverse]' if pane.index == side else ''} $name [/]",
                name=f"{'AB'[pane.index]} {clean_line(self.comparison.names[pane.index])}",
            )
            for pane in self._panes
        ]
        self.query_one("#tabs", Static).update(Content("  ").join(parts))
        self._show_use()

    def action_other(self) -> None:
        """Go to the other side, which comes to the front where only one is shown."""
        self._go_to(int(self._panes[0].has_class("-front")))

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "use":
            return self._can_use
        if action == "wait":
            return not self._waits and bool(self.comparison.turns) and not self.has_class("-asking")
        if action in ("next", "repeat", "agreement"):
            return None if self.busy else True
        return True

    @work(exclusive=True, group="round")
    async def action_agreement(self) -> None:
        """Show the list of places, or the stage again; where the sides are loaded in turn, the places are found now."""
        if self.has_class("-places"):
            self.remove_class("-places")
            self._go_to(self._chosen)
            return
        turns = self.comparison.turns
        if self._refuse_while_busy() or not turns or not turns[-1].rounds:
            return
        if self._agreeing is None or not self._agreeing.is_running:
            self._agreeing = self._agree() if turns[-1].rounds[-1].agreement is None else None
        self.add_class("-places")  # at once: Esc goes back to the stage
        self._places.focus()
        self._show_use()
        if self._agreeing is not None and not await result_of(self._agreeing):
            self.remove_class("-places")
            self._go_to(self._chosen)
            if reason := await asyncio.to_thread(self.comparison.agreement_refused):
                self.notify(clean_line(reason), markup=False)

    @on(PlacesList.Chosen)
    def _place_chosen(self, event: PlacesList.Chosen) -> None:
        answer = self.comparison.turns[-1].rounds[-1].answers[event.side]
        self._show_front(event.side)
        at = event.place.character - len(answer.reasoning)
        self._panes[event.side].go_to(max(0, at) / max(1, len(answer.content)))

    def action_next(self) -> None:
        self.remove_class("-places")
        self.add_class("-asking")
        self._prompt.focus()
        self._show_use()

    def _hide_prompt(self) -> None:
        self.remove_class("-asking")
        self._go_to(self._chosen)

    async def action_wait(self) -> None:
        """Repeat the round once the cores are quiet; what runs is stopped."""
        if not self._waits and (turns := self.comparison.turns):
            running = self.comparison.running is not None
            self._waits = True
            await self.comparison.stop()
            if not running:
                self._run(turns[-1].prompt, None)

    def action_table(self) -> None:
        self.toggle_class("-table")

    def action_replay(self) -> None:
        if not self.busy:
            self.remove_class("-table")
            self._stage.replay()
