"""Tests which cells a matrix has, from options and from TOML, and what is said about wrong values."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import DraftMismatch, ModelNotFound, UsageError
from cpuchat.bench.matrix import Matrix, cells_of, check_placements, located, read_matrix
from cpuchat.config.settings import Settings
from cpuchat.models.library.library import Library
from cpuchat.models.machine import Tuned, TunedSettings


def cells(**values: object) -> list:
    return cells_of(read_matrix(values), Settings(), Library([]))


def test_the_product_of_all_lists_by_setup() -> None:
    found = cells(
        models=["demo"], threads=["1", "2"], kv_types=["f16", "q8_0/f16"], pp=["64"], tg=["8"], depth=["0", "32"]
    )
    assert len(found) == 2 * 2 * 4
    assert [one.test.name for one in found[:4]] == ["pp64", "tg8", "pp64 @ d32", "tg8 @ d32"]
    setups = list(dict.fromkeys(one.setup for one in found))
    assert [(one.threads, one.cache_type_k, one.cache_type_v) for one in setups] == [
        (1, "f16", "f16"), (1, "q8_0", "f16"), (2, "f16", "f16"), (2, "q8_0", "f16"),
    ]  # fmt: skip
    assert [one.setup for one in found] == [setup for setup in setups for _ in range(4)]


def test_where_something_drafts_there_is_a_plain_cell() -> None:
    found = cells(models=["demo"], prompts=["code", "chat"], drafters=["draft:4", "lookup"])
    assert [(one.test.name, one.drafting) for one in found] == [
        ("code", "off"), ("code", "draft:4"), ("code", "lookup"),
        ("chat", "off"), ("chat", "draft:4"), ("chat", "lookup"),
    ]  # fmt: skip
    assert len({one.setup for one in found}) == 1 and "draft" in found[0].setup.draft
    assert {one.plain for one in found} == {one for one in found if one.drafting == "off"}


def test_with_speech_each_prompt_is_measured_without_it_too() -> None:
    found = cells(models=["demo"], prompts=["chat"], drafters=["off", "lookup"], tg=["8"], speech=True)
    assert [(one.test.name, one.drafting, one.speech) for one in found] == [
        ("tg8", "off", False),
        ("chat", "off", False), ("chat", "off", True), ("chat", "lookup", False), ("chat", "lookup", True),
    ]  # fmt: skip
    assert [one.plain for one in found] == [found[0], found[1], found[1], found[1], found[3]]
    assert found[2].words.endswith("chat · speech")
    with pytest.raises(UsageError, match="--speech reads answers"):
        cells(models=["demo"], tg=["8"], speech=True)


def test_all_prompts_are_the_default_and_no_draft_model_is_loaded_for_nothing() -> None:
    assert len({one.test.name for one in cells(models=["demo"])}) == 4
    assert not cells(models=["demo"], drafters=["off"], prompts=["code"])[0].setup.draft
    assert not cells(models=["demo"], drafters=["lookup"], prompts=["code"])[0].setup.draft
    assert not cells(models=["demo"], tg=["8"])[0].setup.draft


def test_quantizations_are_other_files_of_the_same_model() -> None:
    found = cells(models=["demo"], quantizations=["Q8_0", "q4_k_m"], tg=["8"])
    assert [Path(one.setup.model).name for one in found] == ["cpuchat-demo-8m-q8_0.gguf", "cpuchat-demo-8m-q4_k_m.gguf"]
    with pytest.raises(UsageError, match=r"no Q2_K of .* on this machine\. Available: Q4_K_M, Q8_0\."):
        cells(models=["demo"], quantizations=["Q2_K"])


def test_quantizations_are_found_beside_the_file(tmp_path: Path) -> None:
    for name in ("demo", "demo-q4"):
        file = Library([]).resolve(name)
        (tmp_path / file.name).symlink_to(file)
    found = cells(models=[str(tmp_path / "cpuchat-demo-8m-q8_0.gguf")], quantizations=["Q4_K_M"], tg=["8"])
    assert [one.setup.model for one in found] == [str(tmp_path / "cpuchat-demo-8m-q4_k_m.gguf")]


def test_what_cannot_be_is_left_out_or_refused() -> None:
    found = cells(models=["demo"], flash_attn=["on", "off"], kv_types=["f16", "q8_0"], tg=["8"])
    possible = {("on", "f16"), ("on", "q8_0"), ("off", "f16")}
    assert {(one.setup.flash_attn, one.setup.cache_type_v) for one in found} == possible
    with pytest.raises(UsageError, match="needs flash attention"):
        cells(models=["demo"], flash_attn=["off"], kv_types=["q8_0"])
    with pytest.raises(UsageError, match="threads"):
        check_placements(cells(models=["demo"], threads=["4096"], tg=["8"]), Settings())


@pytest.mark.parametrize(
    "values, said",
    [
        ({"drafters": ["fast"]}, "drafters: 'fast' is not one of"),
        ({"drafters": ["draft:99"]}, "drafters: 'draft:99'"),
        ({"drafters": ["off:2"]}, "drafters: 'off:2'"),
        ({"kv_types": ["q9"]}, "kv_types: 'q9' is not one of"),
        ({"threads": ["many"]}, "--threads: "),
        ({"rounds": 2}, "--rounds: "),
        ({"prompts": ["poems"]}, "--prompts: "),
        ({"cores": ["everywhere"]}, "--cores: must be auto, all"),
        ({"tokens": 0}, "--tokens: "),
    ],
)
def test_wrong_options_are_named(values: dict, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        cells(models=["demo"], **values)
    assert said in str(raised.value)


def test_models_and_drafts_that_are_not_there() -> None:
    with pytest.raises(ModelNotFound):
        cells(models=["nothing.gguf"])
    with pytest.raises((DraftMismatch, ModelNotFound)):
        cells(models=["demo"], drafters=["draft"], draft_models=["nothing.gguf"])


def test_cells_of_another_machine_are_found_by_the_names_of_their_files() -> None:
    ours = cells(models=["demo"], prompts=["code"], drafters=["draft:2"])

    def elsewhere(path: str) -> str:
        return f"/elsewhere/{Path(path).name}"

    theirs = [
        msgspec.structs.replace(
            one,
            setup=msgspec.structs.replace(
                one.setup, model=elsewhere(one.setup.model), draft=elsewhere(one.setup.draft)
            ),
        )
        for one in ours
    ]
    assert located(theirs, Library([])) == ours
    missing = msgspec.structs.replace(
        ours[0], setup=msgspec.structs.replace(ours[0].setup, model="/elsewhere/other.gguf")
    )
    with pytest.raises(ModelNotFound):
        located([missing], Library([]))


def test_toml_and_options_over_it(tmp_path: Path) -> None:
    file = tmp_path / "matrix.toml"
    file.write_text('models = ["demo", "demo-q4"]\nthreads = [1]\ntg = [8]\nrounds = 5\n')
    found = read_matrix({"threads": ["2"]}, file)
    assert found == Matrix(models=["demo", "demo-q4"], threads=[2], tg=[8], rounds=5)


@pytest.mark.parametrize(
    "text, said",
    [
        ("models = [", "is not valid TOML"),
        ("model = ['demo']", "unknown field `model`"),
        ("threads = ['one']", "threads: "),
        ("memory_policies = ['near']", "memory_policies: must be auto"),
        ("depth = 5", "depth: "),
        ("rounds = 1", "rounds: "),
    ],
)
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "matrix.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        read_matrix({}, file)
    assert "matrix.toml" in str(raised.value) and said in str(raised.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_matrix({}, tmp_path / "none.toml")


def test_what_tuning_found_is_measured_where_the_matrix_names_nothing_else() -> None:
    changes = {"engine": {"threads": 1, "flash_attn": "off", "ubatch": 128}}
    TunedSettings().put(Library([]).resolve("demo"), Tuned(model="demo", changes=changes))

    def setups(**values: object) -> list[tuple[int, str, int]]:
        found = dict.fromkeys(one.setup for one in cells(models=["demo", "demo-q4"], tg=["8"], **values))
        return [(one.threads, one.flash_attn, one.ubatch) for one in found]

    untuned = (0, "auto", 0)
    assert setups() == [(1, "off", 128), untuned]
    assert setups(cores=["all"]) == [(0, "off", 128), untuned]
    assert setups(flash_attn=["on"]) == [(1, "on", 128), (0, "on", 0)]
