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

import numpy as np

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
        self._process = await _spawn(self.name, rate)

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


class SoundDevice:
    """Looks once for a program that can play, ahead of the first sound. Use it from one event loop."""

    def __init__(self) -> None:
        self._looking: asyncio.Task[str] | None = None

    def look(self) -> None:
        """Look in the background, unless that was done."""
        if self._looking is None:
            self._looking = asyncio.ensure_future(playing_program())

    def forget(self) -> None:
        """Look again the next time."""
        if self._looking is not None and self._looking.done():
            self._looking = None

    async def close(self) -> None:
        """Stop looking."""
        if (looking := self._looking) is not None and not looking.done():
            self._looking = None
            looking.cancel()
            await asyncio.wait({looking})

    async def player(self, file: Callable[[], Path], missing: Callable[[Path], None]) -> Player:
        """Return a player; where nothing can play, one that writes `file`, after telling `missing` of it."""
        self.look()
        assert self._looking is not None
        if program := await asyncio.shield(self._looking):
            return ProgramPlayer(program)
        to = file()
        missing(to)
        return WavPlayer(to)


async def playing_program() -> str:
    """Return the first program that can play here, "" if none can. Plays 20 ms of silence to find out."""
    silence = bytes(2 * int(_PROBE_RATE * _PROBE_SECONDS))
    for name in PROGRAMS:
        if shutil.which(name) is None:
            continue
        try:
            process = await _spawn(name, _PROBE_RATE)
        except SpeechFailed:
            continue
        try:
            async with asyncio.timeout(_PATIENCE):
                await process.communicate(silence)
        except TimeoutError:
            continue
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == 0:
            return name
    return ""


def unused_file(folder: Path, stem: str) -> Path:
    """Return `folder/stem.wav`, or with a number if that exists."""
    file, number = folder / f"{stem}.wav", 2
    while file.exists():
        file, number = folder / f"{stem}-{number}.wav", number + 1
    return file


async def _spawn(name: str, rate: int) -> asyncio.subprocess.Process:
    null = asyncio.subprocess.DEVNULL
    server = {key: value for key, value in os.environ.items() if key.startswith(_SERVERS)}
    try:
        return await asyncio.create_subprocess_exec(
            *PROGRAMS[name](rate), stdin=asyncio.subprocess.PIPE, stdout=null, stderr=null,
            env=child_environment(**server),
        )  # fmt: skip
    except OSError as error:
        raise SpeechFailed(f"Cannot start {name}: {error.strerror}.") from None


_AUDIBLE = 0.01
"""Of full scale."""
_BEFORE_SECONDS, _AFTER_SECONDS = 0.03, 0.2


def trimmed(samples: bytes, rate: int) -> bytes:
    """Return the samples without most of the silence around them: hibari leaves 0.3 s before and 0.46 s after."""
    values = np.frombuffer(samples, "<i2")
    audible = np.flatnonzero(np.abs(values.astype(np.int32)) > _AUDIBLE * 32768)
    if not audible.size:
        return b""
    start = max(0, int(audible[0]) - int(_BEFORE_SECONDS * rate))
    return values[start : int(audible[-1]) + 1 + int(_AFTER_SECONDS * rate)].tobytes()
