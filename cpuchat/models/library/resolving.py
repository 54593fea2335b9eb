"""Resolves what users write for a model to its file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from cpuchat import paths
from cpuchat.errors import ModelNotFound
from cpuchat.models.file_names import quantization_of, rank, role_of, without_prefix
from cpuchat.models.library.places import DEMO_FILES, Place, model_files, repo_folder, repo_places, walk
from cpuchat.models.library.summaries import SummaryCache

_REPO = re.compile(r"^(?P<repo>(?:[\w.-]+/)?[\w.-]+)(?::(?P<quant>[\w.-]+))?$")


def resolve(spec: str, cache: Path, places: Callable[[], Iterable[Place]], summaries: SummaryCache) -> Path:
    """Resolve `spec` as `Library.resolve` does. `places` walks through all models, which takes a while.

    Raises:
        ModelNotFound: nothing matches.
    """
    spec = spec.strip()
    if spec in DEMO_FILES:
        return _demo(spec)
    path = paths.expanded(spec)
    try:
        if spec and path.is_file():
            return model_files(path)[0]
        if spec and path.is_dir():
            return _only_model(path)
    except (OSError, ValueError):  # such as a name that is too long, or with a NUL in it
        pass
    match = _REPO.match(spec)
    if match is not None:
        found = repo_places(repo_folder(cache, match["repo"]), match["repo"])
        if found:
            return _choose(match["repo"], found, match["quant"], summaries)
    return _by_name(spec, match["repo"] if match is not None else "", places())


def _by_name(spec: str, repo: str, places: Iterable[Place]) -> Path:
    names: dict[str, Path] = {}
    for place in places:
        if not place.is_unfinished:
            repository = place.repo if role_of(place.path.name) == "model" else ""
            for name in (place.path.name, place.path.stem, repository):
                if name:
                    names.setdefault(name.lower(), place.path)
    if spec.lower() in names:
        return names[spec.lower()]
    close = difflib.get_close_matches(spec.lower(), [*names, *DEMO_FILES], n=3, cutoff=0.5)
    hints = [f"Did you mean {' or '.join(close)}?"] if close else []
    if "/" in repo and not spec.lower().endswith(".gguf"):
        hints.append(f"If it is a Hugging Face repository, download it first: cpuchat models download {spec}.")
    hints = hints or ["Give the path of a GGUF file, or `demo` for the model that comes with cpuchat."]
    raise ModelNotFound(f"There is no model {spec!r} on this machine.", " ".join(hints))


def _is_model(place: Place, summaries: SummaryCache) -> bool:
    """Return whether it is a model by its name, and by its header where that says more."""
    if role_of(place.name_in_repo) != "model":
        return False
    model = summaries.model(place)
    return model is None or model.kind == "model"


def _choose(repo: str, places: list[Place], quant: str | None, summaries: SummaryCache) -> Path:
    """Return the file of a repository with the quantization `quant`, or that of the usual trade-off."""
    places = [place for place in places if _is_model(place, summaries)]
    if not places:
        raise ModelNotFound(
            f"The cache has no model of {repo}, only its companion files.",
            f"Download the model: cpuchat models download {repo}{f':{quant}' if quant else ''}.",
        )
    named = [(quantization_of(place.name_in_repo), place) for place in places]
    if quant is None:
        return min(named, key=lambda one: (rank(one[0]), one[1].name_in_repo.count("/")))[1].path
    wanted = quant.upper()
    fitting = [place.path for name, place in named if name == wanted]
    fitting += [place.path for name, place in named if without_prefix(name) == wanted]
    if not fitting:
        models = [summaries.model(place) for place in places]
        fitting = [model.path for model in models if model is not None and model.quantization == wanted]
    if fitting:
        return fitting[0]
    available = ", ".join(place.path.name for place in places)
    raise ModelNotFound(f"{repo} is in the cache, but not as {quant}.", f"Available: {available}.")


def _demo(spec: str) -> Path:
    path = paths.demo_dir() / DEMO_FILES[spec]
    if not path.is_file():
        raise ModelNotFound(f"The demo model {path.name} is missing.", "Reinstall cpuchat, or give --model FILE.")
    return path


def _only_model(folder: Path) -> Path:
    files = [path for path, _ in walk(folder)]
    files = [path for path in files if role_of(path.name) == "model"] or files
    if len(files) == 1:
        return files[0]
    listed = ", ".join(path.name for path in files[:5])
    raise ModelNotFound(
        f"The folder {folder} has {len(files)} models{': ' + listed if listed else ''}.",
        "Give the path of one GGUF file.",
    )
