"""Finds model files in the package, in the Hugging Face cache, in the user's folders and in other programs' stores, and
describes them by their headers, whose summaries are cached while the files stay unchanged.

The Hugging Face cache is walked directly: importing huggingface_hub costs more than the whole of `cpuchat --help`. Its
layout is that of huggingface_hub 1.x: `models--OWNER--NAME/refs/main` names a revision, `snapshots/REVISION/` holds
links to the files of `blobs/`, where a partial download is called `*.incomplete`.

In the stores of other programs nothing is ever changed. LM Studio has PUBLISHER/REPOSITORY/FILE.gguf below its folder.
llama.cpp has OWNER_REPOSITORY_FILE.gguf beside manifest=OWNER=REPOSITORY=TAG.json; newer versions use the Hugging Face
cache, or make one of LLAMA_CACHE (common/download.cpp and common/hf-cache.cpp of llama.cpp).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from cpuchat.base import paths
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, ModelDamaged, ModelUnsupported
from cpuchat.base.files import MAX_FOLDERS, JsonCache, read_small
from cpuchat.base.files import walk as walk_files
from cpuchat.base.text import clean_line
from cpuchat.costs.model import COST_MODEL
from cpuchat.models import ollama
from cpuchat.models.file_names import engine_fingerprint, samples, stat_fingerprint, without_quantization
from cpuchat.models.gguf.header import GGUFHeader, model_files, read_model, split_parts, telling_name
from cpuchat.models.ollama import file_name
from cpuchat.models.support import why_unsupported
from cpuchat.models.traffic import model_work
from cpuchat.protocol.model_info import ModelWork

Store = Literal["ollama", "lmstudio", "llama.cpp"]
Source = Literal["demo", "huggingface", "folder"] | Store
STORES: dict[Store, str] = {"ollama": "Ollama", "lmstudio": "LM Studio", "llama.cpp": "llama.cpp"}
"""What people call these programs."""
PLACES = {"demo": "cpuchat", "huggingface": "HF cache", **STORES}

# In the home of the user `ollama` as its installer has it, or as packages of distributions.
_OLLAMA_SERVICES = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/models", "/var/lib/ollama")
_MANIFEST = re.compile(r"manifest=([^=]+)=([^=]+)=.*\.json")


class HeaderSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a model's header for lists. Sizes in bytes, of all parts of a split model.

    `n_params_active` are the parameters that one token uses: all but experts that it is not sent to. `work` is that of
    its passes. A "head" only predicts further tokens for a model in another file. `damaged`: what is wrong with it, or
    why it cannot be loaded; `unsupported`: it is intact, but the engine cannot run it. `name` "": no language model."""

    name: str = ""
    architecture: str = ""
    quantization: str = ""
    n_params: int = 0
    n_params_active: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ctx_train: int = 0
    has_template: bool = False
    size: int = 0
    work: ModelWork | None = None
    kind: Literal["model", "head"] = "model"
    damaged: str | None = None
    unsupported: bool = False


class LocalModel(HeaderSummary, frozen=True, kw_only=True):
    """One model on this machine.

    `path` is its first file, `parts` how many there are; `source`, `repo`, `alias` and `projector` as of `LocalFile`.
    `last_used` is when it was loaded last, in seconds since 1970 (0: never). `measured_tok_s` is what plain decoding
    last reached here, `drafted_tok_s` an answer with drafts (0: not measured)."""

    path: Path
    source: Source
    repo: str = ""
    alias: str = ""
    parts: int = 1
    projector: Path | None = None
    last_used: float = 0.0
    measured_tok_s: float = 0.0
    drafted_tok_s: float = 0.0

    @property
    def state(self) -> Literal["", "damaged", "unsupported", "head"]:
        """Return in a word why it cannot be loaded; "" when it can."""
        if self.damaged is None:
            return ""
        return "head" if self.kind == "head" else "unsupported" if self.unsupported else "damaged"


