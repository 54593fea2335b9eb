"""Ways to divide each made-up machine, which one is recommended and why, and what each would reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cpuchat.errors import UsageError
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.placement.candidates import (
    IN_TURN,
    ONE_NODE,
    OWN_L3,
    OWN_LINK,
    OWN_SOCKET,
    Layout,
    Prediction,
    layouts,
    predict,
    reach,
    recommend,
)
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import Topology
from cpuchat.settings import Settings
from tests.hardware.trees import NAMES

GB = 1e9
Machine = Callable[[str], Topology]


def named(topology: Topology) -> dict[str, Layout]:
    return {layout.name: layout for layout in layouts(topology)}


def predicted(topology: Topology, layout: str, **more: float | bool) -> Prediction:
    """A 70B Q4_K_M with a 1B draft model, on what an EPYC 9354P was measured to read."""
    values: dict = {
        "target_bytes": 42.5 * GB, "draft_bytes": 0.8 * GB, "peak": 367 * GB, "l3_link": 50 * GB,
        "one_core": 25.3 * GB, "tokens_per_pass": 5, "depth": 8,
    }  # fmt: skip
    return predict(named(topology)[layout], topology, **(values | more))


@pytest.mark.parametrize(
    ("name", "cores", "reason"),
    [
        (
            "epyc-9334", "0-31",
            "All 32 cores, draft and target in turn: an L3 group of its own would give the draft model one of 4 links "
            "to memory, and take it from the target.",
        ),
        (
            "epyc-9354", "0-31",
            "All 32 cores, draft and target in turn: an L3 group of its own would give the draft model one of 8 links "
            "to memory, and take it from the target.",
        ),
        (
            "epyc-9354p-nps4", "0-31",
            "All 32 cores, draft and target in turn, with memory interleaved over 4 nodes: that is what one node for "
            "the socket (NPS1) does by itself.",
        ),
        (
            "epyc-9654", "0-95",
            "All 96 cores, draft and target in turn: an L3 group of its own would give the draft model one of 12 "
            "links to memory, and take it from the target.",
        ),
        (
            "epyc-9754", "0-127",
            "All 128 cores, draft and target in turn: two L3 groups share a fabric link each, so one group for the "
            "draft model would take a part of one of 8 links and slow its neighbour down.",
        ),
        (
            "2x-epyc-7543", "0-63",
            "All 64 cores, draft and target in turn, with memory interleaved: weights are read from the memory of "
            "both sockets at once.",
        ),
        (
            "xeon-6430", "0-31",
            "All 32 cores, draft and target in turn: they share one L3 cache and one way to memory, so there is "
            "nothing to divide.",
        ),
        (
            "hybrid-desktop", "0,2,4,6,8,10,12,14",
            "The 8 performance cores in turn: the 4 efficient ones would keep them waiting.",
        ),
        (
            "container", "8-10,12-14",
            "6 of 8 cores in turn: the control group grants the time of 6.5 CPUs.",
        ),
        (
            "vm", "0-7",
            "All 8 cores, draft and target in turn: on a virtual machine L3 groups and nodes need not be real, so "
            "nothing is divided by them.",
        ),
        (
            "vm-without-caches", "0-3",
            "All 4 cores, draft and target in turn: on a virtual machine L3 groups and nodes need not be real, so "
            "nothing is divided by them.",
        ),
        (
            "offline", "0-27",
            "All 28 cores, draft and target in turn: an L3 group of its own would give the draft model one of 7 links "
            "to memory, and take it from the target.",
        ),
        ("garbage", "2", "There is one core, so there is nothing to divide."),
    ],
)  # fmt: skip
def test_recommended(machine: Machine, name: str, cores: str, reason: str) -> None:
    layout = recommend(machine(name))
    assert (layout.name, format_cpu_list(layout.target), layout.draft) == (IN_TURN, cores, None)
    assert (layout.cores, layout.draft_cores, layout.memory) == ("auto", "shared", "auto")
    assert layout.reason == reason


def test_every_tree_has_a_recommendation_that_is_asserted() -> None:
    asserted = {case[0] for case in test_recommended.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    assert asserted == set(NAMES)


def test_a_machine_that_tells_no_caches(machine: Machine) -> None:
    topology = replace(machine("vm-without-caches"), virtual="")
    assert recommend(topology).reason == (
        "All 4 cores, draft and target in turn: the machine does not tell its L3 groups, so nothing is divided by them."
    )


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("epyc-9334", [IN_TURN, OWN_L3, "4 cores per L3 group"]),
        ("epyc-9354", [IN_TURN, OWN_L3, "2 cores per L3 group"]),
        ("epyc-9354p-nps4", [IN_TURN, OWN_L3, "2 cores per L3 group", ONE_NODE]),
        ("epyc-9754", [IN_TURN, OWN_L3, OWN_LINK, "4 cores per L3 group"]),
        ("2x-epyc-7543", [IN_TURN, OWN_L3, "2 cores per L3 group", OWN_SOCKET, ONE_NODE]),
        ("hybrid-desktop", [IN_TURN]),
        ("xeon-6430", [IN_TURN]),
        ("vm-without-caches", [IN_TURN]),
        ("garbage", [IN_TURN]),
    ],
)
def test_what_a_machine_allows(machine: Machine, name: str, names: list[str]) -> None:
    assert [layout.name for layout in layouts(machine(name))] == names


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_a_layout_give_its_cores_and_are_settings(machine: Machine, name: str) -> None:
    topology = machine(name)
    for layout in layouts(topology):
        draft = layout.draft or ()
        assert choose_cores(topology, layout.cores, without=draft).cpus == layout.target
        assert set(layout.target).isdisjoint(draft) and layout.reason.endswith(".")
        if layout.draft is not None:
            assert choose_cores(topology, layout.draft_cores).cpus == layout.draft
        settings = Settings()
        settings.engine.cores, settings.engine.memory = layout.cores, layout.memory
        settings.speculation.draft_cores = layout.draft_cores
        options = settings.load_options()
        assert (options.cores, options.memory, options.draft_cores) == (layout.cores, layout.memory, layout.draft_cores)
        if topology.quota is not None:
            assert len(layout.target) + len(draft) <= topology.quota


def test_cores_of_each_layout(machine: Machine) -> None:
    two = named(machine("2x-epyc-7543"))
    assert (format_cpu_list(two[OWN_SOCKET].target), format_cpu_list(two[OWN_SOCKET].draft or ())) == ("0-31", "32-63")
    assert (two[ONE_NODE].cores, two[ONE_NODE].memory, len(two[ONE_NODE].target)) == ("node:0", "bind:0", 32)
    assert "must fit the 275 GB of its memory" in two[ONE_NODE].reason
    pairs = named(machine("epyc-9754"))
    assert (pairs[OWN_L3].draft_cores, len(pairs[OWN_L3].target)) == ("l3:15", 120)
    assert (pairs[OWN_LINK].draft_cores, len(pairs[OWN_LINK].target)) == ("l3:14-15", 112)


def test_reach_of_cores_links_and_memory(machine: Machine) -> None:
    one = machine("epyc-9354")
    known = {"peak": 367.0, "l3_link": 50.0, "one_core": 25.3}
    assert reach(one, (0,), **known) == (25.3, "cores")
    assert reach(one, range(4), **known) == (50.0, "link")
    assert reach(one, (0, 32), **known) == (25.3, "cores"), "two threads of a core are one core"
    assert reach(one, (0, 4, 8), **known) == (pytest.approx(75.9), "cores")
    assert reach(one, range(28), **known) == (350.0, "link")
    assert reach(one, range(32), **known) == (367.0, "memory")
    assert reach(one, range(4), peak=367.0) == (367.0, "memory"), "what is not known is no bound"
    pairs = machine("epyc-9754")
    assert reach(pairs, range(16), **known) == (50.0, "link"), "two groups, one link"
    two = machine("2x-epyc-7543")
    assert reach(two, range(32), **known) == (183.5, "memory"), "the memory of one socket"
    assert reach(machine("epyc-9354p-nps4"), range(32), **known, memory="bind:0") == (91.75, "memory")


def test_predictions_against_the_worked_example(machine: Machine) -> None:
    """The reference's table for a 70B model on a 9354P, with 0.6 ms for each pass: 8.6, 19.9, 36.2 and 39 tok/s."""
    topology = machine("epyc-9354")
    plain = predicted(topology, IN_TURN, tokens_per_pass=1, depth=0)
    assert plain.tok_s == pytest.approx(8.6, abs=0.1) and plain.tok_s == pytest.approx(plain.plain_tok_s)
    assert plain.limit == "the target model, by the memory"
    apart = predicted(topology, OWN_L3, overhead_s=0.0006)
    assert apart.tok_s == pytest.approx(19.9, rel=0.02)
    assert apart.limit == "the draft model, by the links of its L3 groups"
    in_turn = predicted(topology, IN_TURN, overhead_s=0.0006)
    assert in_turn.tok_s == pytest.approx(36.2, rel=0.01)
    # Ideal overlap would be 39, if both models together did not need more than the memory gives.
    overlap = predicted(topology, OWN_L3, overlap=True)
    assert 37 < overlap.tok_s < 39 and "memory" in overlap.limit
    assert overlap.t_draft_s == pytest.approx(0.128) and overlap.t_target_s == pytest.approx(0.1214, abs=1e-4)


