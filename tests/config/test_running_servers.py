"""Tests finding the servers that run."""

from __future__ import annotations

import os
import subprocess
import sys

from cpuchat.base import paths
from cpuchat.config.servers import RunningServer, recorded, running_servers

SERVER = RunningServer(url="http://127.0.0.1:9", model="tiny", pid=os.getpid())
_KILLED = """
import os, signal
from cpuchat.config.servers import RunningServer, recorded
with recorded(RunningServer("http://127.0.0.1:8", "killed", os.getpid())):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_is_found_while_it_runs() -> None:
    assert running_servers() == []
    app = RunningServer("", "", pid=1)
    with recorded(SERVER), recorded(app):
        assert running_servers() == [SERVER] and app in running_servers(or_apps=True)
    assert running_servers(or_apps=True) == []


def test_a_killed_server_is_forgotten() -> None:
    subprocess.run([sys.executable, "-c", _KILLED])
    assert len(list(paths.servers_dir().iterdir())) == 1
    assert running_servers() == []
    assert list(paths.servers_dir().iterdir()) == []


def test_files_of_others_and_folders_that_cannot_be_written_do_no_harm() -> None:
    with recorded(SERVER):
        (paths.servers_dir() / f"{os.getpid()}.json").write_text("{")
        assert running_servers() == []
    paths.servers_dir().rmdir()
    paths.servers_dir().write_text("not a folder")
    with recorded(SERVER):
        assert running_servers() == []
