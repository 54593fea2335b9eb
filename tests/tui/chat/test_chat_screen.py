from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest
from textual.widgets._toast import Toast

from cpuchat.base import paths
from cpuchat.config import settings
from cpuchat.config.servers import RunningServer, recorded
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol.messages import (
    AnyEvent,
    ContextTrimmed,
    Failed,
    GenerationFinished,
    LoadOptions,
    LoadProgress,
    ModelLoaded,
    PrefillProgress,
    TextDelta,
)
from cpuchat.protocol.timings import Reuse, Timings
from cpuchat.tui import services
from cpuchat.tui.chat.chat_list import ChatList, Chats
from cpuchat.tui.chat.telemetry import Presentation, TelemetryLine, TelemetryPanel
from cpuchat.tui.chat.transcript import COPY
from cpuchat.tui.chat.welcome import CODE, DRAFTS, OF_OTHERS, RACE, STARTS, WHAT
from cpuchat.tui.compare.replay import ReplayScreen
from tests.support.chat_app import SMALL, WIDE, running
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer
from tests.support.snapshots import snapshot
from tests.support.stored_chats import three_chats
from tests.tui.chat.test_branches import select

LONG = """Reading the prompt is a **matrix × matrix** product: each weight is fetched once and used for every token.

```python
tok_s = bandwidth / bytes_per_token
```

```sh
cpuchat --threads 8
```
"""


async def test_a_message_is_answered_shown_and_stored() -> None:
    async with running(ScriptedBackend([answer("Because of *bandwidth*.", reasoning="Let me see.")])) as app:
        await app.ready()
        await app.send("Why is decoding slow?")
        mine, answered = app.transcript.messages
        assert (mine.role, mine.content) == ("user", "Why is decoding slow?")
        assert answered.title == MODEL.name
        assert answered.content == "Because of *bandwidth*."
        assert answered.reasoning == "Let me see."
        assert answered.note == "6 tokens · 40.0 tok/s · first token 0.21 s"
        assert app.stored() == [("user", "Why is decoding slow?"), ("assistant", "Because of *bandwidth*.")]
        assert app.prompt.text == ""
        assert "Why is decoding slow?" in str(app.transcript.border_title)
        assert "48/8k ctx" in app.status


async def test_after_esc_in_the_prompt_status_and_figures_show_the_same_context() -> None:
    stopped = Timings(prompt_n=1024, prompt_ms=900.0, n_past=1024, n_ctx=8192)
    steps = [
        PrefillProgress(request_id=1, processed=1024, total=3000, cache_n=0),
        GenerationFinished(request_id=1, stop_reason="cancelled", timings=stopped),
    ]
    async with running(ScriptedBackend([steps]), size=WIDE) as app:
        await app.ready()
        await app.send("A long prompt.")
        await app.until(lambda: "context    1k " in app.screen_text)
        await app.until(lambda: "1k/8k ctx" in app.status)


async def test_the_prompt_has_the_focus_and_the_model_is_loaded_after_the_first_paint() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[LoadProgress(phase="reading", done=61, total=100), gate,
                                          ModelLoaded(model=MODEL)])  # fmt: skip
    async with running(backend) as app:
        await app.until(gate.reached.is_set)
        assert app.app.focused is app.prompt
        assert "reading the file  61 %" in app.status
        gate.open()
        await app.ready()
        assert "Qwen2.5-1.5B-Instruct Q8_0" in app.status
        assert "8 threads · 0/8k ctx" in app.status


