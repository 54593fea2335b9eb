"""Where the hub is and whether it may be contacted, by the environment variables of huggingface_hub, read at each use;
and errors of huggingface_hub and httpx as typed ones that say what to do.

Neither URLs (a signed one opens its file for anyone) nor tokens get into a message. Both libraries are imported only
when there is an error of theirs to translate.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cpuchat.base.errors import (
    AccessDenied,
    CpuchatError,
    HubError,
    HubOffline,
    NotOnHub,
    RateLimited,
    TooSlow,
    UsageError,
)
from cpuchat.base.text import clean_line, without_password

if TYPE_CHECKING:
    import httpx


DEFAULT_ENDPOINT = "https://huggingface.co"
PROXY = "cpuchat.proxy"
"""The extension of a request that has the `ProxySetting` by which it was sent, None: directly."""
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})  # constants.ENV_VARS_TRUE_VALUES of huggingface_hub


def endpoint() -> str:
    """Return `HF_ENDPOINT`, else the public hub, without a trailing slash."""
    return os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or DEFAULT_ENDPOINT


def host() -> str:
    """Return the endpoint's host and port for messages, without a password that the address may hold."""
    try:
        return urlsplit(endpoint()).netloc.rpartition("@")[2] or "HF_ENDPOINT"
    except ValueError:  # brackets that are no IPv6 address
        return "HF_ENDPOINT"


def check_endpoint() -> None:
    """Raise UsageError where `HF_ENDPOINT` is not an address."""
    try:
        url = urlsplit(endpoint())
        valid = url.scheme.lower() in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # brackets that are no IPv6 address, or a port that is none
        valid = False
    if not valid or not _ADDRESS.fullmatch(endpoint()):
        raise _bad_endpoint()


def _bad_endpoint() -> UsageError:
    shown = without_password(endpoint())
    return UsageError(f"HF_ENDPOINT is not a valid address: {shown!r}.", "Set it to one such as https://HOST.")


def is_offline() -> bool:
    """Return whether `HF_HUB_OFFLINE` (or `TRANSFORMERS_OFFLINE`) forbids all requests."""
    return is_set("HF_HUB_OFFLINE") if os.environ.get("HF_HUB_OFFLINE") else is_set("TRANSFORMERS_OFFLINE")


def is_set(variable: str) -> bool:
    """Return whether this environment variable is true, as huggingface_hub understands it."""
    return os.environ.get(variable, "").upper() in _TRUE


_CHECK = "Check the network, and HF_ENDPOINT if you set it"
REDIRECTED = "A proxy or a login page of this network? Try another network, or check HF_ENDPOINT."
_LOCAL = "or copy a .gguf file into ~/models (`cpuchat docs offline`)."
LOGIN = "Run `hf auth login`, or set HF_TOKEN."
_LONGEST_REASON = 200
_DAY = 86_400
_ADDRESS = re.compile(r"[^\s\"'<>\\^`{|}]+")
_TOKEN = re.compile(r"\bhf_\w+|bearer\s+\S+", re.IGNORECASE)


def translate(error: Exception, repo: str = "") -> CpuchatError:
    """Return the typed error for what huggingface_hub or httpx raised; a typed error is returned unchanged. `repo`:
    "owner/name" of the repository that was asked about, "" for none."""
    import httpx
    from huggingface_hub import errors as hub

    match error:
        case CpuchatError():
            return error
        case hub.OfflineModeIsEnabled():
            return offline_mode()
        case hub.GatedRepoError():
            # Without a password that the endpoint may hold.
            terms = f"Accept them at {endpoint().partition('://')[0]}://{host()}/{repo}"
            then = "with the account of your token"
            if not _has_token(error.response):
                then = "then run `hf auth login` (or set HF_TOKEN)"
            return AccessDenied(f"{_named(repo)} is gated: access requires accepting its terms.", f"{terms}, {then}.")
        case hub.RepositoryNotFoundError():
            return _no_repository(error.response, repo)
        case hub.RevisionNotFoundError():
            return NotOnHub(f"{_named(repo)} has no such revision.", "Leave the revision out for the newest one.")
        case hub.EntryNotFoundError():
            return NotOnHub(f"{_named(repo)} no longer has this file.", "Its files have changed: choose another one.")
        case hub.DisabledRepoError():
            return AccessDenied(f"{_named(repo)} has been disabled.", "Choose another repository.")
        case hub.HFValidationError() | hub.HfUriError():
            return UsageError(f"{clean_line(repo)[:120]!r} is not a repository name.", "Write it as OWNER/NAME.")
        case hub.HfHubHTTPError() | httpx.HTTPStatusError():
            return _by_status(error.response, repo)
        case httpx.UnsupportedProtocol() | httpx.InvalidURL():
            return _bad_endpoint()
        case httpx.TransportError():
            return _no_connection(error)
        case httpx.TooManyRedirects():
            return HubError(f"{host()} redirects in a loop.", REDIRECTED)
        case httpx.DecodingError():
            return invalid_response()
    return HubError(f"{host()}: unexpected {type(error).__name__}.", "Try again.")


def offline_mode() -> HubOffline:
    name = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    return HubOffline(f"Offline mode is on ({name}).", f"Unset it to contact {host()}; {_LOCAL}")


