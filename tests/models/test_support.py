"""Tests what is told of models that the engine cannot run, from real headers, before a download or a load."""

from __future__ import annotations

from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from cpuchat.base.errors import ModelUnsupported
from cpuchat.config.settings import Settings
from cpuchat.hardware.topology import Instructions
from cpuchat.models import fit
from cpuchat.models.catalog import load_catalog
from cpuchat.models.file_names import engine_knows
from cpuchat.models.fit import required_memory
from cpuchat.models.gguf.header import read_header, read_model
from cpuchat.models.inspect import inspect
from cpuchat.models.library.library import Library
from cpuchat.models.machine import Machine, require_loadable
from cpuchat.models.prediction import predict
from cpuchat.models.support import check_supported, scalar_types, why_unsupported
from cpuchat.planner.plan import find_model, from_header
from cpuchat.present.models import sections
from cpuchat.protocol.messages import LoadOptions
from tests.models.gguf.fields import fields, patched
from tests.support.edited_gguf import edited
from tests.support.tiny_gguf import finish

GB = 10**9
ARM, X86 = Instructions(frozenset({"NEON", "DOTPROD"})), Instructions(frozenset({"AVX", "AVX2"}))


def written(path: Path, tensors: dict[str, np.ndarray], architecture: str = "gemma4", **numbers: int) -> Path:
    """Write a file by the gguf package. `numbers` are values of the architecture, with "." written as "__"."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in numbers.items():
        writer.add_uint32(f"{architecture}.{name.replace('__', '.')}", value)
    for name, content in tensors.items():
        writer.add_tensor(name, content)
    finish(writer)
    return path


def retyped(path: Path, number: int, size: int) -> Path:
    """Give all tensors of one dimension another type and that number of weights; the data stays as long as it is."""
    data = path.read_bytes()
    found, n = fields(data), gguf.GGUFReader(path).tensors
    for at, length in found["type"][-len(n) :]:
        data = patched(data, at, length, number)
    for at, length in found["size"]:
        data = patched(data, at, length, size)
    path.write_bytes(data)
    return path


# Architectures


def test_every_architecture_of_the_engine_is_known_and_others_are_not() -> None:
    for name in ("qwen35", "gemma4", "spark2_5", "bailingmoe3", "muse-glimmer", "qwen4exp", "glm5-next", "bert"):
        assert engine_knows(name), name
    for name in ("qwen9", "llama77", "no-such-architecture", "gemma4-no"):
        assert not engine_knows(name), name


def test_an_unknown_architecture_is_named_before_a_load_and_in_the_library(tmp_path: Path, tiny_model: Path) -> None:
    path = edited(tiny_model, tmp_path / "new.gguf", {"general.architecture": "llama77"})
    assert "needs a newer engine" in inspect(read_header(path)).problem
    with pytest.raises(ModelUnsupported, match=r"needs a newer engine: .* does not know the architecture 'llama77'"):
        require_loadable(path, Settings())
    with pytest.raises(ModelUnsupported, match="needs a newer engine"):
        find_model(str(path), load_catalog())
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:-9])
    retyped(written(tmp_path / "type.gguf", {"a.weight": np.zeros(2176, np.int8)}), 199, 8192)
    library = Library((tmp_path,), cache=tmp_path / "hub")
    listed = {one.path.stem: one for one in library.local_models() if one.source == "folder"}
    states = {"new": "unsupported", "cut": "damaged", "type": "unsupported"}
    assert {name: one.state for name, one in listed.items()} == states
    assert listed["new"].damaged is not None and "needs a newer engine" in listed["new"].damaged
    found = library.verify(listed["new"])  # intact
    assert found.state == "unchecked" and "no checksum known" in found.words and "needs a newer engine" in found.words
    assert library.verify(listed["cut"]).state == "damaged"
    check_supported(read_header(tiny_model))


# Bonsai


def test_a_model_whose_weights_are_rotated_is_refused_by_name(tmp_path: Path, tiny_model: Path) -> None:
    path = edited(tiny_model, tmp_path / "bonsai.gguf", {"prism.hadamard.version": 1})
    assert "print garbage" in why_unsupported(read_header(path)) and "Bonsai 2" in why_unsupported(read_header(path))
    with pytest.raises(ModelUnsupported, match="Bonsai 2"):
        require_loadable(path, Settings())


def test_groups_of_128_weights_and_unknown_types_are_told_from_damage(tmp_path: Path) -> None:
    both = {"a.weight": np.zeros(2176, np.int8), "b.weight": np.zeros(2176, np.int8)}
    with pytest.raises(ModelUnsupported, match="groups of 128 weights") as found:
        read_header(retyped(written(tmp_path / "g128.gguf", both), 42, 8192))
    assert "Q2_0_g64" in found.value.hint
    with pytest.raises(ModelUnsupported, match="tensors of type 199") as found:
        read_header(retyped(written(tmp_path / "new.gguf", both), 199, 8192))
    assert "newer engine" in found.value.hint


# Types without vector instructions


def test_which_types_have_no_vector_instructions_on_which_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, cpu, some, none in (
        ("x86_64", X86, {"Q2_0"}, {"Q4_K", "TQ2_0"}),
        ("x86_64", Instructions(frozenset({"AVX"})), {"Q2_0", "TQ1_0", "TQ2_0"}, {"Q4_K"}),
        ("x86_64", Instructions(), {"Q2_0", "Q4_K"}, {"F16", "Q4_0"}),
        ("aarch64", ARM, set[str](), {"Q2_0", "TQ2_0"}),
    ):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert some <= scalar_types(cpu) and not none & scalar_types(cpu), machine


# Tables


def test_tables_of_a_real_header_are_size_and_not_traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp leaves the largest of them on disk: these need no memory."""
    path = written(
        tmp_path / "tables.gguf",
        {
            "token_embd.weight": np.zeros((500, 64), np.float16),
            "output.weight": np.zeros((500, 64), np.float16),
            "per_layer_token_embd.weight": np.zeros((9000, 32), np.float16),
            "blk.0.ffn_up.weight": np.zeros((128, 64), np.float16),
        },
        "qwen4exp",
        block_count=1,
        embedding_length=64,
        ple__ngram_size=3,
        ple__heads_per_ngram=4,
    )
    header = read_model(path)
    found = inspect(header)
    tables = 2 * (500 * 64 + 9000 * 32)
    assert header.size == tables + 2 * (500 * 64 + 128 * 64)
    assert (found.tables, found.bytes_per_token) == (tables, header.size - tables + 2 * (64 + 2 * 4 * 32))
    rows = dict(dict(sections(found))["Memory"])
    assert rows["lookup tables"] == "640 kB, of which a token reads single rows"
    expected = predict(header, LoadOptions(n_ctx=512, use_repack=False), Machine(available=8 * GB, total=16 * GB))
    assert expected.need.weights == header.size and expected.bytes_per_token < 0.2 * header.size
    assert expected.need.reclaimable == 0
    monkeypatch.setattr(fit, "LAZY_BYTES", 9000 * 32 * 2 - 1)
    for more in ({}, {"mlock": True}, {"load_mode": "read"}):
        need = required_memory(header, LoadOptions(use_repack=False, **more), 512)
        assert (need.reclaimable, need.min_bytes) == (9000 * 32 * 2, need.total - 9000 * 32 * 2)
    rows = dict(dict(sections(found))["Memory"])
    assert rows["lookup tables"].endswith("576 kB of them stay on disk and count as no memory")
    assert from_header(msgspec.structs.replace(header, tensors=header.tensors * 40)).work.on_disk == 40 * 9000 * 32 * 2
