"""Tests prompts that are evaluated ahead, and agents whose server was restarted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.serving.test_tools import OWN, TOOLS
from tests.support.serving import Server, chat, server

SYSTEM = "You are careful. " * 40


def reused(running: Server, text: str) -> tuple[int, int]:
    """Return the tokens of a prompt that were reused and evaluated."""
    talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    timings = running.post(chat("", messages=talk, tools=TOOLS)).json()["timings"]
    return timings["cache_n"], timings["prompt_n"]


@pytest.mark.timeout(300)
def test_an_agent_costs_what_is_new_after_a_restart(tiny_model: Path, tmp_path: Path, bandwidth_file: bytes) -> None:
    with server(tiny_model, tmp_path, bandwidth=bandwidth_file) as first:
        assert reused(first, "Hello")[1] > 1000
    with server(tiny_model, tmp_path, bandwidth=bandwidth_file) as again:
        cached, evaluated = reused(again, "Another question")
        assert cached > 1000
        assert evaluated < 90
        assert again.http.get("/metrics").status_code == 200


@pytest.mark.timeout(300)
def test_a_prompt_is_evaluated_ahead(tiny_model: Path, tmp_path: Path, bandwidth_file: bytes) -> None:
    body = {"system": SYSTEM, "tools": OWN, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 500}
    for name, content in (("agent", body), ("wrong", {"messages": []})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "served").mkdir()
    files = (argument for name in ("agent", "wrong") for argument in ("--warm", str(tmp_path / f"{name}.json")))
    with server(tiny_model, tmp_path / "served", *files, bandwidth=bandwidth_file) as running:
        asked = {**body, "messages": [{"role": "user", "content": "Something else"}], "max_tokens": 4}
        usage = running.post(asked, "/v1/messages").json()["usage"]
        assert usage["cache_read_input_tokens"] > 500
        assert usage["input_tokens"] < 90
    assert "`messages` is empty" in (tmp_path / "served" / "stderr.txt").read_text()


ODD = {
    "tools": b'{"tools": [1]}', "empty": b"", "page": b"<html>", "list": b"[1]", "null": b"null",
    "latin": b'{"messages": "\xe9"}',
    "types": b'{"input": [{"type": "reasoning", "content": 5}]}', "name": b'{"model": "gpt-9", "messages": 1}',
    "deep": b"[" * 100_000, "form": b'{"messages": [{"role": "user", "content": "x"}], "json_schema": {"not": {}}}',
}  # fmt: skip


@pytest.mark.timeout(300)
def test_files_that_are_no_requests_are_told_and_the_next_is_evaluated(
    tiny_model: Path, tmp_path: Path, bandwidth_file: bytes
) -> None:
    """A pipe that nobody writes to, a device, a file without an end, one that is gone: none holds up the others."""
    files = [tmp_path / f"{name}.json" for name in ODD]
    for file, content in zip(files, ODD.values(), strict=True):
        file.write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "endless").open("wb") as endless:
        endless.truncate(1 << 40)
    body = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]}
    (tmp_path / "right.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(body).encode())
    files += [tmp_path / "pipe", Path("/dev/zero"), tmp_path / "endless"]
    arguments = [one for file in (*files, tmp_path / "right.json") for one in ("--warm", str(file))]
    with server(tiny_model, tmp_path / "served", *arguments, bandwidth=bandwidth_file) as running:
        while not running.metric("requests_total", endpoint="warm", result="ok"):
            assert running.process.poll() is None
        told = (tmp_path / "served" / "stderr.txt").read_text()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0
    for file in files:
        (line,) = (one for one in told.splitlines() if f"--warm {file}: " in one)
        assert len(line) > len(f"cpuchat: --warm {file}: ") + 5
    assert "Traceback" not in told and told.count("not a regular file") == 2


@pytest.mark.timeout(300)
def test_a_file_whose_reading_does_not_end_does_not_keep_the_server(
    tiny_model: Path, tmp_path: Path, bandwidth_file: bytes
) -> None:
    slow = {"type": "object", "properties": {f"p{n}": {"enum": [1, 2, 3]} for n in range(6000)}}
    schema = {**slow, "required": [*slow["properties"]]}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": schema, "strict": True}} for n in range(9)
    ]
    (tmp_path / "slow.json").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": tools}))
    folder = tmp_path / "served"
    with server(
        tiny_model, folder, "--warm", str(tmp_path / "slow.json"), bandwidth=bandwidth_file, ctx=1 << 15
    ) as one:
        assert one.http.get("/health").status_code == 200
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(60) == 0
    assert "Traceback" not in (folder / "stderr.txt").read_text()
