"""Downloads that stand still, for pictures and for the states that a real one passes too quickly.

How real ones come about is tested with the real manager, its child processes and the hub server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from cpuchat.base import paths
from cpuchat.models.downloads.state import Download, Order
from cpuchat.models.hub.repository import HubFile, RepoModel

REPO = "bartowski/Qwen2.5-7B-Instruct-GGUF"
COMMIT = "8911e8a47f92bac19d6f5c64a2e2095bd2f7d031"


def model(quantization: str, size: int, *, name: str = "Qwen2.5-7B-Instruct", **more: Any) -> RepoModel:
    """Return one file of `size` bytes; `parts` > 1 splits it."""
    parts = more.pop("parts", 1)
    names = [f"{name}-{quantization}{f'-{n + 1:05}-of-{parts:05}' if parts > 1 else ''}.gguf" for n in range(parts)]
    files = tuple(HubFile(path=path, size=size // parts, sha256=f"{hash_of(path):064x}") for path in names)
    return RepoModel(name=f"{name}-{quantization}", quantization=quantization, files=files, **more)


def hash_of(text: str) -> int:
    """Return a number derived from `text`, the same in every run."""
    return int.from_bytes(text.encode()[-16:], "big")


def download(wanted: RepoModel, share: float = 0.0, **more: Any) -> Download:
    """Return a download of which `share` has arrived."""
    repo, revision = more.pop("repo", REPO), more.pop("revision", COMMIT)
    order = Order(repo=repo, revision=revision, model=wanted, cache="")
    return Download(order=order, **{"done": int(share * wanted.size), **more})


class ShownDownloads:
    """Stands in for models.downloads.manager.Downloads; `opener` is what `ChatApp(downloads=…)` takes."""

    def __init__(self, listed: Iterable[Download] = ()) -> None:
        self.listed = list(listed)
        self.asked: list[tuple[Any, ...]] = []
        self._changed: Callable[[Download], None] = lambda download: None

    def opener(self, changed: Callable[[Download], None]) -> Any:
        self._changed = changed
        return self

    def put(self, now: Download) -> None:
        """Set the state of a download."""
        self.listed = [now if one.id == now.id else one for one in self.listed]
        self._changed(now)

    def all(self) -> list[Download]:
        return list(self.listed)

    def start(self, repo: str, revision: str, wanted: RepoModel, newest_at: float = 0.0) -> Download:
        self.asked.append(("start", repo, revision, wanted))
        begun = download(wanted, repo=repo, revision=revision, state="running")
        self.listed.append(begun)
        self._changed(begun)
        return begun

    def _set(self, id: str, **more: Any) -> None:
        self.asked.append((id, *more.values()))
        self.put(msgspec.structs.replace(next(one for one in self.listed if one.id == id), **more))

    def pause(self, id: str) -> None:
        self._set(id, state="paused")

    def resume(self, id: str) -> None:
        self._set(id, state="running", message="", hint="", code="")

    def cancel(self, id: str, *, discard: bool = False) -> None:
        self.asked.append((id, "cancel", discard))
        self.listed = [one for one in self.listed if one.id != id]

    def restore(self) -> None:
        for one in self.listed:
            self._changed(one)

    async def close(self) -> None:
        self.listed.clear()


def left_by_the_last_run(*downloads: Download) -> ShownDownloads:
    """Return a manager that restores these downloads."""
    paths.downloads_file().parent.mkdir(parents=True, exist_ok=True)
    paths.downloads_file().touch()
    return ShownDownloads(downloads)
