"""How the local hub server answers, and what can go wrong with an answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.hub_files import pieces
from tests.support.hub_listening import Connection

Where = Literal["hub", "content", "api"]


class Gate:
    """Holds an answer before byte `at` of its body, until the test opens it. Of many answers, it holds the first."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self._reached = threading.Event()
        self._opened = threading.Event()

    def wait(self) -> None:
        """Wait until the answer has reached the gate: everything before `at` has been sent."""
        assert self._reached.wait(180), "the answer never came to the gate"

    def open(self) -> None:
        self._opened.set()

    def hold(self) -> None:
        """Block the answer; called by the server."""
        self._reached.set()
        self._opened.wait()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong in the answers for one file. `where`: "content": when the bytes are asked for; "hub": when the
    hub is asked where they are (HEAD and GET); "api": when the list of files is asked for (path "" of
    `HubServer.fault`; repository "" is the search). `status`: answer with it and no content; `retry_after` and
    `error_code` as headers. `cut_after`: end the connection after so many bytes of the body. `content`: in the place of
    the right one: of the same length for a wrong hash, shorter for a short file. `page`: a web page with status 200
    instead. `raw`: called to write the whole answer, head and all; the connection ends with it. `headers`: added, in
    the place of those of the same name. `ignore_range`: the whole file though a range was asked for. `gate`: hold the
    answer there."""

    where: Where = "content"
    status: int = 0
    retry_after: str = ""
    error_code: str = ""
    cut_after: int | None = None
    content: bytes | None = None
    page: bytes | None = None
    raw: Callable[[Connection], None] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    ignore_range: bool = False
    gate: Gate | None = None
    times: int = 1


@dataclass
class Request:
    """One request as it came in. `sent`: bytes of the body that went out."""

    host: Literal["hub", "content"]
    method: str
    path: str
    query: dict[str, list[str]]
    range: str
    authorized: bool
    repo: str = ""
    file: str = ""
    status: int = 0
    sent: int = 0


class Answer:
    """Writes one answer and books what went out."""

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self.request = request
        self.token = connection.headers.get("Authorization", "").removeprefix("Bearer ")

    def json(self, value: Any) -> None:
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def error(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        facts = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
        self.send(status, facts, message.encode())

    def raw(self, write: Callable[[Connection], None]) -> None:
        self._connection.cut()
        write(self._connection)

    def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_content(status, headers, body, 0, len(body), Fault())

    def send_content(
        self, status: int, headers: Mapping[str, str], content: bytes | Path, start: int, stop: int, fault: Fault
    ) -> None:
        """Send bytes `start` to `stop` of `content`, as far as the fault lets them through."""
        self.request.status = status
        self._connection.send_head(status, {**headers, "Content-Length": str(stop - start), **fault.headers})
        if self.request.method == "HEAD":
            return
        cut = stop if fault.cut_after is None else min(start + fault.cut_after, stop)
        pauses = [fault.gate.at] if fault.gate is not None and start <= fault.gate.at < cut else []
        for begin, end in zip([start, *pauses], [*pauses, cut], strict=True):
            if begin in pauses and fault.gate is not None:
                fault.gate.hold()
            for piece in pieces(content, begin, end):
                self.request.sent += self._connection.send_body(piece)
        if cut < stop:
            self._connection.cut()


def failed(answer: Answer, fault: Fault | None) -> bool:
    """Answer with the fault if it replaces the whole answer."""
    if fault is None:
        return False
    if fault.raw is not None:
        answer.raw(fault.raw)
        return True
    if fault.page is not None:
        answer.send(200, {"Content-Type": "text/html", **fault.headers}, fault.page)
        return True
    if fault.status:
        headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
        answer.error(fault.status, fault.error_code, f"fault {fault.status}", {**headers, **fault.headers})
        return True
    if fault.where != "content" and fault.gate is not None:
        fault.gate.hold()
    return False


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """Return start and stop of `bytes=A-B`, `bytes=A-` or `bytes=-N`; None without a range."""
    if not header:
        return None
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        return max(size - int(last), 0), size
    return int(first), min(int(last) + 1, size) if last else size