async def test_a_model_that_cannot_be_loaded_gives_way_to_the_one_before() -> None:
    backend = ScriptedBackend()
    async with running(backend) as app:
        await app.ready()
        good, backend.load_steps = backend.load_steps, [Failed(code="model_unsupported", message="Unknown: lhama.")]
        load = backend.load

        def second_time(path: Path, options: LoadOptions, spec: PlacementSpec) -> AsyncGenerator[AnyEvent, None]:
            if str(path) == MODEL.path:
                backend.load_steps = good
            return load(path, options, spec)

        backend.load = second_time  # type: ignore[method-assign]
        app.chat.load_model(Path("/models/other.gguf"))
        await app.until(lambda: len(backend.loads) == 3 and not app.chat.busy)
        assert "Unknown: lhama." in app.transcript.messages[-1].content
        assert app.conversation.model == MODEL and app.chat.session.source == Path(MODEL.path)
        await app.send("Still there?")
        assert app.transcript.messages[-1].content == "Hello there."


async def test_page_keys_scroll_the_chat_from_the_prompt_and_a_long_message_before_it() -> None:
    async with running(ScriptedBackend([answer("\n\n".join(f"line {n}" for n in range(200)))])) as app:
        await app.ready()
        await app.send("Count")
        end = app.transcript.scroll_offset.y
        assert end > 100
        await app.press("pageup", "pageup")
        up = app.transcript.scroll_offset.y
        assert up < end - app.transcript.size.height and not app.transcript.following
        await app.press("pagedown")
        assert up < app.transcript.scroll_offset.y < end
        await app.press("ctrl+home")
        assert app.transcript.scroll_offset.y == 0
        await app.press("ctrl+end")
        assert app.transcript.scroll_offset.y == end and app.transcript.following
        assert app.app.focused is app.prompt

        await app.write("\n".join(f"row {n}" for n in range(30)))
        await app.press("pageup")
        row = app.prompt.cursor_location[0]
        assert 0 < row < 29 and app.transcript.scroll_offset.y == app.transcript.max_scroll_y
        await app.press("pageup", "pageup", "pageup")
        assert app.prompt.cursor_location[0] == 0
        await app.press("pageup", "pageup")
        assert app.transcript.scroll_offset.y < end - 20
        await app.press("x", "ctrl+underscore")  # writing goes on as ever, and can be undone
        assert app.prompt.text.startswith("row 0\n") and app.prompt.text.endswith("row 29")


async def test_prefill_is_shown_where_the_answer_will_be() -> None:
    gate = Gate()
    steps = answer("Done.", prompt_n=2000)
    async with running(ScriptedBackend([[steps[0], gate, *steps[1:]]])) as app:
        await app.ready()
        await app.send("Read this", wait=False)
        await app.until(gate.reached.is_set)
        await app.until(lambda: "reading the prompt · 2,000 of 2,000 tokens" in app.screen_text)
        gate.open()
        await app.until(lambda: not app.chat.busy)
        assert "reading the prompt" not in app.screen_text


async def test_text_that_comes_in_below_what_is_shown_is_marked() -> None:
    gate = Gate()
    lines = " ".join(f"line{number}\n\n" for number in range(60))
    async with running(ScriptedBackend([answer(f"{lines} end", gate=gate)])) as app:
        await app.count_up_to(gate)
        app.transcript.flush()
        await app.press("pageup")
        await app.until(lambda: not app.transcript.following)
        assert "new text" not in app.screen_text
        gate.open()
        await app.until(lambda: not app.chat.busy)
        assert "↓ new text" in app.screen_text
        await app.press("ctrl+end")
        await app.until(lambda: "new text" not in app.screen_text)
        assert app.transcript.following
        await app.press("pageup")
        assert "new text" not in app.screen_text


@pytest.mark.parametrize(("n_threads", "seconds"), [(7, 0.1), (8, 1 / 3)])
async def test_where_every_core_computes_text_is_asked_for_less_often(
    n_threads: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "own_cpus", lambda: tuple(range(8)))
    async with running(ScriptedBackend(model=msgspec.structs.replace(MODEL, n_threads=n_threads))) as app:
        await app.ready()
        await app.send("Hello")
        assert app.backend.requests[-1].output.frame_seconds == seconds


