"""Picture of `cpuchat serve --web` in headless Chromium: a question typed into the page, and its answer.

    .venv/bin/python screenshots/browser.py [CHROMIUM]

Writes screenshots/browser.png. CHROMIUM is the program, chromium-headless-shell by default; it is driven by the
DevTools protocol.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

HERE = Path(__file__).parent
SIZE = (1200, 760)
_PATIENCE_SECONDS = 60.0


class Page:
    """A page of Chromium."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            found = json.loads(await self._socket.recv())
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]

    async def value(self, expression: str) -> Any:
        return (await self.call("Runtime.evaluate", expression=expression))["result"].get("value")

    async def until(self, expression: str) -> None:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while not await self.value(expression):
                await asyncio.sleep(0.2)

    async def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "char", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text="\r")

    async def picture(self, name: str) -> None:
        found = await self.call("Page.captureScreenshot", format="png")
        (HERE / name).write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def chromium(program: str, profile: str) -> AsyncIterator[str]:
    """Yield the address of a browser's DevTools."""
    options = ["--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
    process = await asyncio.create_subprocess_exec(
        program, *options, f"--window-size={SIZE[0]},{SIZE[1]}", "about:blank", stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while (found := re.search(rb"ws://([^/]+)/", await process.stderr.readline())) is None:
                pass
        yield f"http://{found[1].decode()}"
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def opened(devtools: str, address: str) -> AsyncIterator[Page]:
    async with httpx.AsyncClient(trust_env=False) as client:
        target = (await client.put(f"{devtools}/json/new?{address}")).json()
    async with connect(target["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
        yield Page(socket)


@contextlib.contextmanager
def serving() -> Any:
    """Yield the address of a server of the demo model."""
    command = [sys.executable, "-m", "cpuchat.cli.main", "serve", "demo", "--port", "0", "--web"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        found = re.search(rb"http://\S+(?=/v1)", process.stdout.readline())
        assert found is not None
        yield found[0].decode()
    finally:
        process.terminate()
        process.wait()


async def main(program: str) -> None:
    with tempfile.TemporaryDirectory() as profile, serving() as server:
        async with chromium(program, profile) as devtools, opened(devtools, server) as page:
            await page.until("document.activeElement.className == 'xterm-helper-textarea'")
            await asyncio.sleep(4)  # until the app is drawn: a canvas has no text to look for
            await page.call("Input.insertText", text="What can you do?")
            await page.press("Enter", 13)
            await asyncio.sleep(4)
            await page.picture("browser.png")
            print(await page.value("location.pathname"), await page.value("document.title"))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "chromium-headless-shell"))
