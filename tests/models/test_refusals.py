"""Tests that models which cannot chat are refused with the reason: by lists, by their header, and by llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuchat.base.errors import ModelDamaged, ModelUnsupported
from cpuchat.config import settings
from cpuchat.models.gguf.header import read_header, read_model
from cpuchat.models.library.library import Library
from cpuchat.models.support import check_supported, load_refusal, why_unknown, why_unsupported
from cpuchat.models.synthetic.model import from_array, write_gguf
from tests.cli.program import run
from tests.support.edited_gguf import edited
from tests.support.tiny_gguf import write_tiny_gguf

ENGINE = ["llama", "nemotron_h", "qwen35", "gemma3", "deepseek2"]


def with_tensor(model: Path, out: Path, name: str, **changes: Any) -> Path:
    """Write `model` with one more tensor."""
    header = read_header(model)
    data = model.read_bytes()[header.data_offset :]
    tensors = [
        from_array(t.name, np.frombuffer(data, "<f4", t.n_elements, t.offset).reshape(t.shape[::-1]), "F32")
        for t in header.tensors
    ]
    kept = {k: list(v) if not isinstance(v, str | int | float | bool) else v for k, v in header.metadata.items()}
    return write_gguf(out, kept | changes, [*tensors, from_array(name, np.ones(8, "<f4"), "F32")])


@pytest.mark.parametrize("arch", ENGINE)
def test_nothing_is_said_against_models_that_the_engine_runs(arch: Any, tmp_path: Path) -> None:
    assert why_unsupported(read_header(write_tiny_gguf(tmp_path / "m.gguf", arch=arch))) == ""


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("dream", "diffusion model"), ("bert", "encoder"), ("t5", "for translating"), ("wavtokenizer-dec", "speech"),
        ("whisper", "whisper.cpp"),
        ("flux", "ComfyUI"), ("mllama", "Ollama's own format"),
        ("qwen99", "newer engine"),
    ],
)  # fmt: skip
def test_an_architecture_that_cannot_chat_is_refused_with_its_reason(architecture: str, why: str) -> None:
    assert why in why_unknown(architecture)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"llama.pooling_type": 3}, "embedding model"),
        ({"tokenizer.ggml.model": "none"}, "no tokenizer"),
        ({"llama.pooling_type": 4}, "reranker"),
        ({"llama.attention.causal": False}, "in both directions"),
        ({"tokenizer.ggml.pre": "brand-new-bpe"}, "pre-tokenizer 'brand-new-bpe'"),
    ],
)
def test_keys_tell_what_a_model_is_not(changes: dict[str, Any], why: str, tiny_model: Path, tmp_path: Path) -> None:
    file = edited(tiny_model, tmp_path / "m.gguf", changes)
    with pytest.raises(ModelUnsupported, match=why) as caught:
        check_supported(read_header(file))
    assert "again" not in caught.value.hint


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("v.blk.0.attn_q.weight", "Ollama's own format"),
        ("mm.input_projection.weight", "Ollama's own format"),
        ("blk.0.foreign_part.weight", r"such as blk\.0\.foreign_part\.weight"),
        ("cls.output.weight", "reranker or a classifier"),
    ],
)
def test_tensors_tell_it_in_lists_and_by_show_before_a_load(
    name: str, why: str, tiny_model: Path, tmp_path: Path
) -> None:
    file = with_tensor(tiny_model, tmp_path / "m.gguf", name)
    with pytest.raises(ModelUnsupported, match=why) as caught:
        check_supported(read_header(file))
    assert "again" not in caught.value.hint
    [model] = [one for one in Library([tmp_path]).local_models() if one.source == "folder"]
    assert model.state == "unsupported"
    assert Library([tmp_path]).verify(model).state == "unchecked"


@pytest.mark.parametrize(
    ("reason", "why", "kind"),
    [
        ("done_getting_tensors: wrong number of tensors; expected 22, got 21", "does not use", ModelUnsupported),
        ("tensor 'blk.1.ffn_up.weight' not found in the model", "lacks the tensor blk.1.ffn_up", ModelUnsupported),
        ("check_tensor_dims: tensor 'output.weight' has wrong shape; expected 4", "another shape", ModelUnsupported),
        ("key not found in model: llama.context_length", "lacks llama.context_length", ModelUnsupported),
        ("something else", "something else", ModelUnsupported),
        ("tensor 'a' data is not within the file bounds, model is corrupted or incomplete", "bounds", ModelDamaged),
        ("tensor 'a' has invalid data", "invalid data", ModelDamaged),
    ],
)
def test_only_damage_is_to_be_downloaded_again(reason: str, why: str, kind: type[Exception]) -> None:
    error = load_refusal(Path("m.gguf"), reason)
    assert type(error) is kind and why in error.message
    assert ("ownload it again" in error.hint) == (kind is ModelDamaged)


def test_a_vocabulary_is_refused_as_such(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a", "b"]}, [])
    done = run("ask", "--model", str(tmp_path / "m.gguf"), "Hi")
    assert done.returncode == ModelUnsupported.exit_code and "vocabulary without weights" in done.stderr


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(
    ("changes", "why"),
    [({"llama.context_length": None}, "lacks llama.context_length"), ({"llama.block_count": 3}, "lacks the tensor")],
)
def test_what_llama_cpp_refuses_is_said_in_words(
    changes: dict[str, Any], why: str, tiny_model: Path, tmp_path: Path
) -> None:
    done = run("ask", "--model", str(edited(tiny_model, tmp_path / "m.gguf", changes)), "Hi")
    assert done.returncode == ModelUnsupported.exit_code
    assert why in done.stderr and "another publisher" in done.stderr


def test_the_command_line_lists_a_diffusion_model_as_unsupported(tiny_model: Path, tmp_path: Path) -> None:
    header = read_model(tiny_model)
    changes = {key.replace("llama.", "llada."): header.metadata[key] for key in header.metadata if "llama." in key}
    gone = dict.fromkeys(key for key in header.metadata if key.startswith("llama."))
    edited(tiny_model, tmp_path / "m.gguf", {**gone, **changes, "general.architecture": "llada"})
    settings.update({"model": {"folders": [str(tmp_path)]}})
    rows = json.loads(run("models", "list", "--json").stdout)
    [row] = [row for row in rows if row["source"] == "folder"]
    assert row["state"] == "unsupported" and "diffusion" in row["damaged"]
    assert "diffusion" in run("models", "show", str(tmp_path / "m.gguf")).stdout
    done = run("ask", "--model", str(tmp_path / "m.gguf"), "Hi")
    assert done.returncode == ModelUnsupported.exit_code and "diffusion" in done.stderr
