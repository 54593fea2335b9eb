"""Resolves the names of models on the command line: local ones and those on Hugging Face."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpuchat import paths
from cpuchat.errors import ModelNotFound, UsageError
from cpuchat.models.catalog import load_catalog
from cpuchat.models.gguf.header import read_model
from cpuchat.models.hub.choice import choose
from cpuchat.models.library.library import Library

if TYPE_CHECKING:
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.models.hub.address import Address
    from cpuchat.models.hub.client import Hub
    from cpuchat.models.library.model import LocalModel


def specs_of(found: Sequence[LocalModel]) -> list[str]:
    """Return the shortest text by which `Library.resolve` finds each model; the path of what cannot be loaded."""
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
    """Return the one model of the library that `spec` names, as in `models list` (damaged ones too) or for --model.

    Never guesses where --model would choose among several.

    Raises:
        ModelNotFound: there is none, or it is not in the library.
        UsageError: it is ambiguous.
    """
    found = library.local_models()
    specs = specs_of(found)
    path = paths.expanded(spec).absolute()
    exact = [model for model, name in zip(found, specs, strict=True) if spec == name or path == model.path.absolute()]
    if exact:
        return exact[0]
    meant = [name for model, name in zip(found, specs, strict=True) if spec.lower() in _names(model)]
    if len(meant) > 1:
        raise UsageError(f"{spec} is ambiguous: {len(meant)} models match.", f"Use {' or '.join(meant)}.")
    real = os.path.realpath(library.resolve(spec))
    for model in found:
        if os.path.realpath(model.path) == real:
            return model
    raise ModelNotFound(
        f"{spec} is neither in the Hugging Face cache nor in a folder named in config.toml.",
        "See `cpuchat models list`.",
    )


def _names(model: LocalModel) -> set[str]:
    """Return its possible names in lower case; a partial download has none but its path."""
    if model.unfinished is not None:
        return set()
    of_repo = {model.repo, f"{model.repo}:{model.quantization}"} if model.repo else set()
    return {name.lower() for name in (*of_repo, model.path.name, model.path.stem)}


def hub_address(text: str) -> Address:
    """Return where a model is on the hub: `text` as for `parse_address`, or a catalog id such as `qwen3-8b:Q8_0`.

    Raises:
        UsageError: it is neither; the hint names similar ids.
    """
    from cpuchat.models.hub.address import Address, parse_address

    if "/" in text:
        return parse_address(text)

    catalog = load_catalog()
    id, _, quantization = text.strip().lower().partition(":")
    model = catalog.find(id)
    if model is not None:
        return Address(repo=model.repos[0], quantization=quantization.upper())
    try:
        return parse_address(text)
    except UsageError as error:
        close = difflib.get_close_matches(id, [one.id for one in catalog.models], n=3)
        guess = f"Did you mean {' or '.join(close)}? " if close else ""
        hint = f"{guess}{error.hint} `cpuchat models catalog` lists ids."
        raise UsageError(error.message, hint) from None


def find_header(spec: str, folders: Sequence[str], hub: Hub, *, listed: bool = False) -> GGUFHeader | None:
    """Read the header of a local model (a value of --model), else of one on the hub.

    Args:
        folders: of the settings.
        listed: return None for a repository on the hub of which `spec` names no model, instead of its usual one.

    Raises:
        ModelNotFound: it is neither local nor the name of a repository.
        HubError and its kinds; ModelDamaged.
    """
    try:
        return read_model(Library(folders).resolve(spec))
    except ModelNotFound as error:
        missing = error
    if spec.lower().endswith(".gguf") and "://" not in spec:
        raise missing
    try:
        address = hub_address(spec)
    except UsageError:
        raise missing from None
    if listed and not address.wanted:
        return None
    repository = hub.repository(address.repo, address.revision or "main")
    return hub.header(repository, choose(repository, address.wanted))
