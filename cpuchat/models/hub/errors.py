"""What went wrong between us and the hub, in our own errors: each says what to do.

Neither addresses (a signed one opens its file for anyone) nor tokens get into a message. huggingface_hub and httpx are
imported here only when there is an error of theirs to look at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from cpuchat.errors import AccessDenied, CpuchatError, HubError, HubOffline, NotOnHub, RateLimited, UsageError
from cpuchat.models.hub.environment import endpoint, host, is_offline
from cpuchat.text import clean_line

if TYPE_CHECKING:
    import httpx

_LOCAL = "models on this machine work without it: `cpuchat models list`."
LOGIN = "Run `hf auth login`, or set HF_TOKEN."
_LONGEST_REASON = 200
_TOKEN = re.compile(r"\bhf_\w+|bearer\s+\S+", re.IGNORECASE)


def translate(error: Exception, repo: str = "") -> CpuchatError:
    """The typed error for what huggingface_hub or httpx raised; an error that is typed already stays as it is.

    Args:
        repo: "owner/name" of the repository that it was about; "" when it was about none.
    """
    import httpx
    from huggingface_hub import errors as hub

    match error:
        case CpuchatError():
            return error
        case hub.OfflineModeIsEnabled():
            return offline_mode()
        case hub.LocalEntryNotFoundError():  # huggingface_hub's word for "not reached, and not in the cache"
            return offline_mode() if is_offline() else _unreachable("cannot be reached")
        case hub.GatedRepoError():
            return _gated(error.response, repo)
        case hub.RepositoryNotFoundError():
            return _no_repository(error.response, repo)
        case hub.RevisionNotFoundError():
            return NotOnHub(f"{_named(repo)} has no such revision.", "Leave the revision out for the newest one.")
        case hub.EntryNotFoundError():
            return NotOnHub(f"{_named(repo)} has no such file (any more).", f"See `cpuchat models files {repo}`.")
        case hub.DisabledRepoError():
            return AccessDenied(f"{_named(repo)} has been disabled.", "Choose another one.")
        case hub.HFValidationError() | hub.HfUriError():
            return UsageError(f"{clean_line(repo)[:120]!r} is no repository.", "Write it as OWNER/NAME.")
        case hub.OIDCError() | hub.LocalTokenNotFoundError():
            return AccessDenied("Your Hugging Face token could not be had.", LOGIN)
        case hub.HfHubHTTPError() | httpx.HTTPStatusError():
            return _by_status(error.response, repo)
        case httpx.UnsupportedProtocol() | httpx.InvalidURL():
            return UsageError(f"{host()} is no address of a hub.", "Set HF_ENDPOINT to one such as https://HOST.")
        case httpx.TransportError():
            return _no_connection(error)
        case ImportError():  # httpx, of a package that it needs for such proxies
            return HubError("A SOCKS proxy is set, and the package for it is not installed.", "Install httpx[socks].")
        case httpx.TooManyRedirects() | httpx.DecodingError():
            return garbage()
    return HubError(f"{host()}: unexpected {type(error).__name__}.", "Try again.")


def offline_mode() -> HubOffline:
    return HubOffline("Offline mode is on (HF_HUB_OFFLINE).", f"Unset it to ask {host()}; {_LOCAL}")


def garbage() -> HubError:
    """For an answer that is not what the hub's API says."""
    return HubError(
        f"{host()} answered with something that is not the hub's.",
        "A login page of this network? Open a web page first; or check HF_ENDPOINT.",
    )


def too_slow() -> HubOffline:
    return _unreachable("did not answer in time")


def seconds_to_wait(headers: Mapping[str, str]) -> float | None:
    """How long a server asks to wait: `Retry-After` (RFC 9110 §10.2.3: seconds or a date), else `RateLimit`; None when
    it doesn't say."""
    from huggingface_hub.utils import parse_ratelimit_headers

    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    if value:
        try:
            when = parsedate_to_datetime(value)
        except ValueError:
            return None
        return max((when.astimezone(UTC) - datetime.now(UTC)).total_seconds(), 0.0)
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None


def _named(repo: str) -> str:
    return clean_line(repo) or "The repository"


def _unreachable(how: str) -> HubOffline:
    return HubOffline(f"{host()} {how}.", f"Check the network, and HF_ENDPOINT if you set it; {_LOCAL}")


def _no_connection(error: httpx.TransportError) -> HubOffline:
    import httpx

    if isinstance(error, httpx.TimeoutException):
        return too_slow()
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return HubOffline(
            f"The certificate of {host()} is not trusted here.",
            "Behind a proxy that reads along, set SSL_CERT_FILE to its certificates.",
        )
    if isinstance(error, httpx.ConnectError | httpx.ProxyError):
        return _unreachable("cannot be reached")
    return _unreachable("broke off the connection")


def _has_token(response: httpx.Response) -> bool:
    """Whether the user's token was sent along: with the first request of a chain of redirects."""
    return any("authorization" in one.request.headers for one in (*response.history, response))


def _gated(response: httpx.Response, repo: str) -> AccessDenied:
    terms = f"Accept its terms at {_page(repo)}"
    then = "with the account of your token" if _has_token(response) else "then run `hf auth login` (or set HF_TOKEN)"
    return AccessDenied(f"{_named(repo)} is gated: its owner lets in who has accepted the terms.", f"{terms}, {then}.")


def _page(repo: str) -> str:
    """The repository's web page, without a password that the endpoint may hold."""
    scheme = endpoint().partition("://")[0]
    return f"{scheme}://{host()}/{repo}"


def _no_repository(response: httpx.Response, repo: str) -> NotOnHub:
    name = repo.rpartition("/")[2] or "NAME"
    private = "a private one needs a token that may read it" if _has_token(response) else (
        "a private one needs a token (`hf auth login`)"
    )  # fmt: skip
    return NotOnHub(
        f"There is no repository {clean_line(repo)} on {host()}.",
        f"Check the spelling (`cpuchat models search {clean_line(name)}`); {private}.",
    )


def _by_status(response: httpx.Response, repo: str) -> HubError:
    status = response.status_code
    if status == 401 and repo and not _has_token(response):  # mirrors don't tell as much as the hub
        return _no_repository(response, repo)
    if status == 401:
        return AccessDenied(f"{host()} does not accept your token.", LOGIN)
    if status == 403:
        return AccessDenied(
            f"Your token may not read {clean_line(repo) or 'this'}{_reason(response)}.",
            "Give it the right to read gated repositories in the hub's settings, or use another one.",
        )
    if status in (404, 410):
        return NotOnHub(f"{_named(repo)}: {host()} has no such thing.", "Check the spelling.")
    if status == 429:
        seconds = seconds_to_wait(response.headers)
        how_long = f" for {seconds:.0f} s" if seconds else ""
        more = "" if _has_token(response) else " With a token (`hf auth login`) the hub allows more."
        return RateLimited(f"{host()} gets too many requests from here and asks to wait{how_long}.", f"Wait.{more}")
    if status >= 500:
        return HubError(f"{host()} has trouble of its own (status {status}).", "Try again in a minute.")
    return HubError(f"{host()} refused the request (status {status}){_reason(response)}.", "Try again.")


def _reason(response: httpx.Response) -> str:
    """`: Access is restricted`: the hub's own words for a refusal, as far as they are safe to show."""
    said = _TOKEN.sub("…", clean_line(response.headers.get("x-error-message", "")))[:_LONGEST_REASON].rstrip(" .")
    return f": {said}" if said else ""
