"""Tests which draft model is counted beside a model that is on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.models.drafts.choice import planned_draft
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.hub.client import Hub
from cpuchat.models.library.library import Library
from tests.models.drafts.files import WORDS, header_file, write_catalog
from tests.support.hub_server import HubServer

WEIGHTS = 700_000  # enough for a draft of the size that the catalog tells


@pytest.fixture
def target(tmp_path: Path) -> GGUFHeader:
    """Return a file of a model that is in the catalog but not in the library."""
    write_catalog(("big", "Big", WEIGHTS / 1e9, ["small"]), ("small", "Small", 8e-9, []))
    return read_model(header_file(tmp_path / "Big-Q8_0.gguf", weights=WEIGHTS))


def on_hub(hub_server: HubServer, file: Path) -> Hub:
    hub_server.add("owner/Small-GGUF", {"Small-Q8_0.gguf": file})
    return Hub()


@pytest.mark.parametrize(("file", "is_named"), [("mine/Small-Q8_0.gguf", False), ("own.gguf", True)])
def test_the_catalogs_draft_that_is_here_or_the_one_that_the_settings_name_is_counted(
    file: str, is_named: bool, tmp_path: Path, target: GGUFHeader, library: Library
) -> None:
    draft = header_file(tmp_path / file)
    beside = planned_draft(target, str(draft) if is_named else "", library)
    assert beside is not None and beside.here and beside.header.path == draft
    assert is_named or beside.name.startswith("Small")
    assert planned_draft(target, "none", library) is planned_draft(target, "no-such-model", library) is None


def test_one_that_is_not_here_is_looked_up_on_the_hub(
    tmp_path: Path, target: GGUFHeader, library: Library, hub_server: HubServer
) -> None:
    hub = on_hub(hub_server, header_file(tmp_path / "on hub/Small-Q8_0.gguf"))
    beside = planned_draft(target, "auto", library, hub)
    assert beside is not None and not beside.here and beside.name == "Small Q8_0"
    assert planned_draft(target, "auto", library) is None
    assert planned_draft(target, "none", library, hub) is None


def test_one_with_another_vocabulary_is_not_counted(
    tmp_path: Path, target: GGUFHeader, library: Library, hub_server: HubServer
) -> None:
    stranger = header_file(tmp_path / "stranger.gguf", [*WORDS[:200], "other", *WORDS[201:]])
    assert planned_draft(target, "", library, on_hub(hub_server, stranger)) is None
    assert planned_draft(target, str(stranger), library) is None
