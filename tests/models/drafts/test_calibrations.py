"""What the engine measured of a model is found again by its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cpuchat import paths
from cpuchat.engine.calibrate import save_costs
from cpuchat.models.drafts.calibrations import UNKNOWN, target_costs
from cpuchat.models.fingerprint import file_fingerprint
from cpuchat.speculation.costs import PassCosts
from tests.models.drafts.files import header_file


def costs(plain_ms: float, draft_ms: float = 0.0) -> PassCosts:
    return PassCosts(tuple(plain_ms + n for n in range(32)), draft_ms=draft_ms)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, Path, Path]:
    """Fingerprints and paths of a target and a draft."""
    target = header_file(tmp_path / "target.gguf", weights=4096)
    draft = header_file(tmp_path / "draft.gguf")
    return file_fingerprint(target), file_fingerprint(draft), target, draft


def saved(key: str, kept: PassCosts, target: str, draft: str, age: int) -> None:
    """As the engine keeps it, `age` seconds ago."""
    folder = paths.calibration_dir()
    save_costs(folder, key * 64, kept, target, draft)
    os.utime(folder / f"{key * 32}.json", (1_700_000_000 - age, 1_700_000_000 - age))


def test_nothing_is_known_of_a_model_that_was_never_loaded(files: tuple[str, str, Path, Path]) -> None:
    _, draft, path, _ = files
    assert target_costs(path) == UNKNOWN
    saved("a", costs(10.0), draft, "", 0)
    saved("b", costs(10.0), "", "", 0)
    assert target_costs(path) == UNKNOWN
    assert target_costs(path.with_name("none.gguf")) == UNKNOWN


def test_the_latest_counts(files: tuple[str, str, Path, Path]) -> None:
    target, draft, path, draft_path = files
    saved("a", costs(10.0), target, "", 5)
    saved("b", costs(20.0, 3.0), target, draft, 60)
    saved("c", costs(30.0, 4.0), target, draft, 90)
    found = target_costs(path)
    assert found.pass_ms[:2] == (10.0, 11.0)
    assert found.measured_draft(draft_path) == 3.0
    assert found.measured_draft(path) == 0.0
    assert found.measured_draft(path.with_name("none.gguf")) == 0.0


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b"\xff", b'{"format": 0}', b"x" * 100_000],
    ids=["empty", "{}", "[]", "ff", "0", "big"],
)
def test_files_that_cannot_be_read_are_left_out(content: bytes, files: tuple[str, str, Path, Path]) -> None:
    target, _, path, _ = files
    saved("a", costs(10.0), target, "", 5)
    (paths.calibration_dir() / "broken.json").write_bytes(content)
    assert target_costs(path).pass_ms[0] == 10.0


def test_a_broken_link_hides_no_other_file(files: tuple[str, str, Path, Path]) -> None:
    target, _, path, _ = files
    saved("a", costs(10.0), target, "", 5)
    (paths.calibration_dir() / "link.json").symlink_to("gone.json")
    assert target_costs(path).pass_ms[0] == 10.0


def test_times_that_are_none_are_left_out(files: tuple[str, str, Path, Path]) -> None:
    target, _, path, _ = files
    saved("a", costs(10.0), target, "", 5)
    file = next(paths.calibration_dir().glob("*.json"))
    file.write_text(file.read_text().replace("10.0", "-1.0"))
    assert target_costs(path) == UNKNOWN
