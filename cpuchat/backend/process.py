"""One worker process: starts it, exchanges frames with it, and reports how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import Interrupted, WorkerDied, WorkerStuck
from cpuchat.base.processes import (
    child_environment,
    exit_reason,
    is_set_within,
    kill_group,
    last_output,
    python_command,
    starter,
)
from cpuchat.hardware.numa.mempolicy import launch_command
from cpuchat.models.cpu_modules import AUTO, MODULE_VARIABLE
from cpuchat.protocol.messages import (
    HEADER_SIZE,
    AnyEvent,
    Command,
    CountTokens,
    Failed,
    Generate,
    LoadModel,
    Measure,
    Score,
    Shutdown,
    ShuttingDown,
    TokensCounted,
    decode_event,
    encode,
    frame_length,
)

KEPT_LOGS = 10
SHUTDOWN_SECONDS = 10.0
"""Seconds that a worker gets to save its state."""
ANSWER_SECONDS = 1.5
"""Seconds after which a worker that has not confirmed the shutdown counts as hung (stopped, or waiting for a disk)."""
_DYING_SECONDS = 3.0
_READ_BYTES = 1 << 16  # what a pipe holds
_NO_INSTRUCTION = (
    "This CPU, or the virtual machine, lacks an instruction that was used: set engine.kernels to llama.cpp, or "
    "engine.cpu_module to an older one. "
)
_NO_MEMORY = "Close other programs, or choose a smaller model or context. "
WORKER_CLOSED = Failed(code=Interrupted.code, message="The inference worker was closed.")


@dataclass(frozen=True)
class Launch:
    """What a process is started with and keeps: a memory policy in words, and a CPU module of the engine."""

    memory_policy: str = "local"
    cpu_module: str = AUTO


@dataclass(frozen=True)
class Spawned:
    """A worker process that nothing listens to yet."""

    process: subprocess.Popen[bytes]
    log: Path
    launch: Launch


def spawn(log_dir: Path, launch: Callable[[], Launch]) -> Future[Spawned]:
    """Start a worker as `launch` returns, called in the thread of the `starter`. Needs no event loop. The result raises
    OSError, and what `launch` raises."""

    def start() -> Spawned:
        wanted, log = launch(), _new_log(log_dir)
        # numpy must not start a thread pool of its own beside llama.cpp's.
        more = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as stderr:
            # A process group of its own, so that no helper of the worker outlives it.
            process = subprocess.Popen(
                launch_command(wanted.memory_policy, python_command("-m", "cpuchat.worker")),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=child_environment(**more, **{MODULE_VARIABLE: wanted.cpu_module}),
                process_group=0 if sys.platform != "win32" else None,
            )
        return Spawned(process, log, wanted)

    return starter().submit(start)


class WorkerProcess:
    """A running worker, as `start` makes one. Use it from one event loop only.

    `events` holds what it reported, without what is of requests that are `listened_to`, and, once it is gone, one last
    `Failed`, as each queue does: "worker_died", or "interrupted" when it was closed or killed from here. A thread of
    its own writes to its pipe, which may be full. `log` is its standard error, which outlives it."""

    def __init__(self, spawned: Spawned) -> None:
        self._process = spawned.process
        self.pid: int = spawned.process.pid
        self.log, self.launch = spawned.log, spawned.launch
        self._status: int | None = None
        self._gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[AnyEvent] = asyncio.Queue()
        self._shutting_down = asyncio.Event()  # or gone
        self._failure: Failed | None = None  # with which it was ended from here
        self._end: Failed | None = None  # once it has exited
        self._answers: dict[int, asyncio.Queue[AnyEvent]] = {}
        self._counts: dict[int, asyncio.Future[int | None]] = {}
        self._count_ids = itertools.count(1)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"to-{self.pid}")
        assert self._process.stdout is not None
        self._output, self._unread = self._process.stdout.fileno(), bytearray()
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._read)

    @classmethod
    async def start(cls, log_dir: Path, launch: Launch) -> WorkerProcess:
        """Start a worker. Raises OSError."""
        return cls(await asyncio.wrap_future(spawn(log_dir, lambda: launch)))

    @property
    def alive(self) -> bool:
        return self._status is None

    async def finished(self) -> None:
        """Wait until the process has exited."""
        await self._gone.wait()

    @contextlib.contextmanager
    def listened_to(self, command: LoadModel | Generate | Measure | Score) -> Iterator[asyncio.Queue[AnyEvent]]:
        """Yield the queue with the events of a command; what a load reports names no request."""
        if isinstance(command, LoadModel):
            yield self.events
            return
        events = self._answers[command.request_id] = asyncio.Queue()
        if self._end is not None:
            events.put_nowait(self._end)
        try:
            yield events
        finally:
            del self._answers[command.request_id]

    def send(self, command: Command) -> None:
        """Queue a frame for the worker without waiting. Frames to a worker that has exited are dropped."""
        if self.alive:
            self._writer.submit(self._write, encode(command))

    async def count_tokens(self, of: str | Generate) -> int | None:
        """Return the tokens of a text or a prompt, once all earlier commands are done; None when the worker exits."""
        if not self.alive:
            return None
        request_id = next(self._count_ids)
        counted = self._counts[request_id] = self._loop.create_future()
        text, prompt = (of, None) if isinstance(of, str) else ("", of)
        self.send(CountTokens(request_id=request_id, text=text, prompt=prompt))
        try:
            return await counted
        finally:
            del self._counts[request_id]

    async def close(self) -> None:
        """Let the worker save and exit; kill it if it does not."""
        self._failure = self._failure or WORKER_CLOSED
        self.send(Shutdown())
        obeys = await is_set_within(self._shutting_down, ANSWER_SECONDS)
        if obeys and await is_set_within(self._gone, SHUTDOWN_SECONDS):
            return
        self.kill()
        if not await is_set_within(self._gone, _DYING_SECONDS):  # it hangs in the kernel and dies when let go
            self._ended(-signal.SIGKILL, "")

    def wake(self) -> None:
        """Continue a worker that was stopped (SIGSTOP): it could not obey."""
        if self.alive:
            kill_group(self._process.pid, signal.SIGCONT)

    def kill(self, failure: Failed = WORKER_CLOSED) -> None:
        """Kill the worker and its helpers, which reports `failure`; unsaved data is lost."""
        self._failure = self._failure or failure
        self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            kill_group(self._process.pid)

    def _write(self, frame: bytearray) -> None:
        """Write frames, on a separate thread: the pipe of a stopped or busy worker eventually fills up and blocks."""
        stream = self._process.stdin
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):  # gone in the meantime, or its pipe closed
            stream.write(frame)
            stream.flush()

    def _read(self) -> None:
        """Pass on the frames that have arrived. On the loop: waking a thread for each would cost as much again."""
        broken = ""
        try:
            data = os.read(self._output, _READ_BYTES)
            self._unread += data
            while len(self._unread) >= HEADER_SIZE:
                end = HEADER_SIZE + frame_length(self._unread[:HEADER_SIZE])
                if len(self._unread) < end:
                    break
                event = decode_event(memoryview(self._unread)[HEADER_SIZE:end])
                del self._unread[:end]
                if isinstance(event, ShuttingDown):
                    self._shutting_down.set()
                elif isinstance(event, TokensCounted):
                    if (counted := self._counts.get(event.request_id)) is not None and not counted.done():
                        counted.set_result(event.n_tokens)
                else:
                    self._answers.get(getattr(event, "request_id", 0), self.events).put_nowait(event)
            if data:
                return
        except BlockingIOError:
            return
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._kill()
            broken = f"invalid message on its pipe ({error})"
        self._loop.remove_reader(self._output)
        reap = threading.Thread(target=self._reap, args=(broken, _DYING_SECONDS), name=f"reap-{self.pid}", daemon=True)
        reap.start()

    def _reap(self, broken: str, seconds: float) -> None:
        """Wait until it has exited, killed after so many seconds, then report that. Runs on a separate thread."""
        assert self._process.stdout is not None
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:  # it is hung
            self._kill()
            status = self._process.wait()
        kill_group(self._process.pid)
        self._process.stdout.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed: no receiver is left
            self._loop.call_soon_threadsafe(self._ended, status, broken)

    def _ended(self, status: int, broken: str) -> None:
        if not self.alive:  # reported as exited already
            return
        self._status = status
        self._gone.set()
        assert self._process.stdin is not None
        self._writer.submit(self._process.stdin.close)  # what it raises, nobody waits for
        self._writer.shutdown(wait=False)
        failure = self._failure
        if failure is None:  # it crashed: described by what its log says last, else by its exit status
            tail = ""
            with contextlib.suppress(OSError), self.log.open("rb") as file:
                tail = last_output(file)
            reason = exit_reason(status, tail, broken)
            remedy = _NO_INSTRUCTION if status == -signal.SIGILL else _NO_MEMORY if "OOM" in reason else ""
            message = f"The inference worker crashed: {reason}."
            failure = Failed(code=WorkerDied.code, message=message, hint=f"{remedy}{log_hint(self.log)}".strip())
        self._end = failure
        for events in (self.events, *self._answers.values()):
            events.put_nowait(failure)
        for counted in self._counts.values():
            if not counted.done():
                counted.set_result(None)
        self._shutting_down.set()


def log_hint(log: Path | None) -> str:
    """Return where a worker's log is; "" for one without text, which tells nothing."""
    try:
        return f"Log: {paths.shown(log)}" if log is not None and log.stat().st_size else ""
    except OSError:
        return ""