DEMO_FILES = {
    "demo": "cpuchat-demo-8m-q8_0.gguf",
    "demo-q4": "cpuchat-demo-8m-q4_k_m.gguf",
    "demo-draft": "cpuchat-demo-draft-1m-q8_0.gguf",
}
_DEMO_CHAT = ("demo", "demo-q4")
INCOMPLETE = ".incomplete"
_REPO, _BLOBS = "models--", "blobs"
_BLOCK = 4096  # bytes at the ends of files that are compared
_MAX_FILES, _MAX_BESIDE = 10_000, 200  # in a folder that is not searched below; nobody waits for more headers


class LocalFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that may be a model. `root` is the folder under which it was found: nothing outside is ever deleted.

    `alias` is the name that Ollama lists (`qwen2.5-coder:7b`), or that of a demo model; `repo` "owner/name" on Hugging
    Face, where that is known; `projector` the multimodal projector beside it. Of Ollama's, the file may be missing."""

    path: Path
    source: Source
    root: Path
    repo: str = ""
    alias: str = ""
    projector: Path | None = None

    @property
    def name_in_repo(self) -> str:
        """`Q8_0/m.gguf` for a file in the Hugging Face cache, whatever its revision."""
        if self.source != "huggingface":
            return self.path.name
        return str(Path(*self.path.relative_to(self.root / "snapshots").parts[1:]))


def hub_cache() -> Path:
    """Return the Hugging Face cache, found as huggingface_hub finds it."""
    for variable, inside in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        value = os.environ.get(variable)
        if value:
            return paths.expanded(os.path.expandvars(value)) / inside
    base = os.environ.get("XDG_CACHE_HOME")
    return paths.expanded(os.path.expandvars(base or "~/.cache")) / "huggingface/hub"


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
    """Return the entry that a link leads to, which may be a link itself. Raises OSError: it is not a link."""
    return entry(link.parent / link.readlink())


def links(root: Path) -> dict[Path, list[Path]]:
    """Return the files of all revisions of a cached repository, by the entry that each leads to: its content in
    `blobs`, also of a copy of that (as `cp -rL` leaves behind), or the file itself, where a cache has no links."""
    found: dict[Path, list[Path]] = {}
    copies: list[Path] = []
    for base, _, names in os.walk(root / "snapshots"):
        for path in (Path(base, name) for name in names):
            try:
                found.setdefault(linked(path), []).append(path)
            except OSError:  # not a link
                copies.append(path)
    free: dict[int, list[Path]] = {}
    for content in _blobs(root) if copies else ():
        with contextlib.suppress(OSError):
            if content not in found:
                free.setdefault(content.stat().st_size, []).append(content)
    for path in copies:
        with contextlib.suppress(OSError):
            # The content of its size that most of it is the same as: one of both may be damaged.
            likeness = [(_likeness(one, path), one) for one in free.get(path.stat().st_size, [])]
            share, content = max(likeness, default=(0.0, path))
            found.setdefault(content if share > 0.5 else entry(path), []).append(path)
    return found


def _blobs(root: Path) -> list[Path]:
    """Return the contents of a cached repository, partial ones too."""
    with contextlib.suppress(OSError):
        return sorted(entry(Path(one)) for one in os.scandir(root / _BLOBS) if one.is_file())
    return []


def _likeness(one: Path, other: Path) -> float:
    """Return the share of blocks that two files of one size have in common. Raises OSError."""
    pairs = list(zip(samples(one, _BLOCK, _BLOCK), samples(other, _BLOCK, _BLOCK), strict=True))
    return sum(theirs == ours for theirs, ours in pairs) / len(pairs)


def is_demo(model: Path) -> bool:
    """Return whether a file is one of the two demo models to chat with."""
    return os.path.realpath(model) in (os.path.realpath(paths.demo_dir() / DEMO_FILES[name]) for name in _DEMO_CHAT)


