"""Tests what is a draft head, of which kind, and whether it fits a target."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.models.fit import HeadSize, draft_memory, head_size, kv_bytes, largest_context
from cpuchat.models.gguf.header import read_header
from cpuchat.models.heads import HeadKind, difference, kind_named, kind_of
from cpuchat.models.machine import Machine
from cpuchat.models.prediction import predict
from cpuchat.models.traffic import model_work
from cpuchat.protocol.messages import LoadOptions
from tests.support.head_files import WORDS, mtp_head_file, tap_head_file, target_file
from tests.support.head_model import HybridShape, write_head_model


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("eagle3-gpt-oss-20b-Q8_0.gguf", "eagle3"),
        ("EAGLE-3/gpt-oss-120b-Q8_0.gguf", "eagle3"),
        ("MTP/head-Q8_0.gguf", "mtp"),
        ("Qwen3-8B-DFlash-b16-Q8_0.gguf", "dflash"),
        ("dspark-Qwen3-8B-Q8_0.gguf", "dflash"),
        ("Qwen3.5-27B-MTP-Q4_K_M.gguf", None),  # a model with its head
        ("gpt-oss-20b-mxfp4.gguf", None),
        ("mmproj-F16.gguf", None),
    ],
)
def test_names_tell_the_kind(path: str, kind: HeadKind | None) -> None:
    assert kind_named(path) == kind


def test_headers_tell_the_kind(tmp_path: Path) -> None:
    assert kind_of(read_header(tap_head_file(tmp_path / "a.gguf"))) == "eagle3"
    assert kind_of(read_header(tap_head_file(tmp_path / "b.gguf", architecture="dflash"))) == "dflash"
    assert kind_of(read_header(mtp_head_file(tmp_path / "d.gguf"))) == "mtp"
    assert kind_of(read_header(target_file(tmp_path / "e.gguf", n_mtp=1))) is None


def test_a_head_made_for_the_target_fits(tmp_path: Path) -> None:
    target = read_header(target_file(tmp_path / "m.gguf", n_mtp=1))
    heads = (
        tap_head_file(tmp_path / "eagle3.gguf"),
        tap_head_file(tmp_path / "own-tokens.gguf", tokens=None),
        mtp_head_file(tmp_path / "mtp.gguf"),
    )
    assert [difference(target, read_header(head)) for head in heads] == [""] * 3
    assert difference(target, target) == ""


def test_an_mtp_head_takes_the_memory_of_its_own_layers(tmp_path: Path) -> None:
    whole = read_header(target_file(tmp_path / "m.gguf", n_mtp=1))
    head = read_header(mtp_head_file(tmp_path / "h.gguf"))
    assert kv_bytes(head, 512) == kv_bytes(whole, 512) // 4
    assert draft_memory(head, LoadOptions(), 512, whole).kv == kv_bytes(head, 512)
    assert head_size(whole, LoadOptions()) == HeadSize(2 * 32 * 4, kv_bytes(head, 512) // 512)
    assert head_size(read_header(target_file(tmp_path / "n.gguf")), LoadOptions()) is None


def test_a_head_that_is_named_by_a_link_to_its_model_counts_once(tmp_path: Path) -> None:
    file = write_head_model(tmp_path / "model.gguf", 0.5)
    (tmp_path / "link.gguf").symlink_to(file)
    model, link = read_header(file), read_header(tmp_path / "link.gguf")
    machine, options = Machine(available=8 << 30, total=16 << 30), LoadOptions(n_ctx=512)
    assert predict(model, options, machine, draft=link) == predict(model, options, machine, draft=model)
    alone, beside = predict(model, options, machine), predict(model, options, machine, draft=link)
    assert beside.draft_need is not None and beside.draft_need.weights == beside.draft_need.kv == 0
    assert largest_context(model, options, alone.needed, link) == largest_context(model, options, alone.needed, model)


def test_a_pass_of_a_head_in_a_file_of_its_own_reads_that_of_the_head_in_the_model(tmp_path: Path) -> None:
    """Whose layers have the numbers of the model's, however few tensors the file has."""
    shape = HybridShape(n_layer=24)
    whole = read_header(write_head_model(tmp_path / "whole.gguf", 0.5, shape=shape))
    write_head_model(tmp_path / "model.gguf", 0.5, head_path=tmp_path / "mtp-model.gguf", shape=shape)
    apart = read_header(tmp_path / "mtp-model.gguf")
    one, other = (model_work(header, of_head=True) for header in (whole, apart))
    assert (one.dense, one.head, one.attention) == (other.dense, other.head, other.attention)
    size = head_size(whole, LoadOptions())
    assert size is not None and size.kv == sum(part.nbytes for part in one.attention)
    norm = 4 * shape.n_embd  # the model's, before the output matrix
    assert sum(part.nbytes for part in (*one.dense, *one.head)) == size.weights + norm


def test_a_head_for_another_model_does_not_fit_and_says_why(tmp_path: Path) -> None:
    target = read_header(target_file(tmp_path / "m.gguf"))

    def why(head: Path) -> str:
        return difference(target, read_header(head))

    assert "96 values, the target has 64" in why(tap_head_file(tmp_path / "wide.gguf", n_embd=96))
    assert "reads layer 9, the target has 4" in why(tap_head_file(tmp_path / "deep.gguf", layers=(1, 5, 9)))
    many = [*WORDS, *(f"more{n}" for n in range(200))]
    assert "500 tokens against 300" in why(tap_head_file(tmp_path / "words.gguf", tokens=many))
    assert "for glm4moe, the target is llama" in why(mtp_head_file(tmp_path / "glm.gguf", architecture="glm4moe"))
    assert "32 values" in why(mtp_head_file(tmp_path / "narrow.gguf", n_embd=32))
    assert "not a draft head" in why(target_file(tmp_path / "model.gguf"))