def test_a_draft_on_its_own_l3_group_is_a_loss_for_a_small_target(machine: Machine) -> None:
    """8B Q4 with a 0.6B Q8 draft model: 75 tok/s without, 58 with."""
    small = {"target_bytes": 4.9 * GB, "draft_bytes": 0.64 * GB, "tokens_per_pass": 3.8, "depth": 4}
    result = predicted(machine("epyc-9354"), OWN_L3, **small)
    assert result.tok_s == pytest.approx(58, rel=0.03) and result.plain_tok_s == pytest.approx(74.9, rel=0.01)
    assert any("slower than the target without a draft model on all cores (74.9 tok/s)" in r for r in result.remarks)
    assert any("idle" in remark for remark in result.remarks)
    assert predicted(machine("epyc-9354"), IN_TURN, **small).tok_s > 150


@pytest.mark.parametrize(
    ("name", "layout", "cache"), [("epyc-9754", OWN_L3, 16), ("epyc-9754", OWN_LINK, 32), ("epyc-9354", OWN_L3, 32)]
)
def test_a_draft_model_of_500_mb_does_not_fit_its_l3(machine: Machine, name: str, layout: str, cache: int) -> None:
    """The layout is offered and predicted as what it is: read from memory through one link, not from the cache."""
    result = predicted(machine(name), layout, draft_bytes=0.5 * GB, depth=1)
    assert f"The draft model of 500 MB does not fit the L3 of {cache} MB" in result.remarks[0]
    assert "read from memory for every token" in result.remarks[0]
    # 100 tok/s at most, not the 200 that a cache would give.
    assert 1 / result.t_draft_s == pytest.approx(100)


