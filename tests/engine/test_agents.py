"""Tests that what the prompts of an agent begin with is evaluated once, and survives a restart."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuchat.engine.states.files import DiskWriter, StateFiles
from cpuchat.engine.states.prompt import StateKind
from cpuchat.protocol.messages import (
    CallDelta,
    CallRule,
    LoadModel,
    LoadOptions,
    Message,
    Output,
    Speculation,
    TextDelta,
    Timings,
    Tool,
)
from tests.engine.conftest import ONE_CPU
from tests.support.engine_chat import Chat, assistant, user
from tests.support.tiny_gguf import CHATML, write_tiny_gguf

SYSTEM = Message(role="system", content="You are careful. " * 60)
LOOK = Tool(
    name="look",
    description="Looks.",
    parameters={"type": "object", "properties": {"at": {"enum": ["a", "b"]}}, "required": ["at"]},
)
AGENT: dict[str, Any] = {"tools": (LOOK,), "owner": "me", "keeps": True, "when_full": "refuse"}
OPTIONS = LoadOptions(n_ctx=4096)


class Served(Chat):
    """An engine as the server drives it."""

    def __init__(self, model: Path, folder: Path) -> None:
        super().__init__()
        self.model, self.folder = model, folder
        self.start()

    def start(self) -> None:
        command = LoadModel(
            path=str(self.model), cpus=ONE_CPU, options=OPTIONS, state_dir=str(self.folder), resumes=True
        )
        self.engine.load(command)

    def again(self, *, crashed: bool = False) -> None:
        """Start as after a restart, or after a crash, when nothing more was saved."""
        self.settle()
        kept = self.folder.with_name("kept")
        shutil.copytree(self.folder, kept)
        self.restart()
        if crashed:
            shutil.rmtree(self.folder)
            kept.rename(self.folder)
        self.start()

    def heads(self) -> list[Path]:
        """Return the files of what several conversations begin with."""
        self.settle()
        with contextlib.closing(DiskWriter()) as writer:
            files = StateFiles(self.folder, 1 << 40, self.loaded.model.state_key(), writer)
        return [file for file, index in files.indexes() if index.parts[0].kind is StateKind.HEAD]

    def say(self, *messages: Message, **more: Any) -> Timings:
        return self.ask(SYSTEM, *messages, **{**AGENT, **more})


@pytest.fixture
def served(tiny_model: Path, tmp_path: Path) -> Iterator[Served]:
    chat = Served(tiny_model, tmp_path / "kv")
    yield chat
    chat.engine.close()


@pytest.mark.parametrize("crashed", [False, True])
def test_the_first_request_after_a_restart_evaluates_what_is_new(served: Served, crashed: bool) -> None:
    first = served.say(user("Hello"))
    assert first.prompt_n > 1000
    served.say(user("A second question"))
    served.again(crashed=crashed)
    told = served.say(user("Another question, which nobody asked before"))
    assert told.prompt_n < 128
    assert told.cache_n > first.prompt_n - 64
    assert told.reuse.source == "", "it is in the memory already"


def test_an_agent_is_written_once_and_its_conversations_do_not_replace_it(served: Served) -> None:
    def agents() -> list[tuple[str, int]]:
        return [(one.name, one.stat().st_ino) for one in served.heads()]

    served.say(user("Hello"))
    assert agents() == []
    served.say(user("Something else"))
    first = agents()
    assert len(first) == 1
    served.again()
    served.say(user("Hello again"), assistant("Yes?"), user("Nothing. " * 100))
    served.ask(user("Something else. " * 100), owner="me", keeps=True)
    served.say(user("A third one"))
    assert agents() == first
    other = Message(role="system", content="Be quick. " * 60)
    for text in ("Hello", "Once more"):
        served.ask(other, user(text), **AGENT)
    assert len(agents()) == 2


def test_nobody_else_gets_it(served: Served) -> None:
    served.say(user("Hello"))
    served.again()
    assert served.say(user("Hello"), owner="you").cache_n == 0
    assert served.say(user("Hello there")).prompt_n < 128


def test_the_memory_of_a_recurrent_model_comes_back_too(recurrent_model: Path, tmp_path: Path) -> None:
    served = Served(recurrent_model, tmp_path / "kv")
    first = served.say(user("Hello"))
    served.say(user("Hello"), assistant("Yes?"), user("Nothing. " * 100))
    served.again()
    assert served.say(user("A third one")).prompt_n < 128 < first.prompt_n
    served.engine.close()


@pytest.mark.parametrize("drafting", [Speculation(), Speculation(drafters=("suffix",), depth=4)])
def test_a_required_call_comes_in_pieces(served: Served, drafting: Speculation) -> None:
    rule = CallRule(mode="required", single=True)
    served.say(user("Where?"), calling=rule, output=Output(streams_calls=True), max_tokens=100, speculation=drafting)
    pieces = served.of(CallDelta)
    assert {piece.name for piece in pieces} == {"look"}
    assert is_look("".join(piece.arguments for piece in pieces))


def test_a_model_reasons_before_a_required_call(tmp_path: Path) -> None:
    template = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
    served = Served(write_tiny_gguf(tmp_path / "thinker.gguf", template=template), tmp_path / "kv")
    rule = CallRule(mode="required", single=True)
    served.say(user("Where?"), calling=rule, output=Output(streams_calls=True), max_tokens=150, reasoning_budget=6)
    assert any(delta.channel == "reasoning" for delta in served.of(TextDelta))
    assert is_look("".join(piece.arguments for piece in served.of(CallDelta)))
    served.engine.close()


def is_look(arguments: str) -> bool:
    return arguments.replace(" ", "") in ('{"at":"a"}', '{"at":"b"}')
