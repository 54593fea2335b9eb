"""Tests what is shown of a model, from real files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from cpuchat.costs.model import N_PAST
from cpuchat.models.gguf.header import read_header
from cpuchat.models.inspect import Inspection, inspect
from cpuchat.present.models import sections
from tests.models.llama import Llama
from tests.support.edited_gguf import edited
from tests.support.tiny_gguf import CHATML, Architecture, finish, vocabulary, write_tiny_gguf

TOKENS = vocabulary()


@pytest.fixture
def tiny(tiny_model: Path) -> Inspection:
    return inspect(read_header(tiny_model))


def of(path: Path, arch: Architecture) -> Inspection:
    return inspect(read_header(write_tiny_gguf(path / f"{arch}.gguf", arch=arch)))


def test_the_figures_of_memory_are_those_of_llama_cpp(tiny: Inspection, tiny_model: Path) -> None:
    with Llama(tiny_model, n_ctx=512) as loaded:
        assert tiny.kv_per_token * 512 == pytest.approx(loaded.mebibytes("KV buffer size") * 2**20, rel=0.01)
    # One row of the embedding table, everything else whole, and the cache in the middle of an answer: as predicted.
    assert tiny.bytes_per_token == tiny.header.size - 272 * 64 * 4 + 64 * 4 + (N_PAST + 1) * tiny.kv_per_token


def test_tensors_by_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(path := tmp_path / "mixed.gguf", "llama")
    writer.add_block_count(1)
    for name, kind in (("blk.0.a", "Q4_0"), ("blk.0.b", "Q8_0"), ("blk.0.c", "Q8_0")):
        raw = gguf.quants.quantize(np.zeros((4, 64), np.float32), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)
    found = inspect(read_header(path))
    assert [(k.type, k.count, k.n_params, k.nbytes) for k in found.tensors] == [
        ("Q8_0", 2, 512, 544),
        ("Q4_0", 1, 256, 144),
    ]
    assert found.header.bits_per_weight == 8 * 688 / 768


def test_the_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.add_bos_token": True}
    found = inspect(read_header(edited(tiny_model, tmp_path / "m.gguf", changes))).tokenizer
    assert (found.kind, found.model, found.pre, found.n_tokens, found.n_merges) == ("BPE", "gpt2", "gpt-2", 272, 11)
    assert (found.add_bos, found.add_eos) == (True, False)


@pytest.mark.parametrize(
    ("template", "features"),
    [
        (CHATML, ("system",)),
        ("{% if messages[0]['role'] == 'system' %}x{% endif %}{% if tools %}y{% endif %}", ("system", "tools")),
        ("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", ("thinking",)),
        ("{{ messages[0].reasoning_content }}{% for c in images %}{% endfor %}", ("thinking", "images")),
        ("{{ messages[0]['content'] }}", ()),
    ],
)
def test_templates(template: str, features: tuple[str, ...], tiny_model: Path, tmp_path: Path) -> None:
    changes = {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": "{{ tools }}"}
    first, second = inspect(read_header(edited(tiny_model, tmp_path / "m.gguf", changes))).templates
    assert (first.name, first.text, first.features) == ("", template, features)
    assert (second.name, second.features) == ("tool_use", ("tools",))


def test_metadata_in_short(tiny_model: Path, tmp_path: Path) -> None:
    changes = {"general.description": "x" * 500, "llama.rope.freq_base": 1e6}
    settings = dict(inspect(read_header(edited(tiny_model, tmp_path / "m.gguf", changes))).settings)
    assert settings["general.description"] == "x" * 119 + "…"
    assert settings["llama.rope.freq_base"] == "1e+06"
    assert settings["tokenizer.ggml.token_type"] == "272 values: 1, 1, 1, 1, …"


def test_sections_hold_nothing_that_steers_a_terminal(tiny_model: Path, tmp_path: Path) -> None:
    evil = "a\x1b]0;x\x07\u202eb\nc"
    changes = {
        "general.name": evil, "tokenizer.ggml.pre": evil,
        "general.base_model.count": 1, "general.base_model.0.name": evil, f"x.{evil}": evil,
    }  # fmt: skip
    shown = sections(inspect(read_header(edited(tiny_model, tmp_path / "m.gguf", changes))))
    text = "".join(heading + label + value for heading, rows in shown for label, value in rows)
    assert text.isprintable() and "␛" in text
    assert [heading for heading, _ in shown] == [
        "Problems", "Model", "Memory", "Tensors", "Tokenizer", "Chat template", "Origin", "Metadata",
    ]  # fmt: skip


def test_what_is_no_language_model_is_told_as_such(tiny_model: Path, tmp_path: Path) -> None:
    changes = {"general.type": "mmproj", "general.architecture": "clip", "tokenizer.ggml.model": None,
               "tokenizer.ggml.tokens": None, "tokenizer.chat_template": None}  # fmt: skip
    shown = dict(sections(inspect(read_header(edited(tiny_model, tmp_path / "m.gguf", changes))), settings=False))
    assert list(shown) == ["Model", "Tensors"]
    assert ("kind", "a multimodal projector") in shown["Model"]