def _new_log(log_dir: Path) -> Path:
    """Create an empty file in `log_dir`, or in the temporary folder if that fails. Raises OSError: neither works."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"worker-{stamp}-{os.getpid()}-{time.monotonic_ns() % 1_000_000:06}.log"
    try:
        log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        old = sorted(log_dir.glob("worker-*.log"), key=lambda file: file.name)
        for file in old[: max(0, len(old) - KEPT_LOGS + 1)]:
            file.unlink(missing_ok=True)
        (log_dir / name).touch()
    except OSError:
        handle, path = tempfile.mkstemp(prefix="cpuchat-", suffix=".log")
        os.close(handle)
        return Path(path)
    return log_dir / name


STUCK_CPU_SECONDS: Final = 4.0
"""CPU time of one thread after a cancel."""
POLL_SECONDS: Final = 0.5
_STUCK: Final = Failed(
    code=WorkerStuck.code,
    message="The inference worker was ended: it did not stop when it was told to.",
    hint="The model is loaded again with the next message. If a grammar or schema was used, simplify it.",
)


async def watch_over(worker: WorkerProcess, is_cancelled: Callable[[], bool], longest_pass: float) -> None:
    """Kill a worker that does not stop when it was told to; runs until cancelled from here or the worker is gone.

    A prefill obeys a cancel within a second, so only cancels that are not obeyed count, and only the CPU time that one
    thread spends on them: a worker that is slow, swapped out or stopped by a debugger is left alone. `longest_pass` are
    the seconds that a recurrent model, which stops between passes only, may take for one."""
    import psutil  # 10 ms

    try:
        process, spent = psutil.Process(worker.pid), None
        while worker.alive:
            await asyncio.sleep(POLL_SECONDS)
            if is_cancelled():
                times = {one.id: one.user_time + one.system_time for one in process.threads()}
                spent, limit = times if spent is None else spent, STUCK_CPU_SECONDS + longest_pass
                if max((time - spent.get(id, 0.0) for id, time in times.items()), default=0.0) > limit:
                    worker.kill(_STUCK)
    except psutil.Error:  # it is gone, or hidden from us
        return
