"""Reads commands, drives the engine on its own thread, writes events.

The main thread only reads frames: it must see a `Cancel` while the engine thread sits inside llama.cpp. The engine
thread does everything that touches llama.cpp, because thread pools belong to the thread that made them.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from cpuchat.errors import CpuchatError
from cpuchat.hardware.numa.launch import in_effect
from cpuchat.protocol import (
    HEADER_SIZE,
    AnyCommand,
    Cancel,
    Event,
    Failed,
    ForgetChat,
    Generate,
    LoadModel,
    Shutdown,
    Unload,
    WorkerReady,
    decode_command,
    encode,
    frame_length,
)

if TYPE_CHECKING:
    from cpuchat.engine.engine import Engine

IDLE_SECONDS = 2.0
"""Quiet time after which unsaved KV is written to disk."""


class _Output:
    """Writes whole frames; a parent that is gone ends the process' work quietly."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self.closed = False

    def emit(self, event: Event) -> None:
        data = memoryview(encode(event))
        with self._lock:
            try:
                while data and not self.closed:
                    data = data[os.write(self._descriptor, data) :]
            except (BrokenPipeError, OSError):
                self.closed = True


def _read_commands(stream: BinaryIO) -> Iterator[AnyCommand]:
    """Yield commands until the parent closes the pipe."""
    while header := stream.read(HEADER_SIZE):
        if len(header) < HEADER_SIZE:
            return
        length = frame_length(header)
        body = stream.read(length)
        if len(body) < length:
            return
        yield decode_command(body)


class _EngineThread(threading.Thread):
    """Owns the engine: one command after the other."""

    def __init__(self, output: _Output) -> None:
        super().__init__(name="engine")
        self._output = output
        self._commands: queue.SimpleQueue[AnyCommand] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._ready = threading.Event()
        self._pending = 0
        self._lock = threading.Lock()

    def submit(self, command: AnyCommand) -> None:
        with self._lock:
            self._pending += 1
        self._commands.put(command)

    def cancel(self) -> None:
        """Called from the main thread: stop the command that runs or waits; without one there is nothing to stop."""
        self._ready.wait()
        with self._lock:
            if self._pending and self._engine is not None:
                self._engine.cancel()

    def _finished(self) -> None:
        """A cancellation ends with the command that it was meant for."""
        with self._lock:
            self._pending -= 1
            if self._engine is not None:
                self._engine.clear_cancel()

    def run(self) -> None:
        try:
            # The import of llama.cpp happens here, so that even its failure is reported as an event.
            from cpuchat.engine.bindings import engine_info
            from cpuchat.engine.engine import Engine

            memory, refused = in_effect()
            info = msgspec.structs.replace(engine_info(), memory=memory, memory_refused=refused)
            self._engine = Engine(self._output.emit)
        except CpuchatError as error:
            self._output.emit(Failed(code=error.code, message=error.message, hint=error.hint))
            return
        except (ImportError, OSError) as error:
            self._output.emit(
                Failed(
                    code="engine_mismatch",
                    message=f"The inference engine cannot be loaded: {error}.",
                    hint="Build it again with `make setup`.",
                )
            )
            return
        finally:
            self._ready.set()
        self._output.emit(WorkerReady(engine=info))
        try:
            while self._one():
                pass
        finally:
            self._engine.close()

    def _one(self) -> bool:
        """Carry out the next command; False ends the thread."""
        engine = self._engine
        assert engine is not None
        try:
            command = self._commands.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            engine.idle()
            command = self._commands.get()
        try:
            match command:
                case Shutdown():
                    return False
                case LoadModel():
                    engine.load(command)
                case Generate():
                    engine.generate(command)
                case ForgetChat():
                    engine.forget(command.chat_id)
                case Unload():
                    engine.unload()
                case _:
                    pass
        except Exception as error:  # a bug of ours must reach the user as a message and the log as a traceback
            traceback.print_exc()
            request = command.request_id if isinstance(command, Generate) else 0
            self._output.emit(
                Failed(
                    code="error",
                    message=f"Unexpected {type(error).__name__} in the worker: {error}.",
                    hint="The worker's log has the details.",
                    request_id=request,
                )
            )
        finally:
            self._finished()
        return not self._output.closed


def serve(input_descriptor: int, output_descriptor: int) -> int:
    """Run until `Shutdown` or until the parent goes away; returns the exit status."""
    output = _Output(output_descriptor)
    engine = _EngineThread(output)
    engine.start()
    status = 0
    try:
        with open(input_descriptor, "rb", closefd=False) as stream:
            for command in _read_commands(stream):
                if isinstance(command, Cancel):
                    engine.cancel()
                    continue
                engine.submit(command)
                if isinstance(command, Shutdown):
                    break
    except (ValueError, msgspec.MsgspecError) as error:
        output.emit(Failed(code="error", message=f"Unreadable command: {error}."))
        status = 1
    # The parent is gone or wants us to go: stop what runs, save, leave.
    engine.cancel()
    engine.submit(Shutdown())
    engine.join()
    return status
