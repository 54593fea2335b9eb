"""The models on this machine: listing, resolving what users write for a model, verifying, deleting."""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import ModelDamaged, ModelNotFound
from cpuchat.base.text import clean_line, folded
from cpuchat.models.file_names import SIZE, quantization_of, rank, role_of, without_prefix
from cpuchat.models.gguf.header import model_files
from cpuchat.models.library.deleting import Deletion, Progress, Verification, check_content, plan_deletion
from cpuchat.models.library.places import (
    DEMO_FILES,
    STORES,
    LocalFile,
    LocalModel,
    SummaryCache,
    all_places,
    folder_places,
    grouped,
    hub_cache,
    is_inside,
    models_in,
    ollama_models,
    ollama_stores,
    only_drafts,
    place_word,
    shown_name,
    store_folders,
    walk,
)
from cpuchat.models.library.usage import RecentModels, usage_of, usages
from cpuchat.models.ollama import file_name, is_content

_USUAL_FOLDER = "~/models"
_BROWSER_FOLDER = "~/Downloads"
_MAX_NAMED = 6  # models that a message lists
MAX_BELOW, _MAX_FOLDERS = 200, 2_000  # models, and folders with them, that are described before one is added
Tell = Callable[[str], None]
_REPO_NAME = re.compile(r"^(?P<repo>(?:[\w.-]+/)?[\w.-]+)(?::(?P<quant>[\w.-]+))?$")


def is_named(model: LocalModel, words: Collection[str], place: str = "") -> bool:
    """Return whether all `words`, in lower case, are in the names of a model that people see, `place` among them: not
    its architecture, nor the folders above it."""
    file = "" if is_content(model.path) else model.path.name
    names = folded(" ".join((model.name, model.quantization, model.repo, model.alias, file, place)))
    return all(folded(word) in names for word in words)


def specs_of(models: Collection[LocalModel]) -> list[str]:
    """Return the shortest text by which `Library.resolve` finds each model: "owner/name:QUANT", or the name of a demo
    model or of Ollama's; the path of what cannot be loaded, or shares that name."""
    sound = {model.path for model in models if model.state in ("", "unsupported")}
    named = [
        one.alias or (f"{one.repo}:{one.quantization}" if one.repo and one.path in sound else "") for one in models
    ]
    times = Counter(named)
    return [name if name and times[name] == 1 else str(model.path) for model, name in zip(models, named, strict=True)]


def short_specs(models: Collection[LocalModel]) -> list[str]:
    """Return a text for each model by which `Library.resolve` finds it, made to be typed: a word of its name that no
    other model has, with its quantization if it has several files (`1.5b:q8_0`), and with the place of a copy
    (`1.5b:q8_0:lmstudio`); else the name of its file, if that is unique, or what `specs_of` has."""
    usable = [model for model in models if not model.damaged and not only_drafts(model)]
    stems = Counter([*(folded(model.path.stem) for model in models), *DEMO_FILES])
    found = {
        model.path: model.path.stem if stems[folded(model.path.stem)] == 1 and not model.alias else spec
        for model, spec in zip(models, specs_of(models), strict=True)
    }
    for group in grouped(usable):
        words = re.findall(r"[\w.-]+", shown_name(group).lower())
        words = [*sorted(words, key=lambda word: SIZE.fullmatch(word) is None), " ".join(words)]
        others = [model for model in usable if model not in group]
        word = next((one for one in words if not any(is_named(model, [*one.split()]) for model in others)), "")
        for model in (one for one in group if word and not one.alias and is_named(one, word.split())):
            copies, name = _quantized(group, model.quantization), f"{word}:{model.quantization.lower()}"
            if copies == [model]:
                found[model.path] = word if len(group) == 1 else name
            elif [one for one in copies if place_word(one) == place_word(model)] == [model]:
                found[model.path] = f"{name}:{place_word(model)}"
    return [found[model.path] for model in models]


def as_typed(spec: str) -> str:
    """Return `spec` as a shell takes it, a path below the home folder with `~`."""
    below = spec.removeprefix(f"{Path.home()}/")
    return "~/" * (below != spec) + shlex.quote(below)


