"""Finds the GGUF files on this machine: the demo models, the Hugging Face cache and the user's folders.

The cache is walked directly: importing huggingface_hub costs more than the whole of `cpuchat --help`. Its layout is
that of huggingface_hub 1.x: `models--OWNER--NAME/refs/main` names a revision, `snapshots/REVISION/` holds links to
the files of `blobs/`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from cpuchat import paths
from cpuchat.errors import CpuchatError, ModelNotFound
from cpuchat.models.gguf import read_model, split_parts

Source = Literal["demo", "huggingface", "folder"]

DEMO_FILES = {
    "demo": "cpuchat-demo-8m-q8_0.gguf",
    "demo-q4": "cpuchat-demo-8m-q4_k_m.gguf",
    "demo-draft": "cpuchat-demo-draft-1m-q8_0.gguf",
}
# Which file of a repository is meant when the user names no quantisation: the usual trade-off first.
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0")
_REPO = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w.-]+))?$")
_MAX_FOLDERS = 50_000


class LocalModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model on this machine. `size` in bytes, all parts of a split one. `damaged`: what is wrong with it.

    `repo` is "owner/name" for files of the Hugging Face cache, else "".
    """

    path: Path
    name: str
    source: Source
    repo: str = ""
    architecture: str = ""
    quantization: str = ""
    n_params: int = 0
    size: int = 0
    n_ctx_train: int = 0
    damaged: str | None = None


class _Candidate(msgspec.Struct, frozen=True):
    path: Path
    source: Source
    repo: str = ""


def hub_cache() -> Path:
    """The Hugging Face cache, found as huggingface_hub finds it."""
    for variable, inside in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        value = os.environ.get(variable)
        if value:
            return Path(os.path.expandvars(value)).expanduser() / inside
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(os.path.expandvars(base)) if base else Path("~/.cache")).expanduser() / "huggingface/hub"


def _is_model_file(name: str) -> bool:
    """A GGUF file, no vision part, and the first part if split."""
    if not name.lower().endswith(".gguf") or "mmproj" in name.lower():
        return False
    parts = split_parts(Path(name))
    return parts is None or parts[0].name == name


def _walk(folder: Path) -> Iterator[Path]:
    """Model files under `folder`. Follows links, but enters no folder twice: links can form circles."""
    seen: set[tuple[int, int]] = set()
    for base, folders, files in os.walk(folder, followlinks=True):
        entered: list[str] = []
        for name in sorted(folders):
            try:
                status = Path(base, name).stat()
            except OSError:
                continue
            key = (status.st_dev, status.st_ino)
            if key not in seen and not name.startswith(".") and len(seen) < _MAX_FOLDERS:
                seen.add(key)
                entered.append(name)
        folders[:] = entered
        yield from (Path(base, name) for name in sorted(files) if _is_model_file(name))


