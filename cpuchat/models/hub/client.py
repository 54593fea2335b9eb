"""The Hugging Face Hub: search, list a repository, read a model's header by byte ranges: some MB, not the whole file.

Requests of the API go through huggingface_hub. Files are read by byte ranges, headers as downloads: `hf_hub_download`
(huggingface_hub 1.x) starts over when a transfer breaks off, and checks lengths only. Its headers and errors are used.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from cpuchat import __version__
from cpuchat.base.errors import AccessDenied, HubError, HubOffline, ModelDamaged, TooSlow, UsageError
from cpuchat.base.text import clean_line
from cpuchat.models.gguf.header import GGUFHeader, header_from, join_parts
from cpuchat.models.hub import errors
from cpuchat.models.hub.errors import endpoint, host, is_offline, too_slow
from cpuchat.models.hub.repository import (
    FoundRepository,
    HubFile,
    ModelData,
    RepoModel,
    Repository,
    listed_repositories,
    repository_of,
)

if TYPE_CHECKING:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ExpandModelProperty_T


_PROGRAM, _VERSION = "cpuchat", __version__
_MALFORMED = (TypeError, ValueError, KeyError, AttributeError, RecursionError)
"""Errors that huggingface_hub raises for a malformed response."""

_TOKEN = re.compile(r"[!#-&(-_a-~]*")  # printable, without quotes
T = TypeVar("T")
_setting_up = threading.Lock()


def token() -> str:
    """Return the user's token, from `HF_TOKEN` or `hf auth login`; "" when there is none. Raises HubError: it cannot be
    read; AccessDenied: it contains characters that no token has."""
    from huggingface_hub.utils import get_token_to_send

    try:
        found = get_token_to_send(None) or ""
    except OSError as error:
        raise HubError(
            f"Cannot read your Hugging Face token, {error.filename}: {error.strerror}.",
            "Check that file (HF_HOME or HF_TOKEN_PATH names it), run `hf auth login`, or set HF_TOKEN.",
        ) from None
    except UnicodeDecodeError:
        found = "\0"
    if not _TOKEN.fullmatch(found):
        names = (one for one in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(one))
        where = f" in {name}" if (name := next(names, "")) else ""
        raise AccessDenied(
            f"Your Hugging Face token{where} contains quotes, spaces or invalid characters.", errors.LOGIN
        )
    return found


def headers() -> dict[str, str]:
    """Return the headers of every request: user agent and token. Raises as `token`."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(token=token() or False, library_name=_PROGRAM, library_version=_VERSION)


def ask(question: Callable[[HfApi], T], repo: str = "") -> T:
    """Call the hub's API. `question` must read the response to its end; `repo` is for messages. Raises HubError and its
    kinds: offline, refused, not found, connection lost, invalid response."""
    _set_up()
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(endpoint=endpoint(), token=token() or False, library_name=_PROGRAM, library_version=_VERSION)
    try:
        return question(api)
    except (HfHubHTTPError, HFValidationError) as error:  # some of these are ValueErrors
        raise errors.translate(error, repo) from None
    except _MALFORMED:
        raise errors.invalid_response() from None
    except Exception as error:
        raise errors.translate(error, repo) from None


