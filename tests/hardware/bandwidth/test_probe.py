"""Tests the read probe: real measurements (short ones), what goes wrong with them, what is kept, and what a survey
takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from cpuchat import paths
from cpuchat.errors import Interrupted, UsageError
from cpuchat.hardware.bandwidth import cache as bandwidth_cache
from cpuchat.hardware.bandwidth import measuring, peaks, read_probe
from cpuchat.hardware.bandwidth import survey as surveying
from cpuchat.hardware.bandwidth.measuring import ProbeFailed, ReadBandwidth, buffer_bytes, measure
from cpuchat.hardware.bandwidth.survey import Survey, cached_survey, survey
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.hardware.topology import read_topology
from tests.hardware.trees import Machine, make_tree, server, write

pytestmark = pytest.mark.slow

MIB = 1 << 20
CPU, *_ = own_cpus()
CPUS = own_cpus()[:2]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return a machine without caches and with little free memory, so that measurements fill little."""
    return write(tmp_path / "small", {"proc/meminfo": f"MemTotal: {2 << 20} kB\nMemAvailable: {1 << 19} kB"})


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return machines of `trees` that no test changes, each written once."""
    return lru_cache(lambda name: make_tree(tmp_path_factory.mktemp("trees"), name))


def short(cpus: tuple[int, ...] = CPUS, **more: Any) -> ReadBandwidth:
    return measure(cpus, **{"seconds": 0.02, "rounds": 2, **more})


# What is read


@pytest.mark.parametrize("kernel", ["scan_with_memchr", "scan_with_numpy"])
def test_every_byte_is_ones_and_every_byte_is_looked_at(kernel: str) -> None:
    memory = read_probe.Memory(4 * MIB)
    scan: Callable[[int, int], object] = getattr(memory, kernel)()
    untouched = scan(0, 4 * MIB)
    assert untouched in (None, 0x0101010101010101)  # memchr found no 0; all words are ones
    for place in (0, 123_457, 4 * MIB - 1):
        memory._map[memory.skip + place] = 0 if "memchr" in kernel else 0xFF
        assert scan(0, 4 * MIB) != untouched, place
        assert scan(place // 4096 * 4096, 4096) != untouched, place
        memory._map[memory.skip + place] = 1
    assert scan(MIB, 2 * MIB) == untouched


def test_memory_starts_on_a_huge_page() -> None:
    assert read_probe.Memory(2 * MIB).address % (2 * MIB) == 0


def test_threads_are_pinned_before_they_touch_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    touched_on: list[set[int]] = []

    class Recorded(read_probe.Memory):
        def __init__(self, size: int) -> None:
            touched_on.append(os.sched_getaffinity(0))
            super().__init__(size)

    monkeypatch.setattr(read_probe, "Memory", Recorded)
    run = read_probe.Probe(list(CPUS), 4 * MIB, 0.01, 2, "memchr")
    run.run()
    assert sorted(touched_on, key=min) == [{cpu} for cpu in CPUS]
    assert len(run.rounds) == 2 and min(run.rounds) > 0


def test_a_slow_c_library_is_replaced_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.39")
    assert read_probe.default_kernel() == "memchr"
    monkeypatch.setattr(os, "confstr", unknown)  # musl
    assert read_probe.default_kernel() == "numpy"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert read_probe.default_kernel() == "memchr"


def test_the_process_that_measures_is_small() -> None:
    imported = "len({'numpy', 'msgspec', 'psutil'} & set(sys.modules))"
    code = f"import sys, cpuchat.hardware.bandwidth.read_probe; print({imported})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


# Measuring


@pytest.mark.parametrize(
    "options",
    [["--kernel", "memchr"], ["--kernel", "numpy"], ["--threads", "1"]],
    ids=["memchr", "numpy", "a process per thread"],
)
def test_a_measurement(small: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    monkeypatch.setattr(measuring, "_OPTIONS", options)
    found = short(root=small)
    assert found.cpus == CPUS
    assert len(found.rounds) == 2
    assert found.bytes_per_s == max(found.rounds)
    assert found.bytes_per_s > 1e8  # any memory of the last thirty years; beside load a round may read nothing
    assert found.node is None


def test_a_caller_that_is_pinned_elsewhere_does_not_matter(small: Path) -> None:
    found: list[ReadBandwidth] = []

    def pinned() -> None:
        os.sched_setaffinity(0, {CPUS[-1]})
        found.append(short((CPU,), root=small))

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert found[0].cpus == (CPU,)


def args(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(("options", "processes"), [([], 1), (["--threads", "1"], 3)])
def test_cancelling_ends_every_process(
    small: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], processes: int
) -> None:
    monkeypatch.setattr(measuring, "_OPTIONS", options)
    seen: set[psutil.Process] = set()

    def when_all_run() -> bool:
        children = psutil.Process().children(recursive=True)
        found = [one for one in children if read_probe.__name__ in args(one)]
        seen.update(found)
        return len(found) == processes

    with pytest.raises(Interrupted):
        short(seconds=60, root=small, cancelled=when_all_run)
    assert len(seen) == processes
    psutil.wait_procs(seen, timeout=60)
    assert not [process for process in seen if process.is_running()]


@pytest.mark.parametrize("options", [[], ["--threads", "1"]])
def test_a_cpu_that_may_not_be_used(small: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    monkeypatch.setattr(measuring, "_OPTIONS", options)
    with pytest.raises(ProbeFailed, match=r"CPU 4000 may not be used by this process.*Choose other"):
        short((CPU, 4000), root=small)


def test_processes_that_measure_together_are_added_up() -> None:
    def part(rates: list[float], shares: list[float]) -> list[str]:
        said = json.dumps({"rounds": rates, "shares": shares})
        return [sys.executable, "-c", f"print('ready', flush=True); input(); print({said!r})"]

    together = read_probe.run_together([part([1.0, 2.0], [0.9, 1.0]), part([10.0, 20.0], [1.0, 0.8])])
    assert together == ([11.0, 22.0], [0.9, 0.8])
    with pytest.raises(RuntimeError, match="a measuring process ended early"):
        read_probe.run_together([part([1.0], [1.0]), [sys.executable, "-c", "pass"]])
    with pytest.raises(RuntimeError, match="a measuring process ended early"):
        read_probe.run_together([[sys.executable, "-c", "print('ready', flush=True); input()"]])


def test_no_core() -> None:
    with pytest.raises(ProbeFailed, match="No cores"):
        measure(())


def test_little_memory_says_so_and_measures_nothing(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 100000 kB"})
    with pytest.raises(ProbeFailed, match=r"needs 0.3 GB of free memory, 0.1 GB are free.*Close"):
        measure(CPUS, root=root)


def test_a_process_that_is_killed(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    monkeypatch.setattr(measuring, "_MODULE", "tests.support.no_such_module")
    with pytest.raises(ProbeFailed, match="No module named"):
        short(root=small)
    with pytest.raises(ProbeFailed, match="killed by signal 9"):
        measuring._run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], lambda: False, 60)
    with pytest.raises(ProbeFailed, match="failed with status 3"):
        measuring._run([sys.executable, "-c", "raise SystemExit(3)"], lambda: False, 60)
    with pytest.raises(ProbeFailed, match="timed out after 0 seconds"):
        measuring._run([sys.executable, "-c", "while True: pass"], lambda: False, 0.2)
    with pytest.raises(ProbeFailed, match="Cannot start"):
        measuring._run(["/no/such/program"], lambda: False, 60)


def test_a_refused_policy_is_a_failure_where_the_node_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"rounds": [2e10], "memory_refused": "Operation not permitted"}
    monkeypatch.setattr(measuring, "_run", lambda *_: told)
    with pytest.raises(ProbeFailed, match="node 1: Operation not permitted"):
        measure(CPUS, node=1)
    assert measure(CPUS, memory="interleave").bytes_per_s == 2e10


def test_the_node_and_the_policy_reach_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], *_: object) -> dict[str, Any]:
        commands.append(command)
        return {"rounds": [1e10], "memory_refused": ""}

    monkeypatch.setattr(measuring, "_run", run)
    assert measure(CPUS, node=1).node == 1
    measure(CPUS, memory="interleave:0-1")
    measure(CPUS)
    assert ["--memory" in command for command in commands] == [True, True, False]
    assert "bind:1" in commands[0] and "interleave:0-1" in commands[1]
    with pytest.raises(UsageError):
        measure(CPUS, memory="sideways")


# How much memory


@pytest.mark.parametrize(
    ("name", "cpus", "times"),
    [
        ("epyc-9354", (0,), 8),
        ("epyc-9354", tuple(range(4)), 8),
        ("epyc-9354", tuple(range(32)), 8),
        ("epyc-9754", tuple(range(128)), 8),
        ("epyc-9654", tuple(range(96)), 8),
        ("2x-epyc-7543", tuple(range(64)), 7),
        ("xeon-6430", tuple(range(32)), 8),
    ],
)
def test_no_cache_holds_what_is_read(tree: Callable[[str], Path], name: str, cpus: tuple[int, ...], times: int) -> None:
    root = tree(name)
    each = buffer_bytes(cpus, root)
    assert each * len(cpus) <= 3_900_000_000
    assert each % (2 * MIB) == 0
    topology = read_topology(root)
    for group in topology.l3_groups:
        threads = len(set(group.cpus) & set(cpus))
        assert threads == 0 or each * threads >= times * group.size


def test_never_more_than_a_quarter_of_what_is_free(small: Path) -> None:
    assert buffer_bytes((0, 1), small) * 2 <= 1 << 27
    assert buffer_bytes((0,), small) <= 1 << 27


def test_hundreds_of_cores_take_less_each(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": f"MemTotal: {1 << 30} kB\nMemAvailable: {1 << 30} kB"})
    assert 0 < buffer_bytes(range(384), root) * 384 <= 3_900_000_000


# Peaks that are kept


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Simulate measurements of 10 GB/s per core that take no time. Returns what was measured."""
    calls: list[tuple[int, ...]] = []

    def instead(cpus: tuple[int, ...], *, node: int | None = None, **_: object) -> ReadBandwidth:
        calls.append(tuple(cpus))
        rate = 1e10 * len(cpus) + len(calls)
        return ReadBandwidth(tuple(cpus), rate, (rate / 2, rate), node)

    monkeypatch.setattr(peaks, "measure", instead)
    monkeypatch.setattr(surveying, "measure", instead)
    return calls


