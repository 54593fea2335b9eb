"""Tests which models can draft for a target: of this machine, and those the catalog names on a (local) hub."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.base import paths
from cpuchat.costs.calibrations import TargetCosts
from cpuchat.models.catalog import load_catalog
from cpuchat.models.drafts.candidates import (
    NOT_CALIBRATED,
    UNKNOWN,
    DraftCandidate,
    candidates,
    check,
    expected_pair,
    recommended,
)
from cpuchat.models.file_names import file_fingerprint
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.hub.client import Hub
from cpuchat.models.library.library import Library
from cpuchat.models.machine import Machine
from cpuchat.present.models import draft_details, draft_rows
from tests.models.drafts.files import WORDS, header_file, write_catalog
from tests.support.costs import reading
from tests.support.hub_server import HubServer

COSTS = TargetCosts(tuple(40.0 + n for n in range(32)))
MACHINE = Machine(available=8 << 30, total=16 << 30, profile=reading(5e8), source="measured, 2 cores")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return a folder of models."""
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


@pytest.fixture
def target(mine: Path) -> GGUFHeader:
    """Return a file of the model Big, for which the user's catalog names Small and then Other."""
    write_catalog(
        ("big", "Big", 4096e-9, ["small", "other"]), ("small", "Small", 8e-9, []), ("other", "Other", 16e-9, [])
    )
    return read_model(header_file(mine / "Big-Q8_0.gguf", weights=4096))


def found(
    target: GGUFHeader, mine: Path, costs: TargetCosts = COSTS, machine: Machine | None = MACHINE
) -> dict[str, DraftCandidate]:
    listed = candidates(
        target, Library([mine], cache=mine.parent / "hub").local_models(), load_catalog(), costs, machine
    )
    return {one.name: one for one in listed if "demo" not in one.name}


def test_those_that_the_catalog_names_come_first_and_nothing_is_checked_yet(mine: Path, target: GGUFHeader) -> None:
    header_file(mine / "Another-Q8_0.gguf")
    header_file(mine / "Small-Q8_0.gguf")
    header_file(mine / "Larger-Q8_0.gguf", weights=9000)
    (mine / "broken.gguf").write_bytes(b"GGUF")
    rows = found(target, mine)
    assert list(rows) == ["Small-Q8_0", "Other", "Another-Q8_0"]
    assert [one.where for one in rows.values()] == ["here", "hub", "here"]
    assert [one.named for one in rows.values()] == [True, True, False]
    assert all(one.fits is None for one in rows.values())
    assert rows["Other"].spec == "owner/Other-GGUF:Q8_0"
    assert rows["Small-Q8_0"].spec == str(mine / "Small-Q8_0.gguf")


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ("Q8_0 = 8e-6, Q4_K_M = 5e-6", "Q8_0"),
        ("Q8_0 = 10e-6, Q4_K_M = 5e-6", "Q4_K_M"),
        ("Q8_0 = 90e-6, Q4_K_M = 50e-6", "Q4_K_M"),
    ],
)
def test_on_the_hub_the_most_faithful_file_is_meant_that_reads_much_less_than_the_target(
    mine: Path, target: GGUFHeader, sizes: str, wanted: str
) -> None:
    """Whose weights are 16 kB."""
    file = paths.user_catalog()
    file.write_text(file.read_text().replace("Q8_0 = 0.001", sizes))
    assert found(target, mine)["Other"].quantization == wanted


def test_a_smaller_quantization_of_the_target_is_told_apart(mine: Path, target: GGUFHeader) -> None:
    """It is right about nine of ten tokens in every text, and what was measured of the pair counts instead."""
    header_file(mine / "Another-Q8_0.gguf", weights=4)
    draft = header_file(mine / "Big-Q4_K_M.gguf", weights=4096, kind="F16")
    rows = found(target, mine)
    assert list(rows) == ["Small", "Other", "Big-Q4_K_M", "Another-Q8_0"]
    assert [one.same_model for one in rows.values()] == [False, False, True, False]
    (expected,) = rows["Big-Q4_K_M"].expected.gains
    assert (expected.kind, expected.acceptance) == ("same model", 0.9)
    assert expected_pair(target, read_model(draft), COSTS, MACHINE).gains == (expected,)
    print = file_fingerprint(draft)
    known = TargetCosts(COSTS.pass_ms, {print: 24.0}, {print: 0.75})
    (measured,) = found(target, mine, known)["Big-Q4_K_M"].expected.gains
    assert measured.words == "≈ 1.1× at its measured acceptance of 75 %"


