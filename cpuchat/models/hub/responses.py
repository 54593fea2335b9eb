"""Turns the hub's responses, as huggingface_hub hands them out, into plain data.

huggingface_hub validates nothing, and nothing here is trusted: names, hashes and ids become names of files and folders
of the cache.

File names are those that publishers really use: `Model-Q4_K_M.gguf` (bartowski, lmstudio-community), `Model-UD-Q4_K_XL`
and `BF16/Model-BF16-00001-of-00002` (unsloth), `Model.i1-IQ3_M` and `Model.mmproj-f16` (mradermacher),
`model-mxfp4` and `mmproj-model-f16` (ggml-org), `model-q4_0` (Qwen, Google).

Validates names, hashes and sizes from the hub before they become file names: the one place where that is done.

The HTTP client for all requests to the hub, with limits on time and size: httpx and huggingface_hub have none.

Imports httpx, which takes its time: import this only where the hub is contacted.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import httpx

from cpuchat.base.errors import HubError, UsageError
from cpuchat.base.text import clean_line
from cpuchat.models.file_names import quantization_of, role_of
from cpuchat.models.hub.errors import bad_redirect, endpoint, host, invalid_response, too_slow
from cpuchat.models.hub.repository import FoundRepository, HubFile, RepoModel, Repository

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import RepoSibling


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


_MAX_FILES = 5_000
_MAX_PROBLEMS = 10
_MAX_TEXT = 200
_SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})$", re.IGNORECASE)
_FRAGMENT = re.compile(r"\.gguf\.?(part\d+of\d+|-?split-[a-z])$", re.IGNORECASE)


def found(infos: Iterable[ModelInfo]) -> list[FoundRepository]:
    """Return the hits of a search that have a valid id.

    Raises:
        HubError: none has.
    """
    hits = list(infos)
    valid = [info for info in hits if is_repo(info.id)]
    if hits and not valid:
        raise invalid_response()
    return [_hit(info) for info in valid]


def _hit(info: ModelInfo) -> FoundRepository:
    gguf = info.gguf if isinstance(info.gguf, dict) else {}  # of its first GGUF file; total: parameters
    return FoundRepository(
        id=info.id,
        downloads=_count(info.downloads),
        likes=_count(info.likes),
        gated=bool(info.gated),
        private=bool(info.private),
        updated=_day(info),
        architecture=_text(gguf.get("architecture")),
        n_params=_count(gguf.get("total")),
    )


def repository(info: ModelInfo, newest_at: float = 0.0) -> Repository:
    """Return a repository with its models. `newest_at` see `Repository`.

    Raises:
        HubError: its id or commit is invalid.
    """
    files, problems = _files(info.siblings or [])
    return Repository(
        id=_checked(is_repo, info.id),
        revision=_checked(is_sha1, info.sha),
        newest_at=newest_at,
        models=models_of(files),
        gated=bool(info.gated),
        private=bool(info.private),
        downloads=_count(info.downloads),
        likes=_count(info.likes),
        updated=_day(info),
        license=_text(getattr(info.card_data, "license", None)),
        base_model=_text(getattr(info.card_data, "base_model", None)),
        problems=tuple(problems),
    )


def _files(siblings: Iterable[RepoSibling]) -> tuple[list[HubFile], list[str]]:
    """Return the model files that can be downloaded and verified, and why others cannot."""
    files: list[HubFile] = []
    problems: list[str] = []
    fragments = 0
    for sibling in siblings:
        try:
            path = safe_path(str(sibling.rfilename))
        except HubError as error:
            problems.append(error.message)
            continue
        if path.lower().endswith(_SUFFIX):
            file = _file(path, sibling)
            if file is not None:
                files.append(file)
                if len(files) == _MAX_FILES:
                    problems.insert(0, f"Only the first {_MAX_FILES:,} model files are listed.")
                    break
            else:
                problems.append(f"Hugging Face publishes no size or hash of {path}, so it cannot be verified.")
        fragments += _FRAGMENT.search(path) is not None
    if len(problems) > _MAX_PROBLEMS:
        problems[_MAX_PROBLEMS:] = [f"{len(problems) - _MAX_PROBLEMS} more files were skipped for the same reasons."]
    if fragments:
        problems.append(f"{fragments} files are fragments that must be joined by hand.")
    return files, problems


def _file(path: str, sibling: RepoSibling) -> HubFile | None:
    """Return a file; None when it could not be verified after a download."""
    large = sibling.lfs
    if large is not None:
        file = HubFile(path=path, size=large.size, sha256=large.sha256)
        return file if is_size(file.size) and is_sha256(file.sha256) else None
    if not is_size(sibling.size) or not is_sha1(sibling.blob_id):
        return None
    return HubFile(path=path, size=sibling.size or 0, git_sha1=sibling.blob_id or "")


def models_of(files: Iterable[HubFile]) -> tuple[RepoModel, ...]:
    """Return the GGUF models among a repository's files, the smallest first; all parts of a split one are one model."""
    groups: dict[tuple[str, int], dict[int, HubFile]] = {}
    for file in files:
        if not file.path.lower().endswith(_SUFFIX):
            continue
        stem, number, count = file.path[: -len(_SUFFIX)], 1, 1
        part = _PART.match(stem)
        if part is not None:
            stem, number, count = part["stem"], int(part["number"]), int(part["count"])
        groups.setdefault((stem, count), {})[number] = file
    models = [_model(stem, count, parts) for (stem, count), parts in groups.items()]
    return tuple(sorted(models, key=lambda model: (model.size, model.name)))