async def test_the_cursor_does_not_blink_while_an_answer_is_written() -> None:
    gate = Gate()
    async with running(ScriptedBackend([answer("One two", gate=gate)])) as app:
        await app.count_up_to(gate)
        await app.press("x")
        assert app.prompt._draw_cursor and not app.prompt.blink_timer._active.is_set()
        gate.open()
        await app.until(lambda: not app.chat.busy)
        assert app.prompt.blink_timer._active.is_set()
        app.transcript.focus()
        await app.until(lambda: app.transcript.has_focus)
        app.prompt.hold_cursor(True)
        assert not app.prompt._draw_cursor


async def test_a_trimmed_context_is_told() -> None:
    steps = [ContextTrimmed(request_id=1, dropped_messages=4, dropped_tokens=1203, n_ctx=8192), *answer("Yes.")]
    async with running(ScriptedBackend([steps])) as app:
        await app.ready()
        await app.send("Still there?")
        assert (
            "The oldest 4 messages (1,203 tokens) no longer fit in the 8,192-token context and were left out; "
            "they stay in the chat." in app.notices
        )
        assert "without the oldest 4 messages" in app.transcript.messages[-1].note


async def test_what_was_reused_is_told_in_whole_and_what_is_not_kept_once() -> None:
    gate, kept = Gate(), Reuse(source="disk", changed="message", message=2, note="this KV cache is not kept")
    *_, end = steps = answer("Yes.")
    steps[0] = PrefillProgress(request_id=1, processed=2600, total=3140, cache_n=2102, reuse=kept)
    steps[1:1] = [gate]
    steps[-1] = msgspec.structs.replace(end, timings=msgspec.structs.replace(end.timings, reuse=kept))
    async with running(ScriptedBackend([steps]), size=SMALL) as app:
        await app.ready()
        await app.send("Still there?", wait=False)
        words = ("2,600 of 3,140 tokens, 2,102 from disk", "message 2 was edited")
        await app.until(lambda: all(any(one in line.text for line in app.transcript.lines) for one in words))
        gate.open()
        await app.until(lambda: not app.chat.busy)
        assert app.notices.count("This KV cache is not kept.") == 1
        assert app.transcript.messages[-1].note == "1 token · first token 0.21 s"


async def test_a_dead_worker_is_a_message_and_the_next_one_goes_on() -> None:
    died = Failed(code="worker_died", message="The worker ended: GGML_ASSERT(x) failed.", hint="", request_id=1)
    backend = ScriptedBackend(
        [[TextDelta(request_id=1, text="Half an ans"), died], [ModelLoaded(model=MODEL), *answer("Whole.")]]
    )
    async with running(backend) as app:
        await app.ready()
        await app.send("Tell me")
        assert app.transcript.messages[1].content == "Half an ans"
        failure = app.transcript.messages[-1]
        assert failure.role == "notice"
        assert "GGML_ASSERT(x) failed" in failure.content
        assert "Your next message restarts the model" in failure.content
        backend.die()
        await app.send("And now?")
        assert app.transcript.messages[-1].content == "Whole."
        assert app.stored()[-1] == ("assistant", "Whole.")


async def test_a_failed_load_says_why_and_what_to_do() -> None:
    failed = Failed(code="does_not_fit", message="It needs 40 GB, 3 GB are free.", hint="Use a smaller context (F2).")
    async with running(ScriptedBackend(load_steps=[failed])) as app:
        await app.until(lambda: app.transcript.messages)
        shown = app.transcript.messages[0]
        assert shown.title == "Not enough memory"
        assert "40 GB" in shown.content and "F2" in shown.content
        assert "no model" in app.status


async def test_a_model_without_a_template_is_told_once() -> None:
    note = "This model has no chat template: it continues text."
    import msgspec

    backend = ScriptedBackend(model=msgspec.structs.replace(MODEL, notes=(note,)))
    async with running(backend) as app:
        await app.ready()
        await app.until(lambda: note in app.notices)
        app.chat.load_model(app.chat.session.source)  # type: ignore[arg-type]
        await app.until(lambda: len(backend.loads) == 2 and not app.chat.busy)
        assert app.notices.count(note) == 1