def is_same_model(one: LocalModel | GGUFHeader, other: LocalModel | GGUFHeader) -> bool:
    """Return whether two files are quantizations of the same model, as far as their headers and names tell."""
    if (one.architecture, one.n_params) != (other.architecture, other.n_params):
        return False
    stems = (without_quantization(file.path.stem.lower()) for file in (one, other))
    return one.name == other.name or len({*stems}) == 1


def grouped(models: Iterable[LocalModel]) -> list[list[LocalModel]]:
    """Return the files of each model together, the largest first, copies in the order of `models`; by their names,
    the demo after them, then what only drafts, then what is damaged, each file alone."""
    groups: list[list[LocalModel]] = []
    alike: dict[tuple[str, int], list[list[LocalModel]]] = {}
    for model in models:
        same = alike.setdefault((model.architecture, model.n_params), [])
        group = next((one for one in same if is_same_model(one[0], model)), None) if not model.damaged else None
        if group is not None:
            group.append(model)
            continue
        groups.append([model])
        if not model.damaged:
            same.append(groups[-1])
    for group in groups:
        group.sort(key=lambda model: -model.size)

    def order(group: list[LocalModel]) -> tuple[object, ...]:
        one, name = group[0], shown_name(group).rpartition("/")[2]
        return bool(one.damaged), only_drafts(one), one.source == "demo", natural(name), natural(one.path.stem)

    return sorted(groups, key=order)


def place_of(model: LocalModel) -> str:
    """Return where a model is kept: its folder, or the program that keeps it."""
    return PLACES.get(model.source) or paths.shown(model.path.parent)


def place_word(model: LocalModel) -> str:
    """Return what is typed for the place of a model: the name of its folder, or `lmstudio`."""
    return model.path.parent.name.lower() if model.source == "folder" else model.source


def natural(name: str) -> list[tuple[bool, float, str]]:
    """Return a sort key for which `Qwen 7B` precedes `Qwen 32B`, and both `Qwen Coder`."""
    parts = re.findall(r"\d+(?:\.\d+)?|[^\W\d]+", name.lower())
    return [(not part[0].isdigit(), float(part) if part[0].isdecimal() else 0.0, part) for part in parts]


def shown_name(group: list[LocalModel]) -> str:
    """Return the name of a model by its files: that of the program which keeps it, if there is one file alone."""
    one = group[0]
    if len(group) > 1:
        return without_quantization(one.name)
    return one.alias if one.alias and one.source != "demo" else one.name


def only_drafts(model: LocalModel) -> bool:
    """Return whether a file is there to draft for another model, by what it says of itself."""
    named = re.search(r"(?<![a-z])draft(?![a-z])", f"{model.name} {model.path.stem}".lower())
    return model.kind == "head" or named is not None


def all_places(
    cache: Path, folders: Iterable[Path], files: Iterable[Path] = (), *, copies: bool = False
) -> Iterator[LocalFile]:
    """Yield every model: demo, cache, folders, other programs' stores, single `files`; one that is reached in several
    ways once, unless with all its `copies`."""
    demo, seen, folders = paths.demo_dir(), set[object](), list(folders)
    llama = llama_cache()
    caches = [cache, *([llama] if llama != cache else [])]
    real_caches = [os.path.realpath(one) for one in caches]

    def in_cache(path: Path) -> bool:
        """Return whether a file below a folder is in a cache around which it lies: it is found there."""
        real = entry(path)
        below = (real.relative_to(one).parts for one in real_caches if real.is_relative_to(one))
        return any(parts[0].startswith(_REPO) for parts in below)

    def every() -> Iterator[LocalFile]:
        for name, file in DEMO_FILES.items():
            if (demo / file).is_file():
                yield LocalFile(path=demo / file, source="demo", root=demo, alias=name)
        for folder in (folder for one in caches for folder in sorted(one.glob(f"{_REPO}*"))):
            yield from repo_places(folder, folder.name.removeprefix(_REPO).replace("--", "/", 1))
        for folder in folders:
            yield from (place for place in folder_places(folder) if not in_cache(place.path))
        yield from ollama_models(ollama_stores())
        others: list[tuple[Store, Path]] = [("lmstudio", folder) for folder in lmstudio_folders()]
        others.append(("llama.cpp", llama))
        for store, folder in others:
            for path, beside in walk(folder):
                if not in_cache(path):
                    repo = repo_in_store(store, folder, path)
                    yield LocalFile(path=path, source=store, root=folder, repo=repo, projector=beside)
        for file in files:
            yield LocalFile(path=file, source="folder", root=file.parent)

    for place in every():
        same: object = os.path.realpath(place.path)
        with contextlib.suppress(OSError):
            same = (status := place.path.stat()).st_dev, status.st_ino  # of hard links, too
        if copies or same not in seen:
            seen.add(same)
            yield place


