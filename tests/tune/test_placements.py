from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.hardware.topology import read_topology
from cpuchat.protocol import ModelInfo
from cpuchat.telemetry.meter import Meter
from cpuchat.telemetry.roofline import Roofline
from cpuchat.tune.placements import PlacementOptions, compare_placements
from tests.hardware.trees import make_tree
from tests.support.machines import ON_8_CORES, TRAFFIC, WITH_DRAFT, on, surveyed


def options(
    tmp_path: Path, model: ModelInfo | None, in_use: PlacementSpec | None = None, known: bool = True
) -> PlacementOptions:
    topology = read_topology(make_tree(tmp_path, "epyc-9354"))
    return compare_placements(
        topology,
        surveyed(topology) if known else None,
        None,
        on(topology, model) if model is not None else None,
        Meter().figures(),
        in_use or PlacementSpec(),
    )


def test_without_a_draft_the_speed_is_bandwidth_by_bytes(tmp_path: Path) -> None:
    first = options(tmp_path, ON_8_CORES).options[0]
    assert first.ceiling is not None
    kv = TRAFFIC.kv[0]
    # One token is in the context, and llama.cpp reads its cache in steps.
    least = 367e9 / (TRAFFIC.weights + 256 * kv.bytes_per_token)
    assert least <= first.ceiling.tok_s <= 367e9 / TRAFFIC.weights
    assert first.recommended


def test_a_prediction_by_bandwidth_says_so_where_compute_is_the_limit(tmp_path: Path) -> None:
    topology = read_topology(make_tree(tmp_path, "epyc-9354"))
    figures = dataclasses.replace(Meter().figures(), roofline=Roofline(limit="compute"))
    found = compare_placements(topology, surveyed(topology), None, on(topology, ON_8_CORES), figures, PlacementSpec())
    assert "compute is the limit now" in found.options[0].about
    assert "compute" not in options(tmp_path / "other", ON_8_CORES).options[0].about


def test_of_weights_that_fit_the_cache_no_speed_by_bandwidth_is_told(tmp_path: Path) -> None:
    cached = msgspec.structs.replace(ON_8_CORES, cache_bytes=2 * round(TRAFFIC.weights))
    for choice in options(tmp_path, cached).options:
        assert choice.ceiling is None
        assert "Limit" not in choice.about and "tok/s" not in choice.speed
    assert "fit in the L3 cache" in options(tmp_path / "again", cached).options[0].about


def test_layouts_with_cores_for_a_draft_need_one(tmp_path: Path) -> None:
    choice = next(c for c in options(tmp_path, ON_8_CORES).options if c.spec.draft_cores == "l3:7")
    assert choice.ceiling is None
    assert "none is loaded" in choice.about


def test_a_draft_on_one_l3_group_is_predicted_slower_and_why(tmp_path: Path) -> None:
    found = options(tmp_path, WITH_DRAFT, PlacementSpec(draft_cores="l3:7"))
    sequential, apart = found.options[0], next(c for c in found.options if c.spec.draft_cores == "l3:7")
    assert sequential.ceiling and apart.ceiling
    assert sequential.ceiling.tok_s > 3 * apart.ceiling.tok_s
    assert "does not fit the L3" in apart.about
    assert "that of now" in found.advice


def test_what_is_in_use_keeps_its_words(tmp_path: Path) -> None:
    found = options(tmp_path, ON_8_CORES, PlacementSpec(cores="all"))
    assert found.options[0].spec == PlacementSpec(cores="all")
    assert found.advice == ""


@pytest.mark.parametrize("model", [None, ON_8_CORES], ids=["no model", "not measured"])
def test_nothing_is_predicted_from_nothing(tmp_path: Path, model: ModelInfo | None) -> None:
    found = options(tmp_path, model, known=False)
    assert all(choice.ceiling is None and choice.speed in ("", "needs draft") for choice in found.options)
    assert "no speed is predicted" in found.options[0].about
