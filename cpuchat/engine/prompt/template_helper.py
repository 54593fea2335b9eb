"""The helper process that renders a chat template (template_process.py), seen from its parent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Final

from cpuchat.errors import TemplateError

MAX_SOURCE: Final = 1 << 20
_MAX_REPLY: Final = 1 << 28  # far beyond what the helper lets a template write
_WALL_SECONDS: Final = 60.0  # the helper's own limit on CPU time comes first; this is for one that does nothing at all
_HINT: Final = "Use --raw to send text without a template, or choose another file of this model."


class TemplateRejection(TemplateError):
    """The template ran and failed; other messages may work. Any other failure is final."""


class TemplateHelper:
    """Renders one template in a process with limits on memory and CPU time.

    It is started early, because its imports take a tenth of a second, and kept; a rendering costs well under a
    millisecond more than in the same process. When a template kills it, the next rendering starts a new one.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None
        self._is_compiled = False
        self._reaper: weakref.finalize[..., Any] | None = None
        self._lock = threading.Lock()
        if len(source) <= MAX_SOURCE:
            self._start()

    def warm_up(self) -> None:
        """Compile the template in the background."""
        threading.Thread(target=self._warm_up, name="template", daemon=True).start()

    def _warm_up(self) -> None:
        with contextlib.suppress(TemplateError), self._lock:  # raised again when a chat is rendered
            self._ask(None)

    def render(self, variables: dict[str, Any]) -> str:
        """Return the rendered text.

        Raises:
            TemplateRejection: the template raised an error with these variables.
            TemplateError: it is invalid, or exceeded a limit.
        """
        with self._lock:
            reply = self._ask(variables)
        if "error" in reply:
            verb = "rejected the conversation" if reply["raised"] else "failed"
            raise TemplateRejection(f"The model's chat template {verb}: {_one_line(reply['error'])}.", _HINT)
        return reply["text"]

    def _ask(self, variables: dict[str, Any] | None) -> dict[str, Any]:
        """Compile the template if it is not, and return the reply to `variables` (None: none). Raises TemplateError."""
        if len(self._source) > MAX_SOURCE:
            raise TemplateError("The model's chat template is larger than 1 MB.", _HINT)
        try:
            process = self._process or self._start()
        except OSError as error:
            raise TemplateError(f"Cannot start the process for the chat template: {error}.", _HINT) from None
        timed_out = threading.Event()
        timer = threading.Timer(_WALL_SECONDS, lambda: (timed_out.set(), process.kill()))
        timer.daemon = True
        timer.start()
        try:
            if not self._is_compiled:
                reply = _exchange(process, self._source)
                if "error" in reply:
                    self._end()
                    raise TemplateError(f"The model's chat template is invalid: {_one_line(reply['error'])}.", _HINT)
                self._is_compiled = True
            return {} if variables is None else _exchange(process, variables)
        except (EOFError, OSError, ValueError):
            raise TemplateError(f"The model's chat template {self._exit_reason(timed_out.is_set())}.", _HINT) from None
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process. A later rendering starts it again."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._process = None
        if self._reaper is not None:
            self._reaper()

    def _start(self) -> subprocess.Popen[bytes]:
        keep = ("PATH", "SYSTEMROOT", "TZ", "LD_LIBRARY_PATH")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("template_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in keep if name in os.environ},
        )
        self._is_compiled = False
        self._reaper = weakref.finalize(self, _reap, self._process)
        return self._process

    def _exit_reason(self, timed_out: bool) -> str:
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
        self._end()
        if timed_out or (process is not None and process.returncode == -getattr(signal, "SIGXCPU", 0)):
            return "exceeded its time limit"
        return "exceeded its memory or output limit"


def _reap(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):  # a broken pipe with something left in the buffer
                stream.close()
    process.kill()
    process.wait()


def _exchange(process: subprocess.Popen[bytes], message: Any) -> dict[str, Any]:
    """Send one frame and return the reply.

    Raises:
        EOFError, OSError: the process ended, maybe in the middle of its reply.
        ValueError: the reply is malformed.
    """
    assert process.stdin is not None and process.stdout is not None
    body = json.dumps(message).encode()
    process.stdin.write(len(body).to_bytes(4, "little") + body)
    process.stdin.flush()
    header = process.stdout.read(4)
    length = int.from_bytes(header, "little") if len(header) == 4 else 0
    if length > _MAX_REPLY:
        raise ValueError("the reply is too long")
    body = process.stdout.read(length)
    if not body or len(body) < length:
        raise EOFError
    reply = json.loads(body)
    if not isinstance(reply, dict) or not isinstance(reply.get("error", reply.get("text")), str):
        raise ValueError("the reply has neither text nor error")
    return {"raised": False, **reply}


def _one_line(text: str) -> str:
    """Return the text on one line, without control characters and without a final full stop."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split()).rstrip(".")
