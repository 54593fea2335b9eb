"""The collector as root installs it: one file that only root can change, and its systemd unit (systemd.exec(5)).

A privileged service must not run code that a user can write: the copy is in `PROGRAM`, and the system's interpreter
runs it, without anything from a home folder or a virtual environment.
"""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

from cpuchat.base.errors import UsageError
from cpuchat.hardware.collector import NOTHING_TO_READ
from cpuchat.hardware.counters.collector_file import DEFAULT

NAME = "cpuchat-bwd"
PROGRAM = Path("/usr/local/lib/cpuchat/cpuchat-bwd")
_INTERPRETERS = ("/usr/bin/python3", "/usr/local/bin/python3")
_LEAST_PYTHON = (3, 11)
_ROOMS = ("__init__.py", "base/__init__.py", "base/errors.py", "base/text.py", "hardware/**/*.py", "telemetry/*.py")
_MAIN = "import sys\n\nfrom cpuchat.hardware.collector import main\n\nsys.exit(main())\n"
_EPOCH = (2026, 1, 1, 0, 0, 0)

_UNIT = """\
# {name}.service: reads memory bandwidth and power counters, so that cpuchat can show them without privileges.
#
# Install:   cpuchat counters program | sudo install -D -o root -g root -m 0755 /dev/stdin {program}
#            cpuchat counters unit | sudo tee /etc/systemd/system/{name}.service
#            sudo systemctl daemon-reload
#            sudo systemctl enable --now {name}
# Status:    systemctl status {name}; cat {file}
# Remove:    sudo systemctl disable --now {name}; sudo rm /etc/systemd/system/{name}.service
#            sudo rm -r {folder_of_program}
# Update:    the first line of Install again, then sudo systemctl restart {name}
#
# It runs a copy that only root can change, not the program in your own folders.
# It can read performance counters (CAP_PERFMON) and /dev/hsmp, and write {file}; nothing else.
# The figures cover the whole machine, and every local user can read them.

[Unit]
Description=Memory bandwidth and power counters for cpuchat
ConditionVirtualization=!container

[Service]
ExecStart={interpreter} -I -S {program} --output {file}
DynamicUser=yes
AmbientCapabilities=CAP_PERFMON
CapabilityBoundingSet=CAP_PERFMON
RuntimeDirectory={folder}
RuntimeDirectoryMode=0755
UMask=0022
Restart=on-failure
RestartSec=10
RestartPreventExitStatus={nothing}
NoNewPrivileges=yes
DevicePolicy=closed
DeviceAllow=/dev/hsmp r
LimitNOFILE=4096
LockPersonality=yes
MemoryMax=256M
PrivateNetwork=yes
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHome=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectSystem=strict
RestrictAddressFamilies=none
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service perf_event_open
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""


def unit(interpreter: Path | None = None, program: Path = PROGRAM) -> str:
    """Return the text of the systemd unit.

    Args:
        interpreter: default: the system's.
        program: where `program_file` will be.

    Raises:
        UsageError: a user could change what the service would run.
    """
    python = interpreter or _system_python()
    for place in (python, program):
        if (folder := changeable(place)) is not None:
            raise UsageError(
                f"The collector would run privileged, but users other than root can change {folder}.",
                f"Restrict it to root: sudo chown root:root {folder} && sudo chmod go-w {folder}",
            )
    return _UNIT.format(
        name=NAME,
        file=DEFAULT,
        folder=DEFAULT.parent.name,
        interpreter=_quoted(python),
        program=program,
        folder_of_program=program.parent,
        nothing=NOTHING_TO_READ,
    )


def program_file() -> bytes:
    """Return the collector as one file that Python runs (zipapp), with nothing but the standard library."""
    package = Path(__file__).resolve().parent.parent
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(_sources(package)):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content)
    return b"#!/usr/bin/python3 -IS\n" + data.getvalue()


def _sources(package: Path) -> Iterable[tuple[str, str]]:
    yield "__main__.py", _MAIN
    for pattern in _ROOMS:
        for file in package.glob(pattern):
            yield f"cpuchat/{file.relative_to(package).as_posix()}", file.read_text(encoding="utf-8")


def changeable(place: Path, owner: int = 0) -> Path | None:
    """Return the path that lets users other than `owner` (root) replace `place`: the file itself, a parent folder, or
    one of a link's target; None if there is none. Paths that do not exist yet are ignored.
    """
    real = Path(os.path.realpath(place))
    for path in dict.fromkeys((real, *real.parents, place, *place.parents)):
        try:
            found = path.lstat()
        except OSError:
            continue
        writable = 0 if stat.S_ISLNK(found.st_mode) else found.st_mode & stat.S_IWOTH
        if found.st_gid != 0 and not stat.S_ISLNK(found.st_mode):
            writable |= found.st_mode & stat.S_IWGRP
        if found.st_uid != owner or writable:
            return path
    return None


def _system_python() -> Path:
    """Return the system's Python. Raises UsageError if none is recent enough and changeable by root only."""
    why = ""
    for name in (*_INTERPRETERS, str(Path(sys.executable).resolve())):
        python = Path(name)
        if not python.exists():
            continue
        if (folder := changeable(python)) is not None:
            why = f" Users other than root can change {folder}."
        elif not _open_to_all(python):
            why = f" Other users cannot run {python}."
        elif _version_of(python) >= _LEAST_PYTHON:
            return python
    raise UsageError(
        f"The collector needs Python {'.'.join(map(str, _LEAST_PYTHON))} or newer that only root can change.{why}",
        "Install the system's Python: sudo apt-get install python3, or sudo dnf install python3.",
    )


def _open_to_all(place: Path) -> bool:
    """Return whether every user may run it: the service runs as a dynamic user."""
    try:
        return all(path.stat().st_mode & stat.S_IXOTH for path in (place, *Path(os.path.realpath(place)).parents))
    except OSError:
        return False


def _version_of(python: Path) -> tuple[int, ...]:
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=20)
        return tuple(int(part) for part in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def _quoted(path: Path) -> str:
    """Quote a word for systemd: `%` doubled, in quotes if it has spaces or other special characters."""
    text = str(path).replace("%", "%%")
    if any(c in text for c in " \t\"'\\;$"):
        text = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
        return f'"{text}"'
    return text
