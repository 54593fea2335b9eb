"""Tests commands on models of scripted servers, named or used last."""

from __future__ import annotations

import asyncio
import json
import subprocess

import pytest

from cpuchat.base import paths
from cpuchat.cli.app import initial_model
from cpuchat.cli.options import key_ring
from cpuchat.config import settings
from cpuchat.models.library.library import Library
from tests.cli.program import refused, run_process
from tests.support.remote_server import Reply, remote_server


async def test_ask_uses_it_without_the_key_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(reply: Reply) -> None:
        await reply.json({"error": {"message": "Invalid API key"}}, 401)

    monkeypatch.setenv("CPUCHAT_API_KEY", "sk-other")
    async with remote_server(answer=refuse, pages={"/v1/models": refuse}) as server:
        settings.update({"model": {"last": f"{server.url}#name"}})
        done = await asyncio.to_thread(run_process, "ask", "Hello")
    assert done.returncode == 22 and "needs an API key" in done.stderr
    assert server.asked and not any("sk-other" in str(one.headers) for one in server.asked)
    assert key_ring(settings.load(), None).key(server.url) == ""


async def test_a_stored_key_is_sent_and_the_answer_has_figures() -> None:
    async def answer(reply: Reply) -> None:
        if reply.asked.headers.get("authorization") != "Bearer sk-secret":
            return await reply.json({"error": {"message": "Invalid API key"}}, 401)
        await reply.whole("It is a program.")

    async with remote_server(answer=answer) as server:

        def ask(*more: str) -> subprocess.CompletedProcess[str]:
            return run_process("ask", "--server", server.url, *more, "What is it?")

        refused = await asyncio.to_thread(ask)
        assert refused.returncode == 22 and "needs an API key" in refused.stderr
        paths.data_dir().mkdir(parents=True, exist_ok=True)
        paths.keys_file().touch(0o600)
        paths.keys_file().write_text(f'"{server.url}" = "sk-secret"\n')
        done = await asyncio.to_thread(ask)
        assert done.stdout == "It is a program.\n" and " · first token " in done.stderr
        found = json.loads((await asyncio.to_thread(ask, "--json")).stdout)
        assert found["server"].startswith("OpenAI-compatible server at ") and "roofline" not in found


def test_the_app_says_that_they_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    settings.update({"model": {"last": "http://127.0.0.1:9#name"}})
    found = initial_model(Library(()), None, settings.load(), {"engine__threads": 1})
    assert str(found) == "http://127.0.0.1:9#name"
    assert "engine.threads has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("tune",), ("bench",)])
def test_what_computes_here_wants_a_model_of_this_machine(command: tuple[str, ...]) -> None:
    settings.update({"model": {"last": "http://127.0.0.1:9#name"}})
    assert "on a server" in refused(2, *command)
