"""Chooses the model of a repository that a user means."""

from __future__ import annotations

from collections.abc import Iterable

from cpuchat.errors import NotOnHub
from cpuchat.models.file_names import rank, without_prefix
from cpuchat.models.hub.repository import RepoModel, Repository
from cpuchat.text import clean_line

KINDS = {"head": "a draft head", "projector": "a multimodal projector", "imatrix": "an importance matrix"}
"""Names of files that are not models."""


def choose(repository: Repository, wanted: str = "", *, heads: bool = False) -> RepoModel:
    """Return the model that `wanted` names: a quantization, a model's or a file's name; "" is the usual trade-off.

    A quantization without its prefix finds `UD-` and `QAT-` forms when there is no plain one. Of several models of
    the same quantization, the largest outside of folders is meant: the others belong to it.

    Args:
        heads: the name of a draft head is one, too.

    Raises:
        NotOnHub: there is no such model; the hint lists those there are.
    """
    listed = loadable(repository.models)
    models = usual_first(listed)
    if models and not wanted:
        return models[0]
    for model in models:
        if wanted.lower() in {model.quantization.lower(), *_names(model)}:
            return model
    for model in models:
        if wanted.upper() == without_prefix(model.quantization):
            return model
    for model in repository.models:
        if wanted.lower() in _names(model) - {model.quantization.lower()} and model.kind != "model":
            if heads and model.kind == "head" and model.complete:
                return model
            name, listing = clean_line(model.name), f"`cpuchat models files {repository.id}` lists the models."
            raise NotOnHub(f"{name} is {KINDS[model.kind]}, not a model.", listing)
    if not models:
        others = _others(repository)
        raise NotOnHub(
            f"{repository.id} has no GGUF model{f', only {others}' if others else ''}.",
            f"See `cpuchat models search {_name(repository)}`.",
        )
    there = ", ".join(dict.fromkeys(clean_line(model.quantization or model.name) for model in listed))
    raise NotOnHub(f"{repository.id} has no {clean_line(wanted)}.", f"Available: {there}.")


def _others(repository: Repository) -> str:
    """Return what it has instead of models: `draft heads, multimodal projectors`."""
    kinds = dict.fromkeys(model.kind for model in repository.models if model.kind != "model")
    return ", ".join(KINDS[kind].partition(" ")[2] + "s" for kind in kinds)


def loadable(models: Iterable[RepoModel]) -> list[RepoModel]:
    """Return the models without heads, projectors and the like, and without those of which parts are missing."""
    return [model for model in models if model.kind == "model" and model.complete]


def usual_first(models: Iterable[RepoModel]) -> list[RepoModel]:
    """Sort by preference when no quantization was named."""
    return sorted(models, key=lambda one: (rank(one.quantization), one.files[0].path.count("/"), -one.size))


def _names(model: RepoModel) -> set[str]:
    """Return the names of a model and of its files, in lower case."""
    return {name.lower() for name in (model.name, f"{model.name}.gguf", *(file.path for file in model.files)) if name}


def _name(repository: Repository) -> str:
    return repository.id.rpartition("/")[2]