def _model(stem: str, count: int, parts: Mapping[int, HubFile]) -> RepoModel:
    return RepoModel(
        name=PurePosixPath(stem).name,
        files=tuple(parts[number] for number in sorted(parts)),
        quantization=quantization_of(stem),
        kind=role_of(stem),
        complete=len(parts) == count and min(parts) == 1 and max(parts) == count,
    )


def _checked(is_valid: Callable[[object], bool], text: Any) -> str:
    if not is_valid(text):
        raise invalid_response()
    return text


def _day(info: ModelInfo) -> str:
    return f"{info.last_modified:%Y-%m-%d}" if info.last_modified else ""


def _count(value: Any) -> int:
    return value if is_size(value) else 0


def _text(value: Any) -> str:
    """Return a field of a model card: a text, or a list of them."""
    values = value if isinstance(value, list) else [value]
    return ", ".join(one for one in values if isinstance(one, str))[:_MAX_TEXT]


_CONNECT = 10.0
_GRACE = 10.0
_MIN_RATE = 1 << 10
"""Bytes per second below which a response counts as stuck, after `_GRACE` seconds."""
_PIECE = 1 << 16
_MAX_ERROR_BODY = 1 << 20
"""Bytes of the body of a redirect or an error."""
_EXTENSION = "cpuchat.bounds"


@dataclass(frozen=True)
class Bounds:
    """Limits of a response. `max_bytes` counts uncompressed content; None where the reader counts.

    `idle_timeout`: seconds without a byte; the head of the response, redirects included, may take half as much again.
    `seconds`: for all of it. The default is for the API, whose responses become Python objects of 20 times the size.
    """

    max_bytes: int | None = 8 << 20
    idle_timeout: float = 8.0
    seconds: float = 120.0

    def extensions(self) -> dict[str, Any]:
        """Return the extensions of a request with these limits."""
        return {_EXTENSION: self}


DEFAULT = Bounds()


def client() -> httpx.Client:
    """Return a client, also for `huggingface_hub.set_client_factory`. It follows redirects to https, and to http only
    if the hub itself is reached by http; the token goes to no other host than the hub.

    Raises, besides what httpx does, while a response is awaited or read:
        TooSlow: it takes too long.
        HubError: it is too large, or a forbidden redirect.
    """
    hooks = {"request": [_set_timeout, _keep_token], "response": [_check_redirect, _limit_content]}
    return _Client(event_hooks=hooks, follow_redirects=True, headers={"accept-encoding": "gzip"})


class _Client(httpx.Client):
    def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send as httpx does, with a time limit also on what comes before the content: the name lookup, and a head that
        drips or never ends."""
        sending = _Sending(lambda: super(_Client, self).send(request, stream=True, **options))
        request.extensions["trace"] = sending.trace
        sending.start()
        response = sending.response(1.5 * _bounds(request).idle_timeout)
        if not stream:
            try:
                response.read()
            finally:
                response.close()
        return response


class _Sending(threading.Thread):
    """Waits for the head of a response in its own thread, which can be abandoned."""

    def __init__(self, send: Callable[[], httpx.Response]) -> None:
        super().__init__(name="hub", daemon=True)
        self._send = send
        self._ended = threading.Condition()
        self._abandoned = False
        self._response: httpx.Response | None = None
        self._error: BaseException | None = None
        self._sockets: list[socket.socket] = []

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Record sockets; called by httpcore (https://www.encode.io/httpcore/extensions/#trace)."""
        if event in ("connection.connect_tcp.complete", "http11.connect.start_tls.complete"):
            self._sockets.append(info["return_value"].get_extra_info("socket"))

    def run(self) -> None:
        response, error = None, None
        try:
            response = self._send()
        except BaseException as raised:
            error = raised
        with self._ended:
            self._response, self._error = response, error
            self._ended.notify_all()
            if self._abandoned and response is not None:
                response.close()

    def response(self, seconds: float) -> httpx.Response:
        """Return the response, its content unread. Raises what sending raised, or TooSlow."""
        with self._ended:
            try:
                self._ended.wait_for(lambda: self._response is not None or self._error is not None, seconds)
            finally:
                self._abandoned = self._response is None
        if self._error is not None:
            raise self._error
        if self._response is None:
            for connection in self._sockets:  # the thread would read a head without end forever
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            raise too_slow()
        return self._response


