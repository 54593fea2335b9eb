"""Deletes models by a plan of what would go and how much space that frees, and verifies their content by its hash.

In the Hugging Face cache a model is a link in every revision that has it, and a content in `blobs/`, named by its hash,
that these links share, also with files of other names. Nothing outside the cache and the user's folders is ever
deleted, wherever a link leads, and nothing but what the plan showed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, ModelDamaged
from cpuchat.base.files import is_locked
from cpuchat.hardware.numa.residency import mapped_by
from cpuchat.measure import store
from cpuchat.measure.subject import Subject
from cpuchat.models.file_names import stat_fingerprint
from cpuchat.models.gguf.header import MAX_LINKS, files_beside
from cpuchat.models.library.places import LocalModel, entry, is_inside, linked, links
from cpuchat.models.ollama import file_name


class Deletion(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for deleting a model. `files` are deleted in this order, which frees `freed` bytes.

    `stays` are sentences about what stays and why. `refused` is why it may not be deleted, "" when it may. The rest is
    for `delete`: the folder or repository, the files' fingerprint at the time of planning, and files in use."""

    model: LocalModel
    files: tuple[Path, ...] = ()
    freed: int = 0
    stays: tuple[str, ...] = ()
    refused: str = ""
    root: Path = Path()
    state: str = ""
    in_use: tuple[Path, ...] = ()


class _Plan:
    """Collects what is deleted and what is kept. `names` are the links of all revisions, by the entry that each leads
    to."""

    def __init__(self, root: Path, names: dict[Path, list[Path]]) -> None:
        self._root = root
        self._names = names
        self._blobs = entry(root / "blobs" / "x").parent
        self.contents: list[Path] = []
        self.links: list[Path] = []
        self.stays: list[str] = []
        self.freed = 0

    def add_of_cache(self, part: Path) -> None:
        """Add one file of a model in the Hugging Face cache."""
        content = next((one for one, found in self._names.items() if part in found), None) or linked(part)
        name = self._name(part)
        if content.parent != self._blobs and part.is_symlink():
            self.add_only_link(part)
            return
        same = self._names.get(content, [])
        mine = [path for path in same if self._name(path) == name]
        for path in mine:
            self.links.append(path) if path.is_symlink() else self.add_content(path)
        if others := [path for path in same if path not in mine]:
            self.stays.append(f"The content of {part.name} stays: {others[0].name} shares it.")
        elif content.parent == self._blobs and os.path.lexists(content):
            self.add_content(content)
        if any(self._name(path) == name for found in self._names.values() for path in found if path not in mine):
            self.stays.append(f"Another revision's version of {part.name} stays.")

    def add_only_link(self, part: Path) -> None:
        self.links.append(part)
        content = Path(os.path.realpath(part))
        if content.exists():
            self.stays.append(f"{part.name} is a link: its target {content} stays.")

    def add_content(self, path: Path) -> None:
        if path not in self.contents:
            self.contents.append(path)

    def count(self) -> None:
        """Add up what the contents free: one that has hard links elsewhere, or is in the store that repositories share,
        frees nothing."""
        files = [(path, path.lstat()) for path in self.contents if not path.is_symlink()]
        ours = Counter((status.st_dev, status.st_ino) for _, status in files)
        for path, status in files:
            n = ours.pop((status.st_dev, status.st_ino), 0)
            if n == status.st_nlink:
                self.freed += status.st_size
            elif n:
                self.stays.append(f"{path.name} has another hard link, which keeps its content.")

    def _name(self, link: Path) -> Path:
        """Return `a/b.gguf` for `snapshots/REVISION/a/b.gguf`."""
        return Path(*link.relative_to(self._root / "snapshots").parts[1:])


def plan_deletion(model: LocalModel, root: Path | None, in_use: Collection[Path]) -> Deletion:
    """Return what deleting `model` would do. `root`: the user's folder or cached repository that it belongs to."""
    plan = _plan(model, root, in_use)
    users = mapped_by(plan.files[0]) if plan.freed else []  # who has mapped one part has mapped them all
    if users:
        sentence = f"In use by {', '.join(users)}: the space is freed when it exits."
        return msgspec.structs.replace(plan, stays=(*plan.stays, sentence))
    return plan


