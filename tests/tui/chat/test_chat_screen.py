"""Tests the chat screen: answers, loads, scrolling, copying, its panes at all sizes, and its pictures."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest
from textual.widgets._toast import Toast

from cpuchat.base import paths
from cpuchat.config import settings
from cpuchat.models.catalog import CatalogModel
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.present.chats import Offer, Welcome
from cpuchat.protocol.messages import (
    ContextTrimmed,
    Failed,
    GenerationFinished,
    LoadProgress,
    ModelLoaded,
    PrefillProgress,
)
from cpuchat.protocol.timings import Reuse, Timings
from cpuchat.tui import services
from cpuchat.tui.chat.chat_list import ChatList, Chats
from cpuchat.tui.chat.screen import ChatScreen
from cpuchat.tui.chat.telemetry import TelemetryLine, TelemetryPanel
from cpuchat.tui.chat.welcome import CODE, DRAFTS, OF_OTHERS, RACE, STARTS, WHAT
from cpuchat.tui.compare.pane import OtherSideScreen
from cpuchat.tui.compare.replay import ReplayScreen
from cpuchat.tui.compare.stage import Stage
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.widgets.charts import big_digits
from tests.support.chat_app import HANG_GUARD, SMALL, WIDE, loaded, running, three_chats
from tests.support.downloads import REPO
from tests.support.hub_server import HubServer
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer
from tests.support.snapshots import snapshot

DEMO = paths.demo_dir() / DEMO_FILES["demo"]
SUITS = CatalogModel(id="tiny", name="Tiny", family="T", params=0.1, repos=(REPO,), sizes={"F32": 0.1})
LONG = """Reading the prompt is a **matrix × matrix** product: each weight is fetched once and used for every token.

```python
tok_s = bandwidth / bytes_per_token
```

