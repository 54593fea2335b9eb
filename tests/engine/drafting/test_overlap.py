"""Tests drafting while the target verifies, on cores of its own: the same text, and nothing left running."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.protocol.messages import Speculation
from tests.support.pair_files import draft_token_table
from tests.support.pairs import N_VOCAB, OPTIONS, Always, Talker, Wandering, chain, pair_files

Load = Callable[..., Model]

PROMPT = [300, 301, 302]
DRAFTS = Speculation(drafters=("draft",))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[float, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("pairs")
    return {alpha: pair_files(folder, alpha) for alpha in (0.5, 1.0)}


@pytest.fixture
def apart(load: Load, files: dict[float, tuple[Path, Path]]) -> Iterator[Callable[[float], Talker]]:
    """Load a pair with one core for the target and one for the draft."""
    made: list[Talker] = []

    def _apart(alpha: float) -> Talker:
        mine, its = two_cores()
        target = load(files[alpha][0], OPTIONS, threads=(mine,))
        draft = load(files[alpha][1], OPTIONS, threads=target.pool)
        made.append(Talker(target, draft, draft_cpus=(its,)))
        return made[-1]

    yield _apart
    for talker in made:
        if talker.thread is not None:
            talker.thread.close()


def two_cores() -> tuple[int, int]:
    cpus = own_cpus()
    if len(cpus) < 2:
        pytest.skip("one core cannot do two things at once")
    return cpus[0], cpus[1]


def cpus_of(thread: int) -> tuple[int, ...]:
    """Return the CPUs that a thread of this process may run on (proc_pid_status(5))."""
    lines = Path(f"/proc/self/task/{thread}/status").read_text(encoding="ascii").splitlines()
    return parse_cpu_list(next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:")))


def test_what_was_drafted_ahead_is_used(apart: Callable[[float], Talker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything is right the draft model is waited for once, at the start; it drafts the rest meanwhile."""
    talker = apart(1.0)
    assert talker.drafter is not None
    asked: list[int] = []
    propose = talker.drafter.propose
    monkeypatch.setattr(talker.drafter, "propose", lambda n: asked.append(n) or propose(n))
    talker.decide(Always(4, overlap=True))
    said = talker.say(PROMPT, DRAFTS, max_tokens=101)
    assert said.tokens == chain(PROMPT[-1], 101)
    assert said.held == [*PROMPT, *said.tokens[:-1]]
    assert said.figures is not None and said.figures.overlap
    assert said.figures.passes == 20 and said.figures.draft_n_accepted == said.figures.draft_n == 80
    assert asked == [4]


@pytest.mark.parametrize("depth", [1, 4])
def test_a_wrong_assumption_is_thrown_away(apart: Callable[[float], Talker], depth: int) -> None:
    """As many tokens are accepted as without drafting ahead: none that follows a rejected one, or a wrong guess of the
    target's own token, is offered."""
    talker = apart(0.5).decide(Always(depth, overlap=True))
    said = talker.say(PROMPT, DRAFTS, max_tokens=120)
    assert said.tokens == chain(PROMPT[-1], 120)
    table = draft_token_table(N_VOCAB, 0.5).tolist()
    right = [table[a] == b for a, b in pairwise(said.tokens)]
    passes = accepted = at = 0
    while at < 119:
        n = min(depth, 118 - at)
        run = next((i for i, ok in enumerate(right[at : at + n]) if not ok), n)
        passes, accepted, at = passes + 1, accepted + run, at + run + 1
    assert said.figures is not None
    assert (said.figures.passes, said.figures.draft_n_accepted) == (passes, accepted)


def test_plans_may_change_within_an_answer(apart: Callable[[float], Talker]) -> None:
    wandering = Wandering(1, overlaps=True)
    talker = apart(0.5).decide(wandering)
    prompt = [*chain(500, 30), 261, *chain(500, 15)]
    for _ in range(2):
        said = talker.say(prompt, Speculation(drafters=("draft", "suffix")), max_tokens=80)
        assert said.tokens == chain(prompt[-1], 80)
        prompt = [*prompt, *said.tokens, 262, *prompt[:9]]
    assert {plan.overlap for plan in wandering.plans} == {True, False}


@pytest.mark.parametrize("end", ["max_tokens", "cancelled", "stop_string"])
def test_nothing_runs_on_after_the_answer(apart: Callable[[float], Talker], abort: AbortFlag, end: str) -> None:
    talker = apart(1.0).decide(Always(8, overlap=True))
    assert talker.thread is not None and talker.drafter is not None
    passes = talker.drafter.passes
    pieces = [talker.target.vocab.piece(token).decode() for token in chain(PROMPT[-1], 12)]
    said = talker.say(
        PROMPT,
        DRAFTS,
        max_tokens=30,
        stop=("".join(pieces[4:7]),) if end == "stop_string" else (),
        on_update=lambda *_: abort.set() if end == "cancelled" else None,
    )
    abort.clear()
    assert said.reason == end
    ended = talker.drafter.passes
    assert talker.thread.start(lambda: talker.drafter.passes).result() == ended > passes, "the thread waits for work"
    assert said.tokens == chain(PROMPT[-1], len(said.tokens))
    after = talker.say([*PROMPT, *said.tokens, 400], DRAFTS, max_tokens=20)
    assert after.tokens == chain(400, 20) and after.cache_n == len(said.held)


def test_cores_are_apart_while_both_compute_and_free_when_closed(
    load: Load, files: dict[float, tuple[Path, Path]]
) -> None:
    mine, its = two_cores()
    before, known = cpus_of(threading.get_native_id()), set(threading.enumerate())
    target = load(files[1.0][0], OPTIONS, threads=(mine,))
    draft = load(files[1.0][1], OPTIONS, threads=target.pool)
    talker = Talker(target, draft, draft_cpus=(its,))
    assert talker.thread is not None
    [worker] = [one for one in set(threading.enumerate()) - known if one.name.startswith("draft")]
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    talker.decide(Always(4, overlap=True)).say(
        PROMPT, DRAFTS, on_update=lambda *_: seen.add((cpus_of(os.getpid()), cpus_of(worker.native_id or 0)))
    )
    assert seen == {((mine,), (its,))}
    talker.thread.close()
    assert not worker.is_alive()
    draft.free()
    target.free()
    assert cpus_of(os.getpid()) == before


def test_a_failure_of_the_draft_thread_reaches_the_answer(apart: Callable[[float], Talker]) -> None:
    """The next answer is unaffected."""
    talker = apart(1.0).decide(Always(4, overlap=True))
    assert talker.drafter is not None

    def fail(*_: object) -> list[int]:
        raise RuntimeError("broken")

    talker.drafter.draft_ahead = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="broken"):
        talker.say(PROMPT, DRAFTS)
    del talker.drafter.draft_ahead
    assert talker.say(PROMPT, DRAFTS).tokens == chain(PROMPT[-1], 48)
