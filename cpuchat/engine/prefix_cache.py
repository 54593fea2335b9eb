"""KV caches of chats on disk, so that a chat goes on quickly after a restart.

Two files per chat, named by hashes of the chat and of the key: `<name>.kv` is llama.cpp's state of one sequence,
`<name>.text` says which text that was, with the state's checksum. They hold the conversation, so the folder is the
user's alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
import zlib
from pathlib import Path

import msgspec

from cpuchat.engine.continuation import Continuation
from cpuchat.engine.sequence import Sequence
from cpuchat.paths import kv_stem

_FORMAT = 1
_CHUNK = 4 << 20
_STALE_SECONDS = 3600.0


class SavedChat(msgspec.Struct):
    """What `<name>.text` holds. `tokens` are those of the state, `continuation` may reach further."""

    format: int
    key: str
    tokens: list[int]
    continuation: Continuation
    kv_bytes: int
    kv_crc32: int


_decoder = msgspec.msgpack.Decoder(SavedChat)


class PrefixCache:
    """Saved chats of one model in `folder`; all models together stay under `limit` bytes, oldest use goes first.

    Args:
        key: everything that makes a state unusable when it differs: the model's fingerprint, cache types, flash
            attention, the engine's commit.

    No method raises for a disk that is full, read-only or gone: the cache then keeps nothing.
    """

    def __init__(self, folder: Path, limit: int, key: str) -> None:
        self._folder = folder
        self._limit = limit
        self._key = key
        self._suffix = hashlib.sha256(key.encode()).hexdigest()[:20]
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            for left in folder.glob("*.tmp"):
                if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                    left.unlink(missing_ok=True)

    def _files(self, chat_id: str) -> tuple[Path, Path]:
        name = f"{kv_stem(chat_id)}-{self._suffix}"
        return self._folder / f"{name}.kv", self._folder / f"{name}.text"

    def save(self, chat_id: str, sequence: Sequence, continuation: Continuation) -> bool:
        """Write the sequence as the state of `chat_id`; False when it was not worth it or did not work."""
        if not sequence.tokens or sequence.state_size() > self._limit:
            return False
        kv_file, text_file = self._files(chat_id)
        temporary: list[Path] = []
        try:
            for _ in range(2):
                handle, name = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
                os.close(handle)
                temporary.append(Path(name))
            if not sequence.save(str(temporary[0])):
                return False
            saved = SavedChat(
                format=_FORMAT,
                key=self._key,
                tokens=sequence.tokens,
                continuation=continuation,
                kv_bytes=temporary[0].stat().st_size,
                kv_crc32=_crc32(temporary[0]),
            )
            temporary[1].write_bytes(msgspec.msgpack.encode(saved))
            # A crash between the two renames leaves a pair that does not match, which `restore` throws away.
            temporary[0].replace(kv_file)
            temporary[1].replace(text_file)
        except OSError:
            return False
        finally:
            for file in temporary:
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
        self._evict(keep=kv_file.stem)
        return True

    def find(self, chat_id: str) -> SavedChat | None:
        """What is saved for `chat_id`; a damaged file is deleted."""
        _, text_file = self._files(chat_id)
        try:
            saved = _decoder.decode(text_file.read_bytes())
            saved.continuation.check()
            if (saved.format, saved.key) != (_FORMAT, self._key):
                raise ValueError("another format")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError):
            self.forget(chat_id)
            return None
        return saved

    def recent_texts(self, limit: int, without: str = "") -> list[list[int]]:
        """Tokens of saved chats of this model, the one used last first, at most `limit` in all; not of `without`."""
        _, skipped = self._files(without)
        with_times: list[tuple[float, Path]] = []
        with contextlib.suppress(OSError):
            for file in self._folder.glob(f"*-{self._suffix}.text"):
                with contextlib.suppress(OSError):
                    with_times.append((file.stat().st_mtime, file))
        texts: list[list[int]] = []
        for _, file in sorted(with_times, reverse=True):
            if limit <= 0:
                break
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                saved = _decoder.decode(file.read_bytes()) if file != skipped else None
                if saved is not None and (saved.format, saved.key) == (_FORMAT, self._key):
                    texts.append(saved.continuation.tokens[:limit])
                    limit -= len(texts[-1])
        return texts

    def restore(self, chat_id: str, saved: SavedChat, sequence: Sequence) -> bool:
        """Load the state that belongs to `saved`.

        On False the files are gone; the sequence is unchanged or empty. The checksum comes first: llama.cpp checks
        little of a state and aborts on some contradictions.
        """
        kv_file, text_file = self._files(chat_id)
        if len(saved.tokens) > sequence.n_ctx:
            return False
        try:
            sound = kv_file.stat().st_size == saved.kv_bytes and _crc32(kv_file) == saved.kv_crc32
        except OSError:
            sound = False
        if not sound or not sequence.load(str(kv_file)) or sequence.tokens != saved.tokens:
            self.forget(chat_id)
            if sequence.tokens and sound:
                sequence.clear()
            return False
        for file in (kv_file, text_file):
            with contextlib.suppress(OSError):
                os.utime(file)
        return True

    def forget(self, chat_id: str) -> None:
        """Delete what is saved for `chat_id`."""
        for file in self._files(chat_id):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)

    def _evict(self, keep: str) -> None:
        """Delete the pairs that were used longest ago until the folder is within its limit."""
        pairs: dict[str, tuple[float, int]] = {}
        with contextlib.suppress(OSError):
            for file in self._folder.iterdir():
                if file.suffix in (".kv", ".text"):
                    with contextlib.suppress(OSError):
                        info = file.stat()
                        used, size = pairs.get(file.stem, (0.0, 0))
                        pairs[file.stem] = (max(used, info.st_mtime), size + info.st_size)
        total = sum(size for _, size in pairs.values())
        for stem in sorted(pairs, key=lambda s: pairs[s][0]):
            if total <= self._limit:
                return
            if stem == keep:
                continue
            for suffix in (".text", ".kv"):
                with contextlib.suppress(OSError):
                    (self._folder / f"{stem}{suffix}").unlink(missing_ok=True)
            total -= pairs[stem][1]


def _crc32(file: Path) -> int:
    checksum = 0
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
