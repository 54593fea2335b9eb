"""What passes of a model cost on this machine, as the engine measured and kept it: small files in the cache folder.

The engine writes them and looks them up by everything that the costs depend on. Here the latest of a model is read, to
tell what a draft model would gain before it is loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cpuchat import paths
from cpuchat.errors import ModelNotFound
from cpuchat.models.fingerprint import file_fingerprint

FORMAT = 1
DEAREST, STEEPEST, LEAST = 1.25, 0.5, 0.8
"""What times of passes can be, by what was measured on quiet machines: n tokens cost at most n plain steps (Gemma 270M:
2.1 for 2, 4.4 for 5), longer passes may cost less than shorter ones because kernels compute groups of rows (3.9 for 8;
1.5B Q8_0: 3.15 for 6, 2.79 for 8), and none costs less than a plain step."""
_MOST = 500  # files looked at, the latest ones
_MAX_BYTES = 1 << 16


class Calibration(msgspec.Struct, frozen=True):
    """One file. `verify_ms[n - 1]`: milliseconds of a pass of the target over n tokens.

    `draft_ms` is that of one drafted token (0: measured without a draft model). The rest is as in the engine's
    `PassCosts`; `overlap` (T(n), draft ms) if measured. `target` and `draft` are the fingerprints of both files ("" in
    older files, or without a draft model). `steady` False: the measurements scattered.
    """

    format: int
    key: str
    verify_ms: tuple[float, ...]
    draft_ms: float
    read_ms: float
    rollback_ms: float
    overlap: tuple[tuple[float, ...], float] | None
    target: str = ""
    draft: str = ""
    steady: bool = True


def implausible(ms: Mapping[int, float]) -> list[int]:
    """For which numbers of tokens the time of a pass (n -> milliseconds, n = 1 among them) was that of a disturbed one:
    more than `DEAREST` times that of n plain steps, or far above that of a longer pass. [] when all can be."""
    cheapest = {n: min(time for longer, time in ms.items() if longer >= n) for n in ms}
    return [
        n
        for n, time in sorted(ms.items())
        if time > DEAREST * n * ms[1] or cheapest[n] < (LEAST if n == 1 else STEEPEST) * time
    ]


def is_plausible(pass_ms: Sequence[float]) -> bool:
    """Whether `pass_ms[n - 1]`, times of passes over n tokens, can all be those of a quiet machine."""
    return not implausible(dict(enumerate(pass_ms, 1)))


class TargetCosts(msgspec.Struct, frozen=True):
    """What is known of a target: milliseconds of passes over 1, 2, ... tokens (() when it was never calibrated), and of
    a drafted token by the fingerprint of the draft model."""

    pass_ms: tuple[float, ...] = ()
    draft_ms: dict[str, float] = {}

    def measured_draft(self, draft: Path) -> float:
        """Milliseconds for a token of that draft model beside this target; 0 when not measured."""
        if not self.draft_ms:
            return 0.0
        try:
            return self.draft_ms.get(file_fingerprint(draft), 0.0)
        except ModelNotFound:
            return 0.0


UNKNOWN = TargetCosts()


def target_costs(target: Path, folder: Path | None = None) -> TargetCosts:
    """The latest measurements of a model file on this machine, with whatever cores they were made.

    Args:
        folder: replaces the one in the cache folder.
    """
    try:
        fingerprint = file_fingerprint(target)
    except ModelNotFound:
        return UNKNOWN
    pass_ms: tuple[float, ...] = ()
    draft_ms: dict[str, float] = {}
    for file in _latest_first(folder or paths.calibration_dir()):
        known = _read(file)
        if known is None or known.target != fingerprint:
            continue
        pass_ms = pass_ms or known.verify_ms
        if known.draft and known.draft_ms > 0:
            draft_ms.setdefault(known.draft, known.draft_ms)
    return TargetCosts(pass_ms, draft_ms)


def _latest_first(folder: Path) -> list[Path]:
    try:
        files = list(folder.glob("*.json"))
    except OSError:
        return []
    dated: list[tuple[int, Path]] = []
    for file in files:
        with contextlib.suppress(OSError):  # gone by now, or a broken link
            status = file.stat()
            if status.st_size <= _MAX_BYTES:
                dated.append((status.st_mtime_ns, file))
    return [file for _, file in sorted(dated, reverse=True)[:_MOST]]


def _read(file: Path) -> Calibration | None:
    """None for what cannot be read, or holds times that cannot be."""
    try:
        known = msgspec.json.decode(file.read_bytes(), type=Calibration)
    except (OSError, ValueError):  # msgspec's errors are ValueErrors
        return None
    if known.format != FORMAT or not known.verify_ms or min(known.verify_ms) <= 0:
        return None
    if not is_plausible(known.verify_ms):
        return None
    return known
