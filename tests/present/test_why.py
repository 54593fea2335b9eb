"""Tests the words of `cpuchat why` on simulated machines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.bench.why import SettingFacts, SettingProof
from cpuchat.config.settings import Settings, with_changes
from cpuchat.costs.model import ProductRate
from cpuchat.hardware.numa.residency import Residency
from cpuchat.hardware.process import MemoryPages, ThreadCpus
from cpuchat.hardware.topology import read_topology
from cpuchat.models.kernels import MeasuredProducts
from cpuchat.present.why import rows, wrapped
from cpuchat.protocol.model_info import BufferWeights, EngineInfo, LoadEvidence
from cpuchat.protocol.timings import DrafterCount, SpeculationFigures, Timings
from tests.hardware.trees import make_tree
from tests.support.scripted_backend import MODEL

EVIDENCE = LoadEvidence(
    weights=(
        BufferWeights(buffer="AMX", type="q4_K", bytes=625_000_000),
        BufferWeights(buffer="CPU_Mapped", type="q6_K", bytes=354_000_000),
    ),
    load_mode="mmap", type_k="f16", type_v="f16", kv_bytes=1 << 28, flash_nodes=28, thread_ids=(10, 11),
)  # fmt: skip
FIGURES = SpeculationFigures(
    passes=9, draft_n=30, draft_n_accepted=20, by_position=((7, 6), (7, 5)),
    by_drafter=(DrafterCount(name="suffix", draft_n=30, draft_n_accepted=20),),
)  # fmt: skip


def facts(root: Path, evidence: LoadEvidence = EVIDENCE, engine: str = "local", **more: Any) -> SettingFacts:
    model = msgspec.structs.replace(MODEL, cpus=(0, 1), n_threads=2, evidence=evidence)
    found = SettingFacts(
        chosen=Settings(),
        model=model,
        engine=EngineInfo(version="1", memory_policy=engine),
        topology=read_topology(root),
        timings=Timings(predicted_n=16, speculation=FIGURES),
        pages=MemoryPages(resident=2_000_000_000, huge_anonymous=620_000_000),
        threads=(ThreadCpus((0,), 0), ThreadCpus((1,), 1)),
        huge_pages="madvise",
    )
    return dataclasses.replace(found, **more)


def proofs(found: SettingFacts) -> dict[str, tuple[str, str]]:
    return {row.name: (row.state, row.proof) for row in rows(found)}


def test_a_machine_where_all_works(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    residency = Residency(weights={0: 51, 1: 49}, policy="interleave:0-1")
    found = proofs(facts(root, engine="interleave:0-1", residency=residency))
    assert found["threads"] == ("works", "2 threads, each pinned to one CPU: allowed 0-1, ran on 0-1")
    assert found["SMT siblings"][0] == "off"
    assert found["memory policy"] == ("works", "weights: 51 % on node 0 · 49 % on node 1; kernel: interleave:0-1")
    assert found["repack"] == ("works", "AMX 625 MB (q4_K), CPU_Mapped 354 MB (q6_K)")
    assert found["huge pages"] == ("works", "620 MB of 2.0 GB (own 620 MB, files 0 B)")
    assert found["flash attention"] == ("works", "in 28 of 28 attention nodes of the graph")
    words = "drafted in 7 of 9 passes of the test answer, 20 of 30 accepted (suffix)"
    assert found["drafters"] == ("works", words)


def test_kernels_are_named_with_what_they_read_and_how_llama_cpp_s_compare(tmp_path: Path) -> None:
    weights = (
        BufferWeights(buffer="CPU_CPUCHAT", type="q4_K", bytes=626_000_000),
        BufferWeights(buffer="CPU_REPACK", type="q8_0", bytes=141_000_000),
        BufferWeights(buffer="CPU", type="f32", bytes=500_000),
    )
    evidence, root = msgspec.structs.replace(EVIDENCE, weights=weights), make_tree(tmp_path, "vm")

    def products(kind: str, ours: float, theirs: float) -> MeasuredProducts:
        return MeasuredProducts(
            cpuchat=ProductRate(kind, ((1.0, ours),)),
            llama_cpp=ProductRate(kind, ((1.0, theirs),)),
        )

    both = {"Q4_K": products("Q4_K", 25.2e9, 12.6e9), "Q8_0": products("Q8_0", 20e9, 24e9)}
    found = facts(root, evidence, products=both)
    model = msgspec.structs.replace(found.model, peak_read=26.9e9)
    found = dataclasses.replace(found, engine=EngineInfo(version="1", kernels="AVX2"), model=model)
    assert proofs(found)["kernels"] == (
        "works",
        "cpuchat Q4_K 626 MB: 25 of 27 GB/s, 2.00× llama.cpp; llama.cpp Q8_0 141 MB: 24 of 27 GB/s, ≈1.20× cpuchat",
    )
    elsewhere = dataclasses.replace(found, engine=EngineInfo(version="1", features=("NEON",)))
    assert proofs(elsewhere)["kernels"][1] == "llama.cpp's (cpuchat's are for x86 with AVX2)"


def test_what_does_not_work_says_so(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "2x-epyc-7543")
    weights = (BufferWeights(buffer="CPU", type="q2_0", bytes=300_000_000),)
    evidence = msgspec.structs.replace(EVIDENCE, weights=weights, scalar_types=("q2_0",), flash_nodes=0,
                                       softmax_nodes=28, load_mode="none", type_v="f32")  # fmt: skip
    threads = (ThreadCpus((0, 1, 2), 2), ThreadCpus((0, 1, 2), 2))
    residency = Residency(large={0: 100}, policy="default")
    found = proofs(facts(root, evidence, engine="bind:0-1", residency=residency, threads=threads))
    for name in ("threads", "memory policy", "tensor types", "load mode", "flash attention", "KV cache"):
        assert found[name][0] == "fails", name
    assert found["tensor types"][1] == "slow kernel: q2_0 (300 MB) without SIMD here; choose Q4_K_M"
    assert found["repack"][0] == "no effect"
    assert "not pinned" in found["threads"][1]


def test_a_machine_where_little_matters_or_is_known(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "vm")
    off = with_changes(
        Settings(),
        {"engine": {"flash_attn": "off", "mlock": True, "cpu_module": "haswell"}, "speculation": {"drafters": "off"}},
    )
    found = proofs(facts(root, LoadEvidence(), threads=(), pages=None, chosen=off))
    assert found["memory policy"] == ("no effect", "no effect on this machine: one NUMA node")
    assert found["drafters"][0] == "off"
    assert found["CPU module"] == ("no effect", "no effect: this engine has no modules")
    others = {name for name, (state, _) in found.items() if state == "unknown"}
    assert others >= {"threads", "repack", "tensor types", "load mode", "huge pages", "lock memory", "KV cache", "poll"}


def test_a_long_proof_is_wrapped() -> None:
    proof = " ".join(["word"] * 40)
    lines = wrapped([SettingProof(name="a", value="b", state="works", proof=proof)], 80)
    assert lines[0][:2] == ("a", "b") and lines[1][:2] == ("", "")
    assert all(len(line) <= 74 for *_, line in lines)
    assert " ".join(line for *_, line in lines) == proof
