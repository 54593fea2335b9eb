"""Parses what users write for a model on the hub: `owner/name`, `owner/name:Q4_K_M`, a browser link, `hf://…`."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, urlsplit

from cpuchat.errors import UsageError
from cpuchat.models.hub.environment import endpoint, host
from cpuchat.models.hub.repository import Data
from cpuchat.text import clean_line

_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_QUANTIZATION = re.compile(r"[\w.-]+", re.ASCII)


class Address(Data, frozen=True):
    """A repository (`owner/name`) and what was named of it; "" for what was not. `path`: a file or a folder of it."""

    repo: str
    revision: str = ""
    path: str = ""
    quantization: str = ""

    @property
    def wanted(self) -> str:
        """Return the argument for `choice.choose`; "" when no model of the repository was named."""
        return self.path or self.quantization


def parse_address(text: str) -> Address:
    """Parse `OWNER/NAME`, links (`https://huggingface.co/OWNER/NAME/blob/main/x.gguf`, with or without
    `https://`; those of `HF_ENDPOINT`; `…?show_file_info=x.gguf`, the link of a quantization on the repository's page)
    and `hf://OWNER/NAME@REVISION/x.gguf`; each optionally followed by `:QUANTIZATION`.

    Raises:
        UsageError: it is none of these, or not a model.
    """
    from huggingface_hub import parse_hf_uri

    text = text.strip()
    location, colon, quantization = text.rpartition(":")
    if not colon or not _QUANTIZATION.fullmatch(quantization):
        location, quantization = text, ""
    uri = f"hf://{location}" if _REPO.fullmatch(location) else location
    try:
        found = parse_hf_uri(uri, endpoint())
    except ValueError:  # HfUriError is one, and a broken host another
        found = None
    if found is None or found.type != "model":
        raise UsageError(
            f"{clean_line(text)[:120]!r} is not a model repository.",
            f"Write OWNER/NAME, OWNER/NAME:Q4_K_M, or its URL on {host()}.",
        )
    shown = parse_qs(urlsplit(location).query).get("show_file_info", [""])
    path = found.path_in_repo or shown[0]
    return Address(repo=found.id, revision=found.revision or "", path=path, quantization=quantization.upper())
