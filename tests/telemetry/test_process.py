from __future__ import annotations

import mmap
import os
import subprocess
import sys

from cpuchat.telemetry.process import process_memory


def test_private_and_shared_are_told_apart(tmp_path):
    before = process_memory(os.getpid())
    assert before is not None
    assert before.private > 1 << 20
    own = bytearray(b"x" * (32 << 20))
    file = tmp_path / "weights"
    file.write_bytes(b"y" * (32 << 20))
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[i] for i in range(0, len(mapped), 4096)) > 0
        after = process_memory(os.getpid())
    assert after is not None
    assert after.private - before.private > 24 << 20
    assert after.shared - before.shared > 24 << 20
    assert own


def test_a_process_that_is_gone_has_none():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is waited for
        assert process_memory(child.pid) is None
    assert process_memory(child.pid) is None