def delete(deletion: Deletion) -> int:
    """Carry out a plan; returns the bytes that were freed. Raises CpuchatError: it is refused, the files are no longer
    those of the plan, or the system refuses; what was deleted before that stays deleted."""
    now = deletion if deletion.refused else _plan(deletion.model, deletion.root, deletion.in_use)
    if now.refused:
        raise CpuchatError(f"{deletion.model.name} was not deleted. {now.refused}")
    if (now.files, now.state) != (deletion.files, deletion.state):
        raise CpuchatError(f"{deletion.model.name} was not deleted: its files have changed.", "Refresh and try again.")
    for file in now.files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise CpuchatError(
                f"Cannot delete {file}: {error.strerror}.", "Check the permissions of its folder."
            ) from None
    if now.model.source == "huggingface" and not _downloading(now.root):
        _tidy(now.root)
    return now.freed


def _plan(model: LocalModel, root: Path | None, in_use: Collection[Path]) -> Deletion:
    def refused(why: str) -> Deletion:
        return Deletion(model=model, refused=why)

    if model.source == "demo":
        return refused("The demo models are part of cpuchat and cannot be deleted.")
    whole = files_beside(model.path)
    parts = [part for part in whole if os.path.lexists(part)]
    if not parts:
        return refused(f"{file_name(model.path)} no longer exists.")
    if root is None or not all(is_inside(part.parent, root) for part in parts):
        return refused(f"{file_name(model.path)} is outside the Hugging Face cache and your model folders.")
    used = {os.path.realpath(path) for path in in_use}
    if any(os.path.realpath(part) in used for part in parts):
        return refused("It is in use: load another model first.")
    cached = model.source == "huggingface"
    try:
        plan = _Plan(root, links(root) if cached else {})
        for part in parts:
            if cached:
                plan.add_of_cache(part)
            elif part.is_symlink():
                plan.add_only_link(part)
            else:
                plan.add_content(part)
        plan.count()
        contents = plan.contents
        state = stat_fingerprint([path for path in contents if path.exists()])
    except OSError as error:
        return refused(f"Cannot read {error.filename}: {error.strerror}.")
    # Which content a missing part will have is not known here.
    arriving = _downloading(root) if cached else set()
    if arriving and (len(parts) < len(whole) or arriving & {path.name.partition(".")[0] for path in contents}):
        return refused("It is being downloaded: cancel the download first.")
    if any(path.is_symlink() for path in contents):
        plan.stays.append("Its content is kept in the store that repositories share: `hf cache prune` frees it.")
    if model.projector is not None:
        plan.stays.append(f"{model.projector.name}, its multimodal projector, is kept.")
    return Deletion(
        model=model,
        # Contents first: a link without content is listed and can be deleted again.
        files=(*contents, *dict.fromkeys(plan.links)),
        freed=plan.freed,
        stays=tuple(plan.stays),
        root=root,
        state=state,
        in_use=tuple(in_use),
    )


def _downloading(root: Path) -> set[str]:
    """Return the hashes of the contents of a cached repository whose huggingface_hub lock another program holds."""
    try:
        locks = list((root.parent / ".locks" / root.name).iterdir())
    except OSError:
        return set()
    return {lock.stem for lock in locks if lock.suffix == ".lock" and is_locked(lock)}


