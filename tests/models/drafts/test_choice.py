"""Tests which draft model is loaded beside a target: what was asked for, or the one that belongs to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpuchat.base.errors import DraftMismatch, ModelNotFound, from_code
from cpuchat.costs.calibrations import PassCosts
from cpuchat.measure.subject import Subject
from cpuchat.models.catalog import load_catalog
from cpuchat.models.costs import keep_calibration
from cpuchat.models.drafts.candidates import candidates
from cpuchat.models.drafts.choice import ChosenDrafts, choose_draft
from cpuchat.models.file_names import file_fingerprint
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library.library import Library
from tests.models.drafts.files import WORDS, header_file, write_catalog


@pytest.mark.parametrize("wanted", ["", "auto", " "])
def test_the_own_draft_is_chosen_unless_another_is_wanted(wanted: str, library: Library, demo: dict[str, Path]) -> None:
    assert choose_draft(demo["demo"], wanted, library) == (demo["demo-draft"], "")
    assert choose_draft(demo["demo"], "none", library) == (None, "")
    assert choose_draft(demo["demo"], "demo-q4", library) == (demo["demo-q4"], "")


def test_a_draft_that_was_asked_for_and_does_not_fit_is_an_error(
    tmp_path: Path, library: Library, demo: dict[str, Path]
) -> None:
    stranger = header_file(tmp_path / "stranger.gguf")
    with pytest.raises(DraftMismatch) as refused:
        choose_draft(demo["demo"], str(stranger), library)
    error = refused.value
    assert error.message.startswith("stranger.gguf cannot draft for cpuchat-demo-8m-q8_0.gguf: ")
    assert "300 tokens against 3,072" in error.message and "cpuchat models pair" in error.hint
    assert isinstance(from_code("draft_mismatch", error.message, error.hint), DraftMismatch)
    with pytest.raises(DraftMismatch, match="target itself"):
        choose_draft(demo["demo"], "demo", library)
    with pytest.raises(ModelNotFound):
        choose_draft(demo["demo"], "no-such-draft", library)


def test_a_draft_from_the_settings_is_left_out_where_it_does_not_fit(
    tmp_path: Path, library: Library, demo: dict[str, Path]
) -> None:
    stranger = header_file(tmp_path / "stranger.gguf")
    for wanted in (str(stranger), "no-such-draft"):
        path, note = choose_draft(demo["demo"], wanted, library, strict=False)
        assert path is None
        assert note.startswith("No draft model: ")
    path, note = choose_draft(demo["demo-draft"], "demo", library)
    assert path == demo["demo"]
    assert "not smaller" in note


# What the catalog names.


def family(folder: Path, **draft: Any) -> tuple[Path, Path]:
    """Return a target and the draft that the user's catalog names for it, which differs in `draft`."""
    write_catalog(("big", "Big", 4096e-9, ["small"]), ("small", "Small", 8e-9, []))
    return header_file(folder / "Big-Q8_0.gguf", weights=4096), header_file(folder / "Small-Q8_0.gguf", **draft)


def test_the_draft_that_the_catalog_names_is_chosen_by_itself(tmp_path: Path, library: Library) -> None:
    target, draft = family(tmp_path / "mine")
    for wanted in ("", "auto"):
        path, note = choose_draft(target, wanted, library)
        assert path == draft
        assert "Small" in note
        assert "recommended by the catalog for Big" in note
    assert choose_draft(target, "none", library) == (None, "")
    assert choose_draft(draft, "auto", library) == (None, "")


@pytest.mark.parametrize(("changes", "fits"), [({"weights": 2048}, True), ({"tokens": [*WORDS[:200], "other"]}, False)])
def test_a_draft_that_reads_half_as_much_or_has_other_words_is_not_chosen_by_itself(
    changes: dict[str, Any], fits: bool, tmp_path: Path, library: Library, tiny_model: Path
) -> None:
    target, draft = family(tmp_path / "mine", **changes)
    for one in (target, tiny_model, tmp_path / "none.gguf"):  # one that the catalog does not know, and one that is gone
        assert choose_draft(one, "auto", library) == (None, "")
    assert (choose_draft(target, str(draft), library, strict=False)[0] == draft) == fits


def test_where_nothing_can_be_measured_only_a_draft_of_known_cost_is_chosen(tmp_path: Path, library: Library) -> None:
    target, draft = family(tmp_path / "mine")
    assert choose_draft(target, "auto", library, measured_only=True) == (None, "")
    files = Subject(model=(file_fingerprint(target), file_fingerprint(draft)))
    keep_calibration(files, PassCosts(tuple(40.0 + n for n in range(32)), draft_ms=2.0))
    assert choose_draft(target, "auto", library, measured_only=True)[0] == draft


def test_of_several_files_of_the_draft_the_most_faithful_is_chosen(tmp_path: Path, library: Library) -> None:
    target, draft = family(tmp_path / "mine", facts={"general.file_type": 7})
    header_file(tmp_path / "mine" / "Small-Q4_K_M.gguf", facts={"general.file_type": 15})
    assert choose_draft(target, "auto", library)[0] == draft


def test_a_choice_holds_for_its_target_alone(tmp_path: Path, library: Library, demo: dict[str, Path]) -> None:
    ChosenDrafts().put(demo["demo"], "none")
    assert choose_draft(demo["demo"], "auto", library) == (None, "")
    assert choose_draft(demo["demo-q4"], "auto", library) == (demo["demo-draft"], "")
    ChosenDrafts().put(demo["demo"], str(tmp_path / "deleted.gguf"))
    path, note = choose_draft(demo["demo"], "auto", library)
    assert path == demo["demo-draft"] and "deleted.gguf" in note
    ChosenDrafts().put(demo["demo"], "auto")
    assert choose_draft(demo["demo"], "auto", library) == (demo["demo-draft"], "")


def test_a_toy_is_not_offered_its_own_smaller_quantization(library: Library, demo: dict[str, Path]) -> None:
    here = library.local_models()
    assert demo["demo-q4"] in [model.path for model in here]
    found = [one.path for one in candidates(read_model(demo["demo"]), here, load_catalog())]
    assert demo["demo-draft"] in found and demo["demo-q4"] not in found
