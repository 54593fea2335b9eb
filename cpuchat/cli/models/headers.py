"""The header of a model that a user names, wherever it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpuchat.errors import ModelNotFound, UsageError

if TYPE_CHECKING:
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.models.hub.client import Hub


def find_header(spec: str, folders: Sequence[str], hub: Hub, *, listed: bool = False) -> GGUFHeader | None:
    """Of a model here (what --model takes), else of one on the hub.

    Args:
        folders: of the settings.
        listed: None for a repository on the hub of which `spec` names no model; else it is the usual one of it.

    Raises:
        ModelNotFound: it is neither here nor the name of a repository.
        HubError and its kinds; ModelDamaged.
    """
    from cpuchat.cli.models.address import hub_address
    from cpuchat.models.gguf.header import read_model
    from cpuchat.models.hub.choice import choose
    from cpuchat.models.library.library import Library

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
