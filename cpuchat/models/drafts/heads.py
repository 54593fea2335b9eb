"""Lists the draft heads of a target: one that it contains, those on this machine, and those of its repository."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cpuchat.models.drafts.candidates import Candidate
from cpuchat.models.drafts.gain import Expectation
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.heads import ENGINE, HeadKind, included_layers, kind_named, title
from cpuchat.models.library.model import LocalModel

if TYPE_CHECKING:
    from cpuchat.models.hub.repository import Repository

_NOT_PREDICTED = Expectation(why=f"not predicted: {ENGINE} drafts with a head, at a fixed depth")
_ARCHITECTURES: dict[str, HeadKind] = {"eagle3": "eagle3", "dflash": "dflash"}
_RANK = ("Q8_0", "BF16", "F16", "Q6_K", "Q4_K_M", "Q4_0")


def local_heads(target: GGUFHeader, here: Iterable[LocalModel]) -> list[Candidate]:
    """Return the MTP layers of the target itself, then the head files on this machine, unchecked."""
    found: list[Candidate] = []
    if included_layers(target):
        one = Candidate(
            name=title("mtp"), where="here", path=target.path, head="mtp", included=True, expected=_NOT_PREDICTED
        )
        found.append(one)
    for model in here:
        if model.kind == "head" and model.unfinished is None:
            kind = kind_named(model.path.name) or _ARCHITECTURES.get(model.architecture, "mtp")
            one = Candidate(
                name=model.path.stem,
                where="here",
                path=model.path,
                repo=model.repo,
                quantization=model.quantization,
                size=model.size,
                head=kind,
                expected=_NOT_PREDICTED,
            )
            found.append(one)
    return found


def heads_of(repository: Repository, here: Iterable[Candidate] = ()) -> list[Candidate]:
    """Return the heads of the target's repository that are not `here`, unchecked: one file of each kind and base, the
    least quantized of the usual ones.
    """
    known = {one.path.stem for one in here if one.path is not None and one.repo.lower() == repository.id.lower()}
    best: dict[tuple[str, str], Candidate] = {}
    for model in repository.models:
        path = model.files[0].path
        kind = kind_named(path)
        if kind is None or not model.complete or model.name in known:
            continue
        one = Candidate(
            name=model.name,
            where="hub",
            repo=repository.id,
            quantization=model.quantization,
            size=model.size,
            head=kind,
            file=path,
            expected=_NOT_PREDICTED,
        )
        other = best.get((kind, model.base))
        if other is None or _rank(one) < _rank(other):
            best[kind, model.base] = one
    return list(best.values())


def _rank(one: Candidate) -> int:
    return _RANK.index(one.quantization) if one.quantization in _RANK else len(_RANK)


def repository_of(target: GGUFHeader, here: Iterable[LocalModel]) -> str:
    """Return the repository that the target was downloaded from, "" when that is not known."""
    return next((model.repo for model in here if model.path == target.path), "")
