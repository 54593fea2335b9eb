"""The systemd unit of the collector, for the user to read and install. Settings: systemd.exec(5)."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from cpuchat.hardware.collector import NOTHING_TO_READ
from cpuchat.hardware.counters.collector_file import DEFAULT

NAME = "cpuchat-bwd"
_HOMES = ("/home", "/root", "/run/user")

_UNIT = """\
# {name}.service: reads memory-bandwidth and power counters, so that cpuchat can show them without rights.
#
# Install:   cpuchat counters unit | sudo tee /etc/systemd/system/{name}.service
#            sudo systemctl daemon-reload
#            sudo systemctl enable --now {name}
# Look:      systemctl status {name}; cat {file}
# Remove:    sudo systemctl disable --now {name}; sudo rm /etc/systemd/system/{name}.service
#
# It may read performance counters (CAP_PERFMON) and /dev/hsmp, and write {file}; nothing else.
# The figures are of the whole machine, and everyone who can log in can read them.

[Unit]
Description=Memory bandwidth and power counters for cpuchat
ConditionVirtualization=!container

[Service]
ExecStart={interpreter} -m cpuchat.hardware.collector --output {file}
{user}
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
ProtectHome={home}
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


def unit(interpreter: Path | None = None, package: Path | None = None) -> str:
    """The unit's text.

    A user made for the service alone runs it; where that user could not reach the interpreter or the package, such as
    in a closed home folder, the owner of what is closed does.

    Args:
        interpreter: default: the one that runs this.
        package: the folder of cpuchat; default: this one.
    """
    python = interpreter or Path(sys.executable)
    code = package or Path(__file__).resolve().parent.parent
    places = (python, python.resolve(), code)
    shut = next((folder for place in places if (folder := _closed(place)) is not None), None)
    user = "DynamicUser=yes" if shut is None else f"User={_owner(shut)}"
    home = "read-only" if any(str(place).startswith(_HOMES) for place in places) else "yes"
    return _UNIT.format(
        name=NAME,
        file=DEFAULT,
        folder=DEFAULT.parent.name,
        interpreter=_quoted(python),
        user=user,
        home=home,
        nothing=NOTHING_TO_READ,
    )


def _closed(place: Path) -> Path | None:
    """What keeps other users from `place`: the innermost closed folder on the way, or itself."""
    for path in (place, *place.parents):
        try:
            mode = path.stat().st_mode
        except OSError:
            continue  # a closed folder further out says why
        listed = path == place and stat.S_ISDIR(mode)  # Python looks into the package's folder
        needed = stat.S_IXOTH | (stat.S_IROTH if listed else 0)
        if mode & needed != needed:
            return path
    return None


def _owner(path: Path) -> str:
    """Never who owns what a link leads to: that could be the administrator."""
    try:
        number = path.lstat().st_uid
    except OSError:
        number = os.getuid()
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _quoted(path: Path) -> str:
    """As systemd reads a word of a command: `%` doubled, quoted where it has spaces or other special characters."""
    text = str(path).replace("%", "%%")
    if any(c in text for c in " \t\"'\\;$"):
        text = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
        return f'"{text}"'
    return text
