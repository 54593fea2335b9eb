"""Tests models on servers on the command line, against a real llama-server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from cpuchat.base import paths
from cpuchat.config import settings
from cpuchat.models.library.places import DEMO_FILES
from tests.cli.program import run
from tests.support.llama_server import llama_server

pytestmark = pytest.mark.slow
DEMO = paths.demo_dir() / DEMO_FILES["demo"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with llama_server(DEMO, api_key="sk-secret") as url:
        yield url


@pytest.fixture
def keyed(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CPUCHAT_API_KEY", "sk-secret")
    return url


def test_ask_prints_figures_and_as_json_names_the_server(keyed: str) -> None:
    settings.update({"servers": {"urls": [keyed]}})
    done = run("ask", "--model", keyed, "--temperature", "0", "What is cpuchat?")
    assert done.returncode == 0 and "cpuchat" in done.stdout
    assert re.search(r"tok/s · first token ", done.stderr)
    done = run("ask", "--server", keyed, "--json", "--temperature", "0", "--max-tokens", "9", "What is RAM?")
    answer = json.loads(done.stdout)
    assert answer["server"].startswith("llama-server at ") and "roofline" not in answer
    assert answer["timings"]["predicted_n"] == 9
    assert answer["stop_reason"] == "max_tokens"


def test_without_its_key_the_server_refuses(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPUCHAT_API_KEY", raising=False)
    done = run("ask", "--server", url, "Hello")
    assert done.returncode == 22
    assert "needs an API key" in done.stderr


def test_a_stored_key_is_found(url: str) -> None:
    assert run("servers", "key", url, stdin="sk-secret\n").returncode == 0
    assert paths.keys_file().stat().st_mode & 0o777 == 0o600
    assert run("ask", "--server", url, "--max-tokens", "4", "Hello").returncode == 0
    assert run("servers", "key", url, "--delete").returncode == 0
    assert run("ask", "--server", url, "--max-tokens", "4", "Hello").returncode == 22