def _hub_files(cache: Path) -> Iterator[_Candidate]:
    for folder in sorted(cache.glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        yield from (_Candidate(path, "huggingface", repo) for path in _repo_files(folder))


def _repo_files(folder: Path) -> list[Path]:
    """Model files of a cached repository, each in its current revision."""
    try:
        main = (folder / "refs/main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        main = ""
    try:
        revisions = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
        revisions.sort(key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)
    except OSError:
        return []
    files: dict[Path, Path] = {}
    for revision in revisions:
        for path in _walk(revision):
            files.setdefault(path.relative_to(revision), path)
    return [files[name] for name in sorted(files)]


class Library:
    """The models of this machine. Reading takes a while with many files: not for the UI's own thread."""

    def __init__(self, settings_folders: Iterable[Path | str] = (), cache: Path | None = None) -> None:
        """`settings_folders` are the user's; `cache` replaces the Hugging Face cache."""
        self._folders = [Path(folder).expanduser() for folder in settings_folders]
        self._cache = cache or hub_cache()
        self._read: dict[tuple[Path, int, int], LocalModel] = {}

    def _candidates(self) -> Iterator[_Candidate]:
        """Every file once, also when it can be reached in several ways."""
        seen: set[str] = set()
        demo = paths.demo_dir()
        found: Iterable[_Candidate] = (
            *(_Candidate(demo / name, "demo") for name in DEMO_FILES.values() if (demo / name).is_file()),
            *_hub_files(self._cache),
            *(_Candidate(path, "folder") for folder in self._folders for path in _walk(folder)),
        )
        for candidate in found:
            real = os.path.realpath(candidate.path)
            if real not in seen:
                seen.add(real)
                yield candidate

    def _model(self, candidate: _Candidate) -> LocalModel:
        path = candidate.path
        try:
            status = path.stat()
            key = (path, status.st_size, status.st_mtime_ns)
        except OSError:
            key = (path, -1, 0)
        if key not in self._read or key[1] < 0:
            self._read[key] = self._inspect(candidate)
        return self._read[key]

    @staticmethod
    def _inspect(candidate: _Candidate) -> LocalModel:
        path = candidate.path
        model = LocalModel(path=path, name=path.stem, source=candidate.source, repo=candidate.repo)
        try:
            header = read_model(path)
        except CpuchatError as error:
            return msgspec.structs.replace(model, damaged=error.message)
        if header.is_projector:
            return msgspec.structs.replace(model, architecture="", name="")
        return msgspec.structs.replace(
            model,
            name=header.name,
            architecture=header.architecture,
            quantization=header.quantization,
            n_params=header.n_params,
            size=header.file_size,
            n_ctx_train=header.n_ctx_train,
            damaged=None if header.tensors else f"{path.name} holds a vocabulary but no weights.",
        )

    def local_models(self) -> list[LocalModel]:
        """All models: demo first, then the cache, then folders. Damaged ones are in, and say so."""
        models = [self._model(candidate) for candidate in self._candidates()]
        return [model for model in models if model.name]

    def resolve(self, spec: str) -> Path:
        """The file that `spec` means: a path; "demo", "demo-q4" or "demo-draft"; "owner/name" or
        "owner/name:QUANT" of the Hugging Face cache; or the name of a model file that the library knows.

        Raises:
            ModelNotFound: nothing fits; the message names what is close and what to do.
        """
        spec = spec.strip()
        if spec in DEMO_FILES:
            return self._demo(spec)
        path = Path(spec).expanduser()
        try:
            if spec and path.is_file():
                return (split_parts(path) or [path])[0]
            if spec and path.is_dir():
                return self._only_one(path)
        except OSError:  # such as a name that is too long
            pass
        match = _REPO.match(spec)
        if match is not None:
            folder = self._cache / f"models--{match['repo'].replace('/', '--', 1)}"
            files = _repo_files(folder)
            if files:
                return self._choose(match["repo"], files, match["quant"])
        return self._by_name(spec, match["repo"] if match is not None else "")

    @staticmethod
    def _demo(spec: str) -> Path:
        path = paths.demo_dir() / DEMO_FILES[spec]
        if not path.is_file():
            raise ModelNotFound(
                f"The demo model {path.name} is missing.", "Install cpuchat again, or give --model FILE."
            )
        return path

    @staticmethod
    def _only_one(folder: Path) -> Path:
        files = list(_walk(folder))
        if len(files) == 1:
            return files[0]
        listed = ", ".join(path.name for path in files[:5])
        raise ModelNotFound(
            f"The folder {folder} holds {len(files)} models{': ' + listed if listed else ''}.",
            "Give the path of one GGUF file.",
        )

    def _choose(self, repo: str, files: list[Path], quant: str | None) -> Path:
        def is_a(path: Path, wanted: str) -> bool:
            # Q4_K must not find Q4_K_M.
            return re.search(rf"(?<![A-Z0-9]){re.escape(wanted.upper())}(?![A-Z0-9_])", path.stem.upper()) is not None

        for wanted in (quant,) if quant else _PREFERRED:
            fitting = [path for path in files if is_a(path, wanted)]
            if not fitting and quant:
                models = (self._model(_Candidate(path, "huggingface", repo)) for path in files)
                fitting = [model.path for model in models if model.quantization == wanted.upper()]
            if fitting:
                return fitting[0]
        if quant is None:
            return files[0]
        raise ModelNotFound(
            f"{repo} is in the cache, but not as {quant}.", f"There is {', '.join(path.name for path in files)}."
        )

    def _by_name(self, spec: str, repo: str) -> Path:
        names: dict[str, Path] = {}
        for candidate in self._candidates():
            for name in (candidate.path.name, candidate.path.stem, candidate.repo):
                if name:
                    names.setdefault(name.lower(), candidate.path)
        if spec.lower() in names:
            return names[spec.lower()]
        close = difflib.get_close_matches(spec.lower(), [*names, *DEMO_FILES], n=3, cutoff=0.5)
        hints = [f"Did you mean {' or '.join(close)}?"] if close else []
        if repo and not spec.lower().endswith(".gguf"):
            hints.append(
                f"If it is a Hugging Face repository, download it first: hf download {repo} --include '*Q4_K_M*'."
            )
        hints = hints or ["Give the path of a GGUF file, or `demo` for the model that comes with cpuchat."]
        raise ModelNotFound(f"There is no model {spec!r} on this machine.", " ".join(hints))
