"""An answer with drafts is the answer without them, and leaves the same state behind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.protocol.messages import LoadOptions, Sampling, Speculation
from tests.engine.conftest import Load
from tests.support.pair_files import draft_token_table
from tests.support.pairs import FLAT, N_VOCAB, OPTIONS, Said, Talker, Wandering, assert_same, chain, pair_files

DEPTHS = (1, 5, 31)
PROMPT = [300, 301, 302, 303]


@pytest.fixture
def load(reuse: Load) -> Load:
    return reuse


@pytest.fixture
def abort(_kept_abort: AbortFlag) -> AbortFlag:
    return _kept_abort


def drafts(depth: int = 0, *drafters: str, **more: object) -> Speculation:
    return Speculation(drafters=drafters or ("draft",), depth=depth, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[float, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("pairs")
    return {alpha: pair_files(folder, alpha) for alpha in (0.0, 0.5, 1.0)}


@pytest.fixture
def pair(load: Load, files: dict[float, tuple[Path, Path]]) -> Callable[..., Talker]:
    """Load the pair with an acceptance rate; `options` are those of the target."""

    def _pair(alpha: float, options: LoadOptions = OPTIONS, **more: object) -> Talker:
        target = load(files[alpha][0], options)
        return Talker(target, load(files[alpha][1], options, threads=target.pool), **more)  # type: ignore[arg-type]

    return _pair


@pytest.fixture
def plain(load: Load, files: dict[float, tuple[Path, Path]]) -> Talker:
    """Return the target without a draft model; it is the same for every acceptance rate."""
    return Talker(load(files[1.0][0], OPTIONS))


@pytest.fixture
def echo(load: Load, tiny_model: Path) -> Talker:
    """Return a model with random weights as its own draft: right where the sampler takes the most likely token."""
    target = load(tiny_model, OPTIONS)
    return Talker(target, load(tiny_model, OPTIONS, threads=target.pool))


def assert_goes_on(plain: Talker, drafted: Talker, first: Said, second: Said) -> None:
    """Assert that after the same answer, the next turn finds the same tokens in the cache and answers the same."""
    assert first.held == second.held
    prompt = [*first.prompt, *first.tokens, 400, 401]
    one, other = plain.say(prompt, max_tokens=12), drafted.say(prompt, max_tokens=12)
    assert one.cache_n == other.cache_n == len(first.held)
    assert one.tokens == other.tokens
    again = drafted.say([*prompt, *one.tokens, 402], drafts(5), max_tokens=12)
    assert again.tokens == plain.say([*prompt, *one.tokens, 402], max_tokens=12).tokens


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_greedy_text_at_every_depth(pair: Callable[..., Talker], plain: Talker, alpha: float) -> None:
    drafted = pair(alpha)
    expected = chain(PROMPT[-1], 45)
    first = plain.say(PROMPT, max_tokens=45)
    assert first.tokens == expected
    table = draft_token_table(N_VOCAB, alpha).tolist()
    right = [table[token] == after for token, after in pairwise(expected)]
    for depth in DEPTHS:
        said = drafted.say(PROMPT, drafts(depth), max_tokens=45)
        assert said.tokens == expected and said.text == first.text and said.held == first.held
        passes = accepted = at = 0
        while at < 44:  # the first token comes from the prompt
            n = min(depth, 43 - at)
            run = next((i for i, ok in enumerate(right[at : at + n]) if not ok), n)
            passes, accepted, at = passes + 1, accepted + run, at + run + 1
        assert (said.figures.passes, said.figures.draft_n_accepted) == (passes, accepted)


@pytest.mark.parametrize("depth", [0, 3])
def test_the_pass_that_only_ends_the_answer_is_none(pair: Callable[..., Talker], depth: int) -> None:
    """That pass comes after the last token and writes nothing; every counted pass has written at least one."""
    drafted = pair(1.0)
    for n in range(12, 15):
        said = drafted.say(PROMPT, drafts(depth), is_eog=chain(PROMPT[-1], n + 1)[-1].__eq__)
        assert (said.reason, len(said.tokens)) == ("end", n) and said.figures is not None
        assert said.figures.passes == -(-(n - 1) // (depth + 1))
        assert said.figures.tokens_per_pass(n) == ((n - 1) / said.figures.passes if depth else None)


@pytest.mark.parametrize("drafters", [("draft",), ("suffix",), ("draft", "suffix")], ids="-".join)
def test_adaptive_text(pair: Callable[..., Talker], plain: Talker, drafters: tuple[str, ...]) -> None:
    drafted = pair(0.5, costs=FLAT)
    prompt = [*chain(500, 40), *chain(500, 20)]  # something to look up
    expected = plain.say(prompt, max_tokens=100)
    for _ in range(2):  # what the first answer taught changes the second one's depths
        said = drafted.say(prompt, drafts(0, *drafters), max_tokens=100)
        assert said.tokens == expected.tokens and said.held == expected.held


def test_every_order_of_drafters_and_depths(pair: Callable[..., Talker], plain: Talker) -> None:
    """Drafts, plain steps and listening in any order, over several turns; the answer repeats parts of the prompt."""
    drafted = pair(0.5).decide(Wandering(0))
    prompt = [*chain(500, 40), 261, *chain(500, 20)]
    names = set()
    for turn in range(3):
        expected = plain.say(prompt, max_tokens=80)
        said = drafted.say(prompt, drafts(0, "draft", "suffix"), max_tokens=80)
        assert said.tokens == expected.tokens and said.text == expected.text
        assert (said.cache_n, said.held) == (expected.cache_n, expected.held)
        names |= {count.name for count in said.figures.by_drafter if count.draft_n_accepted}
        prompt = [*prompt, *said.tokens, 300 + turn, *prompt[-20:]][-200:]
    assert names >= {"draft", "suffix"}


SAMPLINGS = {
    "default": Sampling(seed=5),
    "everything": Sampling(seed=6, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0),
    "min-p": Sampling(seed=8, temperature=1.2, top_k=0, top_p=1.0, min_p=0.1),
    "penalties": Sampling(seed=5, repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampled_text(load: Load, tiny_model: Path, echo: Talker, sampling: Sampling) -> None:
    plain = Talker(load(tiny_model, OPTIONS))
    prompt = list(b"the engine in the inner line")
    expected = plain.say(prompt, sampling=sampling, max_tokens=60)
    accepted = refused = 0
    for speculation in (drafts(1), drafts(31), drafts(3, "draft", "suffix")):
        said = echo.say(prompt, speculation, sampling=sampling, max_tokens=60)
        assert_same(plain.target, expected, said, sampling)
        accepted += said.figures.draft_n_accepted
        refused += said.figures.draft_n - said.figures.draft_n_accepted
    assert accepted and refused  # both ways were taken


def test_penalties_see_only_what_was_accepted(load: Load, tiny_model: Path, echo: Talker) -> None:
    """The draft model applies no penalties, so its tokens are often rejected; rejected tokens must not count."""
    sampling = Sampling(temperature=0.0, repeat_penalty=1.5, frequency_penalty=0.3, repeat_last_n=8)
    plain = Talker(load(tiny_model, OPTIONS))
    prompt = list(b"over and over and over")
    expected = plain.say(prompt, sampling=sampling, max_tokens=80)
    assert expected.tokens != plain.say(prompt, max_tokens=80).tokens
    for depth in (2, 31):
        said = echo.say(prompt, drafts(depth), sampling=sampling, max_tokens=80)
        assert_same(plain.target, expected, said, sampling)
        assert said.figures is not None and said.figures.draft_n_accepted < said.figures.draft_n


@pytest.mark.parametrize("end", ["max_tokens", "end", "stop_string"])
def test_an_end_inside_a_draft(pair: Callable[..., Talker], plain: Talker, end: str) -> None:
    drafted, said = pair(1.0), chain(PROMPT[-1], 20)
    pieces = [plain.target.vocab.piece(token).decode() for token in said]
    for at in (1, 4, 8, 9):
        ends: dict[str, dict[str, Any]] = {
            "max_tokens": {"max_tokens": at},
            "end": {"is_eog": said[at].__eq__},
            "stop_string": {"stop": (pieces[at][-2:] + pieces[at + 1][:2],)},  # completed in the middle of a token
        }
        one, other = plain.say(PROMPT, **ends[end]), drafted.say(PROMPT, drafts(8), **ends[end])
        assert one.reason == other.reason == end
        assert (other.tokens, other.text) == (one.tokens, one.text)
        assert len(one.tokens) == at or end == "stop_string"
        assert_goes_on(plain, drafted, one, other)


def test_context_full_inside_a_draft(load: Load, files: dict[float, tuple[Path, Path]]) -> None:
    options = LoadOptions(n_ctx=256, n_batch=64, n_ubatch=64)
    plain = Talker(load(files[1.0][0], options))
    drafted = Talker(plain.target, load(files[1.0][1], options, threads=plain.target.pool))
    n_ctx = plain.target.sequence.n_ctx
    for left in (1, 2, 5, 10):
        prompt = chain(700, n_ctx - left)
        one = plain.say(prompt, max_tokens=0)
        assert one.reason == "context" and len(one.tokens) == left + 1
        for depth in (4, 31):
            other = drafted.say(prompt, drafts(depth), max_tokens=0)
            assert (other.tokens, other.reason, other.held) == (one.tokens, "context", one.held)
            assert len(other.held) == n_ctx
        shorter = prompt[:100]
        assert drafted.say(shorter, drafts(6)).tokens == plain.say(shorter).tokens


def test_stop_while_a_pass_runs(pair: Callable[..., Talker], plain: Talker, abort: AbortFlag) -> None:
    """The flag is up when the first draft reaches the target."""
    drafted = pair(1.0)
    said = drafted.say(PROMPT, drafts(8), on_update=lambda *_: abort.set())
    abort.clear()
    assert said.reason == "cancelled"
    assert said.tokens == chain(PROMPT[-1], 1) and said.text
    assert said.held == PROMPT
    assert_goes_on(plain, drafted, plain.say(PROMPT, max_tokens=1), said)


def test_stop_in_a_long_answer(pair: Callable[..., Talker], plain: Talker, abort: AbortFlag) -> None:
    """Wherever the stop comes, the text is a prefix of the answer and the state matches the text."""
    drafted = pair(0.5)
    said = drafted.say(PROMPT, drafts(6), max_tokens=0, on_delta=lambda d: abort.set() if d.predicted_n > 1 else None)
    abort.clear()
    n = len(said.tokens)
    assert said.reason == "cancelled" and said.tokens == chain(PROMPT[-1], n)
    assert said.held == [*PROMPT, *said.tokens][: len(said.held)] and len(said.held) >= len(PROMPT) + n - 1
    assert sum(d.n_tokens for d in said.deltas) == n
    prompt = [*PROMPT, *said.tokens, 400]
    after = drafted.say(prompt, drafts(6))
    assert after.cache_n == len(said.held)
    assert after.tokens == plain.say(prompt).tokens
