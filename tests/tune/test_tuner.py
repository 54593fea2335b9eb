"""Tests tuning with a real worker; where a verdict matters, speeds are made up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import CpuchatError, DoesNotFit
from cpuchat.config import settings
from cpuchat.config.settings import Settings, with_changes
from cpuchat.models.machine import find_tuned
from cpuchat.present import tune as words
from cpuchat.protocol.messages import ModelLoaded
from cpuchat.session.conversation import Conversation
from cpuchat.tune import measurer
from cpuchat.tune.tuner import ChoiceResult, Tuner, TuneResult
from tests.support.chatting import collect, in_use
from tests.support.tuning import make_up_speeds, without_flash_attention

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("measured_machine")]

NAMES = ["threads", "memory policy", "flash attention", "micro-batch", "drafters"]


def summary(result: TuneResult) -> str:
    return " ".join(words.summary(result, undo="F8 reverts"))


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure prompts of at most 256 tokens and answers of 16."""
    monkeypatch.setattr(measurer, "CTX", 512)
    monkeypatch.setattr(measurer, "TOKENS", (4, 16))


def test_drafters_that_lose_with_a_text_are_not_said_to_slow_prefill() -> None:
    mixed = ChoiceResult(name="drafters", before="off", after="suffix", verdict="mixed", decode=0.05)
    assert words.row(mixed)[-1] == "not adopted: slower in one text"
    assert words.row(msgspec.structs.replace(mixed, prefill=-0.05))[-1] == "not adopted: slower prefill"


async def test_every_choice_is_measured_and_what_is_adopted_is_kept(tiny_model: Path) -> None:
    said: list[str] = []
    tuner = Tuner(tiny_model, Settings(), seconds=3600, tell=lambda: said.append(tuner.what))
    result = await tuner.run()
    assert [one.name for one in result.choices] == NAMES
    assert {one.name for one in result.choices if one.verdict} >= {"flash attention", "drafters"}
    for one in result.choices:
        assert one.verdict != "failed", one
        assert one.verdict in (None, "noisy", "failed") or not one.reason, one
        assert one.reason or one.decode is not None or one.prefill is not None, one
        assert words.row(one)[-1]
    assert any(what.startswith("flash attention: ") for what in said)
    kept = find_tuned(tiny_model)
    assert (kept.changes if kept is not None else {}) == result.changes
    assert bool(result.changes) == bool(result.adopted)
    assert not result.stopped and not result.out_of_time
    assert summary(result)
    assert settings.load() == Settings()


async def test_it_is_used_from_the_next_load_unless_the_user_set_it_and_reverted_when_it_is_not_faster_any_more(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_up_speeds(monkeypatch, without_flash_attention)
    result = await Tuner(tiny_model, Settings()).run()
    assert result.changes == {"engine": {"flash_attn": "off"}}
    [row] = [words.row(one) for one in result.choices if one.adopted]
    assert row == ("flash attention", "auto → off", "0.0 %", "+25.0 %", "adopted")
    assert "prefill 100 → 125 tok/s. Used from the next load; F8 reverts." in summary(result)

    chosen = Settings()
    chosen.speculation.drafters = "off"
    async with in_use(Conversation(settings=chosen, backend=LocalBackend(), store=None)) as core:
        assert isinstance((await collect(core.load_model(tiny_model))).events[-1], ModelLoaded)
        assert core.in_effect.engine.flash_attn == "off"
        assert core.settings.engine.flash_attn == "auto"
        core.settings = with_changes(chosen, {"engine": {"flash_attn": "on"}})
        assert core.in_effect.engine.flash_attn == "on"
        core.settings = chosen
        make_up_speeds(monkeypatch, lambda chosen: (0.8 if chosen.engine.flash_attn == "off" else 1.0, 1.0))
        result = await Tuner(tiny_model, Settings()).run()
        assert [one.before for one in result.choices if one.name == "flash attention"] == ["off"]
        assert result.changes == {}
        assert find_tuned(tiny_model) is None
        await collect(core.reload())
        assert core.in_effect == chosen


async def test_what_the_user_set_is_not_tried(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_speeds(monkeypatch, without_flash_attention)
    chosen = with_changes(Settings(), {"engine": {"flash_attn": "on"}})
    result = await Tuner(tiny_model, chosen).run()
    reasons = {one.name: one.reason for one in result.choices}
    assert reasons["flash attention"] == "set by you: flash_attn = on"
    assert result.changes == {}
    assert "nothing is faster" in summary(result)


async def test_a_stop_keeps_what_was_adopted(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_speeds(monkeypatch, without_flash_attention)
    stops = []

    def tell() -> None:
        if any(one.adopted for one in tuner.choices):
            stops.append(asyncio.ensure_future(tuner.stop(kill=True)))

    tuner = Tuner(tiny_model, Settings(), tell=tell)
    result = await tuner.run()
    assert result.stopped
    assert result.changes == {"engine": {"flash_attn": "off"}}
    assert "what was adopted is kept" in summary(result)
    assert find_tuned(tiny_model) is not None


async def test_stopped_while_it_measures(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_speeds(monkeypatch, lambda chosen: (1.0, 1.0), but="flash attention")
    stops = []

    def tell() -> None:
        if tuner.what.startswith("flash") and not stops:
            stops.append(asyncio.ensure_future(tuner.stop()))

    tuner = Tuner(tiny_model, Settings(), tell=tell)
    result = await tuner.run()
    assert result.stopped
    assert [one.name for one in result.choices] == NAMES[: len(result.choices)] != NAMES
    assert result.adopted == [] == list(result.changes)
    assert find_tuned(tiny_model) is None


async def test_the_time_limit_ends_it(tiny_model: Path) -> None:
    result = await Tuner(tiny_model, Settings(), seconds=0.01).run()
    assert result.out_of_time and not result.stopped
    assert {one.reason for one in result.choices if one.name in ("flash attention", "drafters")} == {"time limit"}
    assert "Time limit reached" in summary(result)


async def test_a_busy_machine_is_told(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def storm(_: Settings) -> tuple[float, float]:
        calls.append(1)
        factor = (1.0, 0.6, 0.8)[len(calls) % 3]
        return factor, factor

    make_up_speeds(monkeypatch, storm)
    result = await Tuner(tiny_model, Settings()).run()
    assert result.busy and result.changes == {}
    assert "other programs use the CPUs" in summary(result)


async def test_models_that_cannot_be_loaded_are_errors(tiny_model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"PK" + tiny_model.read_bytes()[2:])
    with pytest.raises(CpuchatError, match="GGUF"):
        await Tuner(damaged, Settings()).run()
    huge = with_changes(Settings(), {"engine": {"ctx": 16_777_216}})
    with pytest.raises(DoesNotFit):
        await Tuner(tiny_model, huge).run()
