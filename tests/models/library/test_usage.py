"""Tests when models were used and how fast they were, as several programs write it down."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cpuchat.base.errors import CpuchatError
from cpuchat.costs.model import ALIKE
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library import usage as log
from cpuchat.models.library.library import Library
from cpuchat.models.library.usage import Usage, usage_of, usages
from cpuchat.models.traffic import model_work
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import SpeculationFigures, Timings
from tests.support.costs import work_of_size

WEIGHTS = 1_000_000_000


def info(path: Path, **changes: object) -> ModelInfo:
    try:
        work = model_work(read_model(path), alike=ALIKE)
    except CpuchatError:  # a file of other content
        work = work_of_size(WEIGHTS)
    plain = ModelInfo(
        path=str(path), name="m", architecture="qwen2", quantization="Q8_0", n_params=1, size=WEIGHTS, n_ctx=512,
        n_ctx_train=512, n_vocab=1, n_layer=1, n_threads=2, peak_read=50e9, work=work,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def answer(tok_s: float, n: int = 101, **changes: object) -> Timings:
    plain = Timings(predicted_n=n, predicted_ms=1e3 * (n - 1) / tok_s, cpu_wait=0.01)
    return msgspec.structs.replace(plain, **changes)


def usage(path: Path) -> Usage:
    return usage_of(usages(), [path])


def test_a_load_and_an_answer_are_remembered(model: Path, no_demo: Path, tmp_path: Path) -> None:
    log.loaded([model])
    log.answered(info(model), answer(40.0))
    kept = usage(model)
    assert kept == Usage(used=kept.used, plain_tok_s=40.0) and kept.used > 1.7e9
    [found] = Library([model.parent], cache=tmp_path / "none").local_models()
    assert (found.last_used, found.measured_tok_s, found.drafted_tok_s) == (kept.used, 40.0, 0.0)


def test_with_drafts_the_plain_speed_is_that_of_the_pass_beside_them(model: Path) -> None:
    drafted = answer(60.0, draft_n=50, speculation=SpeculationFigures(passes=40, draft_n=50, plain_ms=25.0))
    log.answered(info(model), drafted)
    first = usage(model)
    assert (first.plain_tok_s, first.drafted_tok_s) == (40.0, 60.0)
    unknown = answer(70.0, draft_n=50, speculation=SpeculationFigures(passes=40, draft_n=50))
    log.answered(info(model), unknown)
    assert usage(model) == msgspec.structs.replace(first, drafted_tok_s=70.0)


def test_an_answer_beside_other_programs_leaves_the_speeds(model: Path) -> None:
    log.answered(info(model), answer(40.0))
    busy = SpeculationFigures(passes=40, draft_n=50)
    log.answered(info(model), answer(4.2, draft_n=50, speculation=busy, cpu_wait=0.4))
    log.answered(info(model), answer(3.1, cpu_wait=0.4))
    kept = usage(model)
    assert (kept.plain_tok_s, kept.drafted_tok_s) == (40.0, 0.0)


def test_what_says_nothing_about_speed_is_not_remembered(model: Path) -> None:
    log.answered(info(model), answer(40.0, n=8))
    log.answered(info(model), Timings(predicted_n=1))
    log.loaded([model.with_name("gone.gguf")])
    assert usages() == {}


def test_another_file_of_the_same_name_was_never_used(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")
    log.loaded([path])
    before = usage(path)
    os.utime(path, (1, 1))  # touched
    assert usage(path) == before != Usage()
    path.write_bytes(b"another")
    assert usage(path) == Usage()
