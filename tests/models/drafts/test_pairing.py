"""Tests which draft fits which target: the rule, the files, the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cpuchat.models.drafts import pairing
from cpuchat.models.drafts.pairing import check_files, check_pair
from cpuchat.models.gguf.header import GGUFHeader, read_header
from tests.models.drafts.files import WORDS, header_file


def pair(folder: Path, **draft: Any) -> tuple[GGUFHeader, GGUFHeader]:
    """Return a target with the common vocabulary and a draft that differs in `draft`."""
    target = header_file(folder / "target.gguf", weights=4096)
    return read_header(target), read_header(header_file(folder / "draft.gguf", **draft))


def verdict(folder: Path, **draft: Any) -> pairing.Compatibility:
    return check_pair(*pair(folder, **draft))


def test_the_same_vocabulary_fits(tmp_path: Path) -> None:
    assert verdict(tmp_path) == pairing.Compatibility(ok=True)


def test_a_different_token_is_named_with_both_texts(tmp_path: Path) -> None:
    tokens = [*WORDS[:200], "<|box|>", *WORDS[201:]]
    found = verdict(tmp_path, tokens=tokens)
    assert not found.ok
    assert found.reason == "token 200 is 'w200' in the target and '<|box|>' in the draft"


@pytest.mark.parametrize(("at", "ok"), [(4, True), (5, False)])
def test_the_first_five_tokens_may_differ(tmp_path: Path, at: int, ok: bool) -> None:
    assert verdict(tmp_path, tokens=[*WORDS[:at], "other", *WORDS[at + 1 :]]).ok is ok


@pytest.mark.parametrize(("extra", "ok"), [(128, True), (129, False)])
def test_128_more_tokens_at_the_end_are_padding(tmp_path: Path, extra: int, ok: bool) -> None:
    longer = WORDS + [f"pad{i}" for i in range(extra)]
    found = verdict(tmp_path, tokens=longer)
    assert found.ok is ok
    small, large = header_file(tmp_path / "small.gguf", weights=9), header_file(tmp_path / "large.gguf", longer)
    assert check_pair(read_header(large), read_header(small)).ok is ok
    if not ok:
        assert "429 tokens against 300" in found.reason


def test_one_adds_bos_and_the_other_does_not(tmp_path: Path) -> None:
    assert verdict(tmp_path, add_bos_token=True).reason == (
        "the draft starts every text with its bos token, and the target does not"
    )
    assert verdict(tmp_path, add_eos_token=True).reason == (
        "the draft ends every text with its eos token, and the target does not"
    )


def test_a_recurrent_draft_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    found = verdict(tmp_path, architecture="mamba")
    assert not found.ok
    assert "recurrent" in found.reason
    target, draft = pair(tmp_path)
    # As a target it is the engine's affair.
    recurrent = msgspec.structs.replace(target, metadata=target.metadata | {"general.architecture": "mamba"})
    assert check_pair(recurrent, draft).ok


def test_a_model_does_not_draft_for_itself(tmp_path: Path, demo: dict[str, Path]) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(demo["demo"])
    for found in (check_files(demo["demo"], link), check_pair(read_header(demo["demo"]), read_header(link))):
        assert not found.ok
        assert "target itself" in found.reason


def test_a_draft_that_is_not_smaller_is_allowed_and_noted(tmp_path: Path, demo: dict[str, Path]) -> None:
    assert check_files(demo["demo"], demo["demo-draft"]).note == ""
    found = check_files(demo["demo-draft"], demo["demo"])
    assert found.ok
    assert "not smaller" in found.note
    assert check_files(demo["demo-draft"], demo["demo"]) == found


# Files and the cache.


def test_a_pair_is_compared_once(tmp_path: Path, demo: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = header_file(tmp_path / "stranger.gguf")
    first, refused = check_files(demo["demo"], demo["demo-draft"]), check_files(demo["demo"], stranger)
    read: list[Path] = []
    monkeypatch.setattr(pairing, "read_header", lambda path: read.append(path) or read_header(path))
    assert check_files(demo["demo"], demo["demo-draft"]) == first
    assert check_files(demo["demo"], stranger) == refused and not refused.ok
    assert not read
    check_files(demo["demo-q4"], demo["demo-draft"])
    assert read.pop()
    monkeypatch.setattr(pairing, "PINNED_VERSION", "another")  # whose rule may be another
    read.clear()
    assert check_files(demo["demo"], demo["demo-draft"]) == first and read


def test_a_file_that_changed_is_compared_again(tmp_path: Path) -> None:
    target, draft = header_file(tmp_path / "t.gguf"), header_file(tmp_path / "d.gguf", [*WORDS[:9], "x", *WORDS[10:]])
    assert not check_files(target, draft).ok
    header_file(draft, [*WORDS[:9], "w9", *WORDS[10:]])
    assert check_files(target, draft).ok
