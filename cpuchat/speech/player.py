"""Plays sound (16-bit mono samples, little-endian) with a program that the system has, or writes it to a WAV file.

A player is a process, so that stopping is killing it: nothing that it has buffered is heard any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import struct
import wave
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from cpuchat.base.errors import SpeechFailed
from cpuchat.base.paths import shown
from cpuchat.base.processes import child_environment

Command = Callable[[int], list[str]]
# In order: a sound server's own program first, the kernel's device next. Each takes 16-bit mono samples on its input.
PROGRAMS: dict[str, Command] = {
    "pw-cat": lambda rate: ["pw-cat", "-p", "--raw", "--rate", str(rate), "--channels", "1", "--format", "s16", "-"],
    "paplay": lambda rate: ["paplay", "--raw", "--format=s16le", f"--rate={rate}", "--channels=1"],
    "aplay": lambda rate: ["aplay", "-q", "-t", "raw", "-f", "S16_LE", "-c", "1", "-r", str(rate), "-"],
    "play": lambda rate: ["play", "-q", "-t", "raw", "-e", "signed", "-b", "16", "-c", "1", "-r", str(rate), "-"],
}  # fmt: skip
_SERVERS = ("PULSE_", "PIPEWIRE_", "ALSA_", "JACK_", "AUDIO")
_PROBE_RATE, _PROBE_SECONDS = 24_000, 0.02
_PATIENCE = 2.0
AHEAD_SECONDS = 6.0
"""Seconds of sound that are ready before they are heard: this bounds memory, and a stop wastes little."""
_CHECK = "Check the sound device."


class Player(Protocol):
    """Plays one reading. `name` is the program or the file; `paced`: playing takes as long as the sound is."""

    name: str
    paced: bool

    async def start(self, rate: int) -> None:
        """Get ready for samples of `rate` per second. Raises SpeechFailed."""
        ...

    async def play(self, samples: bytes) -> None:
        """Play 16-bit mono samples after those before; returns when there is room for more. Raises SpeechFailed."""
        ...

    async def finish(self) -> None:
        """Return when everything was heard. Raises SpeechFailed."""
        ...

    def stop(self) -> None:
        """Be silent at once. Idempotent."""


class ProgramPlayer:
    """See `Player`."""

    paced = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, rate: int) -> None:
        null = asyncio.subprocess.DEVNULL
        server = {key: value for key, value in os.environ.items() if key.startswith(_SERVERS)}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *PROGRAMS[self.name](rate), stdin=asyncio.subprocess.PIPE, stdout=null, stderr=null,
                env=child_environment(**server),
            )  # fmt: skip
        except OSError as error:
            raise SpeechFailed(f"Cannot start {self.name}: {error.strerror}.") from None
        if self._process.stdin is not None:
            self._process.stdin.transport.set_write_buffer_limits(high=int(2 * AHEAD_SECONDS * rate))

    async def play(self, samples: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(samples)
            await self._process.stdin.drain()
        except ConnectionError:
            raise SpeechFailed(f"{self.name} stopped playing.", _CHECK) from None

    async def finish(self) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            status = await process.wait()
            if status and self._process is process:  # else it was stopped
                raise SpeechFailed(f"{self.name} stopped playing: exit status {status}.", _CHECK)
        finally:
            self.stop()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


class WavPlayer:
    """Writes one WAV file, created with the first sound. Its header is valid after each sentence."""

    paced = False

    def __init__(self, file: Path) -> None:
        self.file = file
        self.name = shown(file)
        self._rate = 0
        self._open: IO[bytes] | None = None
        self._wave: wave.Wave_write | None = None

    async def start(self, rate: int) -> None:
        self._rate = rate

    async def play(self, samples: bytes) -> None:
        try:
            if self._open is None or self._wave is None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self._open = self.file.open("wb")
                self._wave = wave.open(self._open, "wb")  # noqa: SIM115
                self._wave.setparams((1, 2, self._rate, 0, "NONE", ""))
            # Here, not in a thread: `stop` must not come between the samples and the header.
            self._wave.writeframes(samples)
            self._open.flush()
        except OSError as error:
            raise SpeechFailed(f"Cannot write {self.name}: {error.strerror}.", "Choose another file.") from None
        except struct.error:
            raise SpeechFailed(f"Cannot write {self.name}: WAV files end at 4 GiB.", "Divide the text.") from None

    async def finish(self) -> None:
        self.stop()

    def stop(self) -> None:
        written, self._wave = self._wave, None
        file, self._open = self._open, None
        for one in (written, file):
            if one is not None:
                with contextlib.suppress(OSError, struct.error):
                    one.close()


async def playing_program() -> str:
    """Return the first program that can play here, by playing 20 ms of silence. Raises SpeechFailed: none can."""
    silence = bytes(2 * int(_PROBE_RATE * _PROBE_SECONDS))
    for name in filter(shutil.which, PROGRAMS):
        player = ProgramPlayer(name)
        try:
            async with asyncio.timeout(_PATIENCE):
                await player.start(_PROBE_RATE)
                await player.play(silence)
                await player.finish()
        except (SpeechFailed, TimeoutError):
            continue
        finally:
            player.stop()
        return name
    raise SpeechFailed(
        f"No sound device: none of {', '.join(PROGRAMS)} can play here.",
        "Write a file: `cpuchat speak -o FILE`.",
    )
