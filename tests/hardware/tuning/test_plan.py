"""Tests what a plan proposes, what it refuses and why, and how the knobs are shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.hardware.topology import Topology
from cpuchat.hardware.tuning.knobs import Change, KnobRefusal, chosen
from cpuchat.hardware.tuning.plan import NAMES, KnobState, effect, knob_states, make_plan
from cpuchat.hardware.tuning.resctrl import CacheGroup, l3_masks, plan_group
from tests.hardware.tuning.machine import CPUFREQ, TOPOLOGY, VIRTUAL, resctrl, server, snapshot, write

HALF_OF_EACH = (0, 1, 4, 5)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return server(tmp_path / "root")


def state(name: str, topology: Topology, root: Path) -> KnobState:
    return next(state for state in knob_states(topology, root) if state.name == name)


def refusal(name: str, topology: Topology, root: Path) -> KnobRefusal:
    [refused] = make_plan(topology, root, (name,), HALF_OF_EACH).refusals
    assert refused.knob == name
    return refused


def test_without_names_only_what_is_of_low_risk_is_planned(root: Path) -> None:
    plan = make_plan(TOPOLOGY, root)
    assert plan.knobs == ("epp", "governor", "thp", "numa-balancing")
    assert plan.group is None
    assert plan.refusals == ()
    assert plan.notes == ("boost: already set",)
    assert Change(knob="thp", path="/sys/kernel/mm/transparent_hugepage/enabled", old="madvise", new="always") in (
        plan.changes
    )


def test_each_change_holds_what_was_read(root: Path) -> None:
    (root / CPUFREQ.format(2) / "scaling_governor").write_text("performance\n")
    (root / CPUFREQ.format(5) / "scaling_governor").write_text("schedutil\n")
    plan = make_plan(TOPOLOGY, root, ("governor",))
    old = {change.path.split("/")[5]: change.old for change in plan.changes if change.knob == "governor"}
    assert old == {**{f"cpu{n}": "powersave" for n in (0, 1, 3, 4, 6, 7)}, "cpu5": "schedutil"}


def test_the_governor_takes_the_preference_along(root: Path) -> None:
    # It changes it, and not every driver puts it back.
    assert make_plan(TOPOLOGY, root, ("governor",)).knobs == ("epp", "governor")
    assert make_plan(TOPOLOGY, root, ("epp",)).knobs == ("epp",)
    for cpu in TOPOLOGY.online:
        (root / CPUFREQ.format(cpu) / "energy_performance_preference").unlink()
    plan = make_plan(TOPOLOGY, root, ("governor",))
    assert (plan.knobs, plan.refusals) == (("governor",), ())


def test_turbo_is_the_other_way_round_on_intel(root: Path) -> None:
    (root / "sys/devices/system/cpu/cpufreq/boost").unlink()
    write(root, {"sys/devices/system/cpu/intel_pstate/no_turbo": "1"})
    assert state("boost", TOPOLOGY, root).value == "off"
    [change] = make_plan(TOPOLOGY, root, ("boost",)).changes
    assert (change.path, change.old, change.new) == ("/sys/devices/system/cpu/intel_pstate/no_turbo", "1", "0")


def test_a_value_that_is_not_offered_is_not_planned(root: Path) -> None:
    (root / CPUFREQ.format(1) / "scaling_available_governors").write_text("powersave userspace\n")
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("[madvise] never\n")
    plan = make_plan(TOPOLOGY, root, ("governor", "thp"))
    assert sum(change.knob == "governor" for change in plan.changes) == 7
    assert "thp" not in plan.knobs
    assert any("cpu1/cpufreq/scaling_governor does not offer the recommended value" in note for note in plan.notes)


def test_a_file_without_a_value_is_left_alone(root: Path) -> None:
    (root / "proc/sys/kernel/numa_balancing").write_text("\n")
    plan = make_plan(TOPOLOGY, root, ("numa-balancing",))
    assert plan.empty
    assert plan.notes == ("numa-balancing: unchanged, /proc/sys/kernel/numa_balancing is unreadable",)


def test_names_that_are_no_knobs(root: Path) -> None:
    with pytest.raises(UsageError, match=r"Unknown knob: speed\. Known knobs: epp, governor"):
        make_plan(TOPOLOGY, root, ("speed",))


def test_missing_files_are_refused_with_their_name(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    plan = make_plan(TOPOLOGY, bare, NAMES, HALF_OF_EACH)
    assert plan.empty
    why = {refused.knob: refused.why for refused in plan.refusals}
    assert set(why) == set(NAMES)
    assert why["governor"] == "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor does not exist"
    assert why["l3"] == "the kernel has no resctrl support"


@pytest.mark.parametrize("name", ["governor", "epp", "boost", "l3"])
def test_a_virtual_machine_does_not_own_its_hardware(root: Path, name: str) -> None:
    assert refusal(name, VIRTUAL, root).why == "virtual machine (hypervisor flag in /proc/cpuinfo)"


@pytest.mark.parametrize("name", ["thp", "numa-balancing"])
def test_a_virtual_machine_has_a_kernel_of_its_own(root: Path, name: str) -> None:
    assert make_plan(VIRTUAL, root, (name,)).knobs == (name,)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run/.containerenv", ""),
        (".dockerenv", ""),
        ("proc/self/cgroup", "0::/kubepods/pod0a/0b"),
        ("var/run/secrets/kubernetes.io/serviceaccount/namespace", "default"),
    ],
)
def test_a_container_is_refused_everything(root: Path, name: str, text: str) -> None:
    write(root, {name: text})
    plan = make_plan(TOPOLOGY, root, NAMES, HALF_OF_EACH)
    assert plan.empty
    assert len(plan.refusals) == len(NAMES)
    assert all("this is a container" in refused.why for refused in plan.refusals)


@pytest.mark.parametrize(
    ("topology", "why"),
    [
        (replace(TOPOLOGY, quota=2.5), "cgroup CPU quota: 2.5"),
        (replace(TOPOLOGY, allowed=(0, 1, 2)), "this process is limited to CPUs 0-2 of 0-7"),
        (replace(TOPOLOGY, memory_limit=8_000_000_000), "cgroup memory limit: 8.0 GB"),
    ],
)
def test_who_has_a_part_of_the_machine_changes_nothing_of_it(root: Path, topology: Topology, why: str) -> None:
    assert refusal("thp", topology, root).why == why


def test_balancing_matters_between_nodes_only(root: Path) -> None:
    one = replace(TOPOLOGY, nodes=TOPOLOGY.nodes[:1])
    assert refusal("numa-balancing", one, root).why == "there is only one NUMA node"


def test_the_cache_is_divided_by_a_quarter_of_the_ways(root: Path) -> None:
    resctrl(root)
    assert plan_group(TOPOLOGY, root, HALF_OF_EACH) == CacheGroup(
        path="/sys/fs/resctrl/cpuchat", schemata="L3:0=f;1=f", cpus="0-1,4-5"
    )
    (root / "sys/fs/resctrl/info/L3/min_cbm_bits").write_text("6\n")
    planned = plan_group(TOPOLOGY, root, HALF_OF_EACH)
    assert isinstance(planned, CacheGroup)
    assert planned.schemata == "L3:0=3f;1=3f"


@pytest.mark.parametrize(
    ("files", "cpus", "why"),
    [
        ({"sys/fs/resctrl/database/schemata": "L3:0=ff"}, HALF_OF_EACH, "partition the cache already (database)"),
        ({"sys/fs/resctrl/schemata": "L3:0=fff0;1=ffff"}, HALF_OF_EACH, "the default group does not have all ways"),
        ({"sys/fs/resctrl/schemata": "L3CODE:0=ffff\nL3DATA:0=ffff"}, HALF_OF_EACH, "mounted with cdp"),
        ({"sys/fs/resctrl/schemata": ""}, HALF_OF_EACH, "resctrl is not mounted"),
        ({"sys/fs/resctrl/info/L3/num_closids": "1"}, HALF_OF_EACH, "no second class of service"),
        ({"sys/fs/resctrl/info/L3/min_cbm_bits": "16"}, HALF_OF_EACH, "only 16 ways"),
        ({"sys/fs/resctrl/info/L3/cbm_mask": "nonsense"}, HALF_OF_EACH, "does not report which masks are allowed"),
        ({}, (), "the draft model has no cores of its own"),
        ({}, (0, 1, 2, 3), "no L3 group is shared by both models"),
    ],
)  # fmt: skip
def test_why_the_cache_is_not_divided(root: Path, files: dict[str, str], cpus: tuple[int, ...], why: str) -> None:
    write(resctrl(root), files)
    planned = plan_group(TOPOLOGY, root, cpus)
    assert isinstance(planned, KnobRefusal)
    assert why in planned.why


def test_a_cpu_without_the_feature(root: Path) -> None:
    planned = plan_group(replace(TOPOLOGY, flags=frozenset()), resctrl(root), HALF_OF_EACH)
    assert isinstance(planned, KnobRefusal)
    assert "no cat_l3" in planned.why


def test_how_to_mount_is_said(root: Path) -> None:
    write(resctrl(root), {"sys/fs/resctrl/schemata": ""})
    assert "sudo mount -t resctrl resctrl /sys/fs/resctrl" in refusal("l3", TOPOLOGY, root).how


def test_only_the_l3_line_is_read_and_written() -> None:
    assert l3_masks("    MB:0=2048;1=2048\n    L3:0=ffff;3=00ff\n") == {0: 0xFFFF, 3: 0xFF}
    assert l3_masks("MB:0=100") == {}
    assert l3_masks("L3:nonsense;1=f") == {1: 15}


def test_the_state_of_every_knob_is_told(root: Path) -> None:
    resctrl(root)
    before = snapshot(root)
    states = {state.name: state for state in knob_states(TOPOLOGY, root)}
    assert {name: state.value for name, state in states.items()} == {
        "epp": "balance_performance",
        "governor": "powersave",
        "boost": "on",
        "thp": "madvise",
        "numa-balancing": "on",
        "l3": "not partitioned",
    }
    assert all(state.refusal is None for state in states.values())
    assert states["l3"].verdict == "experimental, gain about 0"
    assert states["thp"].verdict == "low risk, small gain"
    assert snapshot(root) == before


def test_values_that_differ_are_counted(root: Path) -> None:
    for cpu in range(3):
        (root / CPUFREQ.format(cpu) / "scaling_governor").write_text("performance\n")
    assert state("governor", TOPOLOGY, root).value == "powersave (5 of 8), performance (3 of 8)"


def test_our_own_division_and_that_of_others_are_told_apart(root: Path) -> None:
    write(resctrl(root), {"sys/fs/resctrl/cpuchat/schemata": "L3:0=f;1=f"})
    assert state("l3", TOPOLOGY, root).value == "target confined to 4 ways of 16"
    write(root, {"sys/fs/resctrl/database/schemata": "L3:0=ff;1=ff", "sys/fs/resctrl/cpuchat/schemata": ""})
    assert state("l3", TOPOLOGY, root).value == "partitioned by other control groups (database)"


def test_what_is_in_effect_is_read_again(root: Path) -> None:
    plan = make_plan(TOPOLOGY, root, ("governor", "thp"))
    assert effect(plan, root) == {"epp": (0, 8), "governor": (0, 8), "thp": (0, 1)}
    (root / CPUFREQ.format(2) / "scaling_governor").write_text("performance\n")
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("[always] madvise never\n")
    assert effect(plan, root) == {"epp": (0, 8), "governor": (1, 8), "thp": (1, 1)}


@pytest.mark.parametrize(
    ("text", "value"), [("always [madvise] never", "madvise"), ("powersave", "powersave"), ("", "")]
)
def test_the_chosen_word(text: str, value: str) -> None:
    assert chosen(text) == value


def test_unreadable_files_break_nothing(root: Path) -> None:
    folder = root / CPUFREQ.format(0) / "scaling_governor"
    folder.unlink()
    folder.mkdir()
    (root / "proc/sys/kernel/numa_balancing").write_bytes(b"\xff\x00\xfe\n")
    (root / "sys/fs").symlink_to("nowhere")
    assert state("governor", TOPOLOGY, root).value == "powersave"
    make_plan(TOPOLOGY, root, NAMES)
