"""Models on the hub as they are called on the command line: by repository, by link, or by an id of the catalog."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from cpuchat.errors import UsageError

if TYPE_CHECKING:
    from cpuchat.models.hub.address import Address


def hub_address(text: str) -> Address:
    """Where the model is that `text` names: as `parse_address` takes it, or `qwen3-8b`, `qwen3-8b:Q8_0`.

    Raises:
        UsageError: it is neither; the hint names ids like it.
    """
    from cpuchat.models.hub.address import Address, parse_address

    if "/" in text:
        return parse_address(text)

    from cpuchat.models.catalog import load_catalog

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
        hint = f"{guess}{error.hint} `cpuchat models catalog` lists models that go by an id."
        raise UsageError(error.message, hint) from None