def test_a_draft_model_that_fits_is_told(machine: Machine) -> None:
    result = predicted(machine("2x-epyc-7543"), OWN_SOCKET, draft_bytes=0.2 * GB, overlap=True)
    assert "fits the L3 of 256 MB" in result.remarks[0]
    assert any("half of what each model reads" in remark for remark in result.remarks)


def test_few_cores_per_group_fill_the_links_all_the_same(machine: Machine) -> None:
    topology = machine("epyc-9654")
    few, all_cores = predicted(topology, "4 cores per L3 group"), predicted(topology, IN_TURN)
    assert few.tok_s == all_cores.tok_s


def test_what_a_virtual_machine_tells_is_doubted(machine: Machine) -> None:
    assert any("virtual machine" in remark for remark in predicted(machine("vm"), OWN_L3).remarks)


@pytest.mark.parametrize("wrong", [{"peak": 0.0}, {"target_bytes": 0}, {"tokens_per_pass": 0}, {"depth": -1}])
def test_nothing_is_predicted_from_nothing(machine: Machine, wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        predicted(machine("vm"), IN_TURN, **wrong)


@pytest.mark.parametrize("quota", [0.5, 1.0, 2.5, 6.5])
def test_no_layout_takes_more_threads_than_the_control_group_has_time_for(machine: Machine, quota: float) -> None:
    found = named(replace(machine("container"), quota=quota))
    assert IN_TURN in found
    for layout in found.values():
        assert len(layout.target) + len(layout.draft or ()) <= max(int(quota), 1), layout.name
    assert OWN_L3 not in found or quota == 6.5
    assert "2 cores per L3 group" not in found or quota == 6.5
