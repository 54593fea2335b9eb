"""Tests drafting on the chat screen: figures, the keys, and messages about draft models."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.config import settings
from cpuchat.protocol.messages import Failed, Speculation
from cpuchat.tui.chat.status import StatusLine, short_name
from cpuchat.tui.chat.telemetry import TelemetryPanel
from tests.support.chat_app import SMALL, WIDE, RunningApp, loaded, running
from tests.support.scripted_backend import DRAFTING, REFUSED, WITH_DRAFT, Gate, ScriptedBackend, answer
from tests.support.snapshots import snapshot
from tests.support.tiny_gguf import write_tiny_gguf

TEXT = """Reading the prompt is a **matrix × matrix** product: each weight is fetched once and used for every token. \
Writing is matrix × vector: every weight is fetched again for each token, so memory bandwidth sets the pace.

```python
tok_s = bandwidth / bytes_per_token
```"""
TAKING_TURNS = ("draft", "draft", "draft", "", "suffix", "suffix", "suffix", "draft")


def drafted(text: str = TEXT, gate: Gate | None = None) -> list:
    return answer(text, drafters=TAKING_TURNS, speculation=DRAFTING, gate=gate)


async def panel(app: RunningApp) -> str:
    """Return all figures."""
    shown = app.chat.query_one(TelemetryPanel)
    shown.add_class("-all")
    await app.pilot.pause()
    return "\n".join(shown.render_line(y).text for y in range(shown.size.height))


async def test_an_answer_with_drafts_tells_its_figures_and_the_status_line_as_much_as_there_is_room_for() -> None:
    backend = ScriptedBackend([drafted(), answer("Hm hm.", speculation=REFUSED)], model=WITH_DRAFT)
    async with loaded(backend, size=WIDE) as app:
        assert "draft 0.5B Q8_0 · adaptive depth · 8 threads" in app.status
        await app.press("ctrl+t", "ctrl+t")
        await app.told("New answers")  # nothing to mark yet
        await app.send("Why?")
        assert app.transcript.messages[-1].note == "412 tokens · 41.3 tok/s · 1.64× vs plain · first token 0.21 s"
        shown = await panel(app)
        for row in ("acceptance        74 %", "per pass         6.2 tokens", "plain           25.2 tok/s",
                    "drafting           7 % time", "by draft 84 %, suffix 16 %", "drafted          7.1 a pass",
                    "1.64×"):  # fmt: skip
            assert row in shown, row
        assert "draft 0.5B Q8_0 · adaptive depth 7 · 8 threads" in app.status
        for width, told in ((80, "draft 0.5B Q8_0 · 8 threads"), (74, "draft 0.5B · 8 threads")):
            await app.pilot.resize_terminal(width, 24)
            await app.until(lambda width=width: app.chat.query_one(StatusLine).size.width == width)
            assert told in app.status
        await app.pilot.resize_terminal(*WIDE)
        await app.send("Why?")
        off = "drafts off: at 31 % acceptance plain decoding is 12 % faster on these cores"
        assert off in " ".join((await panel(app)).split())


def test_short_names_of_models() -> None:
    names = {"Qwen2.5-0.5B-Instruct": "0.5B", "cpuchat-demo-1m": "1M", "SmolLM2 135M": "135M", "v2.5b3": "v2.5b3"}
    assert [short_name(name) for name in names] == [*names.values()]


async def test_f9_chooses_drafters_and_switches_drafting_from_the_next_answer() -> None:
    settings.update({"speculation": {"drafters": "off"}})
    async with loaded(ScriptedBackend([answer("One."), drafted()], model=WITH_DRAFT)) as app:
        assert app.backend.loads[0][1].draft_path == ""
        await app.press("f9")
        await app.until(lambda: app.conversation.speculation.drafters)
        await app.press("f9")
        await app.told("Drafting off from the next answer")
        assert "off (F9 or F2)" in await panel(app)
        assert "draft 0.5B Q8_0 off" in app.status
        await app.send("One")
        await app.press("f9")
        assert "off (F9 or F2)" not in await panel(app)
        await app.send("Two")
        await app.press("f9")
        assert "off (F9 or F2)" not in await panel(app)  # its figures are of that answer
        assert "draft 0.5B Q8_0 off" in app.status
        off, auto = (request.speculation for request in app.backend.requests)
        assert auto == settings.load().speculation.speculation() and auto.drafters and off == Speculation()
    assert settings.load().speculation.drafters == "auto"


async def test_marks_are_switched_with_a_key_remembered_and_those_of_the_last_answers_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cpuchat.tui.chat.transcript.MAX_COLORED", 2)
    backend = ScriptedBackend([drafted("A **bold** word")] * 3, model=WITH_DRAFT)
    async with loaded(backend) as app:
        await app.send("One")
        assert "proposed by" not in app.screen_text and "A bold word" in app.screen_text
        await app.press("ctrl+t")
        assert "A **bold** word" in app.screen_text  # as it was written
        assert "proposed by the model 27 %, draft 73 %" in app.screen_text
        await app.press("ctrl+t")
        assert "proposed by" not in app.screen_text
        await app.press("ctrl+t")
        await app.until(lambda: app.conversation.settings.ui.color_drafts)
        ids = list[str]()
        for question in ("", "Two", "Three"):
            if question:
                await app.send(question)
            ids.append(app.conversation.chat.id if app.conversation.chat else "")
            await app.press("ctrl+n")
        for chat_id, is_marked in zip(ids, (False, True, True), strict=True):
            await app.chat.commands.open(chat_id).wait()
            await app.shows("bold")
            assert ("proposed by" in app.screen_text) == is_marked
    assert settings.load().ui.color_drafts


async def test_a_draft_model_is_loaded_beside_the_model_or_left_out_where_it_is_not_there_or_does_not_load(
    tmp_path: Path,
) -> None:
    target, draft = (write_tiny_gguf(tmp_path / f"{name}-F32.gguf") for name in ("target", "draft"))
    settings.update({"speculation": {"draft_model": str(draft)}})
    backend = ScriptedBackend(draft_failure=Failed(code="does_not_fit", message="It needs 9 GB, there are 4 GB."))
    async with loaded(backend, model=target) as app:
        assert [(path, options.draft_path) for path, options in backend.loads] == [(target, str(draft)), (target, "")]
        assert any("without the draft model draft-F32" in n and "9 GB" in n for n in app.notices)
        app.conversation.settings.speculation.draft_model = "/nowhere/draft.gguf"
        app.chat.session.load(target)
        await app.told("nowhere")
        await app.ready()
        assert backend.loads[-1][1].draft_path == ""


async def test_settings_of_the_draft_model_offer_to_load_again_but_the_depth_does_not_need_it() -> None:
    async with loaded() as app:
        await app.press("f2")
        await app.until(lambda: app.app.screen.query("#row-speculation-draft_model"))
        app.app.screen.query_one("#row-speculation-draft_model").put("none")  # type: ignore[attr-defined]
        await app.pilot.pause()
        await app.press("ctrl+s")
        await app.confirm()
        await app.until(lambda: len(app.backend.loads) == 2 and not app.chat.session.busy)
        assert app.conversation.settings.speculation.draft_model == "none"
        await app.press("f2")
        await app.until(lambda: app.app.screen.query("#row-speculation-depth"))
        app.app.screen.query_one("#row-speculation-depth").put(5)  # type: ignore[attr-defined]
        await app.pilot.pause()
        await app.press("ctrl+s")
        await app.closes()
        await app.send("Hello")
        assert app.backend.requests[0].speculation.depth == 5
        assert len(app.backend.loads) == 2


async def test_pictures_and_marks_without_color(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [drafted(), answer("Because of that.", drafters=("",), speculation=REFUSED)]
    async with running(ScriptedBackend(answers, model=WITH_DRAFT), size=SMALL) as app:
        app.prompt.cursor_blink = False
        await app.ready()
        await app.press("ctrl+t")
        app.app.clear_notifications()
        await app.send("Why does a CPU write slower than it reads the prompt?")
        await snapshot(app.app, "chat-drafted-80x24")
        await app.press("ctrl+t")
        await app.send("Why?")
        await app.pilot.resize_terminal(*WIDE)
        await snapshot(app.app, "chat-drafts-off-120x40")
    monkeypatch.setenv("NO_COLOR", "1")
    settings.update({"ui": {"color_drafts": True}})
    backend = ScriptedBackend([drafted("one two three four five six seven eight")], model=WITH_DRAFT)
    async with loaded(backend) as app:
        await app.send("Count")
        segments = {s.text.strip(): s.style for line in app.transcript.lines for s in line.segments if s.style}
        assert segments["suffix"].italic and segments["the model"].bold
