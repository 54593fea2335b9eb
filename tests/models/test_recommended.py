"""Tests which sampling options are recommended for a model, and what of them is used."""

from __future__ import annotations

from pathlib import Path

from cpuchat.base import paths
from cpuchat.config.settings import SamplingSection, Settings
from cpuchat.models.catalog import NO_RECOMMENDATION, Recommended, load_catalog, recommended
from cpuchat.models.gguf.header import read_model
from cpuchat.protocol.messages import Sampling
from tests.support.edited_gguf import edited


def with_header(model: Path, folder: Path, **values: object) -> Path:
    return edited(model, folder / "model.gguf", {f"general.sampling.{name}": value for name, value in values.items()})


def test_the_header_counts(tiny_model: Path, tmp_path: Path) -> None:
    model = with_header(
        tiny_model, tmp_path, temp=0.6, top_k=20, top_p=0.95, min_p=0.0, penalty_repeat=1.05, penalty_last_n=128
    )
    found = recommended(model)
    assert found.source == "header"
    assert found.sampling == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repeat_penalty": 1.05, "repeat_last_n": 128
    }  # fmt: skip
    sampling = found.applied_to(Settings()).sampling.sampling()
    assert sampling == Sampling(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, repeat_penalty=1.05, repeat_last_n=128
    )


def test_invalid_values_of_a_header_are_left_out(tiny_model: Path, tmp_path: Path) -> None:
    model = with_header(
        tiny_model, tmp_path, temp=float("nan"), top_k=-1, top_p=7.0, min_p="much", penalty_repeat=-1.0,
        penalty_last_n=-1,
    )  # fmt: skip
    assert recommended(model) == Recommended(sampling={"top_k": 0}, source="header")  # llama.cpp: off


def test_the_catalog_counts_where_the_header_is_silent(tiny_model: Path, tmp_path: Path) -> None:
    assert recommended(tiny_model) == NO_RECOMMENDATION
    header = read_model(tiny_model)
    paths.user_catalog().parent.mkdir(parents=True, exist_ok=True)
    paths.user_catalog().write_text(
        f'[[model]]\nid = "tiny"\nname = "{tiny_model.stem}"\nfamily = "Tiny"\nparams = {header.n_params / 1e9:.9f}\n'
        'repos = ["someone/tiny-GGUF"]\nsampling = { temperature = 0.3, top_k = 7 }\n'
    )
    assert load_catalog().problems == ()
    assert recommended(tiny_model) == Recommended(sampling={"temperature": 0.3, "top_k": 7}, source="catalog")
    named = edited(tiny_model, tmp_path / tiny_model.name, {"general.sampling.temp": 0.9})
    assert recommended(named) == Recommended(sampling={"temperature": 0.9}, source="header")


def test_what_the_user_set_wins_even_if_it_is_the_default_value() -> None:
    chosen = Settings(sampling=SamplingSection(temperature=0.7, seed=5))
    used = Recommended(sampling={"temperature": 0.0, "top_k": 9}, source="demo").applied_to(chosen).sampling.sampling()
    assert used == Sampling(temperature=0.7, top_k=9, seed=5)
    assert chosen.sampling.top_k is None