def test_a_peak_is_measured_once(small: Path, measured: list[tuple[int, ...]]) -> None:
    first = peaks.peak_of((0, 1), root=small)
    assert first is not None
    assert (first.source, first.cpus) == ("measured, 2 cores", (0, 1))
    assert peaks.peak_of((1, 0), root=small) == first == peaks.known_peak((0, 1), root=small)
    assert measured == [(0, 1)]
    assert peaks.known_peak((0,), root=small) is None


def test_what_was_measured_beside_other_programs_is_measured_again(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = iter(
        [
            ReadBandwidth((0,), 3e10, (3e10,), shares=(0.5,)),
            ReadBandwidth((0,), 2e10, (2e10,), shares=(0.6,)),
            ReadBandwidth((0,), 4e10, (3e10, 4e10), shares=(0.7, 1.0)),
        ]
    )
    monkeypatch.setattr(peaks, "measure", lambda *_, **__: next(results))
    now = iter(range(0, 1 << 20, 3600))  # an hour passes whenever somebody looks
    monkeypatch.setattr(peaks, "time", lambda: float(next(now)))
    found = [peaks.peak_of((0,), root=small) for _ in range(4)]
    assert [peak.bytes_per_s for peak in found if peak is not None] == [3e10, 3e10, 4e10, 4e10]
    assert [peak.source for peak in found if peak is not None][-2:] == ["measured, 1 core"] * 2
    assert "other programs" in (found[0].source if found[0] is not None else "")


def test_on_a_machine_that_is_always_busy_not_every_load_measures(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = ReadBandwidth((0,), 3e10, (3e10,), shares=(0.5,))
    asked: list[object] = []
    monkeypatch.setattr(peaks, "measure", lambda cpus, **_: asked.append(cpus) or busy)
    assert peaks.should_measure((0,), root=small)
    assert peaks.peak_of((0,), root=small) == peaks.peak_of((0,), root=small) == peaks.known_peak((0,), root=small)
    assert len(asked) == 1 and not peaks.should_measure((0,), root=small)


def test_a_survey_beside_other_programs_does_not_spoil_a_good_peak(small: Path) -> None:
    good = peaks.remember(ReadBandwidth((0, 1), 3e10, (3e10,), shares=(1.0,)), root=small)
    assert peaks.remember(ReadBandwidth((0, 1), 2e10, (2e10,), shares=(0.6,)), root=small) == good
    assert peaks.known_peak((0, 1), root=small, disturbed=False) == good
    slower = peaks.remember(
        ReadBandwidth((0, 1), 2.5e10, (2.5e10,), shares=(1.0,)), root=small
    )  # other memory settings
    assert peaks.known_peak((0, 1), root=small) == slower


def test_a_busy_core_is_noticed(small: Path) -> None:
    spin = "import os; os.sched_setaffinity(0, {CPU}); print('ready', flush=True)\nwhile True: pass"
    cpu = CPUS[0]
    command = [sys.executable, "-c", spin.replace("CPU", str(cpu))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None and busy.stdout.readline()
            assert measure((cpu,), seconds=0.2, root=small).disturbed
        finally:
            busy.kill()


def test_another_machine_has_other_peaks(
    tmp_path: Path, tree: Callable[[str], Path], measured: list[tuple[int, ...]]
) -> None:
    one, other = make_tree(tmp_path, "epyc-9354"), tree("2x-epyc-7543")
    assert peaks.peak_of((0, 1), root=one)
    assert peaks.known_peak((0, 1), root=other) is None
    cpuinfo = one / "proc/cpuinfo"
    cpuinfo.write_text(cpuinfo.read_text().replace("0xa101148", "0xa10124f"))  # new microcode
    assert peaks.known_peak((0, 1), root=one) is None


def test_policies_count_only_where_there_are_nodes(
    tree: Callable[[str], Path], measured: list[tuple[int, ...]]
) -> None:
    one, two = tree("epyc-9354"), tree("2x-epyc-7543")
    for root in (one, two):
        assert peaks.peak_of((0, 1), "interleave:0-1", root=root)
    assert peaks.known_peak((0, 1), "local", root=one)
    assert peaks.known_peak((0, 1), "interleave:0-1", root=two)
    assert peaks.known_peak((0, 1), "local", root=two) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[]", b"{}", b'{"version": 2, "entries": {}}', b'{"version": 1, "entries": 7}', b"[" * 5000],
)
def test_a_damaged_file_counts_as_empty_and_is_replaced(
    small: Path, measured: list[tuple[int, ...]], content: bytes
) -> None:
    file = paths.bandwidth_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    assert peaks.known_peak((0,), root=small) is None
    peak = peaks.peak_of((0,), root=small)
    assert peak is not None and peaks.known_peak((0,), root=small) == peak


@pytest.mark.parametrize("value", [None, 5, {}, {"cpus": [0], "bytes_per_s": -1, "rounds": []}, {"cpus": "0"}])
def test_an_entry_that_is_nonsense_is_none(small: Path, value: object) -> None:
    bandwidth_cache.store(bandwidth_cache.key("peak", (0,), "local", small), value)
    assert peaks.known_peak((0,), root=small) is None


def test_a_disk_that_cannot_be_written_loses_nothing_but_the_memory(
    small: Path, measured: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("CPUCHAT_CACHE_DIR", str(tmp_path / "a file" / "cache"))
    assert peaks.peak_of((0,), root=small) is not None
    assert peaks.known_peak((0,), root=small) is None


def test_no_peak_has_its_reason(tmp_path: Path, small: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": "MemTotal: 2000000 kB\nMemAvailable: 100000 kB"})
    reasons: list[str] = []
    assert peaks.peak_of(CPUS, failed=reasons.append, root=root) is None
    assert "free memory" in reasons[0]
    assert peaks.peak_of(CPUS, failed=reasons.append, cancelled=lambda: True, root=small) is None
    assert len(reasons) == 1


# Surveys


def surveyed(root: Path, **more: Any) -> tuple[Survey, list[str]]:
    seen: list[str] = []
    found = survey(read_topology(root), lambda done, total, what: seen.append(what), root=root, **more)
    return found, seen


def test_a_survey_of_a_server(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    root = tree("epyc-9354")
    found, seen = surveyed(root)
    assert found.all_cores.cpus == tuple(range(32))
    assert found.one_core.cpus == (0,)
    assert found.l3_group is not None and found.l3_group.cpus == (0, 1, 2, 3)
    assert found.fabric_link is None
    assert {n: len(one.cpus) for n, one in (found.per_core_counts or {}).items()} == {1: 8, 2: 16, 3: 24, 4: 32}
    assert (found.per_core_counts or {})[1].cpus == (0, 4, 8, 12, 16, 20, 24, 28)
    assert found.matrix == {}
    assert found.knee == 4  # 10 GB/s for every core
    assert len(measured) == len(set(measured)) == len(seen)


def test_two_l3_groups_behind_one_link(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    found, _ = surveyed(tree("epyc-9754"))
    assert found.l3_group is not None and len(found.l3_group.cpus) == 8
    assert found.fabric_link is not None and found.fabric_link.cpus == tuple(range(16))


def test_two_nodes_have_a_matrix(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    found, _ = surveyed(tree("2x-epyc-7543"), memory="interleave:0-1")
    assert sorted(found.matrix) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found.matrix[1, 0].cpus == tuple(range(32, 64))
    assert found.matrix[1, 0].node == 0
    assert found.memory == "interleave:0-1"


def test_the_knee_is_the_fewest_that_are_as_good() -> None:
    def one(rate: float) -> ReadBandwidth:
        return ReadBandwidth((0,), rate, (rate,))

    counts = {1: one(200e9), 2: one(350e9), 3: one(360e9), 4: one(359e9)}
    assert Survey(one(25e9), one(359e9), per_core_counts=counts).knee == 2
    assert Survey(one(25e9), one(359e9)).knee is None


def test_a_survey_is_kept_with_its_peak(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    root = tree("2x-epyc-7543")
    topology = read_topology(root)
    assert cached_survey(topology, root=root) is None
    found, _ = surveyed(root, memory="interleave:0-1")
    assert cached_survey(topology, root=root) == found
    assert cached_survey(topology, cpus=(0, 1), root=root) is None
    peak = peaks.known_peak(found.all_cores.cpus, "interleave:0-1", root=root)
    assert peak is not None and peak.bytes_per_s == found.all_cores.bytes_per_s
    bandwidth_cache.store(bandwidth_cache.key(surveying._KIND, found.all_cores.cpus, root=root), {"one_core": 1})
    assert cached_survey(topology, root=root) is None


def test_only_chosen_cores_are_measured(tree: Callable[[str], Path], measured: list[tuple[int, ...]]) -> None:
    found, _ = surveyed(tree("epyc-9354"), cpus=(9, 8))
    assert {cpu for cpus in measured for cpu in cpus} == {8, 9}
    assert found.all_cores.cpus == (8, 9)
    assert found.knee == 2


def test_what_fails_is_noted_but_not_all_cores(tree: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree("2x-epyc-7543")

    def instead(cpus: tuple[int, ...], *, node: int | None = None, **_: object) -> ReadBandwidth:
        if node == 1:
            raise ProbeFailed("Memory could not be bound to node 1: not permitted")
        return ReadBandwidth(cpus, 1e10, (1e10,), node)

    monkeypatch.setattr(surveying, "measure", instead)
    found, _ = surveyed(root)
    assert sorted(found.matrix) == [(0, 0), (1, 0)]
    assert [note.partition(":")[0] for note in found.notes] == ["node 0 reading node 1", "node 1 reading node 1"]

    def never(*_: object, **__: object) -> ReadBandwidth:
        raise ProbeFailed("no")

    monkeypatch.setattr(surveying, "measure", never)
    with pytest.raises(ProbeFailed):
        surveyed(root)


def test_time_runs_out(
    tree: Callable[[str], Path], measured: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tree("2x-epyc-7543")
    topology = read_topology(root)
    ticks = iter(range(0, 10_000, 20))
    monkeypatch.setattr(surveying, "monotonic", lambda: next(ticks))
    found = survey(topology, root=root)
    assert found.all_cores and found.one_core
    assert "within the time limit" in found.notes[0] and "node 1 reading node 0" in found.notes[0]
    assert len(measured) == 2


@pytest.mark.parametrize("name", ["vm-without-caches", "garbage", "hybrid-desktop", "container", "offline", "vm"])
def test_every_machine_can_be_surveyed(tree: Callable[[str], Path], measured: list[tuple[int, ...]], name: str) -> None:
    found, _ = surveyed(tree(name))
    assert found.one_core.cpus[0] in found.all_cores.cpus
    assert msgspec.json.decode(msgspec.json.encode(found))["one_core"]["cpus"] == [found.one_core.cpus[0]]


def test_of_many_nodes_only_the_first_reads_from_all(
    tmp_path: Path, tree: Callable[[str], Path], measured: list[tuple[int, ...]]
) -> None:
    four, _ = surveyed(tree("epyc-9354p-nps4"))
    assert len(four.matrix) == 16
    machine = Machine("AMD EPYC 9354 32-Core Processor", 25, 17, 8, 4, sockets=2, nodes=4)
    eight, _ = surveyed(server(tmp_path / "eight", machine))
    assert sorted(eight.matrix) == [(0, node) for node in range(8)]
