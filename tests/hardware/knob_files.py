"""A simulated server below a temporary root, whose files the shell lines of the knobs really change.

The kernel's part is played after each line: files that hold a choice show all words again with the chosen one in
brackets.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

from cpuchat.hardware.sysfs import Node
from cpuchat.hardware.topology import Core, L3Group, Topology
from tests.hardware.trees import write

CPUFREQ = "sys/devices/system/cpu/cpu{}/cpufreq"
CHOICES = {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise never"}
HANG_GUARD = 180

TOPOLOGY = Topology(
    model="AMD EPYC 9354P 32-Core Processor",
    vendor="AuthenticAMD",
    family=0x19,
    model_number=0x11,
    architecture="x86_64",
    flags=frozenset({"cat_l3", "avx2", "avx512f"}),
    cores=tuple(Core(n, (n,), 0, n // 4, n // 4) for n in range(8)),
    l3_groups=tuple(
        L3Group(n, n, tuple(range(4 * n, 4 * n + 4)), tuple(range(4 * n, 4 * n + 4)), 32 << 20, 0, n, n) for n in (0, 1)
    ),
    nodes=tuple(Node(n, tuple(range(4 * n, 4 * n + 4)), 64 << 30) for n in (0, 1)),
    fabric_links=((0,), (1,)),
    online=tuple(range(8)),
    allowed=tuple(range(8)),
    allowed_nodes=(0, 1),
    memory_total=128 << 30,
)
"""Eight cores, two L3 groups, two NUMA nodes, all of it allowed."""

VIRTUAL = replace(TOPOLOGY, virtual="hypervisor flag in /proc/cpuinfo")


def server(root: Path) -> Path:
    """Write the files of `TOPOLOGY` as a distribution leaves them: set to save power."""
    files = {"sys/devices/system/cpu/cpufreq/boost": "0", "proc/sys/kernel/numa_balancing": "1"}
    for name, words in CHOICES.items():
        files[name] = words.replace(" madvise ", " [madvise] ")
    for cpu in TOPOLOGY.online:
        folder = CPUFREQ.format(cpu)
        files |= {
            f"{folder}/scaling_governor": "powersave",
            f"{folder}/scaling_available_governors": "performance powersave",
            f"{folder}/energy_performance_preference": "balance_performance",
            f"{folder}/energy_performance_available_preferences": "default performance balance_performance power",
        }
    return write(root, files)


def snapshot(root: Path) -> dict[str, bytes]:
    """Return every file below `root`, with its bytes."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def run(line: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell line against `root`, without its `sudo`, then do the kernel's part."""
    tools = root.parent / f"{root.name}-tools"
    tools.mkdir(exist_ok=True)
    for name, body in {
        "sudo": 'exec "$@"',
        "sysctl": f'echo "${{1#*=}}" > "{root}/proc/sys/kernel/numa_balancing"',
    }.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    line = line.replace("/sys/", f"{root}/sys/")
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environment, timeout=HANG_GUARD, check=True
    )
    for name, words in CHOICES.items():
        path = root / name
        text = path.read_text().strip() if path.exists() else "["
        if "[" not in text:
            path.write_text(re.sub(rf"(?<!\S){re.escape(text)}(?!\S)", f"[{text}]", words) + "\n")
    return done
