"""Tests which draft heads are offered for a target, and that one is used only where an engine can use it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cpuchat.base.errors import DraftMismatch
from cpuchat.costs.calibrations import PassCosts
from cpuchat.measure.subject import Subject
from cpuchat.models.catalog import load_catalog
from cpuchat.models.costs import keep_accepted, keep_calibration
from cpuchat.models.drafts.candidates import INCLUDED, candidates, check, own_head, recommended, usual_head
from cpuchat.models.drafts.choice import choose_draft, heads_of, local_heads
from cpuchat.models.file_names import file_fingerprint
from cpuchat.models.fit import snapshots
from cpuchat.models.gguf.header import read_model
from cpuchat.models.hub.repository import HubFile, Repository, models_of
from cpuchat.models.library.library import Library
from cpuchat.models.machine import Machine
from cpuchat.present import models
from cpuchat.protocol.messages import LoadOptions
from tests.support.costs import reading
from tests.support.head_files import mtp_head_file, tap_head_file, target_file
from tests.support.head_model import HybridShape, write_head_model


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
    told = dict(models.draft_details(other.spec, other, is_loaded=False))
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
    assert choose_draft(other, "", library) == (None, "")


def test_heads_that_work_only_in_llama_server_are_refused_by_name_with_the_recipe(
    tmp_path: Path, library: Library
) -> None:
    """In the model and beside it. Several MTP layers of most architectures, and states that the engine does not give,
    would end the process."""
    folder = tmp_path / "mine"

    def model(architecture: str, n_mtp: int = 0) -> Path:
        return target_file(folder / f"{architecture}-{n_mtp}.gguf", n_mtp=n_mtp, architecture=architecture)

    two = mtp_head_file(folder / "mtp-two.gguf", architecture="qwen35", n_layers=2)
    assistant = mtp_head_file(folder / "mtp-gemma.gguf", architecture="gemma4-assistant")
    block = tap_head_file(folder / "dflash-Big-Q8_0.gguf", architecture="dflash")
    for target, wanted, why in (
        (model("qwen35", 2), INCLUDED, "drafts with one MTP layer of qwen35, not with 2"),
        (model("qwen35", 2), str(model("qwen35", 2)), "drafts with one MTP layer of qwen35, not with 2"),
        (model("qwen35"), str(two), "drafts with one MTP layer of qwen35, not with 2"),
        (model("exaone-moe", 1), INCLUDED, "hidden states of no exaone-moe"),
        (model("gemma4"), str(assistant), "reads the model's own KV cache works only in llama-server"),
        (model("llama"), str(block), "draft whole blocks, which only llama-server"),
    ):
        with pytest.raises(DraftMismatch, match=why) as refused:
            choose_draft(target, wanted, library)
        assert "llama-server --spec-type draft-" in refused.value.hint and "--server" in refused.value.hint
        assert choose_draft(target, "", library) == (None, "")
    assert choose_draft(several := model("step35", 3), INCLUDED, library) == (several, "")


def test_what_a_head_is_and_gains_here_is_told_in_one_way(tmp_path: Path, library: Library) -> None:
    file = write_head_model(tmp_path / "mine" / "model.gguf", 0.5, shape=HybridShape(n_layer=16))
    header = read_model(file)
    machine = Machine(available=8 << 30, total=16 << 30, profile=reading(1e8), source="made up")
    told = models.head_words(own_head(header, LoadOptions(), machine))
    assert re.fullmatch(
        r"MTP, [\d.]+ MB, KV cache 1.0 kB per token of context; ≈ [\d.]+× in prose, ≈ [\d.]+× in code, "
        r"at the usual acceptance of 70 to 90 %", told
    )  # fmt: skip
    print = file_fingerprint(file)
    keep_accepted(print, print, (75.0, 100.0))
    keep_calibration(Subject(model=(print, print)), PassCosts(tuple(10.0 + n for n in range(32)), draft_ms=1.0))
    assert models.head_words(own_head(header, LoadOptions(), machine)).endswith("× at its measured acceptance of 75 %")
    two = read_model(target_file(tmp_path / "mine" / "two.gguf", n_mtp=2, architecture="qwen35"))
    assert "not with 2. Start `llama-server" in models.head_words(own_head(two, LoadOptions(), machine))
    none = read_model(target_file(tmp_path / "mine" / "none.gguf"))
    assert models.head_words(own_head(none, LoadOptions(), machine)) == ""


def test_drafts_that_a_model_cannot_roll_back_are_not_promised(tmp_path: Path) -> None:
    """Passes cost about the same, so the longest draft is best; a hybrid rolls back as far as it keeps snapshots."""
    file = write_head_model(tmp_path / "model.gguf", 0.5, shape=HybridShape(n_layer=16))
    header, machine = read_model(file), Machine(available=8 << 30, total=16 << 30)
    print = file_fingerprint(file)
    keep_calibration(Subject(model=(print, print)), PassCosts(tuple(10.0 + 0.01 * n for n in range(32)), draft_ms=0.01))
    found = own_head(header, LoadOptions(), machine)
    kept = snapshots(header, LoadOptions(draft_path=str(file)))
    assert found is not None and 0 < kept < 31
    assert {one.depth for one in found.expected.gains} == {kept}


def test_models_of_the_catalog_say_what_their_heads_take_and_gain() -> None:
    machine, catalog = Machine(available=64 << 30, total=64 << 30, profile=reading(5e10)), load_catalog()
    entry, without = catalog.find("qwen3.5-9b"), catalog.find("qwen3-8b")
    assert entry is not None and without is not None and usual_head(without, machine) is None
    head = usual_head(entry, machine)
    assert head is not None and 0.02 < head.size.weights / entry.size < 0.08
    assert max(one.speedup for one in head.expected.gains) > 1.5


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
