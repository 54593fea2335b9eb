"""Tests what each placement would reach on simulated machines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.hardware.placement.placement import (
    OWN_L3,
    OWN_LINK,
    OWN_SOCKET,
    SHARED,
    Ceiling,
    ReadRates,
    candidates,
    ceiling,
)
from cpuchat.hardware.topology import Topology

GB = 1e9
Machine = Callable[[str], Topology]


def reached(topology: Topology, name: str, **more: float | bool) -> Ceiling:
    """A 70B Q4_K_M with a 1B draft model, on what an EPYC 9354P was measured to read."""
    values: dict = {
        "target_bytes": 42.5 * GB, "draft_bytes": 0.8 * GB, "rates": ReadRates(367 * GB, 50 * GB, 25.3 * GB),
        "tokens_per_pass": 5, "depth": 8,
    }  # fmt: skip
    candidate = next(one for one in candidates(topology) if one.name == name)
    return ceiling(candidate, topology, **(values | more))


def test_read_rate_of_cores_links_and_memory(machine: Machine) -> None:
    one = machine("epyc-9354")
    known = ReadRates(367.0, 50.0, 25.3)
    assert known.of(one, (0,)) == (25.3, "cores")
    assert known.of(one, range(4)) == (50.0, "link")
    assert known.of(one, (0, 32)) == (25.3, "cores"), "two threads of a core are one core"
    assert known.of(one, (0, 4, 8)) == (pytest.approx(75.9), "cores")
    assert known.of(one, range(28)) == (350.0, "link")
    assert known.of(one, range(32)) == (367.0, "memory")
    assert ReadRates(367.0).of(one, range(4)) == (367.0, "memory"), "what is not known is no bound"
    pairs = machine("epyc-9754")
    assert known.of(pairs, range(16)) == (50.0, "link"), "two groups, one link"
    two = machine("2x-epyc-7543")
    assert known.of(two, range(32)) == (183.5, "memory"), "the memory of one socket"
    assert known.of(machine("epyc-9354p-nps4"), range(32), "bind:0") == (91.75, "memory")


def test_predictions_against_the_worked_example(machine: Machine) -> None:
    """The reference's table for a 70B model on a 9354P by reading alone: 8.6, 20, 37.5 and 39 tok/s."""
    topology = machine("epyc-9354")
    plain = reached(topology, SHARED, tokens_per_pass=1, depth=0)
    assert plain.tok_s == pytest.approx(8.6, abs=0.1) and plain.tok_s == pytest.approx(plain.plain_tok_s)
    assert plain.limit == "the target model, by memory bandwidth"
    apart = reached(topology, OWN_L3)
    assert apart.tok_s == pytest.approx(19.9, rel=0.02)
    assert apart.limit == "the draft model, by the links of its L3 groups"
    sequential = reached(topology, SHARED)
    assert sequential.tok_s == pytest.approx(37.5, rel=0.01)
    # Ideal overlap would be 39, if both models together did not need more than the memory gives.
    overlap = reached(topology, OWN_L3, overlap=True)
    assert 37 < overlap.tok_s < 39 and "memory" in overlap.limit
    assert overlap.t_draft_s == pytest.approx(0.128) and overlap.t_target_s == pytest.approx(0.1214, abs=1e-4)


def test_a_draft_on_its_own_l3_group_is_a_loss_for_a_small_target(machine: Machine) -> None:
    """8B Q4 with a 0.6B Q8 draft model: 75 tok/s without, 58 with."""
    small = {"target_bytes": 4.9 * GB, "draft_bytes": 0.64 * GB, "tokens_per_pass": 3.8, "depth": 4}
    result = reached(machine("epyc-9354"), OWN_L3, **small)
    assert result.tok_s == pytest.approx(58, rel=0.03) and result.plain_tok_s == pytest.approx(74.9, rel=0.01)
    assert any("lower than plain decoding on all cores (74.9 tok/s)" in r for r in result.remarks)
    assert any("idle" in remark for remark in result.remarks)
    assert reached(machine("epyc-9354"), SHARED, **small).tok_s > 150


@pytest.mark.parametrize(
    ("name", "layout", "cache"), [("epyc-9754", OWN_L3, 16), ("epyc-9754", OWN_LINK, 32), ("epyc-9354", OWN_L3, 32)]
)
def test_a_draft_model_of_500_mb_does_not_fit_its_l3(machine: Machine, name: str, layout: str, cache: int) -> None:
    """The placement is offered and predicted as what it is: read from memory through one link, not from the cache."""
    result = reached(machine(name), layout, draft_bytes=0.5 * GB, depth=1)
    assert f"The draft model of 500 MB does not fit the L3 of {cache} MB" in result.remarks[0]
    assert "read from memory for every token" in result.remarks[0]
    # 100 tok/s at most, not the 200 that a cache would give.
    assert 1 / result.t_draft_s == pytest.approx(100)


def test_a_draft_model_that_fits_is_told(machine: Machine) -> None:
    result = reached(machine("2x-epyc-7543"), OWN_SOCKET, draft_bytes=0.2 * GB, overlap=True)
    assert "fits the L3 of 256 MB" in result.remarks[0]
    assert any("half of the reads cross sockets" in remark for remark in result.remarks)


def test_few_cores_per_group_fill_the_links_all_the_same(machine: Machine) -> None:
    topology = machine("epyc-9654")
    few, all_cores = reached(topology, "4 cores per L3 group"), reached(topology, SHARED)
    assert few.tok_s == all_cores.tok_s


def test_what_a_virtual_machine_tells_is_doubted(machine: Machine) -> None:
    assert any("virtual machine" in remark for remark in reached(machine("vm"), OWN_L3).remarks)


@pytest.mark.parametrize(
    "wrong", [{"rates": ReadRates(0.0)}, {"target_bytes": 0}, {"tokens_per_pass": 0}, {"depth": -1}]
)
def test_nothing_is_predicted_from_nothing(machine: Machine, wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        reached(machine("vm"), SHARED, **wrong)
