"""Models on the hub go by the ids of the catalog, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base.errors import ModelNotFound, UsageError
from tests.cli.program import run
from tests.models.drafts.files import write_catalog
from tests.support.hub_server import HubServer


@pytest.fixture
def hub(hub_server: HubServer, tiny_model: Path) -> HubServer:
    """Return a hub with the repository of the model that the user's catalog calls tiny."""
    write_catalog(("tiny", "Tiny", 0.001, []))
    content = tiny_model.read_bytes()
    hub_server.add("owner/Tiny-GGUF", {"Tiny-Q4_K_M.gguf": content, "Tiny-Q8_0.gguf": content + b"\0" * 64})
    return hub_server


@pytest.mark.parametrize(("name", "file"), [("tiny", "Tiny-Q4_K_M.gguf"), (" TINY:q8_0", "Tiny-Q8_0.gguf")])
def test_a_model_of_the_catalog_is_downloaded_by_its_id(hub: HubServer, name: str, file: str) -> None:
    done = run("models", "download", name)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name == file


def test_its_header_is_shown_by_its_id(hub: HubServer) -> None:
    shown = run("models", "show", "tiny:Q8_0")
    assert shown.returncode == 0, shown.stderr
    assert "architecture" in shown.stdout


def test_an_id_that_is_none_gets_those_like_it() -> None:
    done = run("models", "download", "qwen3-8")
    assert done.returncode == UsageError.exit_code
    assert "Did you mean qwen3-8b" in done.stderr and "models catalog" in done.stderr
    assert run("models", "show", "no-such-model").returncode == ModelNotFound.exit_code
