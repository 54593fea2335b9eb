"""Tests a pair's acceptance before it is used: figures by kind, what is recommended, and keeping it."""

from __future__ import annotations

import json

import pytest

from cpuchat.base import paths
from cpuchat.base.errors import DraftMismatch, UsageError
from cpuchat.bench import run as bench_run
from cpuchat.bench.run import KindResult, PairResult
from cpuchat.config import settings
from cpuchat.models.drafts.choice import ChosenDrafts
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.present.bench import pair_verdict
from cpuchat.protocol.reasons import DraftsOff
from tests.cli.program import run
from tests.support.tiny_gguf import write_tiny_gguf

TARGET, DRAFT = (paths.demo_dir() / DEMO_FILES[name] for name in ("demo", "demo-draft"))


@pytest.fixture
def lean(measured_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set few tokens, few prompts and one thread."""
    monkeypatch.setattr(bench_run, "KINDS", ("maths", "chat"))
    monkeypatch.setattr(bench_run, "TOKENS", 12)
    settings.update({"engine": {"threads": 1}})


def kind(name: str, speed_up: float) -> KindResult:
    return KindResult(kind=name, plain=20.0, speed_up=speed_up, acceptance=0.7, tokens_per_pass=2.5)


def test_a_pair_is_worth_keeping_by_the_mean_of_its_kinds() -> None:
    found = PairResult(kinds=(kind("code", 1.9), kind("chat", 1.2)))
    assert found.speed_up == pytest.approx((1.9 * 1.2) ** 0.5) and found.worth_keeping
    assert pair_verdict(found).startswith("Worth keeping: 1.51× vs plain")
    off = DraftsOff("too fast", plain_ms=1.0)
    nothing = PairResult(kinds=(kind("code", 1.0), kind("chat", 1.0)), off=off)
    assert not nothing.worth_keeping and not PairResult(kinds=()).worth_keeping
    assert pair_verdict(nothing).endswith(
        "Nothing was drafted: decoding takes 1 ms per token, and handling drafts takes as long."
    )


def test_a_pair_is_measured_and_kept_only_if_the_user_says_so(lean: None) -> None:
    done = run("models", "pair", "demo", "demo-draft", "--measure", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["kind"] for one in found["kinds"]] == ["maths", "chat"]
    for one in found["kinds"]:
        assert one["plain"] > 0 and one["speed_up"] > 0
    assert found["worth_keeping"] in (True, False) and ChosenDrafts().of(TARGET) == ""


def test_what_cannot_be_measured(tmp_path_factory: pytest.TempPathFactory) -> None:
    other = write_tiny_gguf(tmp_path_factory.mktemp("models") / "other.gguf")
    assert run("models", "pair", "demo", str(other), "--measure").returncode == DraftMismatch.exit_code
    assert run("models", "pair", "demo", "--measure").returncode == UsageError.exit_code
