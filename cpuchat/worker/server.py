"""Reads commands, drives the engine on its own thread, writes events.

The main thread only reads frames: it must see a `Cancel` while the engine thread sits inside llama.cpp. The engine
thread does everything that touches llama.cpp, because thread pools belong to the thread that made them.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from cpuchat.base.errors import CpuchatError, EngineMismatch
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
    GenerationFinished,
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
from cpuchat.protocol.timings import Timings

if TYPE_CHECKING:
    from cpuchat.engine.engine import Engine

IDLE_SECONDS = 300.0
"""Seconds without a command after which unsaved KV is written to disk, as when a chat is left, in case of a crash."""
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
    """Owns the engine: runs one command after the other. While it answers, further answers that the engine can run at
    once begin on threads of their own, in order, up to the first other command, which waits until it is alone. If it
    ends abnormally, so does the process, which the parent sees."""

    def __init__(self, output: _Output) -> None:
        super().__init__(name="engine")
        self._output = output
        self._engine: Engine | None = None
        self._changed = threading.Condition()  # over those below
        self._commands: deque[tuple[AnyCommand, float]] = deque()
        self._cancelled: set[int] = set()
        self._running: set[int] = set()
        self._is_answering = False

    def submit(self, command: AnyCommand) -> None:
        """Queue a command. Called from the main thread as soon as the command has arrived."""
        with self._changed:
            self._commands.append((command, perf_counter()))
            self._start_beside()
            self._changed.notify()

    def cancel(self, request_id: int) -> None:
        """Stop that request if it runs; one that waits ends at once. Called from the main thread."""
        ended = None
        with self._changed:
            for number, (command, _) in enumerate(self._commands if request_id else ()):
                if request_id == _request_id(command):
                    if isinstance(command, Generate):
                        ended = GenerationFinished(request_id=request_id, stop_reason="cancelled", timings=Timings())
                        del self._commands[number]
                    else:
                        self._cancelled.add(request_id)
                    break
            if (engine := self._engine_at(request_id)) is not None:
                engine.cancel(request_id)
        if ended is not None:
            self._output.emit(ended)

    def end_reasoning(self, request_id: int) -> None:
        """End the reasoning of that request if it runs, else do nothing. Called from the main thread."""
        with self._changed:
            if (engine := self._engine_at(request_id)) is not None:
                engine.end_reasoning(request_id)

    def _engine_at(self, request_id: int) -> Engine | None:
        return self._engine if request_id and request_id in self._running else None

    def _start_beside(self) -> None:
        """Start what comes next and may run beside what is running. The lock is held."""
        engine = self._engine
        while engine is not None and self._is_answering and self._commands and engine.parallel > 1:
            command, arrived = self._commands[0]
            has_lane = len(self._running) < engine.parallel
            if not (isinstance(command, CountTokens) or (isinstance(command, Generate) and has_lane)):
                return
            self._commands.popleft()
            self._begin(engine, command)
            threading.Thread(target=self._run_beside, args=(engine, command, arrived), daemon=True).start()

    def _begin(self, engine: Engine, command: AnyCommand) -> None:
        """Note that a command runs from now on; one that was cancelled while it waited is stopped at once."""
        request_id = _request_id(command)
        if self._is_answering:
            engine.begin_beside(_key(command))
        self._running |= {request_id} - {0}
        if request_id in self._cancelled:
            engine.cancel(request_id)
        self._cancelled.discard(request_id)

    def _run_beside(self, engine: Engine, command: Generate | CountTokens, arrived: float) -> None:
        try:
            self._run_command(command, lambda: engine.generate_beside(command, arrived))
        finally:
            with self._changed:
                self._running.discard(_request_id(command))
                engine.end_beside(_key(command))
                self._start_beside()

    def shut_down(self) -> None:
        """Stop everything, save, end. Called from the main thread."""
        with self._changed:
            self._cancelled |= {_request_id(command) for command, _ in self._commands}
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
            hint = "Rebuild it with `make setup`, or reinstall cpuchat."
            self._output.emit(Failed.of(EngineMismatch(f"Cannot load the inference engine: {error}.", hint)))
            return
        with self._changed:
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
        """Run the next command, alone or as the first of several answers; False ends the thread."""
        if not self._changed_within(IDLE_SECONDS):
            try:
                engine.idle()
            except Exception:  # nothing waits for this, and the next request may succeed
                traceback.print_exc()
            self._changed_within(None)
        with self._changed:
            if not self._commands:  # it was cancelled
                return True
            command, arrived = self._commands.popleft()
            self._begin(engine, command)
            self._is_answering = isinstance(command, Generate)
            self._start_beside()
        if isinstance(command, Shutdown):
            return False
        try:
            self._run_command(command, lambda: self._run_here(engine, command, arrived))
        finally:
            with self._changed:  # a cancellation applies to one command only
                self._running.discard(_request_id(command))
                engine.clear_cancel()
                self._start_beside()
        while self._is_answering:
            engine.run_beside()
            with self._changed:
                self._is_answering = engine.n_beside > 0
        return not self._output.closed

    def _changed_within(self, seconds: float | None) -> bool:
        """Wait for a command; returns False when there was none in this time."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._commands), seconds)

    def _run_here(self, engine: Engine, command: AnyCommand, arrived: float) -> None:
        match command:
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

    def _run_command(self, command: AnyCommand, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # a bug of ours must reach the user as a message and the log as a traceback
            traceback.print_exc()
            what = f"Internal error in the worker: {type(error).__name__}: {error}."
            failure = CpuchatError(what, "See the worker's log for details.")
            self._output.emit(Failed.of(failure, _request_id(command)))
            if isinstance(command, CountTokens):
                self._output.emit(TokensCounted(request_id=command.request_id))


def _request_id(command: AnyCommand) -> int:
    """Return the request id; 0 for commands that cannot be cancelled."""
    return command.request_id if isinstance(command, LoadModel | Generate | Measure | Score) else 0


def _key(command: AnyCommand) -> int:
    """Return a number of its own for a command beside others: those of counts are counted apart."""
    return -command.request_id if isinstance(command, CountTokens) else _request_id(command)


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
