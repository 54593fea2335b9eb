"""A chat with an engine in this process that may have a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cpuchat.protocol.messages import Event, LoadModel, LoadProgress, ModelLoaded, Sampling, Speculation
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from tests.support.cores import ONE_CPU
from tests.support.engine_chat import Chat
from tests.support.pairs import OPTIONS

PLAIN = Speculation()
ALL = Speculation(drafters=("draft", "suffix"), depth=4)


class PairChat(Chat):
    """An engine and what it said."""

    def command(self, path: Path, **more: Any) -> Event:
        cpus = more.pop("cpus", ONE_CPU)
        options = msgspec.structs.replace(OPTIONS, **more)
        self.events.clear()
        self.engine.load(LoadModel(path=str(path), cpus=cpus, options=options))
        self.engine.clear_cancel()
        return self.events[-1]

    def load(self, path: Path, **more: Any) -> ModelInfo:  # type: ignore[override]
        loaded = self.command(path, **more)
        assert isinstance(loaded, ModelLoaded), loaded
        return loaded.model

    def ask(self, speculation: Speculation = PLAIN, **more: Any) -> tuple[str, Timings]:  # type: ignore[override]
        fields = {"prompt": "a b c d", "sampling": Sampling(temperature=0.0), "max_tokens": 40, **more}
        timings = super().ask(speculation=speculation, **fields)
        return self.text, timings

    def phases(self) -> set[str]:
        return {e.phase for e in self.of(LoadProgress)}
