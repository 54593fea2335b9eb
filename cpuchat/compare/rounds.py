"""Holds the data of a comparison: prompts, and for each the rounds in which both sides answered it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpuchat.compare.difference import Difference, TokenText, first_difference
from cpuchat.compare.memory import MemoryTogether, WorkerMemory
from cpuchat.model_info import ModelInfo
from cpuchat.protocol import Failed
from cpuchat.telemetry.roofline import Roofline
from cpuchat.timings import Timings


@dataclass
class SideAnswer:
    """One side's answer. `timings` and `roofline` are None until it is complete; `failed` is why it is not."""

    content: str = ""
    reasoning: str = ""
    written: TokenText = field(default_factory=TokenText)
    stop_reason: str = ""
    timings: Timings | None = None
    model: ModelInfo | None = None
    roofline: Roofline | None = None
    memory: WorkerMemory | None = None
    failed: Failed | None = None


@dataclass
class Round:
    """Both answers to one prompt. `first` (0 or 1) is the side that answered first, or has the first half of the cores.

    `race`: both answered at the same time; `race_bytes` is what each read per second while both did, None where that
    is not known.
    """

    first: int = 0
    race: bool = False
    answers: tuple[SideAnswer, SideAnswer] = field(default_factory=lambda: (SideAnswer(), SideAnswer()))
    memory: MemoryTogether | None = None
    race_bytes: tuple[float, float] | None = None

    @property
    def complete(self) -> bool:
        """Both sides have finished, by themselves or at their token limit."""
        return all(one.timings is not None and one.stop_reason != "cancelled" for one in self.answers)

    def difference(self) -> Difference | None:
        """Return where the two texts diverge; None while they do not."""
        a, b = self.answers
        ended = all(one.stop_reason in ("end", "stop_string") for one in self.answers)
        return first_difference(a.written, b.written, complete=ended)


@dataclass
class Turn:
    """One prompt and its rounds; the last one is what the next prompt continues."""

    prompt: str
    rounds: list[Round] = field(default_factory=list)

    def comparable(self) -> list[Round]:
        """Return the complete rounds that were measured like the last one."""
        race = bool(self.rounds) and self.rounds[-1].race
        return [one for one in self.rounds if one.complete and one.race == race]
