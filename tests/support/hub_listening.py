"""The sockets under the local hub server: one thread for each connection, answers that can be cut at any byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Connection(BaseHTTPRequestHandler):
    """One request and the way to answer it."""

    protocol_version = "HTTP/1.1"
    server: Listener  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def method(self) -> str:
        return self.command

    @property
    def target(self) -> str:
        return self.path

    def do_GET(self) -> None:
        # The client may leave in the middle: that is part of what is tested.
        with contextlib.suppress(ConnectionError):
            self.server.answer(self)

    do_HEAD = do_GET

    def send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send_body(self, data: bytes) -> int:
        """Send the body; returns how many bytes went out."""
        self.wfile.write(data)
        return len(data)

    def cut(self) -> None:
        """Close the connection immediately."""
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the server records its requests."""


class Listener(ThreadingHTTPServer):
    """Listens on a port of its own; `answer` is called in a thread of the connection."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, answer: Callable[[Connection], None]) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.answer = answer
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def port(self) -> int:
        return self.server_address[1]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        # What lies in the kernel when a client dies would count as sent: keep that little.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that end early; raise anything else, which is a mistake of a test."""
        import ssl
        import sys

        if not isinstance(sys.exception(), ConnectionError | TimeoutError | ssl.SSLError):
            super().handle_error(request, client_address)
