"""Tests models on servers on the command line, against a real llama-server."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest

from cpuchat.base import paths
from cpuchat.config import settings
from cpuchat.config.servers import RunningServer, recorded
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


def test_ask_prints_the_answer_and_its_figures(keyed: str) -> None:
    done = run("ask", "--server", keyed, "--temperature", "0", "What is cpuchat?")
    assert done.returncode == 0 and "cpuchat" in done.stdout
    assert re.search(r"tok/s · first token .* \(queue .*, network .*\)", done.stderr)


def test_ask_as_json_names_the_server(keyed: str) -> None:
    done = run("ask", "--server", keyed, "--json", "--temperature", "0", "--max-tokens", "9", "What is RAM?")
    answer = json.loads(done.stdout)
    assert answer["server"].startswith("llama-server at ") and "roofline" not in answer
    assert answer["timings"]["predicted_n"] == 9 and answer["timings"]["network_ms"] >= 0
    assert answer["stop_reason"] == "max_tokens"


def test_a_model_may_be_an_address(keyed: str) -> None:
    settings.update({"servers": {"urls": [keyed]}})
    assert run("ask", "--model", keyed, "--max-tokens", "4", "Hello").returncode == 0


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


def test_servers_are_listed_with_their_models(keyed: str) -> None:
    settings.update({"servers": {"urls": [keyed]}})
    done = run("servers")
    assert done.returncode == 0
    assert "llama-server, 1 model" in done.stdout and "2k context" in done.stdout
    [listed] = json.loads(run("servers", "list", "--json").stdout)["servers"]
    assert listed["server"] == keyed and listed["models"][0]["n_ctx"] == 2048


def test_a_server_that_is_not_there_is_named() -> None:
    with recorded(RunningServer("http://127.0.0.1:9", "some", os.getpid())):
        done = run("servers")
    assert done.returncode == 21 and "cannot be reached" in done.stdout


def test_options_of_the_worker_are_refused() -> None:
    done = run("ask", "--server", "http://127.0.0.1:9", "--threads", "1", "Hello")
    assert done.returncode == 2 and "engine.threads" in done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:80", "http://user:secret@host"])
def test_wrong_addresses_are_refused(address: str) -> None:
    done = run("ask", "--server", address, "Hello")
    assert done.returncode == 2
    assert "secret" not in done.stderr
