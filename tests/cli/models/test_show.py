"""Tests `cpuchat models show`, as a user's shell runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpuchat.base.errors import ModelDamaged, ModelNotFound, UsageError
from cpuchat.models.gguf.header import read_header
from tests.cli.program import run
from tests.support.hub_server import HubServer
from tests.support.tiny_gguf import CHATML

REPO = "owner/tiny-GGUF"


@pytest.fixture
def hub(hub_server: HubServer, tiny_model: Path) -> HubServer:
    """One repository with two quantizations, by their names."""
    hub_server.add(REPO, {"tiny-Q4_K_M.gguf": tiny_model, "tiny-Q8_0.gguf": tiny_model})
    return hub_server


def test_a_file(tiny_model: Path) -> None:
    done = run("models", "show", str(tiny_model))
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  ")]
    shown = {line[0]: line[1] for line in lines if len(line) > 1}
    assert shown["architecture"] == "llama"
    assert shown["F32"].startswith("21 tensors, ")
    headings = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert headings == ["Model", "Memory", "Tensors", "Tokenizer", "Chat template"]


def test_json(tiny_model: Path) -> None:
    done = run("models", "show", str(tiny_model), "--json", "--tensors")
    found = json.loads(done.stdout)
    header = read_header(tiny_model)
    assert (found["path"], found["n_params"], found["problem"]) == (str(tiny_model), header.n_params, "")
    assert found["settings"]["llama.block_count"] == "2"
    assert found["tokenizer"]["kind"] == "BPE"
    assert [tensor["name"] for tensor in found["tensor_list"]] == [tensor.name for tensor in header.tensors]
    assert "tensor_list" not in json.loads(run("models", "show", str(tiny_model), "--json").stdout)


def test_tensors_and_metadata(tiny_model: Path) -> None:
    done = run("models", "show", str(tiny_model), "--tensors", "--metadata")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["blk.1.ffn_down.weight", "F32", "128", "×", "64", "32.8", "kB"] in rows
    assert ["llama.attention.head_count", "4"] in rows


def test_template(tiny_model: Path, tiny_model_without_template: Path) -> None:
    assert run("models", "show", str(tiny_model), "--template").stdout == CHATML + "\n"
    without = run("models", "show", str(tiny_model_without_template), "--template")
    assert (without.returncode, without.stdout) == (ModelNotFound.exit_code, "")
    assert "no chat template" in without.stderr
    both = run("models", "show", str(tiny_model), "--template", "--json")
    assert both.returncode == UsageError.exit_code


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, but not really")
    damaged = run("models", "show", str(tmp_path / "bad.gguf"))
    assert damaged.returncode == ModelDamaged.exit_code and "is damaged" in damaged.stderr
    missing = run("models", "show", str(tmp_path / "missing.gguf"))
    assert missing.returncode == ModelNotFound.exit_code and "no model" in missing.stderr


def test_a_model_on_the_hub(hub: HubServer, tiny_model: Path) -> None:
    done = run("models", "show", f"{REPO}:Q8_0", "--json")
    found = json.loads(done.stdout)
    assert found["file"] == "tiny-Q8_0.gguf" and found["n_params"] == read_header(tiny_model).n_params
    asked = len(hub.requests)
    link = run("models", "show", f"{hub.endpoint}/{REPO}/blob/main/tiny-Q4_K_M.gguf", "--json")
    assert json.loads(link.stdout)["file"] == "tiny-Q4_K_M.gguf" and len(hub.requests) > asked
