"""A recorded comparison of a real model, replayed on the stage: what the app can show before a model is there."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content

from cpuchat.base import paths
from cpuchat.base.text import clean_line
from cpuchat.compare.recording import Recording, read_recording
from cpuchat.tui.compare.stage import Stage
from cpuchat.tui.markdown.transcript import Transcript, TranscriptMessage
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter

_YOURS = "On another CPU it may be otherwise: ^L measures yours."


class ReplayScreen(Dismissable[str], keys="replay"):
    """Replays `paths.recording_file`. Closes with the action of the chat that the user wants then, if any. Raises
    RecordingError: the file of the recording cannot be read."""

    CSS_PATH = "compare.tcss"
    AUTO_FOCUS = ""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.recording: Recording = read_recording(paths.recording_file(name))
        self.over = False
        """It was shown to its end."""
        self._shown = [0, 0]  # tokens of each side

    def compose(self) -> ComposeResult:
        with Horizontal(id="sides"):
            for index, side in enumerate(self.recording.sides):
                pane = Transcript(id=f"side-{'ab'[index]}")
                pane.border_title = Content(clean_line(f"{'AB'[index]}  {side.name}"))
                yield pane
        yield Stage(id="stage")
        yield KeyFooter()

    def on_mount(self) -> None:
        self._panes = [self.query_one(f"#side-{part}", Transcript) for part in "ab"]
        self._stage = self.query_one(Stage)
        self._stage.border_subtitle = Content(
            clean_line(f"{self.recording.title} · recorded on {self.recording.machine}")
        )
        self._timer = self.set_interval(1 / Stage.FRAMES_PER_S, self._follow, pause=True)
        self.call_after_refresh(self.action_replay)

    def action_replay(self) -> None:
        self.begin()
        self._stage.replay()
        self._timer.resume()

    def begin(self) -> None:
        """Show the prompt, and answers that have not begun."""
        self._shown = [0, 0]
        for pane, side in zip(self._panes, self.recording.sides, strict=True):
            pane.set_messages([TranscriptMessage("user", "You", self.recording.prompt)])
            pane.color_drafts(bool(side.drafters))
            pane.begin_answer(side.name, drafted=bool(side.drafters))
        self._stage.show(self.recording, _YOURS)

    def show_at(self, at_ms: float) -> None:
        """Show what was written `at_ms` after the first token; times only grow."""
        self._stage.show_at(at_ms)
        self._follow()

    def _follow(self) -> None:
        for index, side in enumerate(self.recording.sides):
            end = side.n_at(self._stage.at_ms)
            for number in range(self._shown[index], end):
                drafter = side.drafters[number] if side.drafters else ""
                self._panes[index].append(side.tokens[number][0], drafter=drafter)
            self._shown[index] = end

    @on(Stage.Replayed)
    def _replayed(self) -> None:
        self._timer.pause()
        self._follow()
        for pane in self._panes:
            pane.finish_answer("recording")
        self.over = True
