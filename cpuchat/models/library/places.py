"""Finds model files: in the package, in the Hugging Face cache, in the user's folders.

The cache is walked directly: importing huggingface_hub costs more than the whole of `cpuchat --help`. Its layout is
that of huggingface_hub 1.x: `models--OWNER--NAME/refs/main` names a revision, `snapshots/REVISION/` holds links to
the files of `blobs/`, where a partial download is called `*.incomplete`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from cpuchat import files, paths
from cpuchat.models.gguf.header import split_parts
from cpuchat.models.library.model import Source

DEMO_FILES = {
    "demo": "cpuchat-demo-8m-q8_0.gguf",
    "demo-q4": "cpuchat-demo-8m-q4_k_m.gguf",
    "demo-draft": "cpuchat-demo-draft-1m-q8_0.gguf",
}
_DEMO_CHAT = ("demo", "demo-q4")
INCOMPLETE = ".incomplete"
_MAGIC = b"GGUF"
_REPO, _BLOBS = "models--", "blobs"
_MOST_FILES, _MOST_BESIDE = 10_000, 200  # in a folder that is not searched below; nobody waits for more headers


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A file that may be a model. `root` is the folder under which it was found: nothing outside is ever deleted."""

    path: Path
    source: Source
    root: Path
    repo: str = ""
    projector: Path | None = None

    @property
    def name_in_repo(self) -> str:
        """`Q8_0/m.gguf` for a file in the Hugging Face cache, whatever its revision."""
        return str(Path(*self.path.relative_to(self.root / "snapshots").parts[1:]))

    @property
    def is_unfinished(self) -> bool:
        """Return whether it is a partial download, or a complete one that no snapshot links to."""
        folder = self.path.parent
        return folder.name == _BLOBS and folder.parent.name.startswith(_REPO)


def hub_cache() -> Path:
    """Return the Hugging Face cache, found as huggingface_hub finds it."""
    for variable, inside in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        value = os.environ.get(variable)
        if value:
            return paths.expanded(os.path.expandvars(value)) / inside
    base = os.environ.get("XDG_CACHE_HOME")
    return paths.expanded(os.path.expandvars(base or "~/.cache")) / "huggingface/hub"


def model_files(path: Path) -> list[Path]:
    """Return all files of a model by the path of one of them, whether they exist or not."""
    return split_parts(path) or [path]


def repo_folder(cache: Path, repo: str) -> Path:
    """Return the folder of the repository "owner/name" in the cache."""
    return cache / f"{_REPO}{repo.replace('/', '--', 1)}"


def entry(path: Path) -> Path:
    """Resolve the links in the folder of `path`, but not `path` itself: the same for all ways to one entry."""
    return Path(os.path.realpath(path.parent), path.name)


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether `path` is in `folder` with all links resolved."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def linked(link: Path) -> Path:
    """Return the entry that a link leads to, which may be a link itself.

    Raises:
        OSError: it is not a link.
    """
    return entry(link.parent / link.readlink())


def links(root: Path) -> dict[Path, list[Path]]:
    """Return the links of all revisions of a cached repository, by the entry that each leads to."""
    found: dict[Path, list[Path]] = {}
    for base, _, names in os.walk(root / "snapshots"):
        for path in (Path(base, name) for name in names):
            with contextlib.suppress(OSError):  # not a link
                found.setdefault(linked(path), []).append(path)
    return found


def is_demo(model: Path) -> bool:
    """Return whether a file is one of the two demo models to chat with."""
    return os.path.realpath(model) in (os.path.realpath(paths.demo_dir() / DEMO_FILES[name]) for name in _DEMO_CHAT)


def all_places(cache: Path, folders: Iterable[Path], files: Iterable[Path] = ()) -> Iterator[Place]:
    """Yield every model once, also if it can be reached in several ways: demo, cache, folders, single `files`."""
    seen: set[str] = set()
    single = (Place(path=file, source="folder", root=file.parent) for file in files)
    for place in (*_demo(), *_in_cache(cache), *_in_folders(folders, cache), *single):
        real = os.path.realpath(place.path)
        if real not in seen:
            seen.add(real)
            yield place


def _demo() -> Iterator[Place]:
    demo = paths.demo_dir()
    for name in DEMO_FILES.values():
        if (demo / name).is_file():
            yield Place(path=demo / name, source="demo", root=demo)


def _in_folders(folders: Iterable[Path], cache: Path) -> Iterator[Place]:
    real_cache = os.path.realpath(cache)
    for folder in folders:
        for path, beside in walk(folder):
            real = entry(path)
            inside = real.relative_to(real_cache).parts if real.is_relative_to(real_cache) else ("",)
            if not inside[0].startswith(_REPO):  # a folder around the cache: its repositories are found there
                yield Place(path=path, source="folder", root=folder, projector=beside)


def _in_cache(cache: Path) -> Iterator[Place]:
    for folder in sorted(cache.glob(f"{_REPO}*")):
        repo = folder.name.removeprefix(_REPO).replace("--", "/", 1)
        yield from repo_places(folder, repo)
        for path in _nameless(folder):
            yield Place(path=path, source="huggingface", root=folder, repo=repo)


def repo_places(folder: Path, repo: str) -> list[Place]:
    """Return the models of a cached repository, each in its current revision."""
    try:
        main = paths.read_text(folder / "refs/main").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    try:
        revisions = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
        revisions.sort(key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)
    except OSError:
        return []
    found: dict[Path, Place] = {}
    for revision in revisions:
        for path, projector in walk(revision):
            place = Place(path=path, source="huggingface", root=folder, repo=repo, projector=projector)
            found.setdefault(path.relative_to(revision), place)
    return [found[name] for name in sorted(found)]


def walk(folder: Path) -> Iterator[tuple[Path, Path | None]]:
    """Yield the models under `folder` by their first file, with the multimodal projector beside each."""
    for base, names in files.walk(folder):
        yield from _models(base, names)


def models_in(folder: Path) -> list[Path]:
    """Return the models in `folder` itself by their first file: of very many, some."""
    try:
        with os.scandir(folder) as found:
            names = [one.name for one in itertools.islice(found, _MOST_FILES)]
    except OSError:
        return []
    return [path for path, _ in _models(folder, names)][:_MOST_BESIDE]


def _models(folder: Path, names: Iterable[str]) -> Iterator[tuple[Path, Path | None]]:
    """Yield the models among the files of a folder, with the multimodal projector beside them."""
    ours = sorted(name for name in names if name.lower().endswith(".gguf"))
    projectors = [name for name in ours if "mmproj" in name.lower()]
    projector = folder / projectors[0] if projectors else None
    yield from ((folder / name, projector) for name in _first_files(ours) if name not in projectors)


def _first_files(names: list[str]) -> Iterator[str]:
    """Yield `names`, of a split model only the first part that exists."""
    seen: set[str] = set()
    for name in names:
        parts = split_parts(Path(name))
        whole = name if parts is None else parts[0].name
        if whole not in seen:
            seen.add(whole)
            yield name


def _nameless(root: Path) -> list[Path]:
    """Return GGUF contents that no revision links to: partial downloads, or left behind."""
    blobs = root / _BLOBS
    try:
        names = sorted(one.name for one in os.scandir(blobs) if one.is_file(follow_symlinks=False))
    except OSError:
        return []
    named = {content.name for content in links(root)} if names else set()
    return [blobs / name for name in names if name not in named and _is_gguf(blobs / name)]


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False
