"""Tests addresses of RPC workers, which layers they get, and how one is started."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from cpuchat.backend.heads.server import Drafting, ServerOptions, command
from cpuchat.base.errors import EngineMissing, UsageError
from cpuchat.config.servers import find_worker_program, parse_workers
from cpuchat.config.settings import EngineSection
from cpuchat.models.fit import kv_bytes, layers_elsewhere, needs_workers, required_memory
from cpuchat.models.gguf.header import read_header
from cpuchat.protocol.messages import LoadOptions
from tests.cli.program import run, run_process
from tests.support.head_files import target_file


def test_addresses_have_the_usual_port() -> None:
    assert parse_workers(" big-1, 10.0.0.2:50053,big-1:50052,") == ("big-1:50052", "10.0.0.2:50053")
    assert EngineSection(rpc="big-1").load_options().rpc == "big-1:50052"


@pytest.mark.parametrize("text", ["a:b", "a:0", "a:70000", "http://a", "::1", "a b"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_workers(text)
    with pytest.raises(ValueError, match=r"^rpc: "):
        EngineSection(rpc=text)


def test_workers_get_the_layers_that_do_not_fit(tmp_path: Path) -> None:
    header = read_header(target_file(tmp_path / "m.gguf"))
    options = LoadOptions(n_ctx=512, rpc="a:1")
    one = header.tensors[0].nbytes + kv_bytes(header, 512) // 4
    assert layers_elsewhere(header, options, 512, 0) == (0, 0)
    assert layers_elsewhere(header, options, 512, one + 1) == (2, 2 * one)
    assert layers_elsewhere(header, options, 512, 100 * one) == (4, 4 * one)
    assert layers_elsewhere(header, LoadOptions(rpc="a:1", rpc_layers=3), 512, 0) == (3, 3 * one)

    need = required_memory(header, options, 512).least
    assert needs_workers(header, options, need - 1) and not needs_workers(header, options, need)
    assert needs_workers(header, LoadOptions(rpc="a:1", rpc_layers=1), need)
    assert not needs_workers(header, LoadOptions(), 0)


def test_the_command_line_keeps_the_embedding_and_the_output_here() -> None:
    server = ServerOptions(
        program="x", model="/m.gguf", head="", kind=None, port=1, n_ctx=512, drafting=Drafting(), cpus=(0,),
        rpc_layers=3, options=LoadOptions(rpc="a:1,b:2"),
    )  # fmt: skip
    words = " ".join(command(server))
    assert "--rpc a:1,b:2 --device RPC0,RPC1" in words and "--n-gpu-layers 4" in words
    assert "^output=CPU" in words and "--device none" not in words


@pytest.mark.parametrize("wrong", [("--token-file", "t"), ("--strict-model",), ("--ctx", "512"), ("m.gguf",)])
def test_a_worker_takes_no_options_of_a_server(wrong: tuple[str, ...]) -> None:
    done = run("serve", "--rpc-worker", "--host", "0.0.0.0", *wrong)
    assert done.returncode == UsageError.exit_code
    assert f"--rpc-worker takes no {'model' if wrong[0] == 'm.gguf' else wrong[0]}." in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_a_worker_is_the_rpc_server_on_the_cores_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineMissing):
        find_worker_program()
    program = tmp_path / "ggml-rpc-server"
    told = "[sys.argv[1:], sorted(os.sched_getaffinity(0))]"
    program.write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps({told}))\n")
    program.chmod(0o755)
    cpu = min(os.sched_getaffinity(0))
    done = run_process("serve", "--rpc-worker", "--host", "0.0.0.0", "--cores", str(cpu))
    assert done.returncode == 0, done.stderr
    assert "neither a key nor encryption" in done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("RPC worker on 0.0.0.0:50052, 1 thread")
    assert json.loads(last) == [["--host", "0.0.0.0", "--port", "50052", "--threads", "1"], [cpu]]
