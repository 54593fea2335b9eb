"""Validates names, hashes and sizes from the hub before they become file names: the one place where that is done."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cpuchat.errors import HubError, UsageError
from cpuchat.models.hub.repository import HubFile
from cpuchat.text import clean_line

_REPO = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)  # the rules of validate_repo_id
_SHA1 = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|COM\d|LPT\d)(\.|$)", re.IGNORECASE)  # Windows: names of devices
_MAX_PART = 255  # bytes of one name on every usual file system
_MAX_PATH = 1024
_MAX_SIZE = 1 << 53  # what JSON can carry; 9 PB


def is_repo(text: object) -> bool:
    """Return whether it is "owner/name"."""
    return isinstance(text, str) and _REPO.fullmatch(text) is not None


def is_sha1(text: object) -> bool:
    """Return whether it is a git hash, of a commit or a small file."""
    return isinstance(text, str) and _SHA1.fullmatch(text) is not None


def is_sha256(text: object) -> bool:
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None


def is_size(value: object) -> bool:
    """Return whether it can be the size of a file in bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE


def checked_etag(etag: str) -> str:
    """Return `etag` if it is a hash.

    Raises:
        HubError: it is not, so it must not become a file name.
    """
    if not (is_sha1(etag) or is_sha256(etag)):
        raise HubError(
            "Hugging Face publishes no hash for this file.", "Try again later, or choose another repository."
        )
    return etag


def check_names(repo: str, revision: str, files: Iterable[HubFile]) -> None:
    """Check everything that becomes the name of a file or a folder.

    Raises:
        UsageError: the repository or the revision is malformed.
        HubError: a file has an unsafe name, no hash, or no size.
    """
    if not is_repo(repo):
        raise UsageError(f"{repo!r} is not a repository name.", "Write it as OWNER/NAME.")
    if not is_sha1(revision):
        raise UsageError(f"{revision!r} is not a commit hash.", "Refresh the repository.")
    for file in files:
        safe_path(file.path)
        checked_etag(file.etag)
        if not is_size(file.size):
            raise HubError(f"Hugging Face publishes no size for {file.path}.", "Choose another file.")


def safe_path(path: str) -> str:
    """Return `path` if it names a file inside the folder it will be put into, on any operating system.

    Raises:
        HubError: it is unsafe: absolute, `..`, a drive, backslashes, control or invisible characters, device names, too
            long. The message says which.
    """
    fault = _path_fault(path)
    if fault:
        raise HubError(
            f"The repository contains a file with an unsafe name ({fault}): {clean_line(path)[:100]!r}.",
            "Don't trust this repository; choose another one.",
        )
    return path


def _path_fault(path: str) -> str:
    """Return what is wrong with it; "" when it is safe."""
    parts = path.split("/")
    if not path.isprintable():
        return "control or invisible characters"
    if "\\" in path or ":" in path:
        return "a backslash or colon"
    if path.startswith("/"):
        return "an absolute path"
    if any(part in ("", ".", "..") for part in parts):
        return "outside its folder"
    if any(part != part.rstrip(" .") or _DEVICE.match(part) for part in parts):
        return "a name reserved by Windows"
    if len(path.encode()) > _MAX_PATH or any(len(part.encode()) > _MAX_PART for part in parts):
        return "too long"
    return ""