def _quantized(models: list[LocalModel], wanted: str) -> list[LocalModel]:
    """Return those with this quantization by their file's name, else by their header; else with the only one that
    begins so (q8)."""

    named = [(model, *map(without_prefix, (quantization_of(model.path.name), model.quantization))) for model in models]
    by_name = [model for model, name, _ in named if wanted in (name, quantization_of(model.path.name))]
    if found := by_name or [model for model, _, kind in named if wanted in (kind, model.quantization)]:
        return sorted(found, key=lambda one: rank(quantization_of(one.path.name)))
    begun = [model for model, *kinds in named if any(kind.startswith(wanted) for kind in kinds)]
    return begun if len({model.quantization for model in begun}) == 1 else []


def _at(path: Path) -> Path | None:
    """Return the model in the file or folder `path`, None where there is neither. Raises ModelNotFound, OSError."""
    if path.is_file():
        return model_files(path)[0]
    if path.is_dir():
        models = [one for one, _ in walk(path)]
        models = [one for one in models if role_of(one.name) == "model"] or models
        if len(models) == 1:
            return models[0]
        listed = f": {_listed([str(one.relative_to(path)) for one in models])}" if models else ""
        raise ModelNotFound(f"The folder {path} has {len(models)} models{listed}.", "Give the path of one GGUF file.")
    if path.is_symlink():
        raise ModelNotFound(
            f"{path} is a broken link: its target {path.readlink()} does not exist.", "Restore the target."
        )
    return None


def _still_there(path: Path, name: str) -> Path:
    """Return `path` of a model that is known as `name`. Raises ModelNotFound: its file is gone."""
    if path.is_file():
        return path
    raise ModelNotFound(f"The file of {name or file_name(path)} is gone: {path}.", "Install or download it again.")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{more}"


