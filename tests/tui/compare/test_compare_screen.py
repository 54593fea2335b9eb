"""Tests the compare screen on scripted sides; real workers are in tests/compare and tests/e2e."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import msgspec
import pytest

from cpuchat.compare.choice import FilePair
from cpuchat.compare.comparison import Comparison
from cpuchat.compare.runner import Side
from cpuchat.hardware.placement.cores import BusyCores
from cpuchat.models.library.library import Library
from cpuchat.protocol.messages import Failed, LoadProgress, ModelLoaded, PrefillProgress, TextDelta
from cpuchat.quality.statistics import Interval
from cpuchat.session.conversation import Conversation
from cpuchat.tui.chat.chat_list import COMPARISON, Chats
from cpuchat.tui.compare.pane import OtherSideScreen
from cpuchat.tui.compare.screen import CompareScreen
from cpuchat.tui.widgets.prompt import PromptInput
from tests.support.chat_app import SMALL, WIDE, running
from tests.support.comparing import PROMPT, Q4, Q8, SIDES, TEXTS, comparing, faster, scripted, scripted_side
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, Step, answer
from tests.support.snapshots import snapshot
from tests.tui.compare.test_agreement import BOTH


async def test_the_screen_in_each_size_the_table_and_the_way_back() -> None:
    async with comparing(size=WIDE) as app:
        await app.done()
        assert app.backend.model is None  # the chat gave its memory back
        assert "Q4_K_M reads 40 % fewer bytes and is 1.49× as fast: 89 % of what the bytes allow." in app.screen_text
        await snapshot(app.app, "compare-120x40")
        await app.pilot.resize_terminal(*SMALL)
        await snapshot(app.app, "compare-80x24")
        assert "A Q8_0" in app.screen_text and "B Q4_K_M" in app.screen_text  # the tabs
        await app.pilot.resize_terminal(60, 20)
        assert "A  Qwen2.5-1.5B-Instruct Q8_0" in app.screen_text
        await app.pilot.resize_terminal(*WIDE)
        await app.press("t")
        assert "B ÷ A" in app.screen_text and "mean bytes per token" in app.screen_text
        await app.press("escape")
        assert "B ÷ A" not in app.screen_text
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat and app.backend.model is not None)
        assert all(side.closed for side in app.sides)
        await app.pilot.resize_terminal(160, 40)
        await app.shows(COMPARISON)


async def test_the_side_that_runs_is_in_front_and_the_stage_says_what_it_does() -> None:
    loading, reading, *gates = (Gate() for _ in range(4))
    load: list[Step] = [LoadProgress(phase="reading", done=1, total=2), loading, ModelLoaded(model=Q4)]
    part = PrefillProgress(request_id=1, processed=21, total=42, cache_n=0)
    a, b = (answer(f"{side} writes this", gate=gate) for side, gate in zip("AB", gates, strict=True))
    sides = [
        scripted_side([part, reading, *a], model=Q8),
        ScriptedBackend([answer("Hi"), b], load_steps=load, model=Q4),
    ]
    async with comparing(sides, size=(80, 24)) as app:
        await app.until(loading.reached.is_set)
        await app.shows("Q4_K_M is loading.", "50 %")
        loading.open()
        await app.until(reading.reached.is_set)
        await app.shows("Q8_0 reads the prompt", "21 of 42 tokens")
        reading.open()
        for gate, here, away in ((gates[0], "A writes", "B writes"), (gates[1], "B writes", "A writes")):
            await app.until(gate.reached.is_set)
            await app.shows(here)
            assert away not in app.screen_text
            gate.open()
        await app.done()
        assert "A writes this" in app.screen_text  # the side that one came with: only Tab and a verdict change it
        await app.press("t", "t", "a", "a", "tab")
        assert "B writes this" in app.screen_text


async def test_repeats_and_medians_and_the_next_prompt_with_a_table_of_its_own() -> None:
    gate = Gate()
    sides = [
        scripted_side(*[answer(TEXTS[0])] * 3, answer("And this", gate=gate), model=Q8),
        scripted_side(*[faster(answer(TEXTS[1]), 1.49)] * 3, answer("And that"), model=Q4),
    ]
    async with comparing(sides) as app:
        await app.done()
        for told in ("round 2", "medians of 3 rounds · 1.49× (1.43–1.56)"):
            await app.press("ctrl+r")
            await app.done()
            assert told in app.screen_text
        await app.press("t")
        assert "medians of 3 rounds" in app.screen_text and "mean bytes per token" in app.screen_text
        assert [one.first for one in app.screen.comparison.turns[0].rounds] == [0, 1, 0]

        await app.press("n", *"And", "enter")
        await app.until(gate.reached.is_set)
        await app.shows("No figures of this prompt yet.")
        assert "mean bytes per token" not in app.screen_text
        gate.open()
        await app.done()
        assert "mean bytes per token" in app.screen_text
        for side in app.sides:
            asked = [message.content for message in side.requests[-1].messages if message.role == "user"]
            assert asked == [PROMPT, "And"] and side.requests[-1].sampling.temperature == 0


async def test_escape_stops_and_keeps_what_is_written_and_quitting_ends_both_workers() -> None:
    gates = [Gate(), Gate()]
    sides = [
        scripted_side(*(answer("One two never", gate=gate) for gate in gates), model=Q8),
        ScriptedBackend(model=Q4),
    ]
    async with comparing(sides) as app:
        await app.until(gates[0].reached.is_set)
        await app.press("escape")
        await app.done()
        assert "One two" in app.screen_text and "stopped" in app.screen_text
        assert len(app.sides[1].requests) == 1  # the warm-up
        assert isinstance(app.app.screen, CompareScreen)
        await app.press("ctrl+r")
        await app.until(lambda: app.screen.busy)
        app.press_last("ctrl+q")
        await app.until(lambda: all(side.closed for side in sides))


async def test_a_stopped_repeat_leaves_the_complete_round() -> None:
    gate = Gate()
    sides = [
        scripted_side(answer(TEXTS[0]), answer("Not this", gate=gate), model=Q8),
        scripted_side(answer(TEXTS[1]), answer("Not this"), model=Q4),
    ]
    async with comparing(sides) as app:
        await app.done()
        await app.press("ctrl+r")
        await app.until(gate.reached.is_set)  # B has answered, A has all but one word
        await app.press("escape")
        await app.done()
        assert "Not this" not in app.screen_text and "sets the pace." in app.screen_text
        (turn,) = app.screen.comparison.turns
        assert len(turn.rounds) == 1 and turn.rounds[0].complete
        (chat,) = app.conversation.history.store.chats()
        stored = app.conversation.history.store.messages(chat.id)
        assert [message.content for message in stored] == [PROMPT, *TEXTS]


async def test_escape_while_an_agreement_stops_for_a_repeat_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = asyncio.Event()

    async def agree(comparison: Comparison, tell: object) -> None:
        comparison.busy = True
        await stopped.wait()
        comparison.busy = False

    monkeypatch.setattr(Comparison, "agree", agree)
    monkeypatch.setattr(Comparison, "agreement_refused", lambda _: "")
    async with comparing() as app:
        comparison = app.screen.comparison
        await app.until(lambda: comparison.busy and not app.screen.busy)
        await app.press("ctrl+r", "escape")
        assert comparison.stopped
        stopped.set()
        await app.closes()
        assert all(side.closed for side in app.sides) and len(comparison.turns[0].rounds) == 1
        assert not app.app.crash


async def test_a_disturbed_round_gets_no_verdict_and_w_waits_for_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()

    def disturbed(text: str, **options: Any) -> list[Step]:
        steps = answer(text, **options)
        last: Any = steps[-1]
        return [*steps[:-1], msgspec.structs.replace(last, timings=msgspec.structs.replace(last.timings, cpu_wait=0.3))]

    busy = [2.0, 2.0]
    monkeypatch.setattr(BusyCores, "since_last", lambda *_: busy.pop() if busy else 0.0)
    monkeypatch.setattr("cpuchat.tui.compare.screen._QUIET_SECONDS", 1)
    sides = [
        scripted_side(disturbed(TEXTS[0]), answer(TEXTS[0]), model=Q8),
        scripted_side(disturbed(TEXTS[1], gate=gate), faster(answer(TEXTS[1]), 1.49), model=Q4),
    ]
    async with comparing(sides) as app:
        await app.until(gate.reached.is_set)
        await app.shows("No verdict from this run: other programs take 30 % of the cores.")  # by what A has told
        gate.open()
        await app.done()
        noisy = "Too noisy for a verdict: other programs were using the cores. ^R repeats, w waits for quiet."
        assert noisy in app.screen_text
        assert "× as fast" not in app.screen_text and "⚑" not in app.screen_text
        await app.press("t")
        assert app.screen_text.index("Too noisy for a verdict") < app.screen_text.index("B ÷ A")
        await app.press("t", "w")
        await app.shows("other programs take 2.0 of")
        await app.press("escape")
        await app.shows(noisy)
        await app.press("w")
        await app.shows("1.49× as fast")
        assert len(app.screen.comparison.turns[0].rounds) == 2


async def test_a_run_beside_other_programs_says_so_after_three_seconds() -> None:
    gate = Gate()
    steps = [
        msgspec.structs.replace(step, cpu_wait=0.34, at_ms=100 * step.at_ms) if isinstance(step, TextDelta) else step
        for step in answer(TEXTS[0], gate=gate)
    ]
    async with comparing([scripted_side(steps, model=Q8), scripted_side(model=Q4)]) as app:
        await app.until(gate.reached.is_set)
        await app.shows("other programs take 34 % of the cores. Esc stops, w waits for quiet.")
        gate.open()


async def test_a_side_that_does_not_load_says_why_and_the_other_answers() -> None:
    failure = Failed(code="does_not_fit", message="Not enough memory: 9 GB.", hint="Use --ctx.")
    sides = [scripted()[0], ScriptedBackend(load_steps=[failure], model=Q4)]
    async with comparing(sides) as app:
        await app.done()
        assert "Not enough memory: 9 GB." in app.screen_text and "Use --ctx." in app.screen_text
        assert "memory bandwidth" in app.screen_text


async def test_a_comparison_is_shown_from_the_turn_that_a_search_found() -> None:
    def prepare(conversation: Conversation) -> None:
        store = conversation.history.store
        chat = store.create_chat("m", title="Two models", sides=msgspec.json.encode({"sides": SIDES}).decode())
        for number in range(9):
            store.add_message(chat.id, "user", f"Question {number}")
            for side in "AB":
                text = f"{side}: pangolin{number}." + "\n\nMore." * 20
                store.add_message(chat.id, "assistant", text, stop_reason="end")

    async with running(prepare=prepare, size=(160, 40)) as app:
        await app.ready()
        more = scripted()
        app.app.services.new_backend = lambda: more.pop(0)
        app.chat.query_one(Chats).focus()
        await app.press("slash", *"pangolin4")
        await app.shows("A: pangolin4")
        await app.press("enter", "enter")
        await app.until(lambda: isinstance(app.app.screen, CompareScreen) and "Question 4" in app.screen_text)
        assert app.screen_text.count("Question 4") == 2 and "Question 3" not in app.screen_text


@pytest.fixture
def agreeing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agree(comparison: Comparison, tell: object) -> object:
        last = comparison.turns[-1].rounds[-1]
        last.agreement = BOTH
        return BOTH

    monkeypatch.setattr(Comparison, "agree", agree)
    monkeypatch.setattr(Comparison, "agreement_refused", lambda _: "")


@pytest.mark.usefixtures("agreeing")
async def test_the_verdict_says_which_file_to_take_and_enter_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FilePair(0, 800_000_000, Interval(0.86, 0.84, 0.88))
    monkeypatch.setattr("cpuchat.compare.comparison.read_pair", lambda *_: files)
    faster_q8 = [scripted_side(faster(answer(TEXTS[0]), 1.49), model=Q8), scripted_side(answer(TEXTS[1]), model=Q4)]
    for sides, take, name in ((faster_q8, 0, "verdict-q8"), (scripted(), 1, "verdict-q4")):
        async with comparing(sides, size=WIDE) as app:
            await app.done()
            await app.shows(f"Take {app.screen.comparison.names[take]} here: 1.49× as fast", "1 token in 7")
            assert app.screen_text.count("1.49× as fast") == 1
            await snapshot(app.app, f"{name}-120x40")
            await app.pilot.resize_terminal(*SMALL)
            assert "use for chats" in app.screen_text
            await snapshot(app.app, f"{name}-80x24")
            await app.press("tab", "tab", "tab")  # to the other, which Enter takes then
            take = 1 - take
            await app.press("enter")
            await app.until(lambda: app.app.screen is app.chat and app.backend.model is not None)
            assert str(app.backend.loads[-1][0]) == SIDES[take].path


@pytest.mark.usefixtures("agreeing")
async def test_a_comparison_is_kept_with_its_agreement_and_opens_again() -> None:
    async with comparing() as app:
        await app.done()
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat and not app.chat.session.busy)
        more = scripted()
        sides = list(more)
        app.app.services.new_backend = lambda: more.pop(0)
        store = app.conversation.history.store
        (chat,) = store.chats()
        assert chat.title.startswith("Q8_0 against Q4_K_M: Why does a CPU")
        await app.until(lambda: app.chat.query_one(Chats).option_count)
        app.chat.commands.open(chat.id)
        await app.opens(CompareScreen)
        await app.shows("sets the pace.", "is the limit")
        assert not sides[0].loads
        assert "replay of two fair runs" in app.screen_text and "mean rates" not in app.screen_text
        await app.press("ctrl+r")
        await app.done()
        assert sides[0].requests[1].messages[-1].content == PROMPT
        assert len(store.chats()) == 1
        assert [message.content for message in store.messages(chat.id)] == [PROMPT, *TEXTS]


@pytest.mark.parametrize("readable", [True, False])
async def test_any_other_model_is_compared_with_what_is_chosen(readable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(_: Library) -> NoReturn:
        raise OSError("Input/output error")

    if not readable:
        monkeypatch.setattr(Library, "local_models", unreadable)
    async with running(ScriptedBackend()) as app:
        await app.ready()
        app.app.services.new_backend = lambda: ScriptedBackend()
        await app.press("3", "enter")  # a question of an empty chat
        listed = (await app.opens(OtherSideScreen)).listed
        assert app.prompt.text == ""
        await app.until(lambda: any(row.key == "settings 0" for row in listed.rows))
        assert "quantize" not in [row.key for row in listed.rows]  # of what is no file with more bits
        listed.mark("settings 1")
        await app.press("enter")
        screen = await app.opens(CompareScreen)
        assert screen.comparison.sides[1] == Side(path=MODEL.path, changes={"kv": "q8_0"})
        await app.until(lambda: screen.query_one(PromptInput).has_focus)  # nothing was asked yet
