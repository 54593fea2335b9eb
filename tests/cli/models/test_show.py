"""Tests `cpuchat models show`, as a user's shell runs it."""

from __future__ import annotations

import json
from pathlib import Path

from cpuchat.base.errors import ModelDamaged, ModelNotFound, UsageError
from cpuchat.models.gguf.header import read_header
from tests.cli.program import refused, run
from tests.support.hub_server import HubServer
from tests.support.tiny_gguf import CHATML

REPO = "owner/tiny-GGUF"


def test_commands_agree_on_the_keys_and_figures_of_a_model() -> None:
    show, plan = (json.loads(run(*line, "demo", "--json").stdout) for line in (["models", "show"], ["plan"]))
    [listed] = [row for row in json.loads(run("models", "list", "--json").stdout) if row["spec"] == "demo"]
    for key in ("name", "path", "quantization", "size", "n_ctx_train"):
        assert listed[key] == show[key] == plan["model"][key]
    assert show["bytes_per_token"] == plan["bytes_per_token"]
    assert json.loads(run("models", "pair", "demo", "demo-draft", "--json").stdout)["target"] == listed["path"]


def test_a_file_in_sections_and_as_json(tiny_model: Path) -> None:
    done = run("models", "show", str(tiny_model), "--tensors", "--metadata")
    assert (done.returncode, done.stderr) == (0, "")
    headings = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert headings[:6] == ["Model", "Memory", "Tensors", "Tokenizer", "Chat template", "Metadata"]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["architecture", "llama"] in rows and ["llama.attention.head_count", "4"] in rows
    assert ["blk.1.ffn_down.weight", "F32", "128", "×", "64", "32.8", "kB"] in rows
    found = json.loads(run("models", "show", str(tiny_model), "--json", "--tensors").stdout)
    header = read_header(tiny_model)
    assert (found["path"], found["n_params"], found["problem"]) == (str(tiny_model), header.n_params, "")
    assert found["settings"]["llama.block_count"] == "2" and found["tokenizer"]["kind"] == "BPE"
    assert [tensor["name"] for tensor in found["tensor_list"]] == [tensor.name for tensor in header.tensors]


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
    assert "no file" in refused(ModelNotFound.exit_code, "models", "show", str(tmp_path / "missing.gguf"))


def test_a_model_on_the_hub(hub_server: HubServer, tiny_model: Path) -> None:
    hub_server.add(REPO, {"tiny-Q4_K_M.gguf": tiny_model, "tiny-Q8_0.gguf": tiny_model})
    done = run("models", "show", f"{REPO}:Q8_0", "--json")
    found = json.loads(done.stdout)
    assert found["path"].endswith("tiny-Q8_0.gguf") and found["n_params"] == read_header(tiny_model).n_params
    link = run("models", "show", f"{hub_server.endpoint}/{REPO}/blob/main/tiny-Q4_K_M.gguf", "--json")
    assert json.loads(link.stdout)["path"].endswith("tiny-Q4_K_M.gguf")
