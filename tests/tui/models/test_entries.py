"""Tests what the models screen lists, in which order, and for which typed text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from cpuchat.models.catalog import Ranked, ranked
from cpuchat.models.hub.repository import FoundRepository
from cpuchat.models.library.places import LocalModel
from cpuchat.models.prediction import estimate
from cpuchat.tui.models import entries
from cpuchat.tui.models.entries import (
    HubSearch,
    ModelDetails,
    ModelListEntry,
    ModelListSection,
    ModelListState,
    ServerEntry,
    TypedFile,
    typed_path,
)
from tests.support.downloads import download, model
from tests.support.shelf import CATALOG, LOCAL, MACHINE, shelf_reader

OUTLOOKS = {model.id: estimate(model.size, MACHINE, active=model.active_share) for model in CATALOG.models}
FULL = ModelListState(local=tuple(LOCAL), catalog=ranked(CATALOG.models, OUTLOOKS))


def keys(sections: list[ModelListSection]) -> list[str]:
    return [entry.key for section in sections for entry in section.entries]


def test_what_is_here_comes_first_in_the_order_of_names_and_damaged_last() -> None:
    sections = FULL.sections("")
    headings = ["on this machine", "recommended for this machine", "catalog", "too large or too slow for this machine"]
    assert [section.heading for section in sections] == headings
    names = [Path(key).name for key in keys(sections[:1])]
    assert names[:2] == ["llama-3.1-70b-q4_k_m.gguf", "qwen2.5-0.5b-instruct-q4_k_m.gguf"]
    assert names[-1] == "broken.gguf"
    assert keys(sections[1:2]) == ["catalog gpt-oss-20b", "catalog qwen2.5-7b"]
    assert keys(sections[-1:]) == ["catalog qwen2.5-72b"]


def test_models_that_only_draft_are_left_out_until_they_are_asked_for_and_those_here_are_listed_once() -> None:
    assert "catalog qwen3-draft" not in keys(FULL.sections(""))
    (listed,) = [keys([one]) for one in FULL.sections("qwen") if "catalog qwen3-draft" in keys([one])]
    assert len(listed) > 1 and listed[-1] == "catalog qwen3-draft"
    first, second = CATALOG.models[0].repos[0], "someone/Speculative-GGUF"
    one = msgspec.structs.replace(CATALOG.models[0], repos=(first, second))
    shelf = ModelListState(catalog=Ranked(others=(one,)))
    assert [f"catalog {one.id}" in keys(shelf.sections(name)) for name in (first, second)] == [True, False]
    here = dataclasses.replace(FULL, here=frozenset({"qwen2.5-7b"}))
    assert "catalog qwen2.5-7b" not in keys(here.sections("")) + keys(here.sections("qwen2.5 7b"))


def test_a_file_of_another_publisher_is_known_as_the_catalogs_model_in_its_quantization_only(tmp_path: Path) -> None:
    one = LocalModel(path=Path("/m/Qwen2.5-7B-Instruct-Q4_K_M.gguf"), name="Qwen2.5 7B Instruct", source="folder",
                     quantization="Q4_K_M", n_params=7_615_616_512, size=4_680_000_000)  # fmt: skip
    reader = shelf_reader(tmp_path)
    assert reader.known_here(CATALOG, [one]) == {"qwen2.5-7b"}
    other = msgspec.structs.replace(one, quantization="Q8_0")
    damaged = msgspec.structs.replace(one, damaged="It is cut short.")
    assert not reader.known_here(CATALOG, [other, damaged])


def test_a_download_is_listed_until_it_is_done() -> None:
    paused, done = (download(model("Q5_K_M", 5_444_831_232), 0.61, state=state) for state in ("paused", "done"))
    assert keys(ModelListState(downloads=(done,)).sections("")) == []
    assert keys(ModelListState(downloads=(paused,)).sections("")) == [f"download {paused.id}"]


def test_what_was_found_stays_while_more_is_typed() -> None:
    found = (FoundRepository(id="a/Qwen-GGUF"), FoundRepository(id="b/Qwen-Coder-GGUF"))
    shelf = dataclasses.replace(FULL, search=HubSearch("qwen", found=found))
    assert [key for key in keys(shelf.sections("qwen")) if key.startswith("hub")] == [
        "hub a/Qwen-GGUF", "hub b/Qwen-Coder-GGUF",
    ]  # fmt: skip
    more = keys(shelf.sections("qwen coder"))
    assert "hub b/Qwen-Coder-GGUF" in more and "hub a/Qwen-GGUF" not in more
    assert more[-1] == "search"


def test_how_a_search_stands_is_said_in_its_place() -> None:
    for search, said in (
        (HubSearch("x", running=True), "searching for “x”"),
        (HubSearch("x", found=()), "no matches for “x”"),
        (HubSearch("x", problem="No connection.", hint="Go online."), "No connection."),
    ):
        section = dataclasses.replace(FULL, search=search).sections("x")[-1]
        row = entries.list_rows([section], {}, None)[-1]
        assert row.key == "search" and row.name == said


def test_the_files_of_a_model_stand_below_its_name_and_are_told_apart() -> None:
    one, other = (
        LocalModel(path=Path(f"/m/{stem}.gguf"), name="tuned", source="folder", quantization="Q8_0", size=2)
        for stem in ("tuned-a", "tuned-b")
    )
    small = msgspec.structs.replace(one, path=Path("/m/small.gguf"), quantization="Q4_0", size=1)
    ollama = LocalModel(path=Path("/o/sha256-1"), name="sha", source="ollama", alias="qwen3:8b", architecture="qwen3")
    draft = LocalModel(path=Path("/m/draft.gguf"), name="Some draft 0.6B", source="folder", architecture="qwen3")
    shelf = ModelListState(local=(one, other, small, draft, ollama))
    rows = entries.list_rows(shelf.sections(""), {}, None)
    assert [row.name for row in rows] == [
        "on this machine, by name", "qwen3:8b", "tuned", "tuned-a", "tuned-b", "small",
        "only for drafting", "Some draft 0.6B",
    ]  # fmt: skip
    larger = msgspec.structs.replace(one, path=Path("/m/other-13b-Q8_0.gguf"), n_params=13)  # of the same name
    writing = entries.list_rows(shelf.sections(""), {}, None, writing="new-Q4_0.gguf · writing 40 %")[1]
    assert (writing.mark, writing.key) == (entries.LOADING, "")  # a line that cannot be selected
    twice = entries.list_rows(ModelListState(local=(one, larger)).sections(""), {}, None)
    assert [row.name for row in twice] == ["on this machine, by name", "other-13b", "tuned-a"]
    narrowed = entries.list_rows(shelf.sections("tuned-b"), {}, None)
    assert [row.name for row in narrowed if row.key.startswith("local") or row.mark == entries.FILES] == [
        "tuned", "tuned-b",
    ]  # fmt: skip


def test_no_two_files_look_the_same_and_their_places_are_told_where_they_differ() -> None:
    def at(path: str, repo: str = "", size: int = 1) -> LocalModel:
        source = "lmstudio" if repo else "folder"
        return LocalModel(path=Path(path), name="m", source=source, repo=repo, quantization="Q8_0", size=size)

    theirs = [at(f"/lm/{owner}/m-GGUF/m-Q8_0.gguf", f"{owner}/m-GGUF") for owner in ("a", "b")]
    for models, names, tags in (
        (theirs, ["m-Q8_0 · a", "m-Q8_0 · b"], ["", ""]),
        ([*theirs, at("/x/m-Q8_0.gguf")], ["m-Q8_0 · a", "m-Q8_0 · b", "m-Q8_0 · "], ["", "", ""]),
        ([at("/x/m.gguf"), at("/y/m.gguf")], ["m · /x", "m · /y"], ["", ""]),
        ([theirs[0], at("/x/m.gguf")], ["m-Q8_0", "m"], ["LM Studio", "/x"]),
        ([at("/x/m.gguf"), at("/x/m-Q8_0.gguf")], ["m", "m-Q8_0"], ["", ""]),
    ):
        _, _, *rows = entries.list_rows(ModelListState(local=(*models,)).sections(""), {}, None)
        assert sorted((row.name, row.tag) for row in rows) == sorted(zip(names, tags, strict=True))


def test_the_models_on_this_machine_are_sorted_by_size_or_speed_without_their_headings() -> None:
    models = [
        LocalModel(path=Path(f"/m/{name}.gguf"), name="m", source="folder", size=size, measured_tok_s=speed)
        for name, size, speed in (("m-a", 1, 30.0), ("m-b", 3, 10.0), ("m-c", 2, 20.0))
    ]
    shelf = ModelListState(local=(*models,))
    for order, names in (("size", ["m-b", "m-c", "m-a"]), ("speed", ["m-a", "m-c", "m-b"])):
        heading, *rows = entries.list_rows(shelf.sections(""), {}, None, order=order)
        assert heading.name.endswith(f"by {order}") and [row.name for row in rows] == names


def test_the_address_of_a_server_needs_no_scheme_and_a_name_with_a_tag_is_none() -> None:
    for text in ("localhost:8080", "127.0.0.1:11434/v1"):
        assert keys(FULL.sections(text)) == [f"server http://{text.removesuffix('/v1')}"]
    assert "search" in keys(FULL.sections("qwen3:8"))


def test_no_model_is_found_by_its_architecture_or_the_folder_that_it_is_in_but_by_its_store() -> None:
    one = LocalModel(path=Path("/m/.cache/llama.cpp/smol.gguf"), name="smol", source="llama.cpp", architecture="llama")
    assert keys(ModelListState(local=(one,)).sections("llama")) == ["search"]
    theirs = msgspec.structs.replace(one, source="lmstudio")
    for text, local in (("smol", one), ("lm studio", theirs)):
        assert keys(ModelListState(local=(local,)).sections(text)) == [f"local {one.path}", "search"]


def test_what_the_engine_does_not_know_is_told_in_the_results_of_a_search() -> None:
    new, known = (FoundRepository(id="a/b", architecture=name) for name in ("llama77", "qwen35"))
    assert entries.row(ModelListEntry("hub", new), None, None).note.endswith("unsupported")
    assert "needs a newer engine" in dict(entries.detail_rows(new, ModelDetails(), None, None))["problem"]
    assert "unsupported" not in entries.row(ModelListEntry("hub", known), None, None).note


def test_texts_of_others_are_cleaned_for_the_pane() -> None:
    evil = FoundRepository(id="a/b", architecture="ll\x1b[31mama", updated="2025\n\x07")
    texts = " ".join(text for _, text in entries.detail_rows(evil, ModelDetails(), None, None))
    assert "\x1b" not in texts and "\x07" not in texts and "\n" not in texts and "ll␛[31mama" in texts


def test_what_counts_as_a_path() -> None:
    for text, path in (
        ("qwen 1.5b", None), ("model.gguf", None), ("/a/b.gguf", "/a/b.gguf"), ("'/a/b c.gguf'", "/a/b c.gguf"),
        ("/a/b\\ \\(c\\).gguf ", "/a/b (c).gguf"), ("'/a\\ b.gguf'", "/a\\ b.gguf"), ("./b.gguf", "b.gguf"),
        ("file:///a/b%20c.gguf", "/a/b c.gguf"), ("'/a b/'", "/a b"),
        ("models/b.GGUF", "models/b.GGUF"), ("https://huggingface.co/a/b/blob/main/c.gguf", None),
    ):  # fmt: skip
        assert typed_path(text) == (None if path is None else Path(path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("~nobody/x.gguf", "no such file"), ("/" + "x" * 300, "file name too long"), ("/dev/null", "not a regular file"),
     ("/tmp/a\0b.gguf", "a path cannot contain a NUL character")],
)  # fmt: skip
def test_a_typed_path_that_cannot_be_opened_says_why(text: str, problem: str, tmp_path: Path) -> None:
    path = typed_path(text)
    assert path is not None
    (section,) = ModelListState(typed=shelf_reader(tmp_path).typed(text, path)).sections(text)
    assert isinstance(file := section.entries[0].subject, TypedFile)
    assert file.problem == problem


def test_an_address_can_be_typed_key_by_key_and_what_is_none_is_not_connected_to() -> None:
    for address in ("http://[::1]:8080/v1", "https://host:port", "http://u:p@host", "http://[x]:1/"):
        for end in range(len(address) + 1):
            sections = FULL.sections(address[:end])
            entries.list_rows(sections, {}, None)
            for entry in (entry for section in sections for entry in section.entries):
                entries.detail_rows(entry.subject, ModelDetails(), CATALOG, None)
    [[entry]] = [section.entries for section in FULL.sections("http://u:p@host")]
    assert isinstance(entry.subject, ServerEntry) and entry.subject.is_invalid
