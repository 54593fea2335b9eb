"""Deletes models: first what would go and how much room that makes, then the files.

In the Hugging Face cache a model is a link in every revision that has it, and a content in `blobs/` that they share,
also with files of other names. Nothing outside the cache and the folders of the user is ever deleted, whatever a link
leads to, and nothing but what was shown before.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from cpuchat.errors import CpuchatError
from cpuchat.files import is_locked
from cpuchat.hardware.numa.page_cache import mapped_by
from cpuchat.models.fingerprint import stat_fingerprint
from cpuchat.models.library import shared_store
from cpuchat.models.library.model import LocalModel
from cpuchat.models.library.places import entry, is_inside, linked, links, model_files
from cpuchat.models.library.tidying import tidy


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """What deleting a model does. `files` go, in this order, and `freed` bytes with them.

    `stays` are sentences about what stays, and why. `refused` is why it may not be deleted, "" when it may. The rest
    is for `delete`: where the files are, what they were when this was found out, who must not lose them, and contents
    of the cache's shared store that go when nothing else needs them.
    """

    model: LocalModel
    files: tuple[Path, ...] = ()
    freed: int = 0
    stays: tuple[str, ...] = ()
    refused: str = ""
    root: Path = Path()
    state: str = ""
    in_use: tuple[Path, ...] = ()
    shared: tuple[Path, ...] = ()


class _Plan:
    """What goes and what stays, while it is found out. `named` are the links of all revisions, by what they name."""

    def __init__(self, root: Path, named: dict[Path, list[Path]]) -> None:
        self._root = root
        self._named = named
        self._blobs = entry(root / "blobs" / "x").parent
        self.contents: list[Path] = []
        self.links: list[Path] = []
        self.stays: list[str] = []
        self.freed = 0

    def of_folder(self, part: Path) -> None:
        """One file of a model in a folder of the user."""
        if part.is_symlink():
            self._only_link(part)
        else:
            self._content(part)

    def of_cache(self, part: Path) -> None:
        """One file of a model in the Hugging Face cache."""
        if not part.is_symlink():
            if self._named.get(entry(part)):  # while this was looked at, a download was finished
                self.stays.append(f"{part.name} stays: it has a name by now.")
            else:
                self._content(part)
            return
        content, name = linked(part), self._name(part)
        if content.parent != self._blobs:
            self._only_link(part)
            return
        same = self._named.get(content, [])
        mine = [link for link in same if self._name(link) == name]
        self.links += mine
        if others := [link for link in same if link not in mine]:
            self.stays.append(f"The content of {part.name} stays: {others[0].name} has the same.")
        elif os.path.lexists(content):
            self._content(content)
        if any(self._name(link) == name for found in self._named.values() for link in found if link not in mine):
            self.stays.append(f"Another version of {part.name}, of another revision, stays.")

    def _only_link(self, part: Path) -> None:
        self.links.append(part)
        content = Path(os.path.realpath(part))
        if content.exists():
            self.stays.append(f"{part.name} is a link: {content}, where it leads to, stays.")

    def _content(self, path: Path) -> None:
        self.contents.append(path)
        status = path.lstat()
        if path.is_symlink():  # into the store that repositories share
            return
        if status.st_nlink == 1:
            self.freed += status.st_size
        else:
            self.stays.append(f"{path.name} has another name on this disk, which keeps its content.")

    def _name(self, link: Path) -> Path:
        """`snapshots/REVISION/a/b.gguf` → `a/b.gguf`."""
        return Path(*link.relative_to(self._root / "snapshots").parts[1:])


def plan_deletion(model: LocalModel, root: Path | None, in_use: Collection[Path]) -> Deletion:
    """What deleting `model` would do. `root`: the folder, or the repository of the cache, that it belongs to."""
    plan = _look(model, root, in_use)
    users = mapped_by(plan.files[0]) if plan.freed else []  # who has one part in memory has them all
    if users:
        told = f"{', '.join(users)} uses it: the room is free when that ends."
        return msgspec.structs.replace(plan, stays=(*plan.stays, told))
    return plan


def delete(deletion: Deletion) -> int:
    """Delete; returns the bytes that are free now.

    Raises:
        CpuchatError: it is refused, there is something else now than `deletion` tells, or the system does not let it
            happen; what was deleted before stays deleted.
    """
    now = deletion if deletion.refused else _look(deletion.model, deletion.root, deletion.in_use)
    if now.refused:
        raise CpuchatError(f"{deletion.model.name} is not deleted. {now.refused}")
    if (now.files, now.state) != (deletion.files, deletion.state):
        raise CpuchatError(f"{deletion.model.name} is not deleted: its files have changed meanwhile.", "Look again.")
    for file in now.files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise CpuchatError(
                f"Cannot delete {file}: {error.strerror}.", "Check the permissions of its folder."
            ) from None
    kept = shared_store.sweep(now.root.parent, now.shared)
    if now.model.source == "huggingface" and not _downloading(now.root):
        tidy(now.root)
    return now.freed - kept


def _look(model: LocalModel, root: Path | None, in_use: Collection[Path]) -> Deletion:
    def refused(why: str) -> Deletion:
        return Deletion(model=model, refused=why)

    if model.source == "demo":
        return refused("The demo models are a part of cpuchat.")
    whole = model_files(model.path)
    parts = [part for part in whole if os.path.lexists(part)]
    if not parts:
        return refused(f"{model.path.name} is gone already.")
    if root is None or not all(is_inside(part.parent, root) for part in parts):
        return refused(f"{model.path.name} lies outside of the folders and the cache that cpuchat looks after.")
    used = {os.path.realpath(path) for path in in_use}
    if any(os.path.realpath(part) in used for part in parts):
        return refused("It is in use: load another model first.")
    cached = model.source == "huggingface"
    try:
        plan = _Plan(root, links(root) if cached else {})
        for part in parts:
            (plan.of_cache if cached else plan.of_folder)(part)
        contents = list(dict.fromkeys(plan.contents))
        state = stat_fingerprint([path for path in contents if path.exists()])
    except OSError as error:
        return refused(f"Cannot look at {error.filename}: {error.strerror}.")
    # Which content a missing part will be, nobody here knows.
    arriving = _downloading(root) if cached else set()
    if arriving and (len(parts) < len(whole) or arriving & {path.name.partition(".")[0] for path in contents}):
        return refused("It is downloaded just now: cancel that first.")
    shared = shared_store.freed_by(root.parent, [path for path in contents if path.is_symlink()])
    if any(path.is_symlink() for path in contents) and not shared:
        plan.stays.append("Its content stays in the cache: other repositories have it, too.")
    if model.projector is not None:
        plan.stays.append(f"{model.projector.name}, the part for images or sound beside it, stays.")
    return Deletion(
        model=model,
        # Contents first: a link without content is seen and can be deleted again.
        files=(*contents, *dict.fromkeys(plan.links)),
        freed=plan.freed + sum(shared.values()),
        stays=tuple(plan.stays),
        root=root,
        state=state,
        in_use=tuple(in_use),
        shared=tuple(shared),
    )


def _downloading(root: Path) -> set[str]:
    """Hashes of the contents of a cached repository that a program downloads: it holds huggingface_hub's lock."""
    try:
        locks = list((root.parent / ".locks" / root.name).iterdir())
    except OSError:
        return set()
    return {lock.stem for lock in locks if lock.suffix == ".lock" and is_locked(lock)}
