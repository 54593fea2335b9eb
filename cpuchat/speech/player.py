"""Plays sound (16-bit mono samples, little-endian) with a program that the system has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil

from cpuchat.base.errors import SpeechFailed
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
    """Plays one reading with one of `PROGRAMS`: `start` with the first sound, `play` returns when there is room for
    more, `finish` when everything was heard. `stop` kills it: nothing that it has buffered is heard any more. All but
    `stop` raise SpeechFailed.
    """

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
    hint = "To write a file, use hibari's own command: `hibari -o FILE`."
    raise SpeechFailed(f"No sound device: none of {', '.join(PROGRAMS)} can play here.", hint)
