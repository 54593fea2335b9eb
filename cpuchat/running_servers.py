"""The `cpuchat serve` processes of this user: a file each, locked by the server's process for as long as it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from cpuchat import paths
from cpuchat.files import file_lock, is_locked, read_json


class RunningServer(msgspec.Struct, frozen=True):
    """A server of this user: its address without `/v1`, and the name of the model that it serves."""

    url: str
    model: str
    pid: int


@contextlib.contextmanager
def recorded(server: RunningServer) -> Iterator[None]:
    """Record a server inside the block. If the folder cannot be written, others do not see it."""
    file = paths.servers_dir() / f"{server.pid}.json"
    unfinished = file.with_suffix(".tmp")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            unfinished.touch(0o600)
            unfinished.write_bytes(msgspec.json.encode(server))
            stack.enter_context(file_lock(unfinished))  # it holds under the new name; unlocked, others would remove it
            stack.callback(file.unlink, missing_ok=True)
            unfinished.replace(file)
        yield


def running_servers() -> list[RunningServer]:
    """Return the servers that run now, and remove the records of those that were killed."""
    found: list[RunningServer] = []
    with contextlib.suppress(OSError):
        for file in sorted(paths.servers_dir().glob("*.json")):
            # gone meanwhile, or not ours
            with contextlib.suppress(OSError, ValueError):
                if is_locked(file):
                    found.append(read_json(file, msgspec.json.Decoder(RunningServer).decode))
                else:
                    file.unlink(missing_ok=True)
    return found
