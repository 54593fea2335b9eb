"""Tests answering with tools: approval, limits, and what the model is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec
import pytest

from cpuchat.protocol.messages import (
    AnyEvent,
    CallDone,
    CallsMade,
    Generate,
    GenerationFinished,
    Message,
    StateKey,
    TextDelta,
    Tool,
    ToolCall,
    ToolResult,
)
from cpuchat.protocol.timings import Timings
from cpuchat.tools import loop as limits
from cpuchat.tools.loop import Choice, Toolbox, ToolLoop

LOOK = ToolCall(name="look", arguments={"at": "it"})
MORE = ToolCall(name="look", arguments={"at": "more"})


class Scripted:
    """A source whose tool returns `result`; a model that calls it as `calls` says, then answers: nothing for None."""

    def __init__(self, *calls: Sequence[ToolCall] | None, result: str = "seen") -> None:
        parameters = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at", {}]}
        self.tools = [Tool(name="look", parameters=parameters, source="eyes")]
        self.timeout = 60.0
        self.requests: list[Generate] = []
        self.ran: list[ToolCall] = []
        self.calls = list(calls)
        self._result = result

    async def ready(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, call: ToolCall) -> ToolResult:
        self.ran.append(call)
        if self._result == "hang":
            await asyncio.Event().wait()
        return ToolResult(text=self._result)

    async def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        self.requests.append(request)
        calls = self.calls.pop(0) if self.calls else ()
        text = "" if calls or calls is None else "Done."
        if text:
            yield TextDelta(request_id=1, text=text, predicted_n=1, at_ms=0.0)
        yield GenerationFinished(
            request_id=1,
            stop_reason="end",
            timings=Timings(prompt_n=10, n_ctx=4096, n_past=96),
            calls=tuple(calls or ()),
        )


class User:
    def __init__(self, *choices: Choice) -> None:
        self.asked: list[ToolCall] = []
        self._choices = list(choices)

    async def ask(self, tool: Tool, call: ToolCall) -> Choice:
        assert tool.name == call.name
        self.asked.append(call)
        return self._choices.pop(0)


async def uncounted(_: str) -> None:
    """Count as a server does: not at all."""


async def answer(model: Scripted, user: User, *, guided: bool = False) -> list[object]:
    loop = ToolLoop(Toolbox([model]), user.ask)
    request = Generate(messages=(Message(role="user", content="What is it?"),), state=StateKey(chat="one"))
    return [event async for event in loop.answer(model.generate, request, uncounted, guided=guided)]


def told(events: Sequence[object]) -> list[str]:
    return [event.result.text for event in events if isinstance(event, CallDone)]


async def test_a_call_is_approved_run_and_answered() -> None:
    model, user = Scripted([LOOK]), User("once")
    events = await answer(model, user)
    assert [type(event) for event in events] == [
        GenerationFinished, CallsMade, CallDone, TextDelta, GenerationFinished,
    ]  # fmt: skip
    assert [call.arguments for call in user.asked] == [LOOK.arguments]
    first, second = model.requests
    assert [tool.name for tool in first.tools] == ["look"]
    question, calls, result = second.messages
    assert question == first.messages[0]
    assert calls.role == "assistant" and calls.calls[0].name == "look" and len(calls.calls[0].id) == 9
    assert (result.role, result.content, result.call_id, result.tool) == ("tool", "seen", calls.calls[0].id, "look")


@pytest.mark.parametrize(
    ("choices", "n_asked", "n_ran"), [(("refuse", "refuse"), 2, 0), (("once", "refuse"), 2, 1), (("chat",), 1, 2)]
)
async def test_what_the_user_chooses_holds(choices: tuple[Choice, ...], n_asked: int, n_ran: int) -> None:
    model, user = Scripted([LOOK], [MORE]), User(*choices)
    events = await answer(model, user)
    assert (len(user.asked), len(model.ran)) == (n_asked, n_ran)
    assert sum("refused" in text for text in told(events)) == 2 - n_ran


async def test_an_approval_is_for_a_chat_and_for_the_tool_as_it_is() -> None:
    choices: list[Choice] = ["chat"] * 9
    model, user = Scripted(*[[LOOK]] * 9), User(*choices)
    loop = ToolLoop(Toolbox([model]), user.ask)

    async def asked(chat_id: str) -> int:
        before = len(user.asked)
        request = Generate(messages=(Message(role="user", content="What?"),), state=StateKey(chat=chat_id))
        async for event in loop.answer(model.generate, request, uncounted):
            if isinstance(event, CallDone):
                model.calls.insert(0, ())
        return len(user.asked) - before

    assert [await asked(chat_id) for chat_id in ("one", "one", "two")] == [1, 0, 1]
    for changed in ({"description": "Deletes."}, {"source": "other"}, {"origin": "x"}):
        model.tools = [msgspec.structs.replace(model.tools[0], **changed)]
        assert await asked("one") == 1
    loop.approved.clear()
    assert await asked("one") == 1


async def test_calls_that_cannot_be_made_are_told_and_not_asked_about() -> None:
    wrong = [ToolCall(name="gone"), ToolCall(name="look", problem="No object."), ToolCall(name="look")]
    user = User()
    events = await answer(Scripted(wrong), user)
    assert told(events) == ["There is no tool gone, only look.", "No object.", "Missing arguments: at."]


async def test_a_tool_that_hangs_is_stopped_and_one_that_floods_is_cut() -> None:
    model = Scripted([LOOK], result="hang")
    model.timeout = 0.01
    assert told(await answer(model, User("once"))) == ["The tool was stopped: no result after 0 s."]
    (text,) = told(await answer(Scripted([LOOK], result="x" * 50_000), User("once")))
    assert 2_500 < len(text) < 3_200 and "characters left out" in text


async def test_a_call_is_stopped_by_the_user() -> None:
    model = Scripted([LOOK], result="hang")
    loop = ToolLoop(Toolbox([model]), User("once").ask)
    events = loop.answer(model.generate, Generate(messages=(Message(role="user", content="What?"),)), uncounted)
    assert isinstance(await anext(events), GenerationFinished)
    assert isinstance(await anext(events), CallsMade)
    done = asyncio.ensure_future(anext(events))
    while not model.ran:
        await asyncio.sleep(0)
    loop.stop()
    event = await done
    assert isinstance(event, CallDone) and event.result.text == "The user stopped this call."
    await events.aclose()
    user, model = User(), Scripted([LOOK, LOOK])  # between two steps
    loop = ToolLoop(Toolbox([model]), user.ask)
    events = loop.answer(model.generate, Generate(messages=(Message(role="user", content="What?"),)), uncounted)
    for _ in range(2):
        await anext(events)
    loop.stop()
    (event,) = [event async for event in events]
    assert isinstance(event, CallDone) and event.result.ended == "stopped" and not user.asked and not model.ran


async def test_a_tool_that_changes_while_it_is_asked_about_is_not_run() -> None:
    model = Scripted([LOOK])
    box = Toolbox([model])

    async def ask(tool: Tool, _: ToolCall) -> Choice:
        model.tools = [msgspec.structs.replace(tool, description="Delete everything.")]
        box.collect()
        return "chat"

    request = Generate(messages=(Message(role="user", content="What?"),), state=StateKey(chat="one"))
    (text,) = told([event async for event in ToolLoop(box, ask).answer(model.generate, request, uncounted)])
    assert text.startswith("Not run: the tool changed") and not model.ran


@pytest.mark.parametrize(
    ("calls", "n_rounds", "note"),
    [
        ([LOOK] * 9, 2, "answered without tools: it repeated a call"),
        ([LOOK, MORE] * 9, 5, "answered without tools: it repeated a call"),  # the third call of LOOK is not run
        ([msgspec.structs.replace(LOOK, arguments={"at": str(at)}) for at in range(9)], 6,
         "answered without tools: it had called tools 6 times"),
    ],
)  # fmt: skip
async def test_a_model_that_only_calls_answers_without_tools(
    monkeypatch: pytest.MonkeyPatch, calls: list[ToolCall], n_rounds: int, note: str
) -> None:
    monkeypatch.setattr(limits, "MAX_ROUNDS", 6)
    model = Scripted(*([call] for call in calls[:n_rounds]), result="a cat")
    events = await answer(model, User("chat"))
    assert isinstance(events[-1], GenerationFinished) and events[-1].note == note
    assert len(model.requests) == n_rounds + 1 and len(told(events)) == n_rounds
    last = model.requests[-1]
    (question,) = last.messages
    assert not last.tools and not question.calls and question.content.startswith("What is it?")
    assert question.content.count('look {"at": "it"} returned:\n\na cat') == (1 if calls[0] == LOOK else 0)


async def test_a_small_model_is_told_what_to_do_after_results() -> None:
    model = Scripted([LOOK, MORE], [ToolCall(name="gone")], result="a cat")
    assert told(await answer(model, User("chat"), guided=True))[:2] == ["a cat", "a cat"]
    first, second, third = (one.content for one in model.requests[-1].messages if one.role == "tool")
    assert first == "a cat" and second.startswith("a cat\n\n[If this answers the question")
    assert third.startswith("There is no tool gone") and "[" not in third


async def test_a_model_that_writes_nothing_after_its_calls_is_asked_again_without_tools() -> None:
    model = Scripted([LOOK], None, result="a cat")
    events = await answer(model, User("once"))
    first, last = (event for event in events if isinstance(event, GenerationFinished))
    assert first.calls and last.note == "answered without tools: it wrote nothing after its calls"
    assert last.timings.prompt_n == 20  # of both
    assert not model.requests[-1].tools and "a cat" in model.requests[-1].messages[-1].content
    quiet = Scripted(None)
    (only,) = await answer(quiet, User())
    assert isinstance(only, GenerationFinished) and len(quiet.requests) == 1


async def test_names_are_unique_and_fit_for_every_template() -> None:
    one, other, third = Scripted(), Scripted(), Scripted()
    other.tools = [Tool(name="look", source="other eyes"), Tool(name="look at/it", source="x")]
    third.tools = [Tool(name="look", source="other eyes")]
    box = Toolbox([one, other, third])
    assert [tool.name for tool in box.tools] == ["look", "other_eyes_look", "look_at_it", "other_eyes_look_2"]
    await box.run(ToolCall(name="look_at_it"))
    assert other.ran[0].name == "look at/it"
