"""Tests what is loaded with a target. Whatever is wrong with it, the target answers, and the user hears why."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from cpuchat.engine import engine
from cpuchat.engine.drafting.speculator import set_up_speculation
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.protocol.messages import Event, LoadCancelled, LoadModel, LoadProgress
from tests.engine.conftest import Load
from tests.support.cores import ONE_CPU
from tests.support.pair_chat import ALL, PairChat
from tests.support.pair_files import write_pair
from tests.support.pairs import N_VOCAB, OPTIONS

PLENTY = 1 << 40


def assert_answers(chat: PairChat) -> None:
    """Assert that the answer is the same with and without drafters."""
    plain, timings = chat.ask(max_tokens=40)
    assert plain and timings.speculation is None
    drafted, timings = chat.ask(ALL, max_tokens=40)
    assert drafted == plain
    assert "draft" not in {count.name for count in timings.speculation.by_drafter}


def test_a_pair(chat: PairChat, files: tuple[Path, Path]) -> None:
    info = chat.load(files[0], draft_path=str(files[1]))
    assert info.draft and info.draft_quantization == "Q8_0"
    assert info.drafts_off is None and info.notes == ()
    plain, _ = chat.ask()
    drafted, timings = chat.ask(ALL)
    assert drafted == plain and timings.draft_n_accepted


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("other", "tokenizer"), ("small", "1,024 tokens"), ("missing", ""), ("damaged", ""), ("recurrent", "recurrent")],
)
def test_draft_that_is_none(
    chat: PairChat, files: tuple[Path, Path], tiny_model: Path, recurrent_model: Path, tmp_path: Path, kind: str,
    reason: str,
) -> None:  # fmt: skip
    target, draft = files[0], tmp_path / "draft.gguf"
    match kind:
        case "other":
            draft = tiny_model
        case "small":
            write_pair(draft, None, 0.5, target="tiny", n_vocab=1024)
        case "damaged":
            draft.write_bytes(files[1].read_bytes()[:2000])
        case "recurrent":
            target, draft = tiny_model, recurrent_model
    info = chat.load(target, draft_path=str(draft))
    [note] = info.notes
    assert note.startswith("No draft model: ") and reason in note and info.draft == ""
    assert_answers(chat)


def test_draft_that_has_a_few_tokens_less(chat: PairChat, tmp_path: Path) -> None:
    """Up to 128 may be missing: such tokens of the text cannot be read by the draft model, and none is drafted."""
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    write_pair(target, None, 1.0, target="tiny", n_vocab=N_VOCAB)
    write_pair(tmp_path / "other.gguf", draft, 1.0, target="tiny", draft="tiny", n_vocab=N_VOCAB - 100)
    assert chat.load(target, draft_path=str(draft)).draft
    plain, _ = chat.ask(max_tokens=200)
    drafted, timings = chat.ask(ALL, max_tokens=200)
    assert drafted == plain and timings.draft_n


def test_draft_that_does_not_fit(load: Load, files: tuple[Path, Path], abort: AbortFlag) -> None:
    target = load(files[0], OPTIONS)
    options = msgspec.structs.replace(OPTIONS, draft_path=str(files[1]))
    command = LoadModel(path=str(files[0]), cpus=ONE_CPU, options=options)
    for available in (1 << 20, 0, -5):
        companions = set_up_speculation(target, command, available, lambda *_: None, abort)
        assert companions.draft is None
        assert "does not fit" in target.info.notes[-1] or "memory" in target.info.notes[-1]
    companions = set_up_speculation(target, command, PLENTY, lambda *_: None, abort)
    assert companions.draft is not None and target.info.draft
    companions.free()


def test_recurrent_target(chat: PairChat, recurrent_model: Path, tiny_model: Path) -> None:
    """Whether it drafts or says why not, the text is the same."""
    info = chat.load(recurrent_model, draft_path=str(tiny_model))
    plain, _ = chat.ask()
    drafted, timings = chat.ask(ALL)
    assert drafted == plain
    if info.drafts_off:
        assert timings.draft_n == 0 and timings.speculation.off == info.drafts_off
        assert info.drafts_off.kind == "model" and info.drafts_off.note


def test_one_token_batches_cannot_verify(chat: PairChat, files: tuple[Path, Path]) -> None:
    info = chat.load(files[0], draft_path=str(files[1]), n_batch=1, n_ubatch=1)
    assert info.drafts_off and info.draft == ""
    assert_answers(chat)


def test_a_fault_at_the_end_of_a_load_leaves_nothing_half_loaded(
    chat: PairChat, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    before = os.sched_getaffinity(0)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "StateStore", broken)
        with pytest.raises(KeyError):
            chat.command(files[0], draft_path=str(files[1]))
    assert os.sched_getaffinity(0) == before  # the threads that this one was pinned with are gone
    assert chat.load(files[0], draft_path=str(files[1])).draft
    assert chat.ask(ALL)[1].speculation is not None


def test_a_stop_while_the_draft_is_read_stops_the_load(chat: PairChat, files: tuple[Path, Path]) -> None:
    """The target's file is read to its end first; what is stopped then is the draft's."""
    finished = [0]

    def stop(event: Event) -> None:
        if isinstance(event, LoadProgress) and event.phase.startswith("reading") and event.done == event.total:
            finished[0] += 1
            if finished[0] == 2:
                chat.engine.cancel()

    chat.react = stop
    assert isinstance(chat.command(files[0], draft_path=str(files[1])), LoadCancelled)
    chat.react = lambda _: None
    chat.load(files[0])
    assert chat.ask()[0]
