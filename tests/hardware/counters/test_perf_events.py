"""Tests perf_event_open: the exact bytes, what is read back, and what a refusal says. One event is really opened."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cpuchat.hardware.counters import CannotCount, Kernel, PerfEvent, attributes, open_failure, read_pmu
from tests.hardware.counters.simulated import Simulated, new_fabric, pmu, refused
from tests.hardware.trees import write

TYPE_SOFTWARE, TASK_CLOCK = 1, 1


def really_open() -> PerfEvent:
    """Open an event that counts the nanoseconds of this thread."""
    attr = bytearray(attributes(TYPE_SOFTWARE, (TASK_CLOCK, 0, 0)))
    attr[40] = 0x60  # without the kernel's own work, which needs fewer rights
    return PerfEvent(Kernel().perf_event_open(bytes(attr), 0, -1, 8), Kernel())


def opened(machine: Simulated) -> PerfEvent:
    return PerfEvent(machine.calls.perf_event_open(attributes(10, (1, 0, 0)), -1, 0, 8), machine.calls)


def test_the_kernel_counts_the_time_of_this_thread() -> None:
    event = really_open()
    first = event.growth()
    sum(range(200_000))
    second = event.growth()
    before = len(list(Path("/proc/self/fd").iterdir()))
    event.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1
    assert first is not None and second is not None
    assert second > 1000  # nanoseconds: 200 000 additions take more


def test_what_an_event_counted() -> None:
    machine = Simulated()
    event = opened(machine)
    assert event.growth() == 0
    machine.run(1, lambda _: 1000, share=0.25)  # of the time: extrapolated
    assert event.growth() == pytest.approx(1000)
    machine.run(1, lambda _: 1000, share=0.0)
    assert event.growth() is None
    [counting] = machine.open_events
    counting.count = 10  # it went back
    machine.run(1, lambda _: 0)
    assert event.growth() is None
    machine.run(1, lambda _: 500)
    assert event.growth() == 500


@pytest.mark.parametrize(
    ("code", "paranoid", "why", "how"),
    [
        (errno.EACCES, "4", "perf_event_paranoid is 4", "sysctl kernel.perf_event_paranoid=0`, which `=4` takes back"),
        (errno.EPERM, "-1", "blocked for this process, as containers often do", ""),
        (errno.ENOENT, "2", "no such counter", ""),
        (errno.ENOSYS, "", "this kernel has no performance counters", ""),
        (errno.EBUSY, "2", "another program", "perf"),
        (errno.EMFILE, "2", "too many open files", "ulimit"),
        (errno.ENOMEM, "2", "cannot allocate memory", ""),
    ],
)
def test_a_refusal_says_why_and_what_to_do(tmp_path: Path, code: int, paranoid: str, why: str, how: str) -> None:
    root = write(tmp_path, {"proc/sys/kernel/perf_event_paranoid": paranoid})
    refusal = open_failure(refused(code), root)
    assert isinstance(refusal, CannotCount)
    assert why in str(refusal)
    assert how in refusal.how
    assert bool(refusal.how) == bool(how)


def test_fields_are_put_where_the_kernel_says(tmp_path: Path) -> None:
    new_fabric(tmp_path)
    fabric = read_pmu("amd_df", tmp_path)
    assert fabric is not None
    # event bits 0-7 and 8-13 at 32, umask bits 0-7 at 8 and 8-11 at 24
    assert fabric.configs(event=0x41E, umask=0xFFE) == (0x04_0F00_FE1E, 0, 0)
    assert fabric.has("umask", 12) and not fabric.has("umask", 13)


def test_fields_of_other_words_and_single_bits(tmp_path: Path) -> None:
    pmu(tmp_path, "odd", 9, "0", {"event": "config1:4-7", "flag": "config2:63", "broken": "config:x"})
    odd = read_pmu("odd", tmp_path)
    assert odd is not None
    assert odd.configs(event=0xF, flag=1) == (0, 0xF0, 1 << 63)
    for wrong in ({"event": 16}, {"broken": 1}, {"absent": 0}):
        with pytest.raises(CannotCount, match="has no field"):
            odd.configs(**wrong)


def test_named_events_with_scale_and_unit(tmp_path: Path) -> None:
    pmu(
        tmp_path, "uncore_imc_0", 30, "0,32", {"event": "config:0-7", "umask": "config:8-15"},
        {"cas": "event=0x04,umask=0x03", "cas.scale": "6.103515625e-5", "cas.unit": "MiB", "bad": "event=x"},
    )  # fmt: skip
    controller = read_pmu("uncore_imc_0", tmp_path)
    assert controller is not None
    assert controller.cpus == (0, 32)
    assert controller.event_names() == ["bad", "cas"]
    configs, scale, unit = controller.named("cas")
    assert configs == (0x0304, 0, 0)
    assert scale * (1 << 20) == 64
    assert unit == "MiB"
    with pytest.raises(CannotCount, match="unknown format"):
        controller.named("bad")