def test_a_check_compares_the_vocabularies(mine: Path, target: GGUFHeader) -> None:
    header_file(mine / "Small-Q8_0.gguf")
    header_file(mine / "Stranger-Q8_0.gguf", [*WORDS[:200], "other", *WORDS[201:]])
    rows = {name: check(one, target) for name, one in found(target, mine).items()}
    assert rows["Small-Q8_0"].fits is True
    assert rows["Stranger-Q8_0"].fits is False
    assert rows["Stranger-Q8_0"].verdict is not None
    assert "'w200'" in rows["Stranger-Q8_0"].verdict.reason
    assert rows["Other"].fits is None


def test_one_on_the_hub_is_checked_by_its_header_alone(
    mine: Path, tmp_path: Path, target: GGUFHeader, hub_server: HubServer
) -> None:
    fitting = header_file(tmp_path / "a.gguf", weights=2_000_000)
    stranger = header_file(tmp_path / "b.gguf", [*WORDS[:200], "other", *WORDS[201:]])
    hub_server.add("owner/Small-GGUF", {"Small-Q8_0.gguf": fitting})
    hub_server.add("owner/Other-GGUF", {"Other-Q8_0.gguf": stranger})
    hub = Hub()
    rows = {name: check(one, target, hub=hub) for name, one in found(target, mine).items()}
    assert rows["Small"].fits is True
    assert rows["Small"].size == fitting.stat().st_size
    assert hub_server.bytes_sent("Small-Q8_0.gguf") < fitting.stat().st_size / 2
    assert rows["Other"].fits is False


def test_what_is_missing_for_a_prediction_is_said(mine: Path, target: GGUFHeader) -> None:
    header_file(mine / "Small-Q8_0.gguf")
    assert found(target, mine, UNKNOWN, None)["Small-Q8_0"].expected.words == NOT_CALIBRATED
    unmeasured = Machine(available=1, total=1, peak_source="run cpuchat probe")
    assert found(target, mine, COSTS, unmeasured)["Small-Q8_0"].expected.words == "run cpuchat probe"
    assert "not measured" in found(target, mine, COSTS, None)["Small-Q8_0"].expected.words


def test_the_one_that_gains_most_is_recommended(mine: Path, target: GGUFHeader) -> None:
    header_file(mine / "Small-Q8_0.gguf", weights=1000)
    stranger = header_file(mine / "Stranger-Q8_0.gguf", [*WORDS[:200], "other", *WORDS[201:]])
    better = header_file(mine / "Better-Q8_0.gguf", weights=16)
    costs = TargetCosts(COSTS.pass_ms, {file_fingerprint(better): 1e-6, file_fingerprint(stranger): 1e-7})
    rows = [check(one, target) for one in found(target, mine, costs).values()]
    assert recommended(rows).path == better


def test_what_is_here_is_not_passed_over_for_a_little_more_speed(mine: Path, target: GGUFHeader) -> None:
    small = header_file(mine / "Small-Q8_0.gguf")
    on_hub = check(found(target, mine)["Other"], target).expected.draft_ms
    for beside, wanted in ((1.01, small), (3.0, None)):
        costs = TargetCosts(COSTS.pass_ms, {file_fingerprint(small): on_hub * beside})
        best = recommended(check(one, target) for one in found(target, mine, costs).values())
        assert best.path == wanted


def test_a_type_without_a_simd_kernel_is_marked_and_never_recommended(mine: Path, target: GGUFHeader) -> None:
    """Whatever was measured of it; that is told."""
    slow = header_file(mine / "Small-Q8_0.gguf", weights=16, kind="F16")
    here = msgspec.structs.replace(MACHINE, scalar_types=frozenset({"F16"}))
    measured = TargetCosts(COSTS.pass_ms, {file_fingerprint(slow): 1e-6})
    rows = [check(found(target, mine, costs, here)["Small-Q8_0"], target) for costs in (COSTS, measured)]
    assert all(row.fits and not row.expected.pays for row in rows)
    assert rows[0].expected.words.startswith("F16 has no SIMD kernel on this CPU") and rows[1].expected.gains
    assert recommended(rows) is None
    assert dict(draft_details("", rows[0], is_loaded=False))["gain"] == rows[0].expected.words
    assert draft_rows({"": rows[0]}, "x", "")[1].columns[-1] == "no SIMD"
    for loaded, keys in (("x", ["more"]), ("a", ["a", "more"])):  # the loaded one is listed whatever it gains
        folded = draft_rows({"a": rows[1], "b": rows[1]}, loaded, "", folds=True)
        assert [row.key for row in folded if row.key][: len(keys)] == keys


def test_without_a_calibration_the_first_that_the_catalog_names_is_recommended(mine: Path, target: GGUFHeader) -> None:
    header_file(mine / "Another-Q8_0.gguf")
    header_file(mine / "Other-Q8_0.gguf", weights=16)
    rows = [check(one, target) for one in found(target, mine, UNKNOWN, None).values()]
    assert recommended(rows).name == "Small"
    without = [msgspec.structs.replace(one, named=False) for one in rows]
    assert recommended(without) is None
