"""Tests the launcher: real programs under real policies, real refusals, and what it tells them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.hardware.numa import mempolicy

TELL = """
import json, os, sys
from cpuchat.hardware.numa.mempolicy import in_effect
print(json.dumps({"pid": os.getpid(), "memory": in_effect()[0], "refused": in_effect()[1], "argv": sys.argv[1:],
    "cpus": sorted(os.sched_getaffinity(0)), "env": {k: v for k, v in os.environ.items() if k.startswith("CPUCHAT_")}}))
"""
PROGRAM = [sys.executable, "-c", TELL]
LAUNCH = [sys.executable, "-P", "-m", "cpuchat.hardware.numa.mempolicy"]

# What containers do: a filter on system calls that inherits over exec, then the program. linux/filter.h, seccomp(2).
FILTERED = """
import ctypes, os, struct, sys
blocked = [int(n) for n in sys.argv[1].split(",")]
code = struct.pack("=HBBI", 0x20, 0, 0, 0)  # load the call's number
for left, number in zip(range(len(blocked), 0, -1), blocked):
    code += struct.pack("=HBBI", 0x15, left, 0, number)  # equal: to the last instruction
code += struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000) + struct.pack("=HBBI", 0x06, 0, 0, 0x50000 | 1)  # allow, EPERM
memory = ctypes.create_string_buffer(code, len(code))
program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(memory)))
libc = ctypes.CDLL(None, use_errno=True)
for call in ((38, 1, 0, 0, 0), (22, 2, ctypes.byref(program), 0, 0)):
    if libc.prctl(*call):
        sys.exit(os.strerror(ctypes.get_errno()))
os.execv(sys.argv[2], sys.argv[2:])
"""


def run(*command: str) -> dict[str, object]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("mode", ["bind", "interleave"])
def test_a_program_runs_under_the_policy(mode: str) -> None:
    words = f"{mode}:{mempolicy.allowed_nodes()[0]}"
    told = run(*LAUNCH, "--memory", words, "--", *PROGRAM, "--memory", "a b")
    assert told["memory"] == words
    assert told["refused"] == ""
    assert told["argv"] == ["--memory", "a b"]
    own_folders = {name: value for name, value in os.environ.items() if name.startswith("CPUCHAT_")}
    assert told["env"] == {"CPUCHAT_MEMORY": words, **own_folders}


def test_it_becomes_the_program_and_keeps_the_process_and_programs_of_the_program_inherit_the_policy() -> None:
    node = mempolicy.allowed_nodes()[0]
    nested = "import os, subprocess, sys; print(os.getpid(), flush=True); subprocess.run(sys.argv[1:], check=True)"
    command = [*LAUNCH, "--memory", f"bind:{node}", "--", sys.executable, "-c", nested, *PROGRAM]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    pid, told = process.communicate()[0].splitlines()
    assert int(pid) == process.pid and json.loads(told)["memory"] == f"bind:{node}"


def test_a_refusal_lets_the_program_run_and_tells_it() -> None:
    absent = max(mempolicy.allowed_nodes()) + 700
    told = run(*LAUNCH, "--memory", f"bind:{absent}", "--", *PROGRAM)
    assert told["memory"] == "local"
    assert f"node {absent} is missing" in str(told["refused"])
    assert told["cpus"] == sorted(os.sched_getaffinity(0))


def test_a_container_that_blocks_the_calls() -> None:
    numbers = ",".join(map(str, mempolicy.SYSTEM_CALLS[os.uname().machine]))
    command = [*LAUNCH, "--memory", "interleave", "--", *PROGRAM]
    told = run(sys.executable, "-c", FILTERED, numbers, *command)
    assert told["memory"] == ""
    assert "--cap-add SYS_NICE" in str(told["refused"])


def test_nothing_is_added_where_nothing_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mempolicy.launch_command("local", ["prog", "x"]) == ["prog", "x"]
    with pytest.raises(UsageError):
        mempolicy.launch_command("nonsense", ["prog"])
    monkeypatch.setattr(sys, "platform", "darwin")
    assert mempolicy.launch_command("interleave", ["prog", "x"]) == ["prog", "x"]
