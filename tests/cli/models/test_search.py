"""Tests `cpuchat models search` as a user runs it, against a local hub."""

from __future__ import annotations

import json

import pytest

from cpuchat.base.errors import HubOffline, RateLimited
from tests.cli.program import refused, run, succeeded
from tests.support.hub_server import TOKEN, Fault, HubServer


def test_the_list_has_what_one_chooses_by(hub_server: HubServer) -> None:
    facts = {"total": 8_190_735_360, "architecture": "qwen3"}
    hub_server.add("a/Qwen3-8B-GGUF", {"a.gguf": b"1"}, downloads=123_456, gguf=facts)
    hub_server.add("b/Qwen3-8B-GGUF", {"b.gguf": b"2"}, gated=True)
    done = succeeded("models", "search", "qwen3", "8b")
    headings, first, second = done.stdout.splitlines()
    assert headings.split() == ["REPOSITORY", "PARAMS", "ARCH", "DOWNLOADS", "UPDATED", "ACCESS"]
    assert first.split() == ["a/Qwen3-8B-GGUF", "8.2B", "qwen3", "123,456", "2025-11-03"]
    assert second.split() == ["b/Qwen3-8B-GGUF", "0", "2025-11-03", "gated"]


def test_json_is_for_scripts_and_nothing_found_is_no_error(
    hub_server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.add("a/Tiny-GGUF", {"a.gguf": b"1"}, downloads=7, private=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    [row] = json.loads(run("models", "search", "tiny", "--json").stdout)
    assert (row["id"], row["downloads"], row["private"], row["gated"]) == ("a/Tiny-GGUF", 7, True, False)
    done = run("models", "search", "no\x1b[31m such thing")
    assert (done.returncode, done.stdout) == (0, "")
    assert "No GGUF repositories match" in done.stderr and "\x1b" not in done.stderr


def test_offline_mode_and_a_hub_that_asks_to_wait_end_with_their_own_words(
    hub_server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.fault("", "", Fault(where="api", status=429, retry_after="30"))
    done = run("models", "search", "tiny", "--json")
    assert done.returncode == RateLimited.exit_code
    assert json.loads(done.stdout)["error"]["code"] == RateLimited.code
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "Offline mode" in refused(HubOffline.exit_code, "models", "search", "tiny")
