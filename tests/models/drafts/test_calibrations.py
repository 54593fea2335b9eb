"""What the engine measured of a model is found again by its file."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from cpuchat.costs.calibrations import PassCosts, implausible, interpolate, is_plausible
from cpuchat.measure import store
from cpuchat.measure.subject import Subject
from cpuchat.models.costs import CALIBRATED, keep_accepted, keep_calibration
from cpuchat.models.drafts.candidates import UNKNOWN, measured_draft_ms, target_costs
from cpuchat.models.file_names import file_fingerprint
from tests.models.drafts.files import header_file


def costs(plain_ms: float, draft_ms: float = 0.0) -> PassCosts:
    return PassCosts(tuple(plain_ms + n for n in range(32)), draft_ms=draft_ms)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, Path, Path]:
    """Return fingerprints and paths of a target and a draft."""
    target = header_file(tmp_path / "target.gguf", weights=4096)
    draft = header_file(tmp_path / "draft.gguf")
    return file_fingerprint(target), file_fingerprint(draft), target, draft


def saved(cores: int, kept: PassCosts, *files: str) -> None:
    """Save a calibration as the engine does."""
    keep_calibration(Subject(cores=tuple(range(cores)), model=files), kept)


def test_nothing_is_known_of_a_model_that_was_never_loaded(files: tuple[str, str, Path, Path]) -> None:
    _, draft, path, _ = files
    assert target_costs(path) == UNKNOWN
    saved(1, costs(10.0), draft)
    saved(2, costs(10.0))
    assert target_costs(path) == UNKNOWN
    assert target_costs(path.with_name("none.gguf")) == UNKNOWN


def test_the_latest_counts(files: tuple[str, str, Path, Path]) -> None:
    target, draft, path, draft_path = files
    saved(3, costs(30.0, 4.0), target, draft)
    saved(2, costs(20.0, 3.0), target, draft)
    saved(1, costs(10.0), target)
    found = target_costs(path)
    assert found.pass_ms[:2] == (10.0, 11.0)
    assert measured_draft_ms(found, draft_path) == 3.0
    assert found.acceptance == {}
    keep_accepted(target, draft, (80.0, 100.0))
    assert target_costs(path).acceptance == {draft: 0.8}
    assert measured_draft_ms(found, path) == 0.0
    assert measured_draft_ms(found, path.with_name("none.gguf")) == 0.0


def test_what_other_programs_disturbed_tells_nothing(files: tuple[str, str, Path, Path]) -> None:
    target, draft, path, _ = files
    saved(1, costs(10.0), target)
    saved(2, replace(costs(20.0, 3.0), disturbed=True), target, draft)
    found = target_costs(path)
    assert found.pass_ms[:2] == (10.0, 11.0) and found.draft_ms == {}


QUIET = {1: 1, 2: 1.52, 3: 1.74, 4: 1.86, 5: 2.91, 6: 3.15, 8: 2.79, 12: 3.79, 16: 4.76}  # 1.5B Q8_0


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({2: 6.8}, [2]),  # as it was stored beside a compiler
        ({5: 6.3}, [5]),
        ({6: 7.0}, [6]),  # more than twice what 8 cost
        ({1: 2.5}, [1]),  # a plain step that costs more than passes over several tokens
    ],
)
def test_curves_beside_other_load_are_not(changes: dict[int, float], wrong: list[int]) -> None:
    assert is_plausible(interpolate({n: 35.0 * cost for n, cost in QUIET.items()}))
    assert implausible(QUIET | changes) == wrong


def test_what_cannot_be_is_not_read(files: tuple[str, str, Path, Path]) -> None:
    target, _, path, _ = files
    store.keep(Subject(model=(target,)), CALIBRATED, replace(costs(10.0), verify_ms=(10.0, 68.0, *range(12, 42))))
    assert target_costs(path) == UNKNOWN
