"""The catalog that comes with the program is sound, the user's own is checked, and files are recognized in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.models.catalog import Catalog, load_catalog, match_local
from cpuchat.models.library.places import LocalModel

CATALOG = load_catalog()
BITS = {
    "Q4_0": (4.5, 5.5), "Q4_K_M": (4.4, 5.8), "UD-Q4_K_M": (4.4, 5.8), "UD-Q3_K_XL": (3.4, 4.4), "Q2_0_G64": (2.2, 2.4),
    "UD-Q4_K_XL": (4.3, 5.8), "UD-Q8_K_XL": (4.5, 9.5), "Q8_0": (8.3, 9.2), "MXFP4": (4.0, 5.0), "F16": (5.0, 17.0),
}  # fmt: skip
"""Bits for a weight that the files of a quantization come to: of gpt-oss even "F16" has its experts in MXFP4,
and so has DeepSeek V4 in "UD-Q8_K_XL"."""
SMALL = 1.1
"""Billions of parameters up to which the embedding table, kept in more bits, is a good part of the file."""


def entry(**changes: object) -> dict[str, object]:
    return {"id": "mine", "name": "Mine", "family": "Own", "params": 1.5, "repos": ["me/mine-GGUF"]} | changes


def user_catalog(*entries: dict[str, object]) -> Path:
    def value(of: object) -> str:
        if isinstance(of, dict):
            return "{ " + ", ".join(f"{key} = {item!r}" for key, item in of.items()) + " }"
        return str(of).lower() if isinstance(of, bool) else repr(of)

    text = "\n".join("[[model]]\n" + "".join(f"{k} = {value(v)}\n" for k, v in one.items()) for one in entries)
    file = paths.user_catalog()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


# What comes with the program.


def test_it_is_without_problems_and_has_the_well_known_families() -> None:
    assert CATALOG.problems == ()
    assert load_catalog() is load_catalog()  # read once, until a file changes
    families = {model.family for model in CATALOG.models}
    assert {"Qwen3.5", "Llama 3", "Gemma 4", "gpt-oss", "Granite", "LFM2"} <= families
    assert len({model.id for model in CATALOG.models}) == len(CATALOG.models) > 60


def test_every_entry_is_plausible() -> None:
    for model in CATALOG.models:
        assert all((model.context > 0, model.vocabulary, model.license, model.publisher, model.sizes)), model.id
        assert 2024 <= model.year <= 2026, model.id
        assert bool(model.drafts) != bool(model.no_draft) >= bool(model.no_draft_detail), model.id
        assert model.active_params <= model.params and model.id not in model.drafts, model.id
        assert {*model.verified} <= {"repo", "params", "context", "drafts", *model.sizes}, model.id
        for quantization, size in model.sizes.items():
            low, high = BITS[quantization]
            bits = 8 * size / model.params
            most = high + 2.5 if model.params < SMALL else high
            assert low <= bits <= most, f"{model.id} {quantization}: {bits:.2f} bits"


def test_drafts_are_there_smaller_and_of_the_same_vocabulary() -> None:
    for model in CATALOG.models:
        for name in model.drafts:
            draft = CATALOG.find(name)
            assert draft is not None, (model.id, name)
            assert draft.params <= 0.5 * model.params, (model.id, name)
            assert draft.vocabulary == model.vocabulary, (model.id, name)


def test_search_finds_every_word_in_any_case() -> None:
    assert [model.id for model in CATALOG.search("QWEN2.5 coder 14b")] == ["qwen2.5-coder-14b-instruct"]
    assert {model.family for model in CATALOG.search("mistral ai")} >= {"Mistral", "Ministral 3"}
    assert "phi-4" in {model.id for model in CATALOG.search("bartowski/phi")}
    assert CATALOG.search("no such model") == []
    assert CATALOG.search("") == list(CATALOG.models)


# The user's own.


def test_an_own_entry_comes_first_and_one_with_a_known_id_replaces_ours() -> None:
    user_catalog(entry(drafts=["qwen3-0.6b"]), entry(id="qwen3-8b", name="My Qwen"))
    found = load_catalog()
    assert found.problems == ()
    assert [model.name for model in found.models[:2]] == ["Mine", "My Qwen"]
    assert len(found.models) == len(CATALOG.models) + 1
    changed, mine = found.find("qwen3-8b"), found.find("mine")
    assert (changed.repos, changed.drafts) == (("me/mine-GGUF",), ())
    assert [draft.id for draft in found.drafts_of(mine)] == ["qwen3-0.6b"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"params": 0}, "params"),
        ({"repos": ["../../etc/passwd"]}, "repos"),
        ({"sizes": {"Q4_K_M": -1}}, "sizes"),
        ({"downloads": 5}, "downloads"),
    ],
)
def test_a_wrong_entry_is_told_by_file_and_key_and_the_others_work(changes: dict[str, object], key: str) -> None:
    file = user_catalog(entry(**changes), entry(id="second", name="Second"))
    found = load_catalog()
    [problem] = found.problems
    assert str(file) in problem
    assert "model 1" in problem
    assert key in problem
    assert found.find("second") is not None
    assert found.find("mine") is None
    assert len(found.models) == len(CATALOG.models) + 1


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"[[model", "TOML"),
        (b"model = 5", "double brackets"),
        (b"[[models]]\nid = 'mine'", "double brackets"),
        (b"[[model]]\n" + b"#" * (1 << 20), "MiB"),
        (b"model = " + b"[" * 100_000, "TOML"),
    ],
)
def test_a_broken_file_stops_nothing(content: bytes, word: str) -> None:
    paths.user_catalog().parent.mkdir(parents=True)
    paths.user_catalog().write_bytes(content)
    found = load_catalog()
    assert found.models == CATALOG.models
    assert word in found.problems[0]
    assert str(paths.user_catalog()) in found.problems[0]


# Which entry a file is.


def local(file: str, n_params: float, name: str = "", repo: str = "") -> LocalModel:
    path = Path("/models") / file
    return LocalModel(path=path, name=name or path.stem, source="folder", repo=repo, n_params=round(n_params * 1e9))


@pytest.mark.parametrize(
    ("file", "n_params", "name", "wanted"),
    [
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", 7.62, "Qwen2.5 7B Instruct", "qwen2.5-7b-instruct"),
        ("Qwen_Qwen3-8B-Q8_0.gguf", 8.19, "Qwen3 8B", "qwen3-8b"),
        ("Meta-Llama-3.1-8B-Instruct.i1-IQ3_M.gguf", 8.03, "Meta Llama 3.1 8B Instruct", "llama-3.1-8b-instruct"),
        ("Llama-3.3-70B-Instruct-Q8_0-00001-of-00002.gguf", 70.6, "", "llama-3.3-70b-instruct"),
        ("model.gguf", 14.7, "Phi 4", "phi-4"),
        ("Llama-3.3-70B-Instruct-Q4_K_M.gguf", 70.6, "Llama 3.1 70B Instruct", "llama-3.3-70b-instruct"),
        ("Qwen3-Coder-Instruct-DRAFT-0.75B-32k-Q4_0.gguf", 0.75, "", "qwen3-coder-instruct-draft-0.75b"),
        ("mistralai_Mistral-Small-3.2-24B-Instruct-2506-Q5_K_M.gguf", 23.6, "", "mistral-small-3.2-24b-instruct-2506"),
    ],
)
def test_files_of_all_publishers_are_recognized(file: str, n_params: float, name: str, wanted: str) -> None:
    assert match_local(CATALOG, local(file, n_params, name)).id == wanted


@pytest.mark.parametrize(
    ("file", "n_params"),
    [
        ("Qwen2.5-7B-Instruct-abliterated-Q4_K_M.gguf", 7.62),
        ("Qwen2.5-7B-Q4_K_M.gguf", 7.62),
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", 3.0),
        ("DeepSeek-R1-Distill-Qwen-7B-Uncensored.gguf", 7.62),
        ("Q4_K_M.gguf", 7.62),
        ("model.gguf", 7.62),
    ],
)
def test_other_models_are_not_taken_for_one(file: str, n_params: float) -> None:
    assert match_local(CATALOG, local(file, n_params)) is None


def test_a_file_of_a_known_repository_may_have_any_name() -> None:
    file = local("renamed.gguf", 8.19, repo="unsloth/Qwen3-8B-GGUF")
    assert match_local(CATALOG, file).id == "qwen3-8b"
    assert match_local(CATALOG, local("renamed.gguf", 0.6, repo="unsloth/Qwen3-8B-GGUF")) is None


def test_every_entry_is_recognized_by_its_own_names() -> None:
    for model in CATALOG.models:
        for name in (model.name, model.id, model.repos[0].rpartition("/")[2]):
            found = match_local(Catalog(CATALOG.models), local(f"{name}-Q4_K_M.gguf", model.params))
            assert found is not None, name
            assert found.id == model.id, name