async def test_copying_an_answer_and_its_code_blocks() -> None:
    async with running(ScriptedBackend([answer(LONG)])) as app:
        await app.ready()
        await app.press("f5")
        assert any("No answer" in notice for notice in app.notices)
        await app.send("Explain")
        await app.press("f5")
        assert app.app.clipboard.strip() == LONG.strip()
        seen = []
        for _ in range(3):
            await app.press("f6")
            seen.append(app.app.clipboard.strip())
        assert seen == ["cpuchat --threads 8", "tok_s = bandwidth / bytes_per_token", "cpuchat --threads 8"]
        assert any("block 1 of 2" in notice for notice in app.notices)


async def test_a_click_on_its_mark_copies_a_code_block_and_says_what_it_is() -> None:
    code = "First:\n\n```python\nx = 1\ny = 2\n```\n\n> ```\n> plain\n> ```\n"
    async with running(ScriptedBackend([answer(code), answer("```sh\nls\n```")]), size=SMALL) as app:
        await app.ready()
        await app.send("Explain")
        rows = app.screen_text.splitlines()
        marks = [y for y, row in enumerate(rows) if COPY in row]
        assert len(marks) == 2 and "python" in rows[marks[0]] and "plain" in rows[marks[1]]
        for y, text, said in zip(
            marks, ("x = 1\ny = 2", "plain"), ("2 lines of python", "1 line of code"), strict=True
        ):
            assert await app.pilot.click(offset=(rows[y].rindex(COPY) + 1, y))
            await app.until(lambda said=said: any(f"Sent {said} to the terminal" in one for one in app.notices))
            assert app.app.clipboard == text
        await app.press("f5", "f6")
        await app.until(lambda: any("1 line of code (block 2 of 2)" in one for one in app.notices))
        assert COPY not in app.app.clipboard
        await app.send("More")
        await select(app, 1)
        await app.press("f6", "f6")
        assert app.app.clipboard == "x = 1\ny = 2"  # of the selected message, not of the last


async def test_a_small_screen_has_one_line_of_figures_and_chats_on_demand() -> None:
    async with running(size=SMALL, prepare=three_chats) as app:
        await app.ready()
        assert not app.chat.query_one(ChatList).display
        assert not app.chat.query_one(TelemetryPanel).display
        assert app.chat.query_one(TelemetryLine).display
        await app.press("f8")
        assert app.chat.query_one(ChatList).display
        assert app.app.focused is app.chat.query_one(Chats)
        await app.press("escape")
        assert not app.chat.query_one(ChatList).display
        assert app.app.focused is app.prompt
        await app.pilot.resize_terminal(50, 20)
        await app.until(lambda: not app.chat.query_one(TelemetryLine).display)
        assert not app.chat.query_one(TelemetryPanel).display
        assert "cpuchat" in app.status


async def test_panes_hide_and_that_and_the_loaded_model_are_remembered() -> None:
    async with running(size=WIDE) as app:
        await app.ready()
        panel = app.chat.query_one(TelemetryPanel)
        await app.press("f8", "f3")
        assert not app.chat.query_one(ChatList).display
        assert panel.display and panel.has_class("-all")  # in brief, all figures, none
        await app.until(lambda: app.conversation.settings.ui.all_figures)
        await app.press("f3")
        assert not panel.display
        await app.until(lambda: not app.conversation.settings.ui.telemetry and app.conversation.settings.model.last)
    remembered = settings.load().ui
    assert (remembered.sidebar, remembered.telemetry, remembered.all_figures) == (False, False, False)
    assert settings.load().model.last == MODEL.path


