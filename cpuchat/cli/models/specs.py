"""How the models of this machine are called on the command line."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuchat.models.library.library import Library
    from cpuchat.models.library.model import LocalModel


def specs_of(found: Sequence[LocalModel]) -> list[str]:
    """The shortest text by which `Library.resolve` finds each model; the path of what cannot be loaded."""
    from cpuchat.models.library.places import DEMO_FILES

    demo = {file: name for name, file in DEMO_FILES.items()}
    named = [
        (m.repo, m.quantization) if m.repo and m.quantization and m.unfinished is None and m.kind == "model" else None
        for m in found
    ]
    times = Counter(named)
    specs: list[str] = []
    for model, name in zip(found, named, strict=True):
        if model.source == "demo":
            specs.append(demo[model.path.name])
        elif name is not None and times[name] == 1:
            specs.append(f"{model.repo}:{model.quantization}")
        else:
            specs.append(str(model.path))
    return specs


def find_model(library: Library, spec: str) -> LocalModel:
    """The one model of the library that `spec` names: as `models list` calls it, damaged ones too, or as --model does.

    Where --model would choose among several, nothing is guessed here.

    Raises:
        ModelNotFound: there is none, or it is in none of the places that the library knows.
        UsageError: it may mean several.
    """
    from cpuchat import paths
    from cpuchat.errors import ModelNotFound, UsageError

    found = library.local_models()
    specs = specs_of(found)
    path = paths.expanded(spec).absolute()
    exact = [model for model, name in zip(found, specs, strict=True) if spec == name or path == model.path.absolute()]
    if exact:
        return exact[0]
    meant = [name for model, name in zip(found, specs, strict=True) if spec.lower() in _names(model)]
    if len(meant) > 1:
        raise UsageError(f"{spec} may be one of {len(meant)} models.", f"Give {' or '.join(meant)}.")
    real = os.path.realpath(library.resolve(spec))
    for model in found:
        if os.path.realpath(model.path) == real:
            return model
    raise ModelNotFound(
        f"{spec} is neither in the Hugging Face cache nor in a folder that config.toml names.",
        "`cpuchat models list` shows what is.",
    )


def _names(model: LocalModel) -> set[str]:
    """What people may call it, in lower case; the beginning of a download has no name but its path."""
    if model.unfinished is not None:
        return set()
    of_repo = {model.repo, f"{model.repo}:{model.quantization}"} if model.repo else set()
    return {name.lower() for name in (*of_repo, model.path.name, model.path.stem)}