def folder_places(folder: Path, max_folders: int = MAX_FOLDERS) -> Iterator[LocalFile]:
    """Yield the models below a folder of the user, which may be a store of Ollama's, too."""
    for path, beside in walk(folder, max_folders):
        yield LocalFile(path=path, source="folder", root=folder, projector=beside)
    yield from ollama_models([folder])


def repo_places(folder: Path, repo: str) -> list[LocalFile]:
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
    found: dict[Path, LocalFile] = {}
    for revision in revisions:
        for path, projector in walk(revision):
            place = LocalFile(path=path, source="huggingface", root=folder, repo=repo, projector=projector)
            found.setdefault(path.relative_to(revision), place)
    return [found[name] for name in sorted(found)]


def walk(folder: Path, max_folders: int = MAX_FOLDERS) -> Iterator[tuple[Path, Path | None]]:
    """Yield the models under `folder` by their first file, with the multimodal projector beside each."""
    for base, names in walk_files(folder, max_folders):
        yield from _models(base, names)


def models_in(folder: Path) -> list[Path]:
    """Return the models in `folder` itself by their first file: of very many, some."""
    try:
        with os.scandir(folder) as found:
            names = [one.name for one in itertools.islice(found, _MAX_FILES)]
    except OSError:
        return []
    return [path for path, _ in _models(folder, names)][:_MAX_BESIDE]


def _models(folder: Path, names: Iterable[str]) -> Iterator[tuple[Path, Path | None]]:
    """Yield the models among the files of a folder, with the multimodal projector beside them."""
    # macOS keeps facts about x.gguf in ._x.gguf where the file system cannot.
    ours = sorted(name for name in names if name.lower().endswith(".gguf") and not name.startswith("._"))
    projectors = [name for name in ours if "mmproj" in name.lower()]
    projector = folder / projectors[0] if projectors else None
    seen: set[str] = set()
    for name in ours:  # of a split model only the first part that exists
        parts = split_parts(Path(name))
        whole = name if parts is None else parts[0].name.lower()
        if whole not in seen and name not in projectors:
            yield folder / name, projector
        seen.add(whole)


class _Settings(msgspec.Struct):
    downloadsFolder: str = ""


