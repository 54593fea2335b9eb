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
    monkeypatch.setattr(bench_run, "DEPTHS", (4,))
    monkeypatch.setattr(bench_run, "TOKENS", 12)
    settings.update({"engine": {"threads": 1}})


def kind(name: str, **speed_ups: float) -> KindResult:
    by_depth = {int(depth[1:]): value for depth, value in speed_ups.items()}
    best = max(by_depth, key=lambda depth: by_depth[depth])
    return KindResult(
        kind=name,
        plain=20.0,
        depth=best,
        speed_up=by_depth[best],
        speed_ups=by_depth,
        acceptance=0.7,
        tokens_per_pass=2.5,
    )


def test_adaptive_depth_is_preferred_unless_a_fixed_one_is_clearly_faster() -> None:
    close = PairResult(kinds=(kind("code", d0=1.90, d4=2.0), kind("chat", d0=1.2, d4=1.18)))
    assert close.depth == 0 and close.speed_up == pytest.approx((1.90 * 1.2) ** 0.5)
    clear = PairResult(kinds=(kind("code", d0=1.1, d4=2.0), kind("chat", d0=1.0, d4=1.2)))
    assert clear.depth == 4 and clear.worth_keeping
    assert "with draft depth 4" in pair_verdict(clear)


def test_a_pair_that_gains_nothing_is_not_worth_keeping() -> None:
    found = PairResult(
        kinds=(kind("code", d0=1.0, d4=0.7), kind("chat", d0=1.0, d4=0.6)), off=DraftsOff("too fast", plain_ms=1.0)
    )
    assert not found.worth_keeping
    assert pair_verdict(found).startswith("Not worth keeping: 1.00× vs plain with adaptive depth")
    assert pair_verdict(found).endswith(
        "Adaptive depth is off: decoding takes 1 ms per token, and handling drafts takes as long."
    )
    assert not PairResult(kinds=()).worth_keeping


def test_measured_and_kept_if_it_is_worth_it(lean: None) -> None:
    done = run("models", "pair", "demo", "demo-draft", "--measure", "--keep", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["kind"] for one in found["kinds"]] == ["maths", "chat"]
    for one in found["kinds"]:
        assert one["plain"] > 0 and set(one["speed_ups"]) == {"0", "4"}
        assert one["speed_up"] == max(one["speed_ups"].values())
    assert found["kept"] == found["worth_keeping"]
    assert settings.load().speculation.depth == (found["depth"] if found["kept"] else 0)
    assert ChosenDrafts().of(TARGET) == (str(DRAFT) if found["kept"] else "")


def test_measured_as_a_table(lean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "KINDS", ("maths",))
    done = run("models", "pair", "demo", "demo-draft", "--measure")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split("  ")[0] == "prompts" and lines[1].split()[0] == "maths"
    assert "orth keeping: " in done.stdout
    assert settings.load().speculation.draft_model == ""


def test_what_cannot_be_measured(tmp_path_factory: pytest.TempPathFactory) -> None:
    other = write_tiny_gguf(tmp_path_factory.mktemp("models") / "other.gguf")
    assert run("models", "pair", "demo", str(other), "--measure").returncode == DraftMismatch.exit_code
    assert run("models", "pair", "demo", "--measure").returncode == UsageError.exit_code
    assert run("models", "pair", "demo", "demo-draft", "--keep").returncode == UsageError.exit_code