```sh
cpuchat --threads 8
```
"""


async def test_after_the_first_paint_a_model_is_loaded_and_a_message_is_answered_shown_and_stored() -> None:
    load, prefill = Gate(), Gate()
    backend = ScriptedBackend(
        [
            answer("Because of *bandwidth*.", reasoning="Let me see."),
            [(steps := answer("Done.", prompt_n=2000))[0], prefill, *steps[1:]],
        ],
        load_steps=[LoadProgress(phase="reading", done=61, total=100), load, ModelLoaded(model=MODEL)],
    )
    async with running(backend) as app:
        await app.until(load.reached.is_set)
        assert app.app.focused is app.prompt
        await app.until(lambda: "reading the file  61 %" in app.status)
        assert all(row in app.screen_text for row in big_digits("61%"))  # the panel tells the same at once
        load.open()
        await app.ready()
        assert "Qwen2.5-1.5B-Instruct Q8_0" in app.status and "8 threads · 0/8k ctx" in app.status
        await app.send("Why is decoding slow?")
        mine, answered = app.transcript.messages
        assert (mine.role, mine.content) == ("user", "Why is decoding slow?")
        assert (answered.title, answered.content) == (MODEL.name, "Because of *bandwidth*.")
        assert answered.reasoning == "Let me see."
        assert answered.note == "6 tokens · 40.0 tok/s · first token 0.21 s"
        assert app.stored() == [("user", "Why is decoding slow?"), ("assistant", "Because of *bandwidth*.")]
        assert app.prompt.text == ""
        assert "Why is decoding slow?" in str(app.transcript.border_title)
        assert "48/8k ctx" in app.status

        await app.send("Read this", wait=False)  # the prefill is shown where the answer will be
        await app.until(prefill.reached.is_set)
        await app.shows("reading the prompt · 2,000 of 2,000 tokens")
        prefill.open()
        await app.idle()
        assert "reading the prompt" not in app.screen_text


async def test_what_was_reused_or_trimmed_is_told_in_whole_and_what_is_not_kept_once() -> None:
    gate, kept = Gate(), Reuse(source="disk", changed="message", message=2, note="this KV cache is not kept")
    *_, end = steps = answer("Yes.")
    steps[0] = PrefillProgress(request_id=1, processed=2600, total=3140, cache_n=2102, reuse=kept)
    steps[1:1] = [gate]
    steps[-1] = msgspec.structs.replace(end, timings=msgspec.structs.replace(end.timings, reuse=kept))
    trimmed = [ContextTrimmed(request_id=1, dropped_messages=4, dropped_tokens=1203, n_ctx=8192), *answer("Yes.")]
    stopped = Timings(prompt_n=1024, prompt_ms=900.0, n_past=1024, n_ctx=8192)
    cancelled = [
        PrefillProgress(request_id=1, processed=1024, total=3000, cache_n=0),
        GenerationFinished(request_id=1, stop_reason="cancelled", timings=stopped),
    ]
    async with loaded(ScriptedBackend([steps, trimmed, cancelled]), size=SMALL) as app:
        await app.send("Still there?", wait=False)
        words = ("2,600 of 3,140 tokens, 2,102 from disk", "message 2 was edited")
        await app.until(lambda: all(any(one in line.text for line in app.transcript.lines) for one in words))
        gate.open()
        await app.idle()
        assert app.notices.count("This KV cache is not kept.") == 1
        assert app.transcript.messages[-1].note == "1 token · first token 0.21 s"
        await app.send("Still there?")
        told = "The 8,192-token context has no room for the oldest 4 messages (1,203 tokens), left out but kept in the"
        assert f"{told} chat." in app.notices
        assert "without the oldest 4 messages" in app.transcript.messages[-1].note
        await app.send("A long prompt.")  # stopped while it was read: status and figures show the same context
        await app.until(lambda: "context 1k" in app.screen_text and "1k/8k ctx" in app.status)


async def test_a_failed_load_says_why_and_gives_way_to_the_model_before() -> None:
    note = "This model has no chat template: it continues text."
    failed = Failed(code="does_not_fit", message="It needs 40 GB, 3 GB are free.", hint="Use a smaller context (F2).")
    backend = ScriptedBackend(load_steps=[failed])
    async with running(backend) as app:
        await app.shows("was not loaded: It needs 40 GB, 3", "GB are free. Use a smaller context (F2).")
        assert "Open Qwen3 8B" in app.screen_text
        assert OF_OTHERS[1] not in app.screen_text
        assert "not loaded" in app.status

        noted = [ModelLoaded(model=msgspec.structs.replace(MODEL, notes=(note,)))]
        backend.load_steps = noted
        app.chat.session.load(Path(MODEL.path))
        await app.told(note)
        await app.ready()
        gate = Gate()
        backend.load_steps = [gate, Failed(code="model_unsupported", message="Unknown: lhama.")]
        app.chat.session.load(Path("/models/other.gguf"))
        await app.until(gate.reached.is_set)
        backend.load_steps = noted
        gate.open()
        await app.until(lambda: len(backend.loads) == 4 and not app.chat.session.busy)
        assert "Unknown: lhama." in app.contents()[-1] and app.transcript.messages[-1].title == "Not loaded"
        assert app.conversation.model is not None and app.chat.session.source == Path(MODEL.path)
        assert app.notices.count(note) == 1
        await app.send("Still there?")
        assert app.contents()[-1] == "Hello there."


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


def test_where_every_core_computes_text_is_asked_for_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "own_cpus", lambda: tuple(range(8)))
    paces = [services.pace_beside_model(msgspec.structs.replace(MODEL, n_threads=n)).text for n in (7, 8)]
    assert paces == [0.1, 1 / 3]


async def test_answers_and_code_blocks_are_copied() -> None:
    code = "First:\n\n```python\nx = 1\ny = 2\n```\n\n> ```\n> plain\n> ```\n"
    async with loaded(ScriptedBackend([answer(code), answer(LONG)]), size=SMALL) as app:
        await app.press("f5")
        await app.told("No answer")
        await app.send("Explain")
        await app.press("f6", "f6")
        await app.told("1 line of code (block 2 of 2)", "2 lines of python (block 1 of 2)")
        assert app.app.clipboard == "x = 1\ny = 2"
        await app.send("More")
        await app.press("f5")
        assert app.app.clipboard.strip() == LONG.strip()
        await app.select(1)
        await app.press("f6")
        assert app.app.clipboard == "plain"  # of the selected message, not of the last


async def test_panes_have_the_places_that_the_size_leaves_and_what_is_hidden_is_remembered() -> None:
    async with loaded(size=(160, 40), prepare=three_chats) as app:
        chats, panel, line = (app.chat.query_one(kind) for kind in (ChatList, TelemetryPanel, TelemetryLine))
        await app.press("f8", "f3")
        assert not chats.display
        assert panel.display and panel.has_class("-all")  # in brief, all figures, none
        await app.until(lambda: app.conversation.settings.ui.all_figures)
        await app.press("f3")
        assert not panel.display
        await app.until(lambda: not app.conversation.settings.ui.telemetry and app.conversation.settings.model.last)
        remembered = settings.load().ui
        assert (remembered.sidebar, remembered.telemetry, remembered.all_figures) == (False, False, False)
        assert settings.load().model.last == MODEL.path

        await app.press("f8", "f3")
        await app.write("a message\nof several\nlines\nthat is long")
        app.chat.notify("several words " * 30, timeout=600)  # hides neither the prompt nor the figures
        await app.until(lambda: any(toast.region.height > 1 for toast in app.chat.query(Toast)))

        def clear() -> bool:
            top = line.region.y if line.display else app.prompt.region.y
            return all(toast.region.bottom <= top for toast in app.chat.query(Toast))

        assert clear()
        await app.pilot.resize_terminal(*SMALL)
        await app.until(lambda: line.display and not panel.display and not chats.display and clear())
        await app.press("f8")
        assert chats.display and app.app.focused is app.chat.query_one(Chats)
        await app.press("escape")
        assert not chats.display and app.app.focused is app.prompt
        await app.pilot.resize_terminal(50, 20)
        await app.until(lambda: not line.display)
        assert not panel.display and "cpuchat" in app.status


async def test_no_wider_terminal_leaves_less_room_for_text() -> None:
    async with loaded(ScriptedBackend([answer("word " * 200)]), size=(60, 24)) as app:
        await app.send("Write.")
        columns = []
        for width in (60, 80, 99, 100, 119, 120, 145, 146, 160, 200):
            await app.pilot.resize_terminal(width, 40)
            await app.until(lambda: app.transcript.up_to_date)
            columns.append(max(len(line.text.strip()) for line in app.transcript.lines))
        assert columns == sorted(columns) and columns[1] > 65, columns


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
        await snapshot(app.app, "chat-editing-80x24")


async def test_before_an_audience_figures_are_large_and_nothing_names_a_chat_until_all_is_as_before() -> None:
    async with running(ScriptedBackend([answer(LONG)]), size=(160, 40)) as app:
        app.prompt.cursor_blink = False
        await app.ready()
        await app.send("A private question")
        await app.run("/rename Secret plans")
        await app.until(lambda: app.screen_text.count("Secret plans") == 2)  # in the list and over the transcript
        app.app.clear_notifications()
        await app.pilot.pause()
        before = app.screen_text
        await app.run("/present")
        for width, height in ((160, 40), WIDE, SMALL, (60, 20)):
            await app.pilot.resize_terminal(width, height)
            await app.until(lambda: "of memory bandwidth" in app.screen_text)
            assert "Secret plans" not in app.screen_text and MODEL.name in app.screen_text.splitlines()[1]
            assert "█" in app.screen_text
            await app.press("f8", "f3")
            assert "Secret plans" not in app.screen_text
            if (width, height) in (WIDE, SMALL):
                await snapshot(app.app, f"present-{width}x{height}")
        await app.pilot.resize_terminal(160, 40)
        await app.run("/present")
        await app.until(lambda: app.screen_text == before)


async def test_the_demo_offers_what_can_be_seen_without_a_model_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "MIN_S", 0.1)
    monkeypatch.setattr(Stage, "MAX_S", 0.1)
    async with loaded(size=SMALL, model=DEMO) as app:
        for line in (WHAT, "1      What can you do?", f"2      {DRAFTS}", f"3      {RACE}", "1 to 3, then Enter"):
            assert line in app.screen_text, line
        for key, then in (("escape", ChatScreen), ("ctrl+l", OtherSideScreen)):
            await app.press("2", "enter")
            await app.opens(ReplayScreen)
            await app.shows("On another CPU it may be otherwise: ^L measures yours.")
            await app.press(key)
            await app.opens(then)
        await app.press("escape")
        await app.closes()
        await app.ready()
        assert not app.prompt.text and not app.transcript.has_messages
        await app.press("1", "enter")
        await app.until(lambda: [one.content for one in app.conversation.messages[:1]] == ["What can you do?"])
        await app.shows("the demo is a toy and errs · F1 keys")
    assert paths.state_file().exists()  # the next run is not the first one


async def test_enter_in_an_empty_chat_downloads_what_suits_this_machine_and_then_opens_it(
    hub_server: HubServer, tiny_model: Path
) -> None:
    hub_server.add(REPO, {"tiny-F32.gguf": tiny_model})
    async with loaded(model=DEMO, welcome=Welcome("2 cores", Offer("Download Tiny", "0.1 GB", model=SUITS))) as app:
        await app.shows("Enter  Download Tiny")
        left = [line.index("1      What can you do?") for line in app.screen_text.splitlines() if "What can" in line]
        opens = Welcome("2 cores", Offer("Open a-model-with-a-very-long-name" + 5 * "-instruct", path=tiny_model))
        app.app.services.describe_machine = lambda *_: opens
        await app.press("enter")
        await app.until(lambda: [one.state for one in app.app.services.downloading.all()] == ["done"])
        await app.shows("Enter  Open a-model-with-a-very-long-name", "1      What can you do?")
        lines = app.screen_text.splitlines()
        assert left == [line.index("1      What can you do?") for line in lines if "What can" in line]  # nothing jumps
        await app.press("space", "enter")  # blank
        await app.until(lambda: app.chat.session.source == tiny_model and not app.chat.session.busy)
        assert not app.prompt.text
        assert "Open a-model" not in app.screen_text and OF_OTHERS[1] in app.screen_text
        await app.press("enter")
        assert not app.chat.session.busy and not app.conversation.messages


async def test_an_own_model_that_was_not_loaded_is_named_and_the_next_best_is_offered_and_opened(
    tiny_model: Path,
) -> None:
    seen: list[object] = []

    def describe(_: object, __: object, ___: object, failed: Collection[object]) -> Welcome:
        seen.append(failed)
        return Welcome("2 cores", Offer("Open tiny", path=tiny_model))

    backend = ScriptedBackend(load_steps=[Failed(code="model_damaged", message="Not a GGUF file: bad magic.")])
    async with running(backend, model=None) as app:
        app.app.services.describe_machine = describe
        app.chat.session.load(Path("/models/broken.gguf"))
        await app.shows("broken was not loaded: Not a GGUF file: bad magic.", "Enter  Open tiny")
        assert not app.transcript.has_messages and seen[-1] == {Path("/models/broken.gguf")}
        await app.press("ctrl+n")
        await app.shows("broken was not loaded")
        backend.load_steps = [ModelLoaded(model=MODEL)]
        await app.press("enter")
        await app.until(lambda: app.chat.session.source == tiny_model and not app.chat.session.busy)
        await app.shows(OF_OTHERS[1])
        assert "was not loaded" not in app.screen_text


async def test_an_offer_says_that_the_hub_was_not_reached_until_it_is(
    hub_server: HubServer, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.add(REPO, {"tiny-F32.gguf": tiny_model})
    reached = os.environ["HF_ENDPOINT"]
    async with running(model=None, welcome=Welcome("", Offer("Download Tiny", "0.1 GB", model=SUITS))) as app:
        await app.shows("No model is loaded.", "Enter  Download Tiny", "0.1 GB")
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        await app.press("enter")
        await app.until(lambda: "Contacting Hugging Face…" in app.notices)
        await app.shows(
            "Enter  Retry: Download Tiny", "127.0.0.1:9 cannot be reached. Copy a .gguf file to", "~/models"
        )
        await app.press("ctrl+o")
        await app.shows("! 127.0.0.1:9 cannot be reached. Copy a .gguf")
        monkeypatch.setenv("HF_ENDPOINT", reached)
        await app.press(*"tiny", "ctrl+s")
        await app.until(lambda: not app.app.services.downloading.hub_problem)
        await app.press("escape", "escape", "escape")
        await app.closes()
        await app.shows("Enter  Download Tiny", "0.1 GB")


async def test_enter_waits_for_models_that_are_read_beside_the_load_of_the_demo_and_gone_ones_are_not_offered_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    gone, loading, read = tmp_path / "gone.gguf", Gate(), threading.Event()
    offers = [Offer("Open gone", path=gone)]

    def describe() -> Welcome:
        read.wait(HANG_GUARD)
        return Welcome("2 cores", offers[0])

    steps = [loading, LoadProgress(phase="reading", done=1, total=2), ModelLoaded(model=MODEL)]
    async with running(ScriptedBackend(load_steps=steps), model=DEMO, welcome=describe) as app:
        await app.until(loading.reached.is_set)
        await app.shows("Looking for your models…")
        assert "no model loaded" not in app.screen_text
        await app.press("enter")
        read.set()
        await app.told("gone.gguf is no longer there.")
        assert app.chat.session.source == DEMO
        loading.open()
        await app.ready()
        offers[0] = Offer("Open tiny", path=tiny_model)
        await app.press("ctrl+n")
        await app.shows("Enter  Open tiny")
        offers[0] = Offer("Open another", path=tiny_model)
        await app.press("ctrl+o")
        await app.opens(ModelsScreen)
        await app.press("escape")
        await app.shows("Enter  Open another")
        read.clear()


async def test_an_offer_that_nobody_has_seen_is_not_downloaded() -> None:
    read = threading.Event()
    details = "Q4_K_M 3.1 GB, 4 min at 100 Mbit/s · " + 40 * "x"

    def describe() -> Welcome:
        read.wait(HANG_GUARD)
        return Welcome("", Offer("Download Tiny", details, model=SUITS))

    async with running(model=None, welcome=describe, size=(60, 20)) as app:
        await app.press("enter")
        await app.told("Opens the best of your models once they are read.")
        read.set()
        await app.shows("Enter  Download Tiny")
        lines = app.screen_text.splitlines()
        at = next(n for n, line in enumerate(lines) if "Download Tiny" in line)
        starts = zip(lines[at:], ("Download", "Q4_K_M", "xxx"), strict=False)
        assert len({line.index(word) for line, word in starts}) == 1
        assert not app.app.services.downloading.all() and "Contacting Hugging Face…" not in app.notices


async def test_an_empty_chat_offers_questions_by_number() -> None:
    async with loaded() as app:
        assert OF_OTHERS[1] == CODE and all(question in app.screen_text for question in OF_OTHERS)
        await app.shows("a 4B model: ≈15 tok/s")
        await app.press("2")
        assert app.prompt.text == STARTS[CODE] and app.prompt.text.endswith("\n\n")  # where the code is pasted
        await app.press("x")  # the digit was meant
        assert app.prompt.text == "2x"
        await app.press("backspace", "backspace", "4", "enter")
        await app.until(lambda: len(app.conversation.messages) == 2 and not app.chat.session.busy)
        assert app.conversation.messages[0].content == OF_OTHERS[3]
        assert OF_OTHERS[0] not in app.screen_text
        await app.press("4")
        assert app.prompt.text == "4"
