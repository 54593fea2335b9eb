"""Tests scoring a written text: rows as a plain evaluation gives them, and what is evaluated for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cpuchat.base.text import common_prefix
from cpuchat.protocol.messages import Failed, GenerationFinished, Output, Score, TokensScored
from tests.support.engine_chat import OPTIONS, Chat, user

N_ROWS = 32


def answered(chat: Chat) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of a prompt and of the answer to it."""
    chat.ask(user("Name three colors, please."), output=Output(tokens=True))
    finished = chat.of(GenerationFinished)[0]
    assert len(finished.tokens) == finished.timings.predicted_n > 8 and finished.prompt_tokens
    return finished.prompt_tokens, finished.tokens


def score(chat: Chat, prompt: tuple[int, ...], answer: tuple[int, ...], n: int, file: Path, **more: object) -> None:
    file.touch()
    chat.events.clear()
    chat.engine.score(
        Score(
            request_id=7, tokens=prompt + answer, n=n, n_prompt=len(prompt), n_ctx=256, n_rows=N_ROWS, file=str(file),
            **more,  # type: ignore[arg-type]
        )
    )  # fmt: skip


def plain_rows(chat: Chat, tokens: list[int], n: int) -> np.ndarray:
    """The rows after which the last `n` follow, evaluated token by token."""
    sequence = chat.loaded.model.sequence
    sequence.clear()
    rows = [sequence.step(token).copy() for token in tokens[:-1]]
    return np.stack(rows[-n:])


@pytest.mark.parametrize("kind", ["tiny_model", "recurrent_model"])
def test_rows_are_those_of_a_plain_evaluation_also_after_going_back(
    kind: str, request: pytest.FixtureRequest, chat: Chat, tmp_path: Path
) -> None:
    chat.load(request.getfixturevalue(kind))
    prompt, answer = answered(chat)
    other = (*answer[:4], *(token + 1 for token in answer[4:]))
    written = []
    for text, n in ((answer[:6], 6), (answer, len(answer) - 6), (other, len(other) - 4)):
        file = tmp_path / f"rows{len(written)}"
        score(chat, prompt, text, n, file)
        written.append(np.fromfile(file, np.float32))
    assert chat.of(TokensScored)
    n_vocab = chat.loaded.model.vocab.n_tokens
    rows = np.concatenate(written).reshape(-1, n_vocab)
    expected = [plain_rows(chat, [*prompt, *answer], len(answer)), plain_rows(chat, [*prompt, *other], len(other) - 4)]
    for row, wanted in zip(rows, np.concatenate(expected), strict=True):  # passes of other lengths round otherwise
        assert np.linalg.norm(row - wanted) < 0.01 * np.linalg.norm(wanted)


def test_neither_the_prompt_nor_a_shared_beginning_is_evaluated_again(
    chat: Chat, tiny_model: Path, tmp_path: Path, evaluated: list[int]
) -> None:
    chat.load(tiny_model)
    prompt, answer = answered(chat)
    file = tmp_path / "rows"
    evaluated.clear()
    score(chat, prompt, answer, len(answer), file)
    assert sum(evaluated) == len(answer)  # from the last token of the prompt on
    evaluated.clear()
    other = (*answer[:5], *(token + 1 for token in answer[5:]))
    score(chat, prompt, other, len(other) - 5, file)
    assert sum(evaluated) == len(answer) - 5


def test_a_comparison_with_itself_finds_no_difference_and_the_ranks_are_counted(
    chat: Chat, tiny_model: Path, tmp_path: Path
) -> None:
    chat.load(tiny_model)
    prompt, answer = answered(chat)
    file = tmp_path / "rows"
    score(chat, prompt, answer, len(answer), file)
    score(chat, prompt, answer, len(answer), file, bases=("file", "own"))
    (scored,) = chat.of(TokensScored)
    for found in scored.compared:
        assert np.abs(np.frombuffer(found.kld, "<f4")).max() < 1e-5
        np.testing.assert_array_equal(np.frombuffer(found.base_nll, "<f4"), np.frombuffer(found.other_nll, "<f4"))
        assert np.frombuffer(found.same_top, "<f4").all() and len(found.tops) == len(answer)
    rows = plain_rows(chat, [*prompt, *answer], len(answer))
    ranks = [1 + int((row > row[token]).sum()) for row, token in zip(rows, answer, strict=True)]
    told = np.frombuffer(scored.compared[0].ranks, "<i4").tolist()
    assert common_prefix(told, ranks) >= len(ranks) - 2  # ranks in the hundreds move with the rounding
    chat.events.clear()
    chat.engine.score(Score(request_id=8))
    assert chat.of(TokensScored) and chat.engine._scorer is None


def test_a_cancelled_job_frees_its_memory_and_the_next_one_runs(chat: Chat, tiny_model: Path, tmp_path: Path) -> None:
    chat.load(tiny_model, OPTIONS)
    prompt, answer = answered(chat)
    file = tmp_path / "rows"
    score(chat, prompt, answer, 4, file)
    chat.engine.cancel()
    score(chat, prompt, (*answer, 5, 6), 4, file)
    (failed,) = chat.of(Failed)
    assert failed.code == "interrupted" and chat.engine._scorer is None
    chat.engine.clear_cancel()
    score(chat, prompt, answer, 4, file)
    assert chat.of(TokensScored)
