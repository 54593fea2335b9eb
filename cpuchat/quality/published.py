"""Published losses by quantization, to compare measured ones with.

They were measured on other texts, mostly Wikitext-2, so they give only the order of magnitude.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator

import msgspec

from cpuchat import toml
from cpuchat.models.file_names import without_prefix


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Published losses of a quantization against F16 or BF16. None: not published.

    `kld_mean` and `kld_999` (the 99.9th percentile) in nats, `same_top` in percent of the tokens, `ppl_delta` as PPL
    minus the base's. `imatrix`: quantized with an importance matrix; None: not stated. `same_family`: it is about the
    model that was asked for, not another one in the same quantization.
    """

    model: str
    quantization: str
    kld_mean: float
    kld_999: float | None = None
    same_top: float | None = None
    ppl_delta: float | None = None
    imatrix: bool | None = None
    source: str
    same_family: bool = False


# In names of files, repositories and headers: "Meta-Llama-3-8B-Instruct", "Llama 2 7B Chat", "llama3:8b". Llama 3.1 and
# Qwen3-4B of April 2025 were retrained and are different models.
_MATCHERS = {
    "Llama-3-8B": re.compile(r"(?i)llama[-_. ]?3[-_.: ]8b(?![a-z0-9])"),
    "Llama-2-7B": re.compile(r"(?i)llama[-_. ]?2[-_.: ]7b(?![a-z0-9])"),
    "Qwen3-4B-2507": re.compile(r"(?i)qwen[-_. ]?3[-_.: ]4b(?:[-_. ](?:instruct|thinking))?[-_. ]2507(?!\d)"),
    "Qwen3.6-27B": re.compile(r"(?i)qwen[-_. ]?3\.6[-_.: ]27b(?![a-z0-9])"),
}


def _read() -> Iterator[Published]:
    text = (importlib.resources.files("cpuchat.quality") / "published.toml").read_text(encoding="utf-8")
    for table in toml.loads(text)["table"]:
        columns, rows = table.pop("columns"), table.pop("rows")
        for row in rows:  # the last column may be missing
            yield msgspec.convert({**table, **dict(zip(columns, row, strict=False))}, Published)


PUBLISHED = tuple(_read())


def published_for(name: str, quantization: str) -> list[Published]:
    """Return the published values of a quantization, those of the same family first, marked `same_family`.

    Args:
        name: of the model, its file or its repository; the quantization in it is ignored.
        quantization: `Q4_K_M`, in any case; `UD-` and `QAT-` formats are other ones, so none is published for them.
    """
    wanted = quantization.upper()
    if without_prefix(wanted) != wanted:
        return []
    family = next((model for model, matcher in _MATCHERS.items() if matcher.search(name)), "")
    found = [
        msgspec.structs.replace(row, same_family=row.model == family) for row in PUBLISHED if row.quantization == wanted
    ]
    return sorted(found, key=lambda row: not row.same_family)