async def test_a_presentation_is_over_the_chat_in_the_place_of_panel_or_line() -> None:
    async with running(ScriptedBackend([answer(LONG)]), size=WIDE) as app:
        await app.ready()
        large = app.chat.query_one(Presentation)
        app.chat.action_present()
        for size, one in ((WIDE, TelemetryPanel), (SMALL, TelemetryLine)):
            await app.pilot.resize_terminal(*size)
            await app.until(lambda width=size[0]: large.display and large.region.width == width)
            assert not app.chat.query_one(one).display and app.prompt.region.bottom < size[1]
        await app.send("Why?")
        assert any("tok/s" in strip.text for strip in large._rows)
        app.chat.action_present()
        await app.until(lambda: app.chat.query_one(TelemetryLine).display and not large.display)


async def test_snapshots_of_the_chat() -> None:
    async with running(ScriptedBackend([answer(LONG, reasoning="Think about bandwidth.")]), size=WIDE) as app:

        async def both(name: str) -> None:
            for width, height in (WIDE, SMALL):
                await app.pilot.resize_terminal(width, height)
                await snapshot(app.app, f"{name}-{width}x{height}")

        app.prompt.cursor_blink = False
        await app.ready()
        await app.until(lambda: "a 4B model" in " ".join(app.screen_text.split()))
        await both("chat-empty")
        await app.send("Why does a CPU write slower than it reads the prompt?")
        await both("chat-answer")
        await app.press("f4")
        await app.pilot.pause()
        await both("chat-editing")


async def test_the_first_run_offers_what_can_be_seen_without_a_model_of_ones_own() -> None:
    async with running(first_run=True, size=SMALL, model=paths.demo_dir() / DEMO_FILES["demo"]) as app:
        await app.ready()
        for line in (WHAT, "1  What can you do?", f"2  {DRAFTS}", f"3  {RACE}", "1 to 3 send"):
            assert line in app.screen_text, line
        await app.press("2")
        await app.until(lambda: isinstance(app.app.screen, ReplayScreen))
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)
        assert not app.prompt.text and not app.transcript.has_messages
        await app.press("1")
        await app.until(lambda: [one.content for one in app.conversation.messages[:1]] == ["What can you do?"])
    assert paths.state_file().exists()  # the next run is not the first one


async def test_an_empty_chat_offers_questions_by_number() -> None:
    async with running() as app:
        await app.ready()
        assert OF_OTHERS[1] == CODE and all(question in app.screen_text for question in OF_OTHERS)
        await app.until(lambda: "a 4B model runs at about 15 tok/s here" in app.screen_text)
        await app.press("2")
        assert app.prompt.text == STARTS[CODE] and app.prompt.text.endswith("\n\n")  # where the code is pasted
        await app.press("x")  # the digit was meant
        assert app.prompt.text == "2x"
        await app.press("backspace", "backspace", "4", "enter")
        await app.until(lambda: len(app.conversation.messages) == 2 and not app.chat.busy)
        assert app.conversation.messages[0].content == OF_OTHERS[3]
        assert OF_OTHERS[0] not in app.screen_text
        await app.press("4")
        assert app.prompt.text == "4"


async def test_an_empty_chat_tells_what_is_served_and_no_longer_once_it_is_not() -> None:
    line = "Serving tiny on http://127.0.0.1:8080/v1"
    async with running() as app:
        await app.ready()
        with recorded(RunningServer("http://127.0.0.1:8080", "tiny", os.getpid())):
            await app.press("ctrl+n")
            await app.until(lambda: line in app.screen_text)
        await app.press("ctrl+n")
        await app.until(lambda: line not in app.screen_text)


async def test_a_notice_of_several_lines_hides_neither_the_prompt_nor_the_figures() -> None:
    async with running(size=WIDE) as app:
        await app.ready()
        app.chat.notify("several words " * 30, timeout=600)
        await app.until(lambda: any(toast.region.height > 1 for toast in app.chat.query(Toast)))

        def clear() -> bool:
            line = app.chat.query_one(TelemetryLine)
            top = line.region.y if line.display else app.prompt.region.y
            return all(toast.region.bottom <= top for toast in app.chat.query(Toast))

        assert clear()
        await app.pilot.resize_terminal(*SMALL)
        await app.until(lambda: app.chat.query_one(TelemetryLine).display and clear())