def raise_for_status(response: httpx.Response) -> None:
    """Raise HfHubHTTPError or one of its kinds, or httpx.HTTPStatusError, for an unsuccessful response."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import hf_raise_for_status

    try:
        hf_raise_for_status(response)
    except HfHubHTTPError:
        raise
    except _MALFORMED:  # it searches the body for words, and fails for JSON of another form
        response.raise_for_status()
        raise


def _set_up() -> None:
    """Prepare a request. Raises HubOffline in offline mode, UsageError for an endpoint that is no address."""
    if is_offline():
        raise errors.offline_mode()
    errors.check_endpoint()
    with _setting_up:
        _set_up_library()


@cache
def _set_up_library() -> None:
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils.logging import set_verbosity_error

    from cpuchat.models.hub.http import client

    set_verbosity_error()  # its warnings would be printed across the screen
    constants.HF_HUB_DISABLE_TELEMETRY = True  # else it first asks the hub which programs it may be running in
    set_client_factory(client)


_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_QUANTIZATION = re.compile(r"[\w.-]+", re.ASCII)


class Address(ModelData, frozen=True):
    """A repository (`owner/name`) and what was named of it; "" for what was not. `path`: a file or a folder of it."""

    repo: str
    revision: str = ""
    path: str = ""
    quantization: str = ""

    @property
    def wanted(self) -> str:
        """Return the argument for `repository.choose_repo_model`; "" when no model of the repository was named."""
        return self.path or self.quantization


def parse_address(text: str) -> Address:
    """Parse `OWNER/NAME`, links (`https://huggingface.co/OWNER/NAME/blob/main/x.gguf`, with or without `https://`;
    those of `HF_ENDPOINT`; `…?show_file_info=x.gguf`, the link of a quantization on the repository's page) and
    `hf://OWNER/NAME@REVISION/x.gguf`; each optionally followed by `:QUANTIZATION`. Raises UsageError: it is none of
    these, or not a model."""
    from huggingface_hub import parse_hf_uri

    text = text.strip()
    location, colon, quantization = text.rpartition(":")
    if not colon or not _QUANTIZATION.fullmatch(quantization):
        location, quantization = text, ""
    uri = f"hf://{location}" if _REPO.fullmatch(location) else location
    try:
        found = parse_hf_uri(uri, endpoint())
    except ValueError:  # HfUriError is one, and a broken host another
        found = None
    if found is None or found.type != "model":
        raise UsageError(
            f"{clean_line(text)[:120]!r} is not a model repository.",
            f"Write OWNER/NAME, OWNER/NAME:Q4_K_M, or its URL on {host()}.",
        )
    shown = parse_qs(urlsplit(location).query).get("show_file_info", [""])
    path = found.path_in_repo or shown[0]
    return Address(repo=found.id, revision=found.revision or "", path=path, quantization=quantization.upper())


class BrokenResponse(HubError):
    """A response that is not the requested file but may be at the next attempt: truncated, or a web page."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "Try again.")


class WrongResponse(BrokenResponse):
    """A response with another length, range or hash than was listed: probably the same at every attempt."""


_REFUSED = frozenset({400, 401, 403, 404, 410, 416})
"""Statuses of expired signed links: the next attempt gets a new link."""


def pieces(
    repo: str, revision: str, file: HubFile, offset: int, end: int | None = None, **limits: Any
) -> Iterator[bytes]:
    """Yield the content of a file from `offset` to `end` (default: its end), never more, in one request.

    Each attempt starts at the hub: signed links of the servers that it redirects to expire. httpx passes the
    Authorization header on only within the host and port that it was meant for. `limits`: of `http.ResponseLimits`.
    Raises BrokenResponse: a web page; WrongResponse: not this file, or not the requested range; HubError: a forbidden
    redirect, or a compressed response; httpx.HTTPError, HfHubHTTPError: as of `raise_for_status`, or the connection
    failed."""
    from cpuchat.models.hub.http import LIMITS, ResponseLimits

    missing = (file.size if end is None else end) - offset
    if missing <= 0:
        return
    url = f"{endpoint()}/{quote(repo)}/resolve/{quote(revision, safe='')}/{quote(file.path)}"
    sent = {**headers(), "range": f"bytes={offset}-{'' if end is None else end - 1}"}
    with _client().stream("GET", url, headers=sent, extensions={LIMITS: ResponseLimits(**limits)}) as response:
        elsewhere = bool(response.history) and response.url.netloc != response.history[0].url.netloc
        if elsewhere and response.status_code in _REFUSED:
            raise WrongResponse(f"The download server of {host()} returned status {response.status_code}.")
        raise_for_status(response)
        if response.status_code not in (200, 206):
            raise WrongResponse(f"{host()} sent no file (status {response.status_code}).")
        if response.headers.get("content-type", "").startswith("text/html"):
            raise BrokenResponse(
                f"Received a web page instead of the file, from {host()} or a login page of this network."
            )
        for hop in (*response.history, response):
            etag = hop.headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
            if etag and etag != file.etag:
                raise WrongResponse(f"{host()} serves a different file than it listed.")
        # A server without range support sends the file from its beginning.
        skip, size = offset, response.headers.get("content-length")
        if response.status_code == 206:
            span, _, size = response.headers.get("content-range", "").removeprefix("bytes ").partition("/")
            skip = 0
            if span.partition("-")[0] != str(offset):
                raise WrongResponse(f"{host()} sent a different byte range than requested.")
        if size is not None and size != str(file.size):
            raise WrongResponse(f"{host()} sends {clean_line(size)[:20]} bytes but listed {file.size}.")
        for piece in response.iter_raw():
            wanted = piece[skip : skip + missing]
            skip = max(skip - len(piece), 0)
            missing -= len(wanted)
            if wanted:
                yield wanted
            if not missing:  # what follows is not wanted, and may never end
                return


@cache
def _client() -> httpx.Client:
    """Return an HTTP client separate from huggingface_hub's, for what is not its API."""
    from cpuchat.models.hub.http import client

    return client()


_MORE = 1 << 20  # bytes that a server without range support may send beyond those requested; the reader stops by itself


class _Remote:
    """A file on the hub, as a source of headers."""

    def __init__(self, repo: str, revision: str, file: HubFile) -> None:
        self.name = PurePosixPath(file.path).name
        self.size = file.size
        self._place = repo, revision, file

    def read(self, offset: int, count: int) -> bytes:
        try:
            return self._read(offset, min(offset + count, self.size))
        except HubOffline as error:  # a lost connection, or one that was closed while idle
            if isinstance(error, TooSlow):
                raise
        return self._read(offset, min(offset + count, self.size))

    def _read(self, offset: int, end: int) -> bytes:
        _set_up()
        try:
            content = b"".join(pieces(*self._place, offset, end, max_bytes=end + _MORE))
        except Exception as error:
            raise errors.translate(error, self._place[0]) from None
        if len(content) < end - offset:
            raise BrokenResponse(f"{host()} sent fewer bytes of {self.name} than announced.")
        return content


_MAX_HEADERS = 8  # that are kept
MAX_SECONDS = 60.0
"""Seconds after which no further part's header is requested."""
MAIN = "main"
"""The default branch of every repository."""
_FACTS: list[ExpandModelProperty_T] = ["downloads", "likes", "gated", "private", "lastModified", "gguf"]


class Hub:
    """Client of the Hub. All methods block, up to two minutes on a bad connection, are thread-safe, and raise
    `errors.HubError` or one of its kinds: HubOffline, RateLimited, NotOnHub, AccessDenied."""

    def __init__(self) -> None:
        self._header = lru_cache(_MAX_HEADERS)(_read_header)

    def search(self, query: str, *, limit: int = 30) -> list[FoundRepository]:
        """Return at most `limit` repositories with GGUF files whose name contains the words, most downloads first.

        The link of a repository's page finds that repository."""
        if "://" in query:
            query = parse_address(query).repo
        query = query.strip()
        usual: dict[str, Any] = {"filter": "gguf", "sort": "downloads", "expand": _FACTS}
        return listed_repositories(ask(lambda api: list(api.list_models(search=query, limit=limit, **usual))))

    def repository(self, repo_id: str, revision: str = MAIN) -> Repository:
        """Return its models at `revision`: a branch, a tag or a commit. Raises UsageError: `repo_id` is not
        "owner/name"."""
        repo, asked = parse_address(repo_id).repo, time.time()
        info = ask(lambda api: api.model_info(repo, revision=revision, files_metadata=True), repo)
        return repository_of(info, asked if revision == MAIN else 0.0)

    def header(self, repo: Repository, model: RepoModel) -> GGUFHeader:
        """Return the header of a model, with the tensors of all parts of a split one; fetches some MB, and keeps the
        last few. Raises ModelDamaged: not a GGUF file, a contradictory header, or missing parts; TooSlow: too many
        parts, or too slow a connection."""
        return self._header(repo.id, repo.revision, model)


def _read_header(repo: str, revision: str, model: RepoModel) -> GGUFHeader:
    headers, until = [], time.monotonic() + MAX_SECONDS
    for file in model.files:
        if time.monotonic() > until:
            raise too_slow()
        headers.append(header_from(_Remote(repo, revision, file), Path(file.path)))
    if not model.complete or headers[0].split_count != len(headers):
        raise ModelDamaged(f"{model.name}: parts are missing in {repo}.", "Choose another file.")
    return join_parts(headers)
