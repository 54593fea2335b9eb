"""The Hugging Face Hub: search, list a repository, read a model's header by byte ranges: some MB, not the whole file.

All requests go through huggingface_hub: its API, and byte ranges of files by its session.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from cpuchat import __version__
from cpuchat.base.errors import AccessDenied, HubError, HubOffline, ModelDamaged, TooSlow, UsageError
from cpuchat.base.text import clean_line
from cpuchat.models.gguf.header import GGUFHeader, header_from, join_parts
from cpuchat.models.hub import errors, responses
from cpuchat.models.hub.errors import endpoint, host, invalid_response, is_offline, too_slow
from cpuchat.models.hub.repository import FoundRepository, HubFile, ModelData, RepoModel, Repository

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


@contextmanager
def get(url: str, repo: str, extra: Mapping[str, str], max_bytes: int) -> Iterator[httpx.Response]:
    """Send a GET and yield the response, to be read as a stream. The token goes to no other host than that of `url`.

    Args:
        repo: for messages.
        extra: headers besides the usual ones.
        max_bytes: of the response that are read at most.

    Raises:
        HubError and its kinds: as `ask`, also while the response is read.
    """
    _set_up()
    from huggingface_hub.utils import get_session

    from cpuchat.models.hub.http import LIMITS, ResponseLimits

    bounds = {LIMITS: ResponseLimits(max_bytes=max_bytes)}
    try:
        with get_session().stream("GET", url, headers={**headers(), **extra}, extensions=bounds) as response:
            raise_for_status(response)
            if response.status_code not in (200, 206):
                raise errors.invalid_response()
            yield response
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


_MORE = 1 << 20
"""Bytes that a server without range support may send beyond those requested; the reader stops by itself."""
_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<total>\d+)$")


class _Remote:
    """A file on the hub, as a source of headers."""

    def __init__(self, repo: str, revision: str, file: HubFile) -> None:
        self.name = PurePosixPath(file.path).name
        self.size = file.size
        self._repo = repo
        self._url = f"{endpoint()}/{repo}/resolve/{quote(revision, safe='')}/{quote(file.path)}"

    def read(self, offset: int, count: int) -> bytes:
        count = min(count, self.size - offset)
        try:
            piece = self._request(offset, count)
        except HubOffline as error:  # a lost connection, or one that was closed while idle
            if isinstance(error, TooSlow):
                raise
            piece = self._request(offset, count)
        if len(piece) < count:
            raise HubError(f"{host()} sent fewer bytes of {self.name} than announced.", "Try again.")
        return piece

    def _request(self, offset: int, count: int) -> bytes:
        wanted = {"range": f"bytes={offset}-{offset + count - 1}"}
        with get(self._url, self._repo, wanted, max_bytes=offset + count + _MORE) as response:
            if "html" in response.headers.get("content-type", ""):
                raise invalid_response()
            if response.status_code == 200:  # no range support: it sends the file from its beginning
                return _body(response, count, skip=offset)
            sent = _RANGE.match(response.headers.get("content-range", ""))
            if sent is None or int(sent["first"]) != offset or int(sent["total"]) != self.size:
                raise HubError(f"{host()} sent a different range of {self.name} than requested.", "Try again.")
            return _body(response, count)


def _body(response: httpx.Response, count: int, skip: int = 0) -> bytes:
    """Return up to `count` bytes of the body after the first `skip`; the rest is not fetched."""
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) >= skip + count:
            break
    return bytes(content[skip : skip + count])


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
        self._headers: dict[tuple[str, ...], GGUFHeader] = {}  # by the hashes of the files

    def search(self, query: str, *, limit: int = 30) -> list[FoundRepository]:
        """Return at most `limit` repositories with GGUF files whose name contains the words, most downloads first.

        The link of a repository's page finds that repository."""
        if "://" in query:
            query = parse_address(query).repo
        query = query.strip()
        usual: dict[str, Any] = {"filter": "gguf", "sort": "downloads", "expand": _FACTS}
        return responses.listed_repositories(ask(lambda api: list(api.list_models(search=query, limit=limit, **usual))))

    def repository(self, repo_id: str, revision: str = MAIN) -> Repository:
        """Return its models at `revision`: a branch, a tag or a commit. Raises UsageError: `repo_id` is not
        "owner/name"."""
        repo, asked = parse_address(repo_id).repo, time.time()
        info = ask(lambda api: api.model_info(repo, revision=revision, files_metadata=True), repo)
        return responses.repository(info, asked if revision == MAIN else 0.0)

    def header(self, repo: Repository, model: RepoModel) -> GGUFHeader:
        """Return the header of a model, with the tensors of all parts of a split one; fetches some MB, and keeps the
        last few. Raises ModelDamaged: not a GGUF file, a contradictory header, or missing parts; TooSlow: too many
        parts, or too slow a connection."""
        key = tuple(file.etag for file in model.files)
        if (known := self._headers.get(key)) is not None:
            return known
        headers, until = [], time.monotonic() + MAX_SECONDS
        for file in model.files:
            if time.monotonic() > until:
                raise too_slow()
            headers.append(header_from(_Remote(repo.id, repo.revision, file), Path(file.path)))
        if not model.complete or headers[0].split_count != len(headers):
            raise ModelDamaged(f"{model.name}: parts are missing in {repo.id}.", "Choose another file.")
        for old in list(self._headers)[: 1 - _MAX_HEADERS]:
            self._headers.pop(old, None)
        found = self._headers[key] = join_parts(headers)
        return found
