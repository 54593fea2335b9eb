"""The models to plan for: names, sizes from headers and from the catalog."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base.errors import ModelNotFound
from cpuchat.config.settings import Settings, with_changes
from cpuchat.costs.model import bytes_read
from cpuchat.models.catalog import load_catalog
from cpuchat.models.synthetic.model import write_model
from cpuchat.planner.plan import find_model, from_catalog
from tests.support.stores import ollama

CATALOG = load_catalog()


@pytest.mark.parametrize(
    ("shape", "id"),
    [("7b", "qwen2.5-7b-instruct"), ("8b", "llama-3.1-8b-instruct"), ("70b", "llama-3.3-70b-instruct"),
     ("30b-a3b", "qwen3-30b-a3b-instruct-2507"), ("0.5b", "qwen2.5-0.5b-instruct")],
)  # fmt: skip
@pytest.mark.parametrize("quantization", ["Q4_K_M", "Q8_0"])
def test_the_catalog_gives_about_what_a_header_gives(shape: str, id: str, quantization: str) -> None:
    exact, rough = find_model(f"{shape}:{quantization}", CATALOG), find_model(f"{id}:{quantization}", CATALOG)
    assert exact.exact
    assert not rough.exact
    assert rough.kv_rows == pytest.approx(exact.kv_rows)
    assert rough.size == pytest.approx(exact.size, rel=0.06)
    for n in (1, 8):
        assert bytes_read(rough.work, n, 1000) == pytest.approx(bytes_read(exact.work, n, 1000), rel=0.1)


def test_every_model_of_the_catalog_can_be_planned() -> None:
    for entry in CATALOG.models:
        model = from_catalog(entry)
        assert model.size > 0
        assert model.work.weight_bytes <= 1.01 * model.size
        assert model.kv_bytes(4096) > 0


@pytest.mark.parametrize(
    ("wanted", "quantization"),
    [("70B:Q8_0", "Q8_0"), ("qwen3-8b:f16", "F16"), ("gpt-oss-20b", "MXFP4"), ("llama 3.3 70b:Q5_K_M", "Q5_K_M")],
)
def test_names_with_quantizations(wanted: str, quantization: str) -> None:
    assert find_model(wanted, CATALOG).quantization == quantization


def test_a_file_counts_by_its_header(tmp_path: Path) -> None:
    file = write_model(tmp_path / "my small model.gguf", "tiny", "Q8_0")
    model = find_model(str(file), CATALOG)
    assert model.exact
    assert model.quantization == "Q8_0"
    assert model.size == file.stat().st_size
    ollama(tmp_path, "mine:1.5b", file)
    here = with_changes(Settings(), {"model": {"folders": [str(tmp_path)]}})
    for name in ("mine:1.5b", "mine"):
        assert find_model(name, CATALOG, here).size == model.size
    for name, planned in {"qwen2.5-coder:7b": "Qwen2.5 Coder 7B Instruct", "gemma3:4b": "Gemma 3 4B"}.items():
        assert find_model(name, CATALOG).name == planned  # as Ollama writes them
    file.rename(tmp_path / "tiny.gguf")
    assert find_model("tiny", CATALOG, here).quantization == "Q8_0"


@pytest.mark.parametrize(
    ("wanted", "message", "hint"),
    [
        ("71b", "no model '71b'", "70b"),
        ("lama-3.3-70b-instruct", "no model", "llama-3.3-70b-instruct"),
        ("nobody:1.5b", "no model", "1.5b"),
        ("llama-3", "ambiguous", "more"),
    ],
)
def test_unknown_models_get_the_nearest_names(wanted: str, message: str, hint: str) -> None:
    with pytest.raises(ModelNotFound, match=message) as error:
        find_model(wanted, CATALOG)
    assert hint in error.value.hint