def _bounds(request: httpx.Request) -> Bounds:
    return request.extensions.get(_EXTENSION, DEFAULT)


def _set_timeout(request: httpx.Request) -> None:
    # Not as the client's default: huggingface_hub sets timeout=None explicitly.
    timeout = _bounds(request).idle_timeout
    request.extensions["timeout"] = httpx.Timeout(timeout, connect=min(timeout, _CONNECT)).as_dict()


def _keep_token(request: httpx.Request) -> None:
    """Remove the token from requests to other hosts: huggingface_hub sends it to any URL that the hub names as the next
    page. (httpx removes it from redirects.)"""
    hub = httpx.URL(endpoint())
    if (request.url.host, request.url.port) != (hub.host, hub.port):
        request.headers.pop("authorization", None)


def _check_redirect(response: httpx.Response) -> None:
    response.headers.pop("link", None)  # no further pages: one is enough, and they may have no end
    if not response.has_redirect_location:
        return
    try:
        target = response.url.join(response.headers["location"])
    except (httpx.InvalidURL, ValueError):
        raise bad_redirect(response.url, "an invalid address") from None
    allowed = ("https", "http") if endpoint().lower().startswith("http://") else ("https",)
    if target.scheme in allowed and not target.host:
        raise bad_redirect(response.url, "an invalid address")
    if target.scheme not in allowed:
        raise bad_redirect(response.url, f"{target.scheme}://{target.host}, which is not https")


def _limit_content(response: httpx.Response) -> None:
    encoding = response.headers.pop("content-encoding", "identity").strip().lower()
    wanted = response.request.headers.get("accept-encoding", "")
    if response.status_code in (200, 206) and wanted == "identity" and encoding not in ("", "identity"):
        raise HubError(
            f"{host()} sent the file compressed although that was not requested.",
            "A proxy may cause this: try another network or repository.",
        )
    assert isinstance(response.stream, httpx.SyncByteStream)
    response.stream = _Limited(response, response.stream, encoding)


class _Limited(httpx.SyncByteStream):
    """The content of a response, uncompressed piece by piece: a few MB of gzip can become gigabytes."""

    def __init__(self, response: httpx.Response, content: httpx.SyncByteStream, encoding: str) -> None:
        bounds = _bounds(response.request)
        self._is_content = response.status_code in (200, 206)
        self._max_bytes = bounds.max_bytes
        self._idle_timeout = bounds.idle_timeout
        self._content = content
        self._encoding = encoding
        self._began = time.monotonic()
        self._until = self._began + bounds.seconds

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for piece in self._uncompressed():
            size += len(piece)
            if not self._is_content and size > _MAX_ERROR_BODY:
                return  # the status is known already
            if self._max_bytes is not None and size > self._max_bytes:
                raise HubError(f"{host()} sent more than {self._max_bytes >> 20} MiB.", "Check HF_ENDPOINT.")
            yield piece

    def close(self) -> None:
        self._content.close()

    def _uncompressed(self) -> Iterator[bytes]:
        if self._encoding in ("", "identity"):
            yield from self._received()
            return
        if self._encoding not in ("gzip", "x-gzip", "deflate"):
            raise httpx.DecodingError(self._encoding)
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
        is_empty = True
        try:
            for piece in self._received():
                is_empty = False
                while piece and not unpacker.eof:
                    yield unpacker.decompress(piece, _PIECE)
                    piece = unpacker.unconsumed_tail
            yield unpacker.flush()
        except zlib.error as error:
            raise httpx.DecodingError(str(error)) from None
        if not (unpacker.eof or is_empty):
            raise httpx.DecodingError("truncated")

    def _received(self) -> Iterator[bytes]:
        """Yield what comes from the network; checks the rate over each `_GRACE` seconds, or over the idle timeout."""
        began, size = self._began, 0
        for piece in self._content:
            now = time.monotonic()
            size += len(piece)
            if now > self._until:
                raise too_slow()
            if now - began > min(_GRACE, self._idle_timeout):
                if size < _MIN_RATE * (now - began):
                    raise too_slow()
                began, size = now, 0
            yield piece
