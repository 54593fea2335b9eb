"""Tests tokens, addresses and web pages that may use the server."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil
import pytest

from cpuchat.base.errors import UsageError
from cpuchat.config.servers import RunningServer, recorded
from cpuchat.serving.server import TOKEN_VARIABLE, PortInUse, listen, read_token
from tests.cli.program import run
from tests.support.serving import chat, server

TOKEN = "a-token-for-the-tests-0123456789"


def test_a_token_is_needed_and_compared(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)  # the worker must not inherit it
    arguments = ("--host", "0.0.0.0", "--token-file", str(file), "--cors-origin", "https://page.example")
    with server(tiny_model, tmp_path, *arguments, token=TOKEN) as running:
        assert running.post(chat("Hello")).json()["choices"]
        assert running.http.get("/metrics").status_code == 200
        for key in ("wrong", TOKEN + "x", TOKEN[:-1], "é"):
            refused = running.http.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
        assert running.http.get("/metrics", headers={"authorization": ""}).status_code == 401
        assert running.http.get("/health", headers={"authorization": ""}).status_code == 200
        allowed = running.http.get("/v1/models", headers={"origin": "https://page.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        assert running.http.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403
        preflight = {"origin": "https://page.example", "access-control-request-method": "POST", "authorization": ""}
        asked = running.http.options("/v1/chat/completions", headers=preflight)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://page.example")
        own = psutil.Process(running.process.pid).cmdline()
        assert TOKEN not in " ".join([*own, *running.worker.cmdline(), *running.worker.environ().values()])


def test_another_address_needs_a_token(tiny_model: Path) -> None:
    done = run("serve", str(tiny_model), "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "--token-file" in done.stderr


def test_a_port_in_use_is_told(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match="in use"):
            listen("127.0.0.1", port)
        with recorded(RunningServer(f"http://127.0.0.1:{port}", "another", os.getpid())):
            done = run("serve", str(tiny_model), "--port", str(port))
    assert done.returncode == 2
    assert "another is already served" in done.stderr


def test_a_missing_token_file_is_made_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = read_token(file)
    assert len(token) >= 32
    assert read_token(file) == token
    assert file.stat().st_mode & 0o777 == 0o600


def test_unusable_tokens_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_token(file)
    file.chmod(0o600)
    for text in ("", "short", "with spaces in between it", "ünïcödé-ünïcödé-ünïcödé", "x" * 5000):
        file.write_text(text)
        with pytest.raises(UsageError):
            read_token(file)
    with pytest.raises(UsageError):
        read_token(tmp_path)
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(UsageError, match=TOKEN_VARIABLE):
        read_token(None)
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert read_token(None) == TOKEN
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert read_token(None) == ""