def invalid_response() -> HubError:
    """Return the error for a response that the hub's API would not send."""
    return HubError(
        f"{host()} sent an invalid response.",
        "A login page of this network? Open a web page first, or check HF_ENDPOINT.",
    )


def too_slow(who: str = "") -> TooSlow:
    return TooSlow(f"{who or host()} did not answer in time.", f"{_CHECK}; {_LOCAL}")


def bad_redirect(url: httpx.URL, target: str) -> HubError:
    """Return the error for a forbidden redirect from `url` to `target`, a URL without its path: that may be signed."""
    return HubError(f"{url.netloc.decode('ascii')} redirects to {clean_line(target)[:120]}.", REDIRECTED)


def is_certificate(error: BaseException | None) -> bool:
    """Return whether the server's certificate was rejected, as the error or a cause of it says: a permanent fault."""
    while error is not None and "CERTIFICATE_VERIFY_FAILED" not in str(error):
        error = error.__cause__ or error.__context__
    return error is not None


def seconds_to_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server asks to wait, None if it doesn't say: `Retry-After` (RFC 9110 §10.2.3), or
    `RateLimit`."""
    from huggingface_hub.utils import parse_ratelimit_headers

    value = headers.get("retry-after", "").strip()
    try:
        if value.isdecimal():
            return float(value)
        if value:
            when = parsedate_to_datetime(value)
            return max((when.astimezone(UTC) - datetime.now(UTC)).total_seconds(), 0.0)
        limit = parse_ratelimit_headers(headers)
        return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None
    except (ValueError, OverflowError):  # malformed
        return None


def _named(repo: str) -> str:
    return clean_line(repo) or "The repository"


def _no_connection(error: httpx.TransportError) -> HubOffline:
    import httpx

    who, proxy = host(), None
    with contextlib.suppress(RuntimeError):  # it doesn't know its request
        asked, proxy = error.request.url.netloc.decode("ascii"), error.request.extensions.get(PROXY)
        # Not always the hub, which redirects to other hosts.
        who = asked if asked == who else f"{asked}, where {who} redirects to,"
    if isinstance(error, httpx.TimeoutException):
        return too_slow(who)
    if is_certificate(error) and "mismatch" in str(error):
        return HubOffline(
            f"The certificate of {who} is for another host.",
            "A proxy or a login page of this network may answer in its place; or check HF_ENDPOINT.",
        )
    if is_certificate(error):
        return HubOffline(
            f"The certificate of {who} is not trusted.",
            "Behind a TLS-intercepting proxy, set SSL_CERT_FILE to its certificates.",
        )
    refused = isinstance(error, httpx.ProxyError)
    if refused or (isinstance(error, httpx.ConnectError) and proxy is not None):
        name, shown = (proxy.variable, f" {without_password(proxy.address)}") if proxy else ("its variable", "")
        how = f"refused: {clean_line(str(error))[:80]}" if refused else "cannot be reached"
        return HubOffline(f"The proxy{shown} {how}.", f"Check {name} (http://USER:PASSWORD@HOST:PORT); {_LOCAL}")
    how = "cannot be reached" if isinstance(error, httpx.ConnectError) else "closed the connection"
    return HubOffline(f"{who} {how}.", f"{_CHECK}; {_LOCAL}")


def _has_token(response: httpx.Response) -> bool:
    """Return whether the user's token was sent, with the first request of a chain of redirects."""
    return any("authorization" in one.request.headers for one in (*response.history, response))


def _no_repository(response: httpx.Response, repo: str) -> NotOnHub:
    name = repo.rpartition("/")[2] or "NAME"
    private = f"a private one needs a token {'with access' if _has_token(response) else '(`hf auth login`)'}"
    return NotOnHub(
        f"There is no repository {clean_line(repo)} on {host()}.",
        f"Check the spelling (`cpuchat models search {clean_line(name)}`); {private}.",
    )


def _by_status(response: httpx.Response, repo: str) -> HubError:
    status = response.status_code
    if status == 401 and repo and not _has_token(response):  # mirrors say less than the hub
        return _no_repository(response, repo)
    if status == 401:
        return AccessDenied(f"{host()} rejected your token.", LOGIN)
    if status == 403:
        return AccessDenied(
            f"Your token has no access to {clean_line(repo) or 'this'}{_reason(response)}.",
            "Grant it read access to gated repositories in your Hugging Face settings, or use another token.",
        )
    if status in (404, 410):
        return NotOnHub(f"{_named(repo)}: not found on {host()}.", "Check the spelling.")
    if status == 429:
        seconds = seconds_to_wait(response.headers)
        how_long = f" for {seconds:.0f} s" if seconds and seconds <= _DAY else " for over a day" if seconds else ""
        more = "" if _has_token(response) else " With a token (`hf auth login`) the limit is higher."
        return RateLimited(f"{host()} is rate-limiting requests and asks to wait{how_long}.", f"Try again later.{more}")
    if status >= 500:
        return HubError(f"{host()} has a server error (status {status}).", "Try again in a minute.")
    return HubError(f"{host()} refused the request (status {status}){_reason(response)}.", "Try again.")


def _reason(response: httpx.Response) -> str:
    """Return the hub's own reason for a refusal, `: Access is restricted`, as far as it is safe to show."""
    said = _TOKEN.sub("…", clean_line(response.headers.get("x-error-message", "")))[:_LONGEST_REASON].rstrip(" .")
    return f": {said}" if said else ""
