"""Reads commands, drives the engine on its own thread, writes events.

The main thread only reads frames: it must see a `Cancel` while the engine thread sits inside llama.cpp. The engine
thread does everything that touches llama.cpp, because thread pools belong to the thread that made them.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import traceback
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from cpuchat.base.errors import CpuchatError
from cpuchat.hardware.numa.mempolicy import in_effect
from cpuchat.protocol.messages import (
    HEADER_SIZE,
    AnyCommand,
    Cancel,
    CountTokens,
    EndReasoning,
    Event,
    Failed,
    ForgetChat,
    Generate,
    LoadModel,
    Measure,
    Score,
    Shutdown,
    ShuttingDown,
    TokensCounted,
    WorkerReady,
    decode_command,
    encode,
    frame_length,
)

if TYPE_CHECKING:
    from cpuchat.engine.engine import Engine

IDLE_SECONDS = 300.0
"""Seconds without a command after which unsaved KV is written to disk, in case of a crash: leaving a chat and quitting
save it too.
"""
SAVING_SECONDS = 60.0  # to stop and to save, after which the engine thread counts as stuck
_FAILED = 70  # EX_SOFTWARE


class _Output:
    """Writes whole frames; if the parent is gone, the process ends quietly."""

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


class _EngineThread(threading.Thread):
    """Owns the engine: runs one command after the other. If it ends abnormally, so does the process, which the parent
    sees."""

    def __init__(self, output: _Output) -> None:
        super().__init__(name="engine")
        self._output = output
        self._commands: queue.SimpleQueue[tuple[AnyCommand, float]] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._lock = threading.Lock()  # over the three below
        self._waiting: set[int] = set()
        self._cancelled: set[int] = set()
        self._running = 0

    def submit(self, command: AnyCommand) -> None:
        """Queue a command. Called from the main thread as soon as the command has arrived."""
        with self._lock:
            self._waiting.add(_request_id(command))
        self._commands.put((command, perf_counter()))

    def cancel(self, request_id: int) -> None:
        """Stop that request if it runs or waits, else do nothing. Called from the main thread."""
        with self._lock:
            if request_id in self._waiting:
                self._cancelled.add(request_id)
            if (engine := self._engine_at(request_id)) is not None:
                engine.cancel()

    def end_reasoning(self, request_id: int) -> None:
        """End the reasoning of that request if it runs, else do nothing. Called from the main thread."""
        with self._lock:
            if (engine := self._engine_at(request_id)) is not None:
                engine.end_reasoning()

    def _engine_at(self, request_id: int) -> Engine | None:
        return self._engine if request_id and request_id == self._running else None

    def shut_down(self) -> None:
        """Stop everything, save, end. Called from the main thread."""
        with self._lock:
            self._cancelled |= self._waiting
            if self._engine is not None:
                self._engine.cancel_for_good()
        self.submit(Shutdown())

    def run(self) -> None:
        try:
            self._run()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(_FAILED)

    def _run(self) -> None:
        try:
            # The import of llama.cpp happens here, so that even its failure is reported as an event.
            from cpuchat.engine.engine import Engine
            from cpuchat.engine.llama.bindings import engine_info

            memory, refused = in_effect()
            info = msgspec.structs.replace(engine_info(), memory_policy=memory, policy_refused=refused)
            engine = Engine(self._output.emit)
        except CpuchatError as error:
            self._output.emit(Failed.of(error))
            return
        except (ImportError, OSError) as error:
            self._output.emit(
                Failed(
                    code="engine_mismatch",
                    message=f"Cannot load the inference engine: {error}.",
                    hint="Rebuild it with `make setup`, or reinstall cpuchat.",
                )
            )
            return
        with self._lock:
            self._engine = engine
        self._output.emit(WorkerReady(engine=info))
        gc.freeze()  # full collections would walk all modules, in the middle of an answer
        gc.enable()
        try:
            while self._run_next(engine):
                pass
        finally:
            engine.close()

    def _run_next(self, engine: Engine) -> bool:
        """Run the next command; False ends the thread."""
        try:
            command, arrived = self._commands.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            try:
                engine.idle()
            except Exception:  # nothing waits for this, and the next request may succeed
                traceback.print_exc()
            command, arrived = self._commands.get()
        request_id = _request_id(command)
        with self._lock:
            self._waiting.discard(request_id)
            self._running = request_id
            if request_id in self._cancelled:
                engine.cancel()
            self._cancelled.discard(request_id)
        try:
            match command:
                case Shutdown():
                    return False
                case LoadModel():
                    engine.load(command)
                case Generate():
                    engine.generate(command, arrived)
                case Measure():
                    engine.measure(command)
                case Score():
                    engine.score(command)
                case ForgetChat():
                    engine.forget(command.chat_id)
                case CountTokens():
                    engine.count_tokens(command)
        except Exception as error:  # a bug of ours must reach the user as a message and the log as a traceback
            traceback.print_exc()
            self._output.emit(
                Failed(
                    code="error",
                    message=f"Internal error in the worker: {type(error).__name__}: {error}.",
                    hint="See the worker's log for details.",
                    request_id=request_id,
                )
            )
            if isinstance(command, CountTokens):
                self._output.emit(TokensCounted(request_id=command.request_id))
        finally:
            with self._lock:  # a cancellation applies to one command only
                self._running = 0
                engine.clear_cancel()
        return not self._output.closed


def _request_id(command: AnyCommand) -> int:
    """Return the request id; 0 for commands that cannot be cancelled."""
    return command.request_id if isinstance(command, LoadModel | Generate | Measure | Score) else 0


def serve(input_descriptor: int, output_descriptor: int) -> int:
    """Run until `Shutdown` or until the parent goes away; returns the exit status."""
    output = _Output(output_descriptor)
    engine = _EngineThread(output)
    engine.start()
    status = 0
    try:
        with open(input_descriptor, "rb", closefd=False) as stream:
            # Until the parent closes the pipe.
            while len(header := stream.read(HEADER_SIZE)) == HEADER_SIZE:
                length = frame_length(header)
                if len(body := stream.read(length)) < length:
                    break
                command = decode_command(body)
                if isinstance(command, Cancel):
                    engine.cancel(command.request_id)
                elif isinstance(command, EndReasoning):
                    engine.end_reasoning(command.request_id)
                elif isinstance(command, Shutdown):
                    output.emit(ShuttingDown())
                    break
                else:
                    engine.submit(command)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        output.emit(Failed(code="error", message=f"Invalid command: {error}."))
        status = 1
    # The parent is gone or wants us to go: stop what runs, save, leave.
    engine.shut_down()
    engine.join(SAVING_SECONDS)
    if engine.is_alive():  # inside llama.cpp for ever; if the parent is gone, nobody kills this process
        os._exit(_FAILED)
    return status
