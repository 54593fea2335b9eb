from __future__ import annotations

import os
import subprocess
import sys
from subprocess import PIPE

from cpuchat.telemetry.machine import process_memory

_HOLDER = """
import mmap, sys
def wait():
    print(flush=True)
    sys.stdin.readline()
wait()
own = mmap.mmap(-1, 32 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
for at in range(0, 32 << 20, 4096):
    own[at] = 1 + mapped[at]
wait()
"""


def test_private_and_shared_are_told_apart(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(b"y" * (32 << 20))
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(file)], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdin and child.stdout and child.stdout.readline()
        before = process_memory(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline()
        after = process_memory(child.pid)
        child.stdin.close()
    assert before is not None and after is not None
    assert 1 << 20 < before.private < 32 << 20
    assert after.private - before.private >= 32 << 20
    assert after.shared - before.shared >= 32 << 20


def test_a_process_that_is_gone_has_none():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is waited for
        assert process_memory(child.pid) is None
    assert process_memory(child.pid) is None
