"""Plays sound (16-bit mono samples, little-endian) with a program that the system has, or writes it to a WAV file.

A player is for one reading: `start` with the first sound, `play` returns when there is room for more, `finish` when
everything was heard, `stop` is silent at once. All but `stop` raise SpeechFailed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import struct
import wave
from pathlib import Path

from cpuchat.base.errors import SpeechFailed
from cpuchat.base.paths import shown
from cpuchat.base.processes import child_environment

# In order: a sound server's own program first, the kernel's device next. Each takes 16-bit mono samples on its input.
PROGRAMS = {
    "pw-cat": "-p --raw --rate {rate} --channels 1 --format s16 -",
    "paplay": "--raw --format=s16le --rate={rate} --channels=1",
    "aplay": "-q -t raw -f S16_LE -c 1 -r {rate} -",
    "play": "-q -t raw -e signed -b 16 -c 1 -r {rate} -",
}
_SERVERS = ("PULSE_", "PIPEWIRE_", "ALSA_", "JACK_", "AUDIO")
_PROBE_RATE, _PROBE_SECONDS = 24_000, 0.02
_PATIENCE = 2.0
AHEAD_SECONDS = 6.0
"""Seconds of sound that are ready before they are heard: this bounds memory, and a stop wastes little."""
_CHECK = "Check the sound device."


class ProgramPlayer:
    """Plays with one of `PROGRAMS`. Stopping kills it: nothing that it has buffered is heard any more."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, rate: int) -> None:
        null = asyncio.subprocess.DEVNULL
        server = {key: value for key, value in os.environ.items() if key.startswith(_SERVERS)}
        try:
            self._process = await asyncio.create_subprocess_exec(
                self.name, *PROGRAMS[self.name].format(rate=rate).split(), stdin=asyncio.subprocess.PIPE, stdout=null,
                stderr=null, env=child_environment(**server),
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

    def __init__(self, file: Path) -> None:
        self.file = file
        self._wave: wave.Wave_write | None = None

    async def start(self, rate: int) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._wave = wave.open(str(self.file), "wb")  # noqa: SIM115
        except OSError as error:
            raise self._failure(error) from None
        self._wave.setparams((1, 2, rate, 0, "NONE", ""))

    async def play(self, samples: bytes) -> None:
        assert self._wave is not None
        try:
            self._wave.writeframes(samples)  # not in a thread: `stop` must not come between them and the header
        except (OSError, struct.error) as error:
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> SpeechFailed:
        reason = error.strerror if isinstance(error, OSError) else "WAV files end at 4 GiB"
        return SpeechFailed(f"Cannot write {shown(self.file)}: {reason}.", "Choose another file.")

    async def finish(self) -> None:
        self.stop()

    def stop(self) -> None:
        written, self._wave = self._wave, None
        if written is not None:
            with contextlib.suppress(OSError, struct.error):
                written.close()


Player = ProgramPlayer | WavPlayer


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
