"""Tests sides, first difference and memory of two workers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import UsageError
from cpuchat.compare.runner import PAIR, Side, fit_together, pair_of, parse_side, short_names
from cpuchat.config.settings import Settings
from cpuchat.models.fit import draft_memory, required_memory, snapshots
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library.library import Library
from cpuchat.protocol.messages import LoadOptions
from tests.support.head_model import TINY, write_head_model
from tests.support.stores import ollama

resolve = Library([]).resolve


def test_a_side_is_a_model_and_settings_greedy_and_without_drafters_unless_it_says_otherwise() -> None:
    side = parse_side("demo-q4,drafters=off,threads=2,cores=0,1,kv=q8_0", resolve)
    assert side.quantization == "Q4_K_M"
    assert side.changes == {"drafters": "off", "threads": "2", "cores": "0,1", "kv": "q8_0"}
    base = Settings()
    base.sampling.temperature = 0.8
    settings = side.settings(base)
    assert (settings.engine.type_k, settings.engine.type_v) == ("q8_0", "q8_0")
    assert (settings.engine.threads, settings.engine.cores) == (2, "0,1")
    assert settings.sampling.temperature == 0 and base.sampling.temperature == 0.8
    assert parse_side("demo", resolve).settings(base).speculation.drafters == "off"
    other = parse_side("demo,drafters=auto,temperature=0.5", resolve).settings(base)
    assert other.sampling.temperature == 0.5 and other.speculation.drafters == "auto"
    kept = Side(path="q8.gguf", changes={"memory": "interleave", "threads": "2"}).settings(base)  # of an older version
    assert kept.engine.threads == 2 and kept.engine.memory_policy == base.engine.memory_policy


@pytest.mark.parametrize(
    ("text", "message"),
    [("demo,bogus=1", "Unknown setting 'bogus'"), ("demo,threads=many", "threads"), ("demo,kv=q9", "q9")],
)
def test_a_wrong_side_is_a_usage_error(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_side(text, resolve).settings(Settings())


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ("demo", "demo-q4", ("Q8_0", "Q4_K_M")),
        ("demo,threads=1", "demo,threads=2", ("Q8_0 · threads 1", "Q8_0 · threads 2")),
        ("demo,threads=2", "demo-q4,threads=2", ("Q8_0", "Q4_K_M")),
        ("demo", "demo", ("Q8_0", "Q8_0 again")),
    ],
)
def test_names_tell_only_what_differs(a: str, b: str, names: tuple[str, str]) -> None:
    assert short_names(parse_side(a, resolve), parse_side(b, resolve)) == names
    two = (Side(path=f"{size}.gguf", model=f"Qwen2.5 Coder {size} Instruct", quantization=kind)
           for size, kind in (("1.5B", "Q8_0"), ("0.5B", "Q4_K_M")))  # fmt: skip
    assert short_names(*two) == ("1.5B Q8_0", "0.5B Q4_K_M")


def test_long_names_are_cut_but_not_their_quantization() -> None:
    repos = ("hf.co/bartowski/Qwen2.5-Coder-7B-Instruct-GGUF", "hf.co/bartowski/Qwen2.5-Coder-3B-Instruct-GGUF")
    a, b = (Side(path=repo, model=f"{repo}:Q4_K_M", quantization="Q4_K_M") for repo in repos)
    assert short_names(a, b) == ("hf.co/bartowski/Qwen2.5-Co…7B:Q4_K_M", "hf.co/bartowski/Qwen2.5-Co…3B:Q4_K_M")


def test_models_of_ollama_are_told_apart_by_its_names(tmp_path: Path) -> None:
    one = Side.of(ollama(tmp_path, "tiny-a:latest", resolve("demo")))
    assert (one.name, Side(path=one.path).name) == ("tiny-a:latest Q8_0", "tiny-a:latest")
    other = Side.of(ollama(tmp_path, "tiny-b:latest", resolve("demo-q4")))
    assert short_names(one, other) == ("tiny-a:latest Q8_0", "tiny-b:latest Q4_K_M")


def test_q4_and_q8_of_a_model_are_found_where_both_are_here(tmp_path: Path) -> None:
    for name, kind in zip(("demo", "demo-q4"), PAIR, strict=True):
        shutil.copy(resolve(name), tmp_path / f"tiny-{kind}.gguf")
    found = pair_of(tmp_path / "tiny-Q4_K_M.gguf", Library([str(tmp_path)]))
    assert found is not None and tuple(side.quantization for side in found) == PAIR
    assert pair_of(tmp_path / "other.gguf", Library([str(tmp_path)])) is None


def machine_with(monkeypatch: pytest.MonkeyPatch, available: float) -> None:
    monkeypatch.setattr("cpuchat.compare.runner.memory_here", lambda _: int(available))


def test_what_fits_together_has_one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = parse_side("demo", resolve), parse_side("demo-q4", resolve)
    settings = [side.settings(Settings()) for side in sides]
    machine_with(monkeypatch, 8e9)
    n_ctx, why = fit_together(sides, settings, Library([]))
    assert n_ctx > 0 and why == ""
    machine_with(monkeypatch, 200e6)  # enough for either
    assert "loaded in turn" in fit_together(sides, settings, Library([]))[1]


def test_a_head_and_what_is_kept_for_its_drafts_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(TINY, n_layer=8, n_state_head=16, state=64)  # snapshots of its state are worth it for drafts only
    header = read_model(write_head_model(tmp_path / "model.gguf", 0.5, shape=shape))
    sides = [parse_side(f"{header.path},drafters={one}", resolve) for one in ("draft", "off")]
    settings = [side.settings(Settings()) for side in sides]
    for one in settings:
        one.engine.n_ctx, one.engine.use_repack, one.engine.load_mode = 512, False, "read"
    options = LoadOptions(n_ctx=512, use_repack=False, load_mode="read")
    kept = snapshots(header, msgspec.structs.replace(options, draft_path=str(header.path)))
    needs = [required_memory(header, options, 512, n_rs_seq=n) for n in (kept, 0)]
    total = sum(need.min_bytes for need in (*needs, draft_memory(header, options, 512, header)))
    for less, in_turn in ((0, False), (1, True)):
        machine_with(monkeypatch, total - less)
        assert ("loaded in turn" in fit_together(sides, settings, Library([]))[1]) == in_turn


def test_a_file_that_both_map_needs_its_memory_once(monkeypatch: pytest.MonkeyPatch, without_amx: None) -> None:
    same = parse_side("demo", resolve), parse_side("demo,threads=1", resolve)
    settings = [side.settings(Settings()) for side in same]
    for one in settings:
        one.engine.n_ctx, one.engine.use_repack = 512, False  # else the private copies are what counts
    need = required_memory(read_model(Path(same[0].path)), settings[0].load_options(), 512)
    machine_with(monkeypatch, 2 * need.min_bytes - need.weights)
    assert fit_together(same, settings, Library([]))[1] == ""
    machine_with(monkeypatch, 2 * need.min_bytes - need.weights - 1)
    assert "loaded in turn" in fit_together(same, settings, Library([]))[1]
