"""What a chat needs from whoever answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol import AnyEvent, EngineInfo, Generate, LoadOptions, ModelInfo

DEFAULT_PLACEMENT = PlacementSpec()


class Backend(Protocol):
    """Answers requests, one at a time. No method raises for a failure of the engine: it yields `Failed`."""

    @property
    def model(self) -> ModelInfo | None:
        """The loaded model; None before a load and after the worker died."""
        ...

    @property
    def engine(self) -> EngineInfo | None:
        """The engine of the running worker; None before the first start."""
        ...

    @property
    def pid(self) -> int | None:
        """Process that computes, for memory figures; None when it is not on this machine or not running."""
        ...

    def load(
        self, path: Path, options: LoadOptions, spec: PlacementSpec = DEFAULT_PLACEMENT
    ) -> AsyncGenerator[AnyEvent, None]:
        """Start a worker if needed and load, placed as `spec` says.

        Ends with `ModelLoaded`, `LoadCancelled` (cancelled) or `Failed`.
        """
        ...

    def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        """Stream one answer; ends with `GenerationFinished` or `Failed`.

        A worker that died before is started again and the model loaded again first (its `LoadProgress` events
        come first). Closing the iterator early cancels the answer.
        """
        ...

    async def cancel(self) -> None:
        """Stop the running load or answer, or the one that was asked for last and has not begun; its iterator still
        ends with its final event.
        """
        ...

    async def forget(self, chat_id: str) -> None:
        """Delete the KV saved for a chat that was deleted."""
        ...

    def kill(self) -> None:
        """End the worker at once; what it has not saved is lost. Streams end with `Failed`; `close` is still due."""
        ...

    async def close(self) -> None:
        """Let the worker save and exit; kill it if it does not, or not within some seconds."""
        ...
