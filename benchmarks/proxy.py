"""A proxy in front of a port of this machine, which sees what goes through it and when."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Passes on every connection to `port` of the proxy to the one that it stands in front of."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def passed(self, data: bytes, to_target: bool) -> None:
        """Take note of bytes that have arrived. Runs on the threads of the connections."""
        raise NotImplementedError

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                target = socket.create_connection(("127.0.0.1", self._target))
                for end in (client, target):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for ends in ((client, target, True), (target, client, False)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, to_target: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                self.passed(data, to_target)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
