"""Tests what is reused, kept and written where the beginning of an agent's prompts changes from request to request."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuchat.engine.states.files import StateFiles
from cpuchat.engine.states.prompt import State, StateKind
from cpuchat.engine.states.store import StateStore
from cpuchat.protocol.messages import Message, Sampling
from cpuchat.protocol.timings import Timings
from tests.engine.test_agents import Served
from tests.support.engine_chat import assistant, system, user
from tests.support.tiny_gguf import Architecture, write_tiny_gguf

KINDS: tuple[Architecture, ...] = ("llama", "mamba", "qwen35", "gemma3")
"""One for each kind of memory: attention, recurrent, both, a window."""
RULES = "".join(f"Rule {number}: be careful with file {number}.\n" for number in range(10, 30))
MARKUP = 100
"""Tokens of a question, of the marks around it, and of the beginning of a changed line."""
CLIENT: dict[str, Any] = {"owner": "me", "keeps": True, "when_full": "refuse", "max_tokens": 6}

Head = Callable[[int], str]
Written = list[tuple[StateKind, str]]


def identified(number: int) -> str:
    """Return rules after an id that comes once."""
    return f"Session {number * 7919:08x}\n{RULES}"


def dated(number: int) -> str:
    """Return rules with the time between them."""
    return f"{RULES}Now: 2026-11-{10 + number} {10 + 3 * number}:0{number}.\n{RULES}"


def placed(number: int) -> str:
    """Return rules before a folder that changes."""
    return f"{RULES}{RULES}Work in /home/{number * 7919:x}/project.\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {arch: write_tiny_gguf(folder / f"{arch}-F32.gguf", arch=arch, n_layer=3) for arch in KINDS}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    """The files that states were written to, in turn, and what they hold."""
    files: Written = []
    write = StateFiles.write

    def note(self: StateFiles, stem: str, states: list[State], *args: Any) -> None:
        files.append((states[0].kind, stem))
        write(self, stem, states, *args)

    monkeypatch.setattr(StateFiles, "write", note)
    return files


class Agent(Served):
    """An agent of one client, whose server rests between two requests."""

    def tell(self, *messages: Message, **more: Any) -> Timings:
        timings = self.ask(*messages, **{**CLIENT, **more})
        for _ in range(2):
            self.engine.idle()
            self.settle()
        return timings

    @property
    def store(self) -> StateStore:
        return self.loaded.states


@pytest.fixture(params=["llama", "qwen35"])
def agent(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(models[request.param], tmp_path / "kv")
    yield agent
    agent.engine.close()


@pytest.mark.parametrize(
    ("agent", "head", "between"),
    [("llama", placed, False), ("mamba", dated, True), ("qwen35", dated, False), ("gemma3", placed, True)],
    indirect=["agent"],
    ids=["llama-placed-alone", "mamba-dated-with titles between", "qwen35-dated-alone",
         "gemma3-placed-with titles between"],
)  # fmt: skip
def test_a_line_that_changes_costs_what_follows_it(agent: Agent, written: Written, head: Head, between: bool) -> None:
    """Also after a crash; and the state before it is written once, whatever follows."""

    def ask(number: int) -> Timings:
        timings = agent.tell(system(head(number)), user(f"{'ABCDEF'[number]} question"))
        if between:
            agent.tell(system("Write a title."), user(f"{number * 31:x} of a chat about {number}. " * 3))
        return timings

    following = len(RULES) if head is dated else 0
    ask(0)
    ask(1)  # a memory that cannot be cut evaluates all that comes after a checkpoint once more
    for number in (2, 3):
        assert ask(number).prompt_n < following + MARKUP
    assert [kind for kind, _ in written] == [StateKind.HEAD]
    agent.again(crashed=True)
    assert ask(4).prompt_n < following + MARKUP
    asked, greedy = (system(head(5)), user("F question")), Sampling(temperature=0.0, repeat_penalty=1.5)
    assert agent.tell(*asked, sampling=greedy).prompt_n < following + MARKUP
    said = agent.text
    assert agent.tell(*asked, sampling=greedy, owner="somebody else").cache_n == 0
    assert said == agent.text


def test_heads_that_come_once_are_not_written(agent: Agent, written: Written) -> None:
    for number in range(6):
        agent.tell(system(identified(number)), user("Hello"))
    assert written == []
    agent.again()
    assert len(written) == 1, "what was said last"


def test_variants_of_a_head_that_alternate_are_kept(agent: Agent) -> None:
    heads = [f"{RULES}Channel {name}.\n{RULES}" for name in ("one", "two", "three")]
    for number in range(2):
        for head in heads:
            timings = agent.tell(system(head), user(f"{number} Hello"))
            assert number == 0 or timings.prompt_n < MARKUP


def test_each_user_of_an_agent_has_files_of_their_own(agent: Agent, written: Written) -> None:
    asked = system(RULES + RULES)
    for number in range(3):
        for owner in ("me", "you"):
            agent.tell(asked, user(f"{number} Hello"), owner=owner)
    assert len(written) == len(set(written)) == 2
    agent.again(crashed=True)
    for owner in ("me", "you"):
        assert agent.tell(asked, user("Another one"), owner=owner).prompt_n < MARKUP
    assert agent.tell(asked, user("Another one"), owner="somebody else").cache_n == 0


def test_many_heads_leave_a_real_conversation(agent: Agent) -> None:
    store = agent.store
    shutil.rmtree(agent.folder)  # nothing comes back from the disk
    turns = [user("Tell me. " * 40)]
    agent.tell(*turns)
    turns += [assistant(agent.text), user("And more?")]
    n_past = agent.tell(*turns).n_past
    turns += [assistant(agent.text), user("And now?")]
    store.limit = 6 * store.sequence.state_size()
    for number in range(40):
        agent.tell(system(identified(number)), user("Hello"))
    assert agent.tell(*turns).cache_n >= n_past - 16
    assert store.n_bytes <= store.limit


def test_a_client_keeps_few_heads(models: dict[str, Path], tmp_path: Path, written: Written) -> None:
    agent = Agent(models["llama"], tmp_path / "kv")
    for number in range(12):
        for text in ("Hello", "Again"):
            agent.tell(system(identified(number)), user(text))
    assert len(set(written)) == 12
    assert len(agent.heads()) == 8
    assert agent.tell(system(identified(11)), user("Once more")).prompt_n < MARKUP
    agent.engine.close()


def test_those_with_a_salt_are_kept_in_memory_only(agent: Agent, written: Written) -> None:
    for number in range(4):
        timings = agent.tell(system(placed(number)), user("Hello"), keeps=False)
    assert timings.prompt_n < MARKUP
    agent.again()
    assert written == [] and not list(agent.folder.iterdir())


def test_tools_in_another_order_do_not_replace_the_first_ones(agent: Agent) -> None:
    lines = [f"{RULES[:200]}Tool {number}.\n" for number in range(10, 16)]
    orders = ["".join(lines), "".join(reversed(lines))]
    for number in range(2):
        for order in orders:
            timings = agent.tell(system(order), user(f"{number} Hello"))
    assert timings.prompt_n < MARKUP


def test_a_text_that_changes_at_one_place_costs_what_follows_it(agent: Agent) -> None:
    """A prompt without messages, as of a front end for stories that writes what it knows of a place near the top."""
    for number in range(4):
        prompt = f"{RULES}{RULES}They are in the {'ABCD'[number]} hall.\nAnd then? "
        timings = agent.ask(prompt=prompt, **CLIENT)
    assert timings.prompt_n < MARKUP


def test_a_reminder_that_moves_on_costs_what_follows_its_place(agent: Agent) -> None:
    reminder, turns = "\n<system-reminder>You may edit files now.</system-reminder>", list[Message]()
    for number in range(4):
        turns.append(user(f"{number}: the next step."))
        timings = agent.tell(system(RULES + RULES), *turns[:-1], user(turns[-1].content + reminder))
        turns.append(assistant(agent.text))
    assert timings.prompt_n < len(reminder) + 2 * MARKUP


def test_what_another_request_came_between_goes_on(agent: Agent) -> None:
    """A part of an agent, or a title, with a head of its own."""
    turns: list[Message] = []
    for number in range(4):
        turns.append(user(f"{number}: the next step."))
        timings = agent.tell(system(RULES + RULES), *turns)
        assert number == 0 or timings.prompt_n < MARKUP
        turns.append(assistant(agent.text))
        for _ in range(2):
            agent.tell(system(f"Look for files. {RULES}"), user(f"Where is {number}?"))


def test_a_longer_state_is_found_beside_one_that_was_brought_back(agent: Agent) -> None:
    asked = system(RULES + RULES)
    turns = [user("Tell me. " * 30)]
    for _ in range(3):
        n_past = agent.tell(asked, *turns).n_past
        turns += [assistant(agent.text), user("And more?")]
    for _ in range(2):
        agent.tell(asked, user("Hello"))  # the head was used last
    agent.again()
    assert agent.tell(asked, *turns).cache_n == n_past


def test_a_small_request_before_the_end_takes_no_conversation_along(agent: Agent) -> None:
    turns: list[Message] = []
    for number in range(5):
        turns.append(user(f"{number}: tell me more. " * (16 if not number else 2)))
        n_past = agent.tell(*turns).n_past
        turns.append(assistant(agent.text))
    agent.tell(user("Summarize what was said about it. " * 2))
    agent.again()
    assert agent.tell(*turns, user("Go on.")).cache_n == n_past
