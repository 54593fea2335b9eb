"""Tests how many experts a token uses: checked against the header before llama.cpp, which would abort, sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp as llama
import msgspec
import numpy as np
import pytest

from cpuchat.base.errors import UsageError
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.model import expert_override, plan_load
from cpuchat.models.gguf.header import GGUFHeader, read_header
from cpuchat.models.synthetic.model import SHAPES, from_array, write_gguf, write_model
from cpuchat.protocol.messages import LoadOptions

PLENTY = 1 << 40
USED = "qwen3moe.expert_used_count"


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a mixture of 16 experts with 4 per token."""
    shape = msgspec.structs.replace(
        SHAPES["30b-a3b"], name="tiny-moe", n_layer=2, n_embd=64, n_head=2, n_head_kv=1, n_ff=32, n_vocab=512, head=32,
        n_expert=16, n_expert_used=4, n_ctx=1024,
    )  # fmt: skip
    return write_model(tmp_path_factory.mktemp("models") / "moe-F32.gguf", shape, "F32")


@pytest.fixture
def header(mixture: Path) -> GGUFHeader:
    return read_header(mixture)


def changed(header: GGUFHeader, **values: Any) -> GGUFHeader:
    """Change the header: `values` are keys of the architecture; None removes one."""
    metadata = header.metadata | {f"{header.architecture}.{key}": value for key, value in values.items()}
    return msgspec.structs.replace(header, metadata={key: v for key, v in metadata.items() if v is not None})


@pytest.mark.parametrize(("n", "override"), [(0, None), (4, None), (1, (USED, 1)), (3, (USED, 3)), (16, (USED, 16))])
def test_only_another_number_is_an_override(header: GGUFHeader, n: int, override: tuple[str, int] | None) -> None:
    assert expert_override(header, n) == override


@pytest.mark.parametrize("n", [-1, 17, 1 << 31])
def test_a_number_that_llama_cpp_would_abort_on_is_refused(header: GGUFHeader, n: int) -> None:
    with pytest.raises(UsageError) as refused:
        expert_override(header, n)
    assert "16 to choose from" in refused.value.message
    assert "1 to 16 (trained with 4)" in refused.value.hint


def test_a_dense_model_has_no_experts(tiny_model: Path) -> None:
    dense = read_header(tiny_model)
    assert expert_override(dense, 0) is None
    with pytest.raises(UsageError, match="not a mixture-of-experts"):
        expert_override(dense, 2)
    plan = plan_load(dense, LoadOptions(n_experts=2), PLENTY)  # the setting may have been made for another model
    assert plan.experts is None
    assert "mixture-of-experts" in plan.notes[0]


def test_a_header_without_the_number_cannot_be_overridden(header: GGUFHeader) -> None:
    with pytest.raises(UsageError, match="not a mixture-of-experts"):
        expert_override(changed(header, expert_used_count=None), 2)


def test_a_number_for_every_layer_cannot_be_changed(tmp_path: Path) -> None:
    """llama.cpp ignores an override of an array silently."""
    metadata = {
        "general.architecture": "qwen3moe", "qwen3moe.block_count": 2, "qwen3moe.expert_count": 16, USED: [4, 2],
    }  # fmt: skip
    file = write_gguf(tmp_path / "m.gguf", metadata, [from_array("output_norm.weight", np.ones(4, np.float32))])
    with pytest.raises(UsageError, match="per layer"):
        expert_override(read_header(file), 2)


def test_only_experts_of_the_chosen_groups_can_be_used(header: GGUFHeader) -> None:
    grouped = changed(header, expert_group_count=4, expert_group_used_count=2)
    assert expert_override(grouped, 8) == (USED, 8)
    with pytest.raises(UsageError, match="8 to choose from"):
        expert_override(grouped, 9)


def test_fewer_experts_are_labelled_as_a_change_of_quality(header: GGUFHeader) -> None:
    plan = plan_load(header, LoadOptions(n_experts=2), PLENTY)
    assert plan.experts == (USED, 2)
    [note] = plan.notes
    assert note == "Using 2 experts per token instead of 4: faster, at lower quality."
    [note] = plan_load(header, LoadOptions(n_experts=8), PLENTY).notes
    assert "8 experts" in note
    assert "slower" in note


def test_the_trained_number_leaves_no_trace(header: GGUFHeader) -> None:
    for n in (0, 4):
        plan = plan_load(header, LoadOptions(n_experts=n), PLENTY)
        assert plan.experts is None
        assert plan.notes == ()


def test_memory_is_counted_for_the_experts_in_use(header: GGUFHeader) -> None:
    """The buffer that holds the outputs of all experts of a token grows with their number."""
    wide = changed(header, embedding_length=2048)
    few, many = (plan_load(wide, LoadOptions(n_experts=n), PLENTY).need.compute for n in (1, 16))
    assert few < many


def test_llama_cpp_takes_every_number_that_is_allowed(mixture: Path, header: GGUFHeader) -> None:
    """With the override that is handed out, really loaded and computed; the logits show that it took effect."""
    bindings.start()
    rows = {n: _logits(mixture, expert_override(header, n)) for n in (0, 1, 2, 4, 16)}
    assert all(np.isfinite(row).all() for row in rows.values())
    assert np.array_equal(rows[0], rows[4])
    for n in (1, 2, 16):
        assert not np.array_equal(rows[n], rows[0])


def _logits(path: Path, override: tuple[str, int] | None) -> np.ndarray[Any, Any]:
    """Return the logits after token 300, with the header value overridden."""
    params = llama.llama_model_default_params()
    overrides = (llama.llama_model_kv_override * 2)()  # ends with an empty key
    if override is not None:
        overrides[0].key = override[0].encode()
        overrides[0].tag = llama.LLAMA_KV_OVERRIDE_TYPE_INT
        overrides[0].value.val_i64 = override[1]
        params.kv_overrides = overrides
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    assert model
    options = llama.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 64
    options.n_threads = options.n_threads_batch = 1
    context: Any = llama.llama_init_from_model(model, options)
    assert context
    tokens = (llama.llama_token * 2)(301, 300)
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, 2)) == 0
    row = np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (512,)).copy()
    llama.llama_free(context)
    llama.llama_model_free(model)
    return row
