"""A chat with an engine in this process that may have a draft model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.engine.engine import Engine
from cpuchat.protocol.messages import (
    Event,
    Generate,
    GenerationFinished,
    LoadModel,
    LoadProgress,
    ModelLoaded,
    Sampling,
    Speculation,
    TextDelta,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from tests.support.cores import ONE_CPU
from tests.support.pairs import OPTIONS

PLAIN = Speculation()
ALL = Speculation(drafters=("draft", "suffix", "lookup"), depth=4)


class PairChat:
    """An engine and what it said."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.react: Callable[[Event], None] = lambda _: None
        self.engine = Engine(self._emit)

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self.react(event)

    def command(self, path: Path, **more: Any) -> Event:
        fields = {name: more.pop(name) for name in ("calibration_file", "draft_cpus") if name in more}
        fields = {"cpus": more.pop("cpus", ONE_CPU), **fields}
        options = msgspec.structs.replace(OPTIONS, **more)
        self.events.clear()
        self.engine.load(LoadModel(path=str(path), options=options, **fields))
        self.engine.clear_cancel()
        return self.events[-1]

    def load(self, path: Path, **more: Any) -> ModelInfo:
        loaded = self.command(path, **more)
        assert isinstance(loaded, ModelLoaded), loaded
        return loaded.model

    def ask(self, speculation: Speculation = PLAIN, **more: Any) -> tuple[str, Timings]:
        self.events.clear()
        fields = {"prompt": "a b c d", "sampling": Sampling(temperature=0.0), "max_tokens": 40, **more}
        self.engine.generate(Generate(request_id=1, speculation=speculation, **fields))
        finished = self.events[-1]
        assert isinstance(finished, GenerationFinished), finished
        return "".join(e.text for e in self.events if isinstance(e, TextDelta)), finished.timings

    def phases(self) -> set[str]:
        return {e.phase for e in self.events if isinstance(e, LoadProgress)}
