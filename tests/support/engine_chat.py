"""A chat with an engine in this process, and what it said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cpuchat.engine.answer import LoadedModel
from cpuchat.engine.engine import Engine
from cpuchat.engine.states.files import WriteBudget
from cpuchat.protocol.messages import (
    Event,
    Failed,
    Generate,
    GenerationFinished,
    LoadModel,
    LoadOptions,
    Message,
    ModelLoaded,
    Sampling,
    StateKey,
    TextDelta,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from tests.support.cores import ONE_CPU

E = TypeVar("E", bound=Event)


OPTIONS = LoadOptions(n_ctx=512, n_batch=64, n_ubatch=32)
SEEDED = Sampling(seed=11, temperature=1.0)


class Chat:
    """An engine and everything that it said. `react` may cancel in the middle of something."""

    def __init__(self, budget: WriteBudget | None = None) -> None:
        self.events: list[Event] = []
        self.react: Callable[[Event], None] = lambda _: None
        self.engine = Engine(self._emit, budget)
        self._requests = 0

    @property
    def loaded(self) -> LoadedModel:
        """Return the model in use, with its store of states."""
        assert self.engine._loaded is not None
        return self.engine._loaded

    def settle(self) -> None:
        """Wait until what is being saved is on disk."""
        self.engine._writer.finish()

    def restart(self) -> None:
        """Continue with another engine, as a new worker process would."""
        self.engine.close()
        self.engine = Engine(self._emit)

    def _emit(self, event: Event) -> None:
        self.events.append(event)
        self.react(event)

    def of(self, kind: type[E]) -> list[E]:
        return [e for e in self.events if isinstance(e, kind)]

    def load(
        self,
        path: Path,
        options: LoadOptions = OPTIONS,
        state_dir: Path | None = None,
        cpus: tuple[int, ...] = ONE_CPU,
    ) -> ModelInfo:
        self.events.clear()
        self.engine.load(LoadModel(path=str(path), cpus=cpus, options=options, state_dir=str(state_dir or "")))
        loaded = self.events[-1]
        assert isinstance(loaded, ModelLoaded), loaded
        return loaded.model

    def ask(self, *messages: Message, **more: Any) -> Timings:
        """Send a request that must finish; `events` are those of this request."""
        self.request(messages=messages, **more)
        finished = self.events[-1]
        assert isinstance(finished, GenerationFinished), finished
        return finished.timings

    def request(self, *, chat_id: str = "", owner: str = "", keeps: bool = False, **fields: object) -> None:
        """Send a request; the first three are of the key of its states."""
        self.events.clear()
        self._requests += 1
        fields["state"] = StateKey(owner=owner, chat=chat_id, on_disk=keeps)
        fields = {"sampling": SEEDED, "max_tokens": 24, **fields}
        self.engine.generate(Generate(request_id=self._requests, **fields))  # type: ignore[arg-type]
        assert {e.request_id for e in self.events} == {self._requests}  # type: ignore[attr-defined]
        self.engine.clear_cancel()

    @property
    def failure(self) -> Failed:
        failed = self.events[-1]
        assert isinstance(failed, Failed), failed
        return failed

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.of(TextDelta))

    @property
    def stop_reason(self) -> str:
        return self.of(GenerationFinished)[0].stop_reason


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, reasoning: str = "") -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


def system(text: str) -> Message:
    return Message(role="system", content=text)


LONG = "Tell me everything about the inference engine, in the order of the layers, please."
