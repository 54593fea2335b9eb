"""Tests what of a chat is re-evaluated, with every kind of memory that llama.cpp has."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cpuchat.base import paths
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol.messages import (
    GenerationFinished,
    LoadModel,
    Message,
    PrefillProgress,
    Sampling,
    Speculation,
    TextDelta,
)
from cpuchat.protocol.timings import Timings
from tests.engine.conftest import OPTIONS
from tests.support.cores import ONE_CPU
from tests.support.engine_chat import LONG, Chat, assistant, user
from tests.support.tiny_gguf import CHATML, Architecture, write_tiny_gguf

ARCHITECTURES: tuple[Architecture, ...] = ("llama", "mamba", "jamba", "qwen35", "gemma3")
KINDS: tuple[Architecture, ...] = ("llama", "mamba", "qwen35", "gemma3")
"""One for each kind of memory: attention, recurrent, both, a window."""
WIDE = msgspec.structs.replace(OPTIONS, n_ctx=2048)
GREEDY = Sampling(temperature=0.0, repeat_penalty=1.5)
MARKUP = len("<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
_OWNERS = itertools.count()
REASONS = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("states")
    return {arch: write_tiny_gguf(folder / f"{arch}-F32.gguf", arch=arch, n_layer=3) for arch in ARCHITECTURES}


@pytest.fixture(scope="module")
def fresh() -> Iterator[dict[Path, Chat]]:
    engines: dict[Path, Chat] = {}
    cpus = own_cpus()
    yield engines
    for chat in engines.values():
        chat.engine.close()
    if hasattr(os, "sched_setaffinity"):  # they were loaded while other engines had pinned this thread
        os.sched_setaffinity(0, cpus)


class Talk(Chat):
    """A chat of some turns, which can be stopped. `fresh` are engines for answers to compare with, by their files."""

    def __init__(self, file: Path, folder: Path | None, fresh: dict[Path, Chat]) -> None:
        super().__init__()
        self.file, self.folder, self.fresh = file, folder, fresh
        self.load(file, WIDE, state_dir=folder)
        self.turns: list[Message] = []

    def tell(self, *messages: Message, chat_id: str = "a", max_tokens: int = 12) -> Timings:
        return self.ask(*messages, chat_id=chat_id, max_tokens=max_tokens, sampling=GREEDY)

    def grow(self, turns: int = 3) -> Timings:
        """Have some turns; the last one is an answer."""
        for number in range(turns):
            self.turns.append(user(f"{number}: {LONG}"))
            timings = self.tell(*self.turns)
            self.turns.append(assistant(self.text))
        return timings

    def stop_when(self, is_due: Callable[[object], bool]) -> None:
        self.react = lambda event: self.engine.cancel() if is_due(event) else None

    def go_on(self) -> None:
        self.react = lambda event: None

    def answered_anew(self, *messages: Message) -> str:
        """Return the answer of an engine that has kept nothing of it."""
        fresh = self.fresh.get(self.file)
        if fresh is None:
            fresh = self.fresh[self.file] = Chat()
            fresh.load(self.file, WIDE)
        timings = fresh.ask(*messages, owner=f"{next(_OWNERS)}", max_tokens=12, sampling=GREEDY)
        assert timings.cache_n == 0
        return fresh.text


@pytest.fixture(params=KINDS)
def talk(
    request: pytest.FixtureRequest, files: dict[str, Path], tmp_path: Path, fresh: dict[Path, Chat]
) -> Iterator[Talk]:
    talk = Talk(files[request.param], tmp_path / "kv", fresh)
    yield talk
    talk.engine.close()


def test_regenerating_evaluates_nothing_and_an_edited_message_costs_itself(talk: Talk) -> None:
    talk.grow()
    said = talk.text
    again = talk.tell(*talk.turns[:-1])
    assert (again.prompt_n, talk.text) == (0, said)
    assert again.reuse is not None and not again.reuse.changed and not again.reuse.again

    edited = [*talk.turns[:-2], user(f"2: {LONG[:-8]} after all")]
    timings = talk.tell(*edited)
    assert timings.prompt_n <= len(edited[-1].content) + MARKUP
    assert timings.reuse is not None and (timings.reuse.changed, timings.reuse.message) == ("message", 5)
    assert talk.text == talk.answered_anew(*edited)


def test_what_was_evaluated_before_a_stop_is_not_evaluated_again(talk: Talk) -> None:
    talk.grow()
    n_said = 0

    def is_due(event: object) -> bool:
        nonlocal n_said
        n_said += event.n_tokens if isinstance(event, TextDelta) else 0
        return n_said > 20

    asked = [*talk.turns, user("Go on, please.")]
    talk.stop_when(is_due)
    stopped = talk.tell(*asked, max_tokens=0)
    assert talk.stop_reason == "cancelled"
    talk.go_on()
    following = [*asked, assistant(talk.text), user("And what then?")]
    timings = talk.tell(*following)
    assert timings.cache_n == stopped.n_past
    assert timings.prompt_n <= len(following[-1].content) + MARKUP

    long = [*talk.turns, user("So much more: " + LONG * 8)]
    talk.stop_when(lambda event: isinstance(event, PrefillProgress) and event.processed - event.cache_n >= 400)
    stopped = talk.tell(*long)
    assert talk.stop_reason == "cancelled" and talk.text == ""
    talk.go_on()
    long[-1] = user(long[-1].content + "And more?")  # behind what was evaluated, so nobody edited that
    timings = talk.tell(*long)
    assert timings.cache_n == stopped.n_past  # between two batches nothing is lost
    assert timings.reuse is not None and not timings.reuse.changed
    assert talk.text == talk.answered_anew(*long)


def test_forks_and_branches_evaluate_what_differs(talk: Talk) -> None:
    talk.grow(4)
    fork = [*talk.turns[:-4], user("Something else, from here on.")]
    timings = talk.tell(*fork, chat_id="fork")
    assert timings.prompt_n <= len(fork[-1].content) + MARKUP
    fork_text = talk.text
    back = [*talk.turns, user("And in the first chat?")]
    timings = talk.tell(*back)
    assert timings.prompt_n <= len(back[-1].content) + MARKUP
    assert timings.reuse is not None and timings.reuse.source == "memory"
    assert talk.text == talk.answered_anew(*back)
    assert talk.tell(*fork, chat_id="fork").prompt_n <= len(fork[-1].content) + MARKUP
    assert talk.text == fork_text


def test_reasoning_that_the_template_drops(files: dict[str, Path], talk: Talk, tmp_path: Path) -> None:
    """The answer has its reasoning only until the next message: the template opened it after the last checkpoint."""
    arch = talk.file.stem.partition("-")[0]
    file = write_tiny_gguf(tmp_path / "reasons.gguf", arch=arch, n_layer=3, template=REASONS)  # type: ignore[arg-type]
    talk.load(file, WIDE)
    talk.file = file
    turns = [user(LONG), assistant("Yes."), user(f"Well? {LONG}")]
    talk.tell(*turns)
    following = [*turns, assistant("So it is."), user("And?")]
    assert talk.tell(*following).prompt_n <= len("So it is.") + len("And?") + MARKUP
    assert talk.text == talk.answered_anew(*following)


def test_a_changed_system_prompt_is_said(talk: Talk) -> None:
    turns = [Message(role="system", content="Be brief."), user(LONG)]
    talk.tell(*turns)
    timings = talk.tell(Message(role="system", content="Be long."), user(LONG))
    assert timings.reuse is not None and timings.reuse.changed == "system"
    assert timings.prompt_n > len(LONG)


@pytest.mark.parametrize("talk", ARCHITECTURES, indirect=True)
def test_after_a_restart_it_goes_on(talk: Talk) -> None:
    n_past = talk.grow().n_past
    talk.restart()
    talk.load(talk.file, WIDE, state_dir=talk.folder)
    following = [*talk.turns, user("And now?")]
    timings = talk.tell(*following)
    assert timings.cache_n == n_past
    assert timings.reuse is not None and timings.reuse.source == "disk" and timings.reuse.ms > 0
    said = talk.text
    assert said == talk.answered_anew(*following)
    talk.restart()
    talk.load(talk.file, WIDE, state_dir=talk.folder)
    assert talk.tell(*following).prompt_n < len(following[-1].content) + MARKUP  # checkpoints are saved, too
    assert talk.text == said


def test_a_spoilt_state_is_mended_by_a_checkpoint(talk: Talk) -> None:
    """A stop within a batch of a recurrent model costs what came after the last checkpoint, not the chat."""
    n_past = talk.grow().n_past
    sequence = talk.loaded.model.sequence
    sequence.is_broken = sequence.is_recurrent
    asked = [*talk.turns, user("And?")]
    assert talk.tell(*asked).cache_n >= n_past - 24
    assert talk.text == talk.answered_anew(*asked)
    sequence.is_broken = sequence.is_recurrent
    talk.tell(user("Another chat, for a change. " * 3), chat_id="b")
    assert talk.tell(*asked).cache_n >= n_past - 24


def test_states_stay_within_their_limit_and_the_chat_is_still_answered(
    files: dict[str, Path], fresh: dict[Path, Chat]
) -> None:
    talk = Talk(files["jamba"], None, fresh)
    store = talk.loaded.states
    store.limit = 150_000  # some checkpoints of 20 kB, and no whole state of a long chat
    for number in range(4):
        talk.turns.clear()
        talk.grow(3)
        assert store.n_bytes <= store.limit
        asked = [*talk.turns[:-2], user(f"{number} and so on")]
        assert talk.tell(*asked, chat_id=f"{number}").cache_n > 0
    assert talk.text == talk.answered_anew(*asked)
    store.limit = 0
    talk.turns.clear()
    talk.grow(2)
    assert talk.tell(*talk.turns, user("And?")).cache_n > 0  # what goes on needs no state
    talk.engine.close()


def test_what_is_too_large_to_be_saved_is_said_once(files: dict[str, Path], tmp_path: Path) -> None:
    talk = Talk(files["llama"], None, {})
    limited = LoadModel(
        path=str(talk.file), cpus=ONE_CPU, options=WIDE, state_dir=str(tmp_path / "kv"), state_limit=1000
    )
    talk.engine.load(limited)
    notes = [timings.reuse.note for timings in (talk.grow(1), talk.grow(1)) if timings.reuse is not None]
    assert "engine.saved_kv_gb" in notes[0] and notes[1] == ""
    talk.engine.close()


def draft_of(chat: Chat) -> Sequence:
    """Return the draft model's memory."""
    setup = chat.engine._setup
    assert setup is not None and setup.draft is not None
    return setup.draft.sequence


def test_the_draft_models_state_is_kept_too(tmp_path: Path) -> None:
    demo, draft = (paths.demo_dir() / DEMO_FILES[name] for name in ("demo", "demo-draft"))
    options = msgspec.structs.replace(WIDE, draft_path=str(draft))
    speculation = Speculation(drafters=("draft",), depth=3)
    question = user("Why does a CPU write slower than it reads the prompt?")
    chat = Chat()
    chat.load(demo, options, state_dir=tmp_path / "kv")
    chat.ask(question, chat_id="a", speculation=speculation)
    turns = (question, assistant(chat.text), user("And then?"))
    held = len(draft_of(chat))
    chat.restart()
    chat.load(demo, options, state_dir=tmp_path / "kv")
    seen: list[int] = []

    def look(event: object) -> None:
        if isinstance(event, PrefillProgress):
            seen.append(len(draft_of(chat)))

    chat.react = look
    chat.ask(*turns, chat_id="a", speculation=speculation)
    assert isinstance(chat.events[-1], GenerationFinished)
    assert held > 40 and seen[0] >= held - 4  # before anything of the prompt is evaluated
    chat.engine.close()
