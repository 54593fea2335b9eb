"""From the names of a repository's files to its models: quantizations, split files, heads, projectors. Pure.

The names are those that publishers really use: `Model-Q4_K_M.gguf` (bartowski, lmstudio-community), `Model-UD-Q4_K_XL`
and `BF16/Model-BF16-00001-of-00002` (unsloth), `Model.i1-IQ3_M` and `Model.mmproj-f16` (mradermacher),
`model-mxfp4` and `mmproj-model-f16` (ggml-org), `model-q4_0` (Qwen, Google).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from cpuchat.models.file_roles import role_of
from cpuchat.models.hub.repository import HubFile, RepoModel
from cpuchat.models.quantization_names import quantization_of

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})$", re.IGNORECASE)
_SUFFIX = ".gguf"


def models_of(files: Iterable[HubFile]) -> tuple[RepoModel, ...]:
    """The GGUF models among a repository's files, the smallest first; the parts of a split one are one model.

    What belongs to no model (texts, pictures, other formats) is left out.
    """
    groups: dict[tuple[str, int], dict[int, HubFile]] = {}
    for file in files:
        if not file.path.lower().endswith(_SUFFIX):
            continue
        stem, number, count = file.path[: -len(_SUFFIX)], 1, 1
        part = _PART.match(stem)
        if part is not None:
            stem, number, count = part["stem"], int(part["number"]), int(part["count"])
        groups.setdefault((stem, count), {})[number] = file
    models = [_model(stem, count, parts) for (stem, count), parts in groups.items()]
    return tuple(sorted(models, key=lambda model: (model.size, model.name)))


def _model(stem: str, count: int, parts: Mapping[int, HubFile]) -> RepoModel:
    return RepoModel(
        name=PurePosixPath(stem).name,
        files=tuple(parts[number] for number in sorted(parts)),
        quantization=quantization_of(stem),
        kind=role_of(stem),
        complete=len(parts) == count and min(parts) == 1 and max(parts) == count,
    )