def ollama_stores() -> list[Path]:
    """Return the folders that may hold manifests and blobs, whether they exist or not."""
    own = paths.expanded(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models")
    return [own, *_moved_by_systemd(), *map(Path, _OLLAMA_SERVICES)]


def _moved_by_systemd() -> list[Path]:
    """Return where the units of Ollama's service have its models, which the environment of a user does not say."""
    found: list[Path] = []
    for units in map(Path, os.environ.get("SYSTEMD_UNIT_PATH", "/etc/systemd/system").split(":")):
        for unit in (units / "ollama.service", *sorted(units.glob("ollama.service.d/*.conf"))):
            with contextlib.suppress(OSError, ValueError):  # none, not UTF-8, or an open quote
                lines = read_small(unit).decode().splitlines()
                values = (line.partition("=")[2] for line in lines if line.startswith("Environment="))
                words = (word.partition("=") for value in values for word in shlex.split(value))
                found += [Path(value) for name, _, value in words if name == "OLLAMA_MODELS"]
    return found


def ollama_models(roots: Iterable[Path]) -> Iterator[LocalFile]:
    """Yield the models of the stores in these folders, one for each name. Other folders are none."""
    for root in roots:
        for model in ollama.ollama_models(root):
            yield LocalFile(source="ollama", root=root, **msgspec.structs.asdict(model))


def lmstudio_folders() -> list[Path]:
    """Return the folders in which LM Studio keeps models, whether they exist or not."""
    folders = [paths.expanded("~/.lmstudio/models"), paths.expanded("~/.cache/lm-studio/models")]
    for home in ("~/.lmstudio", "~/.cache/lm-studio"):
        try:
            chosen = msgspec.json.decode(read_small(paths.expanded(home) / "settings.json"), type=prepared(_Settings))
        except (OSError, ValueError, RecursionError):
            continue
        if chosen.downloadsFolder and "\0" not in chosen.downloadsFolder:
            folders.append(paths.expanded(chosen.downloadsFolder))
    return folders


def llama_cache() -> Path:
    """Return the cache of llama.cpp, found as it finds it."""
    if named := os.environ.get("LLAMA_CACHE"):
        return paths.expanded(named)
    if sys.platform == "darwin":
        return paths.expanded("~/Library/Caches/llama.cpp")
    return paths.expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "llama.cpp"


def repo_in_store(store: Store, folder: Path, path: Path) -> str:
    """Return "owner/name" of a file that LM Studio or llama.cpp has from Hugging Face, "" where that is not known."""
    if store == "lmstudio":
        parts = path.relative_to(folder).parts
        return "/".join(parts[:2]) if len(parts) > 2 else ""
    for manifest in folder.glob("manifest=*.json"):
        found = _MANIFEST.fullmatch(manifest.name)
        if found is not None and path.name.startswith(f"{found[1]}_{found[2]}_"):
            return f"{found[1]}/{found[2]}"
    return ""


def store_folders() -> list[Path]:
    """Return all folders that are searched, whether they exist or not."""
    return list(dict.fromkeys((*ollama_stores(), *lmstudio_folders(), llama_cache())))


def unavailable(chosen: Iterable[str | Path] = ()) -> list[str]:
    """Return in words which stores this user may not read, as Ollama's service runs as another one, and which of the
    `chosen` folders do not exist, as on a disk that is not mounted."""
    wanted = [paths.expanded(one) for one in chosen]
    found: list[str] = []
    for folder in dict.fromkeys((*store_folders(), *wanted)):
        try:
            os.scandir(folder).close()
        except PermissionError:
            found.append(f"{paths.shown(folder)} belongs to another user and cannot be read")
        except OSError:
            if folder in wanted:
                found.append(f"{paths.shown(folder)} does not exist; is its disk mounted?")
    return found


_VERSION = 100 * COST_MODEL + 11
_MAX_NAME = 200


class _Cached(msgspec.Struct, frozen=True, kw_only=True):
    """A summary, and what a check of the file's content found wrong."""

    summary: HeaderSummary
    checksum_error: str | None = None


class SummaryCache:
    """Summaries of the model files of this machine, in `library.json` of the cache folder."""

    def __init__(self) -> None:
        self._cache = JsonCache(paths.library_file(), _Cached, version=_VERSION, max_entries=5_000, max_bytes=8 << 20)
        self._known: dict[str, _Cached] = {}
        self._new: dict[str, _Cached] = {}

    def models(self, places: Iterable[LocalFile]) -> list[LocalModel]:
        """Return the models at these places, with what other programs have cached; what is new is written."""
        self._known |= self._cache.read()
        found = [self.model(place) for place in places]
        self.save()
        return [model for model in found if model is not None]

    def model(self, place: LocalFile) -> LocalModel | None:
        """Return the model at `place`; None when it is something else, such as the image part of one."""
        path = place.path
        parts = model_files(path)
        base = LocalModel(
            path=path,
            name=clean_line(path.stem),
            source=place.source,
            repo=place.repo,
            alias=place.alias,
            parts=len(parts),
            projector=place.projector,
        )
        try:
            cached = self._summary(parts)
        except CpuchatError as error:
            size = sum(part.stat().st_size for part in parts if part.is_file())
            unsupported, damaged = isinstance(error, ModelUnsupported), str(error)
            if place.source == "ollama" and not os.path.lexists(path):
                damaged = f"Its file is gone. Download it again: ollama pull {place.alias}."
                base = msgspec.structs.replace(base, name=place.alias)
            return msgspec.structs.replace(base, size=size, damaged=damaged, unsupported=unsupported)
        if not cached.summary.name:
            return None
        known = {name: getattr(cached.summary, name) for name in HeaderSummary.__struct_fields__}
        model = msgspec.structs.replace(base, **known)
        if place.source == "ollama":  # whose file has no name
            name = "" if model.name == model.architecture else model.name
            model = msgspec.structs.replace(model, name=telling_name(name, place.alias))
        if cached.checksum_error:
            return msgspec.structs.replace(model, damaged=model.damaged or cached.checksum_error, unsupported=False)
        return model

    def _summary(self, parts: list[Path]) -> _Cached:
        """Summarize the files of a model. Raises ModelNotFound or ModelDamaged."""
        try:
            key = _key(parts)
        except OSError as error:
            missing = [part.name for part in parts if not part.is_file()]
            why = f"Cannot open {parts[0]}: {error.strerror}."
            if len(parts) == 1 and parts[0].is_symlink() and missing:
                why = f"{parts[0].name} is a broken link: {parts[0].readlink()} is missing."
            elif len(parts) > 1 and missing:
                why = f"{len(missing)} of {len(parts)} parts are missing ({missing[0]})."
            raise ModelDamaged(why) from None
        cached = self._new.get(key) or self._known.get(key)
        if cached is None:
            cached = self._new[key] = _Cached(summary=summarize(read_model(parts[0])))
        return cached

    def set_checksum_error(self, parts: list[Path], error: str | None) -> None:
        """Remember what a check of the content found wrong (None: nothing) while the files stay unchanged."""
        with contextlib.suppress(CpuchatError):  # its header is damaged anyway
            cached = msgspec.structs.replace(self._summary(parts), checksum_error=error)
            self._new[_key(parts)] = cached

    def save(self) -> None:
        """Write new entries."""
        if self._new:
            new, self._new = self._new, {}
            self._known |= new
            self._cache.put(new)


def _key(parts: list[Path]) -> str:
    """Identify files and the engine, which decides what is unsupported. Raises OSError: one does not exist."""
    return stat_fingerprint(parts) + engine_fingerprint()[:8]


def summarize(header: GGUFHeader) -> HeaderSummary:
    """Summarize a header for a list."""
    if header.is_projector:
        return HeaderSummary()
    work, damaged, unsupported = model_work(header), None, why_unsupported(header)
    if header.is_head:
        damaged = f"{file_name(header.path)} is a draft head and cannot answer by itself."
    elif not header.tensors:
        damaged = f"{file_name(header.path)} contains a vocabulary but no weights."
    elif unsupported:
        damaged = f"{file_name(header.path)} cannot run here: {unsupported}."
    return HeaderSummary(
        name=header.name[:_MAX_NAME],
        architecture=header.architecture[:_MAX_NAME],
        quantization=header.quantization,
        n_params=header.n_params,
        n_params_active=header.n_params_active,
        n_expert=work.n_expert,
        n_expert_used=work.n_expert_used,
        n_ctx_train=header.n_ctx_train,
        has_template=bool(header.chat_template),
        size=header.file_size,
        work=work if header.tensors else None,
        kind="head" if header.is_head else "model",
        damaged=damaged,
        unsupported=bool(unsupported),
    )