class Library:
    """The models on this machine. Reading takes a while with many files: not for the UI thread."""

    def __init__(self, settings_folders: Iterable[Path | str] = (), cache: Path | None = None) -> None:
        """`settings_folders` are the user's; `cache` replaces the Hugging Face cache."""
        chosen = [paths.expanded(folder) for folder in (*settings_folders, _USUAL_FOLDER)]
        self.folders = (*dict.fromkeys(chosen), paths.made_models_dir())
        self.cache = cache or hub_cache()
        self._summaries = SummaryCache()

    def places(self, beside: Path | None = None, *, copies: bool = False) -> Iterator[LocalFile]:
        """Yield every file that may be a model, with those that a browser saved, and in the folder of the model
        `beside`; one that is in several places once, or with all its `copies`."""
        files = models_in(beside.parent) if beside is not None else []
        if sys.platform != "darwin":  # macOS asks the user for permission before a program may look there
            files += models_in(paths.expanded(_BROWSER_FOLDER))
        return all_places(self.cache, self.folders, [*RecentModels().files(), *files], copies=copies)

    def at(self, path: Path) -> LocalModel | None:
        """Return the model whose first file is `path`, wherever that is; None when it is something else."""
        return self._summaries.model(LocalFile(path=path, source="folder", root=path.parent))

    def in_folder(self, folder: Path) -> list[LocalModel]:
        """Return the models below `folder`, which need not be one of the user's: of very many, some."""
        return self._summaries.models(itertools.islice(folder_places(folder, _MAX_FOLDERS), MAX_BELOW))

    def opened(self, path: Path) -> None:
        """Record that `path` was loaded: it is listed from now on, also if it lies in no folder that is searched."""
        path = path.absolute()
        places = (*self.folders, self.cache, paths.demo_dir(), *store_folders())
        if not any(is_inside(path.parent, folder) for folder in places):
            RecentModels().add(path)

    def local_models(self, beside: Path | None = None) -> list[LocalModel]:
        """Return all models: demo first, then the cache, then folders, then those in the folder of the model `beside`,
        wherever that is; damaged ones included."""
        known = usages()
        models = [(one, usage_of(known, model_files(one.path))) for one in self._summaries.models(self.places(beside))]
        return [
            msgspec.structs.replace(
                model, last_used=usage.used, measured_tok_s=usage.plain_tok_s, drafted_tok_s=usage.drafted_tok_s
            )
            for model, usage in models
        ]

    def resolve(self, spec: str, tell: Tell = lambda words: None) -> Path:
        """Return the file that `spec` names: a path; "demo", "demo-q4" or "demo-draft"; "owner/name" or
        "owner/name:QUANT"; the name that Ollama has for it; the name of a file; or a part of a model's name that no
        other model has, also with ":QUANT". Of a model in several files the usual one is taken, which it may `tell`.
        Raises ModelNotFound: nothing matches, or several models do, which it lists; the hint names what is close."""
        spec = spec.strip()
        if spec.lower() in DEMO_FILES:
            return _still_there(paths.demo_dir() / DEMO_FILES[spec.lower()], spec)
        empty: ModelNotFound | None = None
        try:
            if spec and (path := _at(paths.expanded(spec).absolute())) is not None:
                return path  # absolute: it is remembered, and compared with what lists have
        except (OSError, ValueError):  # a name that is too long, or with a NUL in it; the current folder was deleted
            pass
        except ModelNotFound as error:
            if "/" in spec or spec[0] in ".~" or any(walk(Path(spec))):
                raise
            empty = error  # a folder by chance: a model may have that name
        ollama = {model.alias.lower(): model.path for model in ollama_models((*ollama_stores(), *self.folders))}
        if (path := ollama.get(spec.lower()) or ollama.get(f"{spec.lower()}:latest")) is not None:
            return _still_there(path, spec)
        places = list(self.places(copies=True))  # each has a name that people know
        named = [one.path for one in places if folded(spec) in (folded(one.path.name), folded(one.path.stem))]
        if len({path.stat().st_size for path in named if path.is_file()}) > 1:
            listed = _listed([as_typed(str(one)) for one in named])
            raise ModelNotFound(f"{spec} names {len(named)} files: {listed}.", "Give a path.")
        if named:
            return named[0]
        match = _REPO_NAME.match(spec)
        if match is not None and (same := [place for place in places if place.repo.lower() == match["repo"].lower()]):
            return self._quantization_of(match["repo"], same, match["quant"], tell)
        if "/" not in spec and (groups := self.matching(spec)):
            if len(groups) > 1:
                files = [model for group in groups for model in group]
                names = _listed(self.typed_names(files))
                raise ModelNotFound(f"{spec} names {len(files)} files: {names}.", "Use one of these names.")
            taken = min(groups[0], key=lambda model: rank(model.quantization))
            self._tell_choice(spec, taken.path, groups[0], tell)
            return _still_there(taken.path, taken.alias)
        if empty is not None:
            raise empty
        if spec.startswith(("/", "~", "./", "../")):
            raise ModelNotFound(f"There is no file {spec} that can be read.", "Check the path.")
        raise self._not_found(spec, places, [*ollama])

    def _not_found(self, spec: str, places: list[LocalFile], ollama: list[str]) -> ModelNotFound:
        """Return what is close to `spec`, or where it can be had."""
        name, stems = spec.lower().replace("@", ":").rpartition(":")[0], [folded(one.path.stem) for one in places]
        close = (*stems, *ollama, *DEMO_FILES, *(one.repo.lower() for one in places))
        close = difflib.get_close_matches(spec.lower(), filter(None, close), 3, 0.5)
        hints = [f"Did you mean {' or '.join(dict.fromkeys(close))}?"] if close else []
        if files := self._models_named(name.split()):
            hints = [f"You have {_listed(self.typed_names(files))}."]
        elif (match := _REPO_NAME.match(spec)) and "/" in match["repo"] and not spec.lower().endswith(".gguf"):
            hints.append(f"If it is a Hugging Face repository, download it first: cpuchat models download {spec}.")
        hints = hints or ["Give the path of a GGUF file, or a name as `cpuchat models list` shows it."]
        error = ModelNotFound(f"There is no model {spec!r} on this machine.", " ".join(hints))
        error.wanted = "" if files else spec
        return error

    def matching(self, text: str) -> list[list[LocalModel]]:
        """Return the models whose names contain each word of `text`, by their files, in the order of lists; with a
        quantization or a `place_word` behind a colon those files alone (`qwen2.5-coder:q8_0`). Models that only draft,
        and those that cannot be loaded, are left out unless there are no others."""
        found = self._models_named(text.lower().split())
        name, colon, quant = text.lower().replace("@", ":").rpartition(":")  # LM Studio writes `qwen@q8_0`
        if not found and colon:
            words = name.replace(":", " ").split()
            found = _quantized(self._models_named(words), quant.upper())
            found = found or [model for model in self._models_named(words) if place_word(model) == quant]
            found = found or self._models_named([*words, quant])  # as Ollama names it: `qwen2.5-coder:1.5b`
        usable = [model for model in found if not model.damaged]
        return grouped([model for model in usable if not only_drafts(model)] or usable or found)

    def _models_named(self, words: list[str]) -> list[LocalModel]:
        if not words:
            return []
        return [model for model in self._summaries.models(self.places()) if is_named(model, words)]

    def _quantization_of(self, repo: str, places: list[LocalFile], quant: str | None, tell: Tell) -> Path:
        """Return the file of a repository with the quantization `quant`, or that of the usual trade-off."""
        # By its name it is a model, and by its header where that says more.
        found = [self._summaries.model(place) for place in places if role_of(place.name_in_repo) == "model"]
        models = [model for model in found if model is not None and model.kind == "model"]
        if not models:
            raise ModelNotFound(
                f"The cache has no model of {repo}, only its companion files.",
                f"Download the model: cpuchat models download {repo}{f':{quant}' if quant else ''}.",
            )
        if quant is None:
            taken = min(models, key=lambda one: (rank(quantization_of(one.path.name)), len(one.path.parts)))
            self._tell_choice(repo, taken.path, models, tell)
            return taken.path
        if fitting := _quantized(models, quant.upper()):
            return fitting[0].path
        available = _listed(self.typed_names(models))
        raise ModelNotFound(f"{repo} is in the cache, but not as {quant}.", f"Available: {available}.")

    def typed_names(self, models: Collection[LocalModel]) -> list[str]:
        """Return the names of these models in the list of all, as a shell takes them."""
        every = self._summaries.models(self.places())
        known = dict(zip((one.path for one in every), short_specs(every), strict=True))
        return [clean_line(as_typed(known.get(model.path, str(model.path)))) for model in models]

    def _tell_choice(self, spec: str, path: Path, files: list[LocalModel], tell: Tell) -> None:
        """`qwen is qwen:q4_k_m, one of 2 files. The other: qwen:q8_0.`"""
        if len(files) > 1 and any(one.path == path for one in files):
            names = dict(zip((one.path for one in files), self.typed_names(files), strict=True))
            taken, others = names.pop(path), "The other" if len(files) == 2 else "Others"
            tell(f"{clean_line(spec)} is {taken}, one of {len(files)} files. {others}: {_listed([*names.values()])}.")

    def verify(self, model: LocalModel, progress: Progress = lambda done, total: None) -> Verification:
        """Read the whole model and compare it with the checksum under which the Hugging Face cache stores it.

        The result is remembered while the files stay unchanged: `local_models` marks damaged ones."""
        parts = model_files(model.path)
        try:
            state, words = check_content(parts, progress)
        except ModelDamaged as error:
            return Verification("damaged", model.damaged or error.message)
        if state != "unchecked":
            self._summaries.set_checksum_error(parts, words if state == "damaged" else None)
            self._summaries.save()
        now = self._summaries.model(LocalFile(path=model.path, source=model.source, root=model.path.parent))
        # By its header, or a partial download; what the engine cannot run is intact, as a head is.
        if state != "damaged" and now is not None and now.damaged and now.state != "head":
            state, words = (state, f"{words}; {now.damaged}") if now.unsupported else ("damaged", now.damaged)
        return Verification(state, words)

    def deletion(self, model: LocalModel, in_use: Collection[Path] = ()) -> Deletion:
        """Plan the deletion of `model`, for `delete`. `in_use` are the files of loaded models: they stay."""
        if model.source in STORES:
            return Deletion(model=model, refused=f"{STORES[model.source]} keeps it: delete it there.")
        if model.source == "huggingface":
            root = next((one for one in model.path.parents if one.name.startswith("models--")), None)
            if root is not None and not any(is_inside(root.parent, one) for one in (self.cache, *self.folders)):
                root = None  # llama.cpp's cache
            return plan_deletion(model, root, in_use)
        root = next((folder for folder in self.folders if is_inside(model.path.parent, folder)), None)
        return plan_deletion(model, root, in_use)
