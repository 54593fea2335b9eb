"""Tests that a load's evidence is what was loaded."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.base import paths
from cpuchat.engine.llama import bindings, evidence
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.gguf.parse import BY_NAME
from cpuchat.models.support import scalar_types
from cpuchat.protocol.model_info import LoadEvidence
from tests.engine.conftest import Load
from tests.support.engine_chat import OPTIONS

DEMO = paths.demo_dir() / "cpuchat-demo-8m-q4_k_m.gguf"


def loaded(load: Load, **options: object) -> LoadEvidence:
    found = load(DEMO, msgspec.structs.replace(OPTIONS, **options)).info.evidence
    assert found is not None
    return found


def test_a_load_shows_its_buffers_attention_cache_and_threads(load: Load) -> None:
    found = loaded(load)
    mapped = {one.type for one in found.weights if one.buffer == "CPU_Mapped"}
    assert mapped >= {"f32"}
    # The table of tokens is mapped for looking them up, and laid out anew where kernels for the head take its type.
    total = sum(one.bytes for one in found.weights)
    assert total == pytest.approx(4.76e6, rel=0.01) or total == pytest.approx(5.40e6, rel=0.01)
    assert (found.load_mode, found.type_k, found.type_v) == ("mmap", "f16", "f16")
    assert (found.flash_nodes, found.softmax_nodes) == (7, 0)
    assert found.kv_bytes > 0
    assert len(found.thread_ids) == 1
    assert found.scalar_types == ()


def test_other_options_leave_other_evidence(load: Load) -> None:
    found = loaded(load, flash_attn="off", load_mode="read", use_repack=False)
    assert {one.buffer for one in found.weights} == {"CPU"}
    assert not found.load_mode.startswith("mmap")
    assert (found.flash_nodes, found.softmax_nodes) == (0, 7)
    assert loaded(load, type_k="q8_0", type_v="q8_0").type_v == "q8_0"


def test_scalar_kernels_follow_from_the_library_and_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_features(*names: str) -> tuple[str, ...]:
        info = msgspec.structs.replace(bindings.engine_info(), features=names)
        monkeypatch.setattr(bindings, "engine_info", lambda: info)
        return evidence.scalar_types(("q2_0", "tq2_0", "q4_K", "q4_0", "f16"))

    really, missing = bindings.has_function, "ggml_vec_dot_q2_0_q8_0_generic"
    monkeypatch.setattr(bindings, "has_function", lambda name: name != missing and really(name))
    assert with_features("SSE3", "AVX", "AVX2") == ("q2_0",)
    assert with_features("SSE3", "AVX") == ("q2_0", "tq2_0")
    assert with_features("SSE3") == ("q2_0", "q4_K", "tq2_0")
    assert with_features("NEON") == ("q2_0",)


def test_the_table_for_processes_that_do_not_load_the_engine_is_what_the_engine_has() -> None:
    kinds = {name: name.lower().replace("_k", "_K") for name in BY_NAME}
    found = set(evidence.scalar_types(kinds.values()))
    assert {name for name, kind in kinds.items() if kind in found} == scalar_types(engine_cpu())
