"""Tests what is shown of a model before it is loaded: the engine's own arithmetic, and speed from bytes."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.base.errors import DoesNotFit
from cpuchat.costs.usual import Figure
from cpuchat.engine.llama.model import plan_load
from cpuchat.hardware.topology import Instructions
from cpuchat.models import fit
from cpuchat.models.catalog import estimate_entry, load_catalog
from cpuchat.models.fit import check_fit
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.library.places import LocalModel, summarize
from cpuchat.models.machine import Machine
from cpuchat.models.prediction import Prediction, estimate, estimate_local, predict, predict_like
from cpuchat.models.synthetic.model import header_of, write_model
from cpuchat.planner.plan import MachineSpec, PlannedWorkload, from_catalog, make_plan
from cpuchat.protocol.messages import LoadOptions
from tests.costs.made_up import two_cores
from tests.support.big_headers import big_header
from tests.support.costs import reading
from tests.support.shapes import TINY_MOE, shape_of
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.slow

MACHINE = Machine(available=20_000_000_000, total=25_000_000_000, profile=reading(35e9), source="probe of 2 cores")
PLANNED = MachineSpec(
    id="x", name="x", kind="here", cpu="zen4", cores=Figure(2), clock_ghz=Figure(3), memory_gb=Figure(900),
    measured=Figure(60),
)  # fmt: skip
ENGINE_OPTIONS = [
    LoadOptions(),
    LoadOptions(n_ctx=1234, type_k="f32", type_v="bf16", n_ubatch=128),
    LoadOptions(flash_attn="off", use_repack=False),
    LoadOptions(mlock=True),
]


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GGUFHeader]:
    folder = tmp_path_factory.mktemp("prediction")
    files = {
        "dense": write_model(folder / "dense.gguf", "tiny", "Q4_0"),
        "moe": write_model(folder / "moe.gguf", TINY_MOE, "Q4_K_M"),
        "hybrid": write_tiny_gguf(folder / "hybrid.gguf", arch="qwen35"),
        "draft": write_model(folder / "draft.gguf", shape_of("tiny", 1), "Q8_0"),
    }
    return {name: read_model(path) for name, path in files.items()}


@pytest.mark.parametrize(
    ("name", "available"),
    [("dense", 20_000_000_000), ("moe", 150_000_000), ("hybrid", 20_000_000_000), ("hybrid", 150_000_000)],
)
def test_memory_is_what_the_engine_counts(headers: dict[str, GGUFHeader], name: str, available: int) -> None:
    machine = msgspec.structs.replace(MACHINE, available=available)
    for options in ENGINE_OPTIONS:
        seen = predict(headers[name], options, machine)
        try:
            assert seen.need == plan_load(headers[name], options, available).need, options
            assert seen.verdict != "too large", options
        except DoesNotFit as refusal:
            assert seen.verdict == "too large", options
            assert seen.need.breakdown() in refusal.message
        assert seen.needed == seen.need.min_bytes


def test_the_draft_model_counts(headers: dict[str, GGUFHeader]) -> None:
    options = LoadOptions(n_ctx=1024)
    alone = predict(headers["dense"], options, MACHINE)
    both = predict(headers["dense"], options, MACHINE, draft=headers["draft"])
    assert both.draft_need == plan_load(headers["draft"], options, MACHINE.available).need
    assert both.needed == alone.needed + both.draft_need.min_bytes
    assert "draft 0.1" in both.explained
    tight = msgspec.structs.replace(MACHINE, available=alone.needed)
    refused = predict(headers["dense"], options, tight, draft=headers["draft"])
    assert refused.verdict == "not free" and refused.need.min_bytes <= refused.available
    assert "free: not free, but it fits without the draft model · " in refused.explained


def test_the_verdicts(headers: dict[str, GGUFHeader]) -> None:
    options = LoadOptions(n_ctx=1024)
    needed = predict(headers["dense"], options, MACHINE).needed

    def with_room(room: int) -> Prediction:
        return predict(headers["dense"], options, msgspec.structs.replace(MACHINE, available=needed + room))

    spare = MACHINE.total // 20
    assert [with_room(n).verdict for n in (spare, spare - 1, 0, -1)] == ["fits", "tight", "tight", "not free"]
    check_fit(with_room(0).need, with_room(0).available)
    with pytest.raises(DoesNotFit):
        check_fit(with_room(-1).need, with_room(-1).available)
    assert "not free while other programs use" in with_room(-1).explained
    small = msgspec.structs.replace(MACHINE, available=needed - 1, total=needed)
    assert predict(headers["dense"], options, small).explained.partition(" · ")[0].endswith("free: too large")


def test_the_sum_is_spelled_out() -> None:
    seen = predict(
        header_of("7b", "Q8_0"), LoadOptions(n_ctx=8192, use_repack=False), MACHINE, draft=header_of("0.5b", "Q8_0")
    )
    assert seen.explained.startswith("9.7 of 20.0 GB free: fits · weights 8.1 + KV cache 0.47 (8,192 tokens) + draft")
    assert seen.explained.endswith("+ draft 0.81 + buffers 0.29 GB")


def test_the_catalog_is_predicted_as_it_is_planned() -> None:
    """The models list and the planner answer the same question: one chat, in the middle of an answer."""
    planned = msgspec.structs.replace(PLANNED, fitted=two_cores(), memory_gb=Figure(25), free_gb=Figure(12))
    facts = {"available": 12_000_000_000, "profile": two_cores(), "scalar_types": planned.scalar_types}
    here = msgspec.structs.replace(MACHINE, **facts)
    for entry in load_catalog().models:
        if entry.sizes:
            plan, expected = make_plan(planned, from_catalog(entry), PlannedWorkload()), estimate_entry(entry, here)
            assert (plan.scalar_type, plan.tok_s is None) == (expected.scalar_type, expected.tok_s is None)
            assert plan.memory.verdict == expected.verdict  # by the whole memory; `!` or "not free" marks the rest
            assert plan.memory.need == expected.need and "≈" in plan.memory.explained, entry.id
            if plan.tok_s is not None:
                assert expected.tok_s == pytest.approx(plan.tok_s.value), entry.id


def test_what_is_not_known_is_none_and_says_how_to_get_it() -> None:
    unknown = msgspec.structs.replace(MACHINE, profile=None, peak_source="not measured: `cpuchat probe` does")
    for seen in (predict(header_of("7b", "Q8_0"), LoadOptions(), unknown), estimate(8_000_000_000, unknown)):
        assert seen.tok_s is None
        assert "cpuchat probe" in seen.basis
    large = predict(header_of("70b", "Q8_0"), LoadOptions(), MACHINE)
    assert large.tok_s is None
    assert "does not fit" in large.basis


@pytest.mark.parametrize("name", ["0.5b", "7b", "70b"])
def test_an_estimate_by_size_is_near(name: str) -> None:
    header = header_of(name, "Q4_K_M")
    machine = msgspec.structs.replace(MACHINE, available=90_000_000_000, total=100_000_000_000)
    exact = predict(header, LoadOptions(n_ctx=8192), machine)
    near = estimate(header.size, machine)
    assert near.needed == pytest.approx(exact.needed, rel=0.25)
    assert near.tok_s == pytest.approx(exact.tok_s, rel=0.4)  # an embedding table that is not read counts
    assert not near.exact
    assert "≈" in near.explained
    assert near.basis.startswith("≈ from the file size: 35 GB/s")


def test_the_list_of_local_models_says_what_their_details_say() -> None:
    """Of a 0.5B model in Q4_K_M most rows are too short for K types."""
    header, machine = header_of("0.5b", "Q4_K_M"), msgspec.structs.replace(MACHINE, profile=two_cores())
    known = LocalModel(path=header.path, source="folder", **msgspec.structs.asdict(summarize(header)))
    exact, listed = predict(header, LoadOptions(), machine), estimate_local(known, machine)
    assert listed.tok_s == pytest.approx(exact.tok_s)
    assert listed.basis == exact.basis
    unknown = estimate_local(msgspec.structs.replace(known, work=None), machine)
    assert unknown.basis.startswith("≈ from the file size")


AMX = {"AVX2", "AVX512", "AVX512_VNNI", "AMX_INT8"}


@pytest.mark.parametrize(("wanted", "available", "cpu", "error"), [
    ("F16", 90_000_000_000, {"AVX2"}, 1e-6), ("Q8_0", 6_000_000_000, AMX, 0.01),
])  # fmt: skip
def test_the_header_of_one_quantization_tells_of_the_others(
    wanted: str, available: int, cpu: set[str], error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "engine_cpu", lambda _: Instructions(frozenset(cpu)))
    machine = msgspec.structs.replace(MACHINE, available=available, total=100_000_000_000)
    header, draft = big_header("7b", wanted), big_header("0.5b", "Q8_0")
    exact = predict(header, LoadOptions(), machine, draft=draft)
    sample = big_header("7b", "Q4_K_M")
    size = header.size + sample.file_size - sample.size
    near = predict_like(sample, size, wanted, LoadOptions(), machine, draft=draft)
    assert near.needed == pytest.approx(exact.needed, rel=error)
    assert (near.verdict, near.need.n_ctx, near.draft_need) == (exact.verdict, exact.need.n_ctx, exact.draft_need)
    assert near.context_that_fits == exact.context_that_fits
    assert near.bytes_per_token == pytest.approx(exact.bytes_per_token, rel=0.02)
    assert not near.exact
