"""Sends all requests to the hub through huggingface_hub: its API, and byte ranges of files by its session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from cpuchat import __version__
from cpuchat.errors import AccessDenied, HubError
from cpuchat.models.hub import errors
from cpuchat.models.hub.environment import endpoint, is_offline

if TYPE_CHECKING:
    import httpx
    from huggingface_hub import HfApi

_PROGRAM, _VERSION = "cpuchat", __version__
_MALFORMED = (TypeError, ValueError, KeyError, AttributeError, RecursionError)
"""Errors that huggingface_hub raises for a malformed response."""

T = TypeVar("T")
_setting_up = threading.Lock()


def token() -> str:
    """Return the user's token, from `HF_TOKEN` or `hf auth login`; "" when there is none.

    Raises:
        HubError: it cannot be read.
        AccessDenied: it contains characters that no token has.
    """
    from huggingface_hub.utils import get_token_to_send

    try:
        found = get_token_to_send(None) or ""
    except OSError as error:
        raise HubError(f"Cannot read your Hugging Face token: {error.strerror}.", errors.LOGIN) from None
    except UnicodeDecodeError:
        found = "\0"
    if not (found.isascii() and found.isprintable()):
        raise AccessDenied("Your Hugging Face token contains invalid characters.", errors.LOGIN)
    return found


def headers() -> dict[str, str]:
    """Return the headers of every request: user agent and token. Raises as `token`."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(token=token() or False, library_name=_PROGRAM, library_version=_VERSION)


def ask(question: Callable[[HfApi], T], repo: str = "") -> T:
    """Call the hub's API. `question` must read the response to its end; `repo` is for messages.

    Raises:
        HubError and its kinds: offline, refused, not found, connection lost, invalid response.
    """
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

    from cpuchat.models.hub.limits import Bounds

    bounds = Bounds(max_bytes=max_bytes).extensions()
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
    """Prepare a request. Raises HubOffline in offline mode."""
    if is_offline():
        raise errors.offline_mode()
    with _setting_up:
        _set_up_library()


@cache
def _set_up_library() -> None:
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils.logging import set_verbosity_error

    from cpuchat.models.hub.limits import client

    set_verbosity_error()  # its warnings would be printed across the screen
    constants.HF_HUB_DISABLE_TELEMETRY = True  # else it first asks the hub which programs it may be running in
    set_client_factory(client)