def _tidy(root: Path) -> None:
    """Remove empty folders of a repository, and references to revisions that no longer exist.

    Such a reference makes other programs call the whole repository corrupted. What cannot be removed stays, and so does
    what links lead to out of `root`."""

    def files(folder: Path) -> list[Path]:
        found = [Path(base, name) for base, _, names in os.walk(folder) for name in names]
        return [file for file in found if is_inside(file.parent, root)]

    def remove_empty(folder: Path) -> None:
        for base, _, _ in os.walk(folder, topdown=False):
            if is_inside(Path(base), root):
                with contextlib.suppress(OSError):  # not empty
                    Path(base).rmdir()

    remove_empty(root / "snapshots")
    try:
        left = {path.name for path in (root / "snapshots").iterdir()}
    except OSError:
        left = set()
    for reference in files(root / "refs"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if reference.read_text(encoding="ascii").strip() not in left:
                reference.unlink()
    for marker in files(root / ".no_exist"):  # .no_exist/REVISION/NAME: this revision has no such file
        with contextlib.suppress(OSError):
            if marker.relative_to(root / ".no_exist").parts[0] not in left and not marker.stat().st_size:
                marker.unlink()
    remove_empty(root)


Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total). An exception from it ends the check."""

_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_CHUNK = 4 << 20


class Verification(NamedTuple):
    """The result of a check; `words` explain it. "unchecked": there is no checksum to compare with."""

    state: Literal["verified", "damaged", "unchecked"]
    words: str


UNCHECKED = "no checksum known: neither a cache nor a download keeps one here"


def check_content(parts: list[Path], progress: Progress) -> Verification:
    """Read all of a model's files and compare their hashes: about 1 GB/s where the disk is that fast. Raises
    ModelDamaged: a file is missing or cannot be read."""
    try:
        announced = [_announced(part) for part in parts]
        total = sum(part.stat().st_size for part in parts)
        if not all(announced):
            return Verification("unchecked", UNCHECKED)
        done = 0
        for part, wanted in zip(parts, announced, strict=True):
            if file_digest(part, wanted, lambda n, before=done: progress(before + n, total)) != wanted:
                words = f"{part.name} is damaged: its checksum differs from the published one. Download it again."
                return Verification("damaged", words)
            done += part.stat().st_size
    except OSError as error:
        raise ModelDamaged(f"Cannot read {error.filename}: {error.strerror}.", "Check the disk.") from None
    return Verification("verified", f"{'SHA-256' if len(announced[0]) == 64 else 'git hash'} matches")


def _announced(part: Path) -> str:
    """Return the hash that a file was published with: SHA-256 for large ones, else git's; "" where none is kept.

    The cache of Hugging Face, and Ollama's, name a content by it; `hf download --local-dir` keeps it beside the file.
    """
    for _ in range(MAX_LINKS):
        root = next((one for one in part.parents if one.name.startswith("models--")), None)
        if root is not None and not part.is_symlink():  # or a copy of the content
            part = next((content for content, found in links(root).items() if part in found), part)
        if part.parent.name == "blobs" and _HASH.fullmatch(part.name.removeprefix("sha256-")):
            return part.name.removeprefix("sha256-")
        if not part.is_symlink():
            break
        part = linked(part)
    for base in list(part.parents)[:3]:
        file = base / ".cache/huggingface/download" / f"{part.relative_to(base)}.metadata"
        with contextlib.suppress(OSError, ValueError):
            lines = paths.read_text(file).split("\n")  # revision, hash, seconds since 1970
            if len(lines) > 2 and _HASH.fullmatch(lines[1]) and part.stat().st_mtime <= float(lines[2]) + 1:
                return lines[1]
    return ""


def content_sha256(path: Path) -> str:
    """Return the SHA-256 of a file: as it was published where that is known, else computed once and kept. Raises
    ModelDamaged: it cannot be read."""
    try:
        if len(known := _announced(path)) == 64:
            return known
        file = Subject(model=(stat_fingerprint([path]),))
        if (kept := store.find(file, "SHA-256", str)) is not None:
            return kept.value
        found = file_digest(path, "0" * 64, lambda _: None)
        store.keep(file, "SHA-256", found)
        return found
    except OSError as error:
        raise ModelDamaged(f"Cannot read {error.filename}: {error.strerror}.", "Check the disk.") from None


def file_digest(path: Path, wanted: str, progress: Callable[[int], None]) -> str:
    """Return the hash of a file in hex digits, of the kind of `wanted`: SHA-256, else git's blob hash (SHA-1 over
    `blob SIZE\\0` and the content). 1 GB takes 0.6 s. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256() if len(wanted) == 64 else hashlib.sha1(b"blob %d\0" % size)
        done = 0
        while piece := file.read(_CHUNK):
            digest.update(piece)
            done += len(piece)
            progress(done)
    return digest.hexdigest()
