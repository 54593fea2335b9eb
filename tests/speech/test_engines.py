from __future__ import annotations

import json
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from cpuchat.base.errors import SpeechFailed
from cpuchat.config.settings import SpeechSection
from cpuchat.speech.__main__ import synthesize
from cpuchat.speech.player import WavPlayer, trimmed
from cpuchat.speech.speaker import Speaker, choose_voice, read_aloud
from tests.support.listening import listen

pytestmark = pytest.mark.slow

# Writes a tone for each line and names the file in its log, as piper does; exits at a line with "crash".
_PIPER = """#!{python}
import sys, time, wave, struct, math
arguments = sys.argv[1:]
folder = arguments[arguments.index("--output_dir") + 1]
rate, scale = 22050, float(arguments[arguments.index("--length_scale") + 1])
print("DEBUG:loading", file=sys.stderr, flush=True)
for number, line in enumerate(sys.stdin):
    if "crash" in line:
        sys.exit("the voice is broken")
    with wave.open(f"{{folder}}/{{number}}.wav", "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        tone = [int(9000 * math.sin(i / 20)) for i in range(int(rate * scale * len(line.strip()) / 10))]
        out.writeframes(struct.pack(f"<{{len(tone)}}h", *tone))
    print(f"INFO:__main__:Wrote {{folder}}/{{number}}.wav", file=sys.stderr, flush=True)
"""


@pytest.fixture
def piper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a piper on the PATH and return a voice for it."""
    program = tmp_path / "bin" / "piper"
    program.parent.mkdir()
    program.write_text(_PIPER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    voice = tmp_path / "voice.onnx"
    voice.touch()
    Path(f"{voice}.json").write_text(json.dumps({"audio": {"sample_rate": 22050}}))
    return voice


def section(voice: Path, **more: object) -> SpeechSection:
    return SpeechSection(engine="piper", voice=str(voice), **more)  # type: ignore[arg-type]


async def speak(chosen: SpeechSection, text: str, file: Path) -> list[str]:
    problems: list[str] = []

    async def player() -> WavPlayer:
        return WavPlayer(file)

    speaker = Speaker(choose_voice(chosen), player, tell=lambda error: problems.append(str(error)))
    try:
        await read_aloud(speaker, text)
    finally:
        await speaker.close()
    assert not list((file.parent / "tmp").iterdir())
    return problems


async def test_piper_speaks_each_sentence_at_its_own_rate(piper: Path, tmp_path: Path) -> None:
    assert await speak(section(piper), "A text of thirty characters. One more.", tmp_path / "a.wav") == []
    heard = listen(tmp_path / "a.wav")
    assert heard.rate == 22_050
    assert heard.seconds == pytest.approx(3.8, abs=0.5)
    assert heard.loudness > 0.1


async def test_speed_makes_it_shorter(piper: Path, tmp_path: Path) -> None:
    assert await speak(section(piper, speed=2.0), "A text of thirty characters.", tmp_path / "a.wav") == []
    assert listen(tmp_path / "a.wav").seconds == pytest.approx(1.4, abs=0.3)


async def test_what_piper_said_last_is_the_reason_of_its_end(piper: Path, tmp_path: Path) -> None:
    problems = await speak(section(piper), "Please crash.", tmp_path / "a.wav")
    assert problems == ["piper ended: the voice is broken. Check speech.voice."]


async def test_a_voice_without_its_description_is_refused(piper: Path, tmp_path: Path) -> None:
    Path(f"{piper}.json").write_text("{}")
    problems = await speak(section(piper), "Hello.", tmp_path / "a.wav")
    assert "sample rate" in problems[0] and "voice.onnx.json" in problems[0]


def test_hibari_is_the_default_and_piper_needs_a_voice(piper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_voice(SpeechSection()).engine == "hibari"
    assert choose_voice(section(piper)).engine == "piper"
    with pytest.raises(SpeechFailed, match="needs a voice file"):
        choose_voice(SpeechSection(engine="piper"))
    with pytest.raises(SpeechFailed, match="is not a file"):
        choose_voice(SpeechSection(engine="piper", voice="/no/voice.onnx"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_voice(SpeechSection(voice=str(piper))).engine == "piper"
    with pytest.raises(SpeechFailed, match="uv tool install"):
        choose_voice(SpeechSection())
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SpeechFailed, match="not on the PATH"):
        choose_voice(section(piper))


def test_a_sentence_that_a_voice_fails_at_is_skipped() -> None:
    class Voice:
        rate = 24_000

        def synthesize(self, text: str) -> bytes:
            raise IndexError(text)

        def close(self) -> None: ...

    assert synthesize(Voice(), "2^128") == b""


def test_silence_around_a_sentence_is_cut() -> None:
    rate = 24_000
    tone = (8000 * np.sin(np.arange(rate) / 10)).astype("<i2")
    padded = np.concatenate([np.zeros(rate, "<i2"), tone, np.zeros(rate, "<i2")])
    cut = np.frombuffer(trimmed(padded.tobytes(), rate), "<i2")
    assert len(cut) / rate == pytest.approx(1.23, abs=0.01)
    assert trimmed(np.zeros(rate, "<i2").tobytes(), rate) == b""
    assert trimmed(b"", rate) == b""


def test_a_wav_file_is_valid_before_it_is_complete(tmp_path: Path) -> None:
    import asyncio

    async def write() -> None:
        player = WavPlayer(tmp_path / "a.wav")
        await player.start(24_000)
        await player.play(bytes(48_000))
        assert (tmp_path / "a.wav").stat().st_size == 44 + 48_000
        with wave.open(str(tmp_path / "a.wav"), "rb") as sound:
            assert sound.getnframes() == 24_000

    asyncio.run(write())
