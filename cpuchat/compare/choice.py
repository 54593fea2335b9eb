"""Which of two files of one model to use on this machine, by speed, answers and memory together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cpuchat.base.errors import CpuchatError
from cpuchat.compare.agreement import Agreement
from cpuchat.compare.figures import MIN_ROUNDS, Verdict
from cpuchat.compare.runner import Side
from cpuchat.config.settings import Settings
from cpuchat.models.fit import required_memory
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library.places import is_same_model
from cpuchat.models.quantize.types import SMALLER
from cpuchat.quality.measure import QualityMeasurement
from cpuchat.quality.statistics import MIN_POSITIONS, Interval

_N_CTX = 8192  # as in the list of models
_MIN_SAME = 0.8
"""Share of equal words or tokens below which the loss is clear (`present.quality`): no speed pays for that."""


class FilePair(NamedTuple):
    """Two files of one model. That of side `larger` takes `memory` more bytes; `hard` is the share of equal next tokens
    on the built-in text, None where `cpuchat quality` has not measured it."""

    larger: int
    memory: int
    hard: Interval | None


def read_pair(sides: Sequence[Side], settings: Settings) -> FilePair | None:
    """Return what tells two quantizations of a model with the same settings apart; None: others. Blocks."""
    if sides[0].changes != sides[1].changes:
        return None
    try:
        headers = [read_model(Path(side.path)) for side in sides]
        larger = int(headers[1].file_size > headers[0].file_size)
        big, small = headers[larger], headers[1 - larger]
        if not is_same_model(big, small) or small.file_size > SMALLER * big.file_size:
            return None
        needs = (required_memory(header, settings.load_options(), _N_CTX).min_bytes for header in (big, small))
        loss = QualityMeasurement(big.path, [small.path]).comparisons[0].summary()
    except (CpuchatError, OSError):
        return None
    hard = loss.same_top if loss is not None and loss.n >= MIN_POSITIONS else None
    return FilePair(larger, next(needs) - next(needs), hard)


def choose(files: FilePair, verdict: Verdict, agreement: Agreement | None) -> int | None:
    """Return the side to use: the larger file, unless the smaller one is faster and loses little; None: unknown."""
    noisy = verdict.kind == "noisy"
    if verdict.kind in ("incomplete", "short", "disturbed") or (noisy and verdict.n_rounds < MIN_ROUNDS):
        return None
    if noisy or verdict.kind == "same" or (verdict.speed > 1) == bool(files.larger):
        return files.larger
    shares = agreement.answers[0].words if agreement is not None else None, files.hard
    same = min((share.value for share in shares if share is not None), default=None)
    if same is None:
        return None
    return files.larger if same < _MIN_SAME else 1 - files.larger
