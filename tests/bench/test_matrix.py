"""Tests which cells a matrix has, and what is said about wrong values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cpuchat.base.errors import DraftMismatch, ModelNotFound, UsageError
from cpuchat.bench.matrix import BenchCell, cells_of, check_placements, workloads
from cpuchat.config.settings import Settings
from cpuchat.models.library.library import Library
from cpuchat.models.machine import Tuned, keep_tuned


def cells(models: Sequence[str] = ("demo",), **values: Any) -> list[BenchCell]:
    tests = workloads(
        **{name: values.pop(name) for name in ("prompts", "pp", "tg", "depth", "users") if name in values}
    )
    return cells_of(models, tests, Settings(), Library([]), **values)


def test_the_product_of_all_lists_by_setup() -> None:
    found = cells(threads=["1", "2"], kv_types=["f16", "q8_0/f16"], pp=[64], tg=[8], depth=[0, 32])
    assert len(found) == 2 * 2 * 4
    assert [one.test.name for one in found[:4]] == ["pp64", "tg8", "pp64 @ d32", "tg8 @ d32"]
    setups = list(dict.fromkeys(one.setup for one in found))
    assert [(one.threads, one.cache_type_k, one.cache_type_v) for one in setups] == [
        (1, "f16", "f16"), (1, "q8_0", "f16"), (2, "f16", "f16"), (2, "q8_0", "f16"),
    ]  # fmt: skip
    assert [one.setup for one in found] == [setup for setup in setups for _ in range(4)]


def test_where_something_drafts_there_is_a_plain_cell() -> None:
    found = cells(prompts=["code", "chat"], drafters=["draft:4", "suffix"])
    assert [(one.test.name, one.drafting) for one in found] == [
        ("code", "off"), ("code", "draft:4"), ("code", "suffix"),
        ("chat", "off"), ("chat", "draft:4"), ("chat", "suffix"),
    ]  # fmt: skip
    assert len({one.setup for one in found}) == 1 and "draft" in found[0].setup.draft
    assert {one.plain for one in found} == {one for one in found if one.drafting == "off"}


def test_users_ask_prompts_beside_random_tokens() -> None:
    found = cells(tg=[8], users=[1, 4], prompts=["code"], drafters=["off"])
    assert [one.test.words for one in found] == ["tg8", "code", "code × 4 users"]
    assert len(cells(users=[2], drafters=["off"])) == 4


def test_all_prompts_are_the_default_and_no_draft_model_is_loaded_for_nothing() -> None:
    assert len({one.test.name for one in cells()}) == 4
    assert not cells(drafters=["off"], prompts=["code"])[0].setup.draft
    assert not cells(drafters=["suffix"], prompts=["code"])[0].setup.draft
    assert not cells(tg=[8])[0].setup.draft


def test_what_cannot_be_is_left_out_or_refused() -> None:
    found = cells(flash_attn=["on", "off"], kv_types=["f16", "q8_0"], tg=[8])
    possible = {("on", "f16"), ("on", "q8_0"), ("off", "f16")}
    assert {(one.setup.flash_attn, one.setup.cache_type_v) for one in found} == possible
    with pytest.raises(UsageError, match="needs flash attention"):
        cells(flash_attn=["off"], kv_types=["q8_0"])
    with pytest.raises(UsageError, match="threads"):
        check_placements(cells(threads=["4096"], tg=[8]), Settings())


@pytest.mark.parametrize(
    "values, said",
    [
        ({"drafters": ["fast"]}, "drafters: 'fast' is not one of"),
        ({"drafters": ["draft:99"]}, "drafters: 'draft:99'"),
        ({"kv_types": ["q9"]}, "--kv-types: must be "),
        ({"threads": ["many"]}, "--threads: "),
        ({"cores": ["everywhere"]}, "--cores: must be auto, all"),
    ],
)
def test_wrong_options_are_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        cells(**values)
    assert said in str(raised.value)


def test_models_and_drafts_that_are_not_there() -> None:
    with pytest.raises(ModelNotFound):
        cells(models=["nothing.gguf"])
    with pytest.raises((DraftMismatch, ModelNotFound)):
        cells(drafters=["draft"], draft_models=["nothing.gguf"])


def test_what_tuning_found_is_measured_where_the_matrix_names_nothing_else() -> None:
    changes = {"engine": {"threads": 1, "flash_attn": "off", "ubatch": 128}}
    keep_tuned(Library([]).resolve("demo"), Tuned(model="demo", changes=changes))

    def setups(**values: object) -> list[tuple[int, str, int]]:
        found = dict.fromkeys(one.setup for one in cells(models=["demo", "demo-q4"], tg=[8], **values))
        return [(one.threads, one.flash_attn, one.ubatch) for one in found]

    untuned = (0, "auto", 0)
    assert setups() == [(1, "off", 128), untuned]
    assert setups(cores=["all"]) == [(0, "off", 128), untuned]
    assert setups(flash_attn=["on"]) == [(1, "on", 128), (0, "on", 0)]
