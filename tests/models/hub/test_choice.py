"""Tests which model of a repository is meant."""

from __future__ import annotations

import pytest

from cpuchat.base.errors import NotOnHub
from cpuchat.models.hub.repository import HubFile, Repository, choose_repo_model, models_of


def repository(*paths: str) -> Repository:
    """Return a repository; later files are larger."""
    listed = models_of(HubFile(path=path, size=n, sha256=f"{n:064x}") for n, path in enumerate(paths, 1))
    return Repository(id="o/Model-GGUF", revision="0" * 40, models=listed)


@pytest.mark.parametrize(
    ("paths", "wanted", "chosen"),
    [
        (("m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf"), "", "m-Q4_K_M"),
        (("m-Q2_K.gguf", "m-Q8_0.gguf"), "", "m-Q8_0"),
        (("m-UD-Q4_K_M.gguf", "m-Q8_0.gguf"), "", "m-UD-Q4_K_M"),
        (("mmproj-Q4_K_M.gguf", "m-Q8_0.gguf"), "", "m-Q8_0"),
        (("m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf"), "Q4_K_XL", "m-UD-Q4_K_XL"),
        (("m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"), "Q4_K_M", "m-Q4_K_M"),
        (("small-Q8_0.gguf", "large-Q8_0.gguf"), "small-q8_0", "small-Q8_0"),
        (("small-Q8_0.gguf", "large-Q8_0.gguf"), "Q8_0", "large-Q8_0"),
        (("m-Q8_0.gguf", "MTP/head-Q8_0.gguf"), "Q8_0", "m-Q8_0"),
        (("m-BF16.gguf", "mtp-m-Q4_K_M.gguf", "dflash-m-Q8_0.gguf"), "", "m-BF16"),
        (("m-UD-Q8_0.gguf", "mtp-m-Q8_0.gguf"), "Q8_0", "m-UD-Q8_0"),
        (("a/x.gguf", "b/y.gguf"), "a/x.gguf", "x"),
        (("m-Q4_K_M-00001-of-00002.gguf", "m-Q5_K_M.gguf"), "", "m-Q5_K_M"),
    ],
)
def test_the_usual_trade_off_or_what_was_named(paths: tuple[str, ...], wanted: str, chosen: str) -> None:
    assert choose_repo_model(repository(*paths), wanted).name == chosen


def test_a_quantization_that_only_a_head_has_is_not_there() -> None:
    with pytest.raises(NotOnHub, match="has no Q8_0") as caught:
        choose_repo_model(repository("gpt-oss-20b-mxfp4.gguf", "eagle3-gpt-oss-20b-Q8_0.gguf"), "Q8_0")
    assert caught.value.hint == "Available: MXFP4."


@pytest.mark.parametrize("wanted", ["eagle3-m-Q8_0", "EAGLE3-m-q8_0.gguf", "mmproj-F16"])
def test_what_is_no_model_is_named_as_what_it_is(wanted: str) -> None:
    with pytest.raises(NotOnHub, match=r"is an? (draft head|multimodal projector), not a model"):
        choose_repo_model(repository("m-Q4_K_M.gguf", "eagle3-m-Q8_0.gguf", "mmproj-F16.gguf"), wanted)


def test_a_head_is_found_by_its_name_where_one_may_be_meant() -> None:
    there = repository("m-Q4_K_M.gguf", "MTP/Q8_0.gguf", "eagle3-m-Q8_0.gguf", "mmproj-F16.gguf")
    assert choose_repo_model(there, "eagle3-m-q8_0", heads=True).kind == "head"
    alone = repository("Qwen3-8B-DFlash-Q8_0.gguf")
    assert choose_repo_model(alone, "Qwen3-8B-DFlash-Q8_0.gguf", heads=True).kind == "head"
    assert choose_repo_model(there, heads=True).name == "m-Q4_K_M"
    for wanted in ("Q8_0", "mmproj-F16"):
        with pytest.raises(NotOnHub):
            choose_repo_model(there, wanted, heads=True)


def test_a_repository_of_heads_says_so() -> None:
    with pytest.raises(NotOnHub, match="no GGUF model, only draft heads"):
        choose_repo_model(repository("Qwen3-8B-DFlash-Q8_0.gguf", "Qwen3-8B-DFlash-F16.gguf"))
