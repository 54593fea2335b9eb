"""Tests which draft heads are offered for a target, and that one is used only where an engine can use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base.errors import DraftMismatch
from cpuchat.models.catalog import load_catalog
from cpuchat.models.drafts.candidates import INCLUDED, candidates, check, recommended
from cpuchat.models.drafts.choice import choose_draft, heads_of, local_heads
from cpuchat.models.gguf.header import read_model
from cpuchat.models.hub.repository import HubFile, Repository, models_of
from cpuchat.models.library.library import Library
from cpuchat.present import models
from tests.support.head_files import mtp_head_file, tap_head_file, target_file


def repository(*paths: str) -> Repository:
    files = [HubFile(path=path, size=100 + n, sha256=f"{n:064x}") for n, path in enumerate(paths)]
    return Repository(id="owner/Big-GGUF", revision="0" * 40, models=models_of(files))


def test_heads_on_this_machine_are_offered_beside_draft_models(tmp_path: Path, library: Library) -> None:
    target = read_model(target_file(tmp_path / "mine" / "Big-Q8_0.gguf", n_mtp=1, architecture="qwen35"))
    head = tap_head_file(tmp_path / "mine" / "eagle3-Big-Q8_0.gguf")
    tap_head_file(tmp_path / "mine" / "eagle3-Other-Q8_0.gguf", n_embd=96)
    here = library.local_models()
    found = {one.spec: check(one, target) for one in local_heads(target, here)}
    own, other = found[INCLUDED], found[str(tmp_path / "mine" / "eagle3-Other-Q8_0.gguf")]
    assert own.head == "mtp" and own.fits and own.path == target.path
    assert found[str(head)].head == "eagle3" and found[str(head)].fits
    told = dict(models.draft_details(other.spec, other, is_loaded=False, is_best=False))
    assert other.fits is False and "96 values" in told["target"]
    assert len(found) == 3
    assert recommended(found.values()) is None  # what it gains is not known
    assert not any(one.head for one in candidates(target, here, load_catalog()))


def test_the_heads_of_its_repository_are_offered_once_each() -> None:
    found = heads_of(
        repository("Big-Q4_K_M.gguf", "eagle3-Big-BF16.gguf", "eagle3-Big-Q8_0.gguf", "mtp-Big-Q8_0.gguf",
                   "mmproj-F16.gguf")
    )  # fmt: skip
    assert [(one.file, one.head) for one in found] == [
        ("eagle3-Big-Q8_0.gguf", "eagle3"), ("mtp-Big-Q8_0.gguf", "mtp")
    ]  # fmt: skip
    assert found[0].spec == "owner/Big-GGUF:eagle3-Big-Q8_0"


def test_a_head_is_chosen_where_the_engine_can_use_it(tmp_path: Path, library: Library) -> None:
    folder = tmp_path / "mine"
    target = target_file(folder / "Big-Q8_0.gguf", n_mtp=1, architecture="glm4moe")
    head = mtp_head_file(folder / "mtp-Big-Q8_0.gguf", architecture="glm4moe")
    assert choose_draft(target, str(head), library) == (head, "")
    assert choose_draft(target, INCLUDED, library) == choose_draft(target, "", library) == (target, "")

    other = target_file(folder / "Other-Q8_0.gguf", n_mtp=1, architecture="qwen2")
    with pytest.raises(DraftMismatch, match="hidden states of no qwen2"):
        choose_draft(other, str(tap_head_file(folder / "eagle3-Other-Q8_0.gguf")), library)
    with pytest.raises(DraftMismatch, match="only llama-server") as refused:
        choose_draft(target, str(tap_head_file(folder / "dflash-Big-Q8_0.gguf", architecture="dflash")), library)
    assert "--server" in refused.value.hint
    assert choose_draft(other, "", library) == (None, "")


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, library: Library) -> None:
    target = target_file(tmp_path / "mine" / "Big-Q8_0.gguf")
    wide = tap_head_file(tmp_path / "mine" / "eagle3-Wide-Q8_0.gguf", n_embd=96)
    with pytest.raises(DraftMismatch, match="96 values"):
        choose_draft(target, str(wide), library)
    with pytest.raises(DraftMismatch, match="contains no MTP head"):
        choose_draft(target, INCLUDED, library)
    with pytest.raises(DraftMismatch, match="target itself"):
        choose_draft(target, str(target), library)
    assert choose_draft(target, "", library) == (None, "")
