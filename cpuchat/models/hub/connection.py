"""Requests to the hub, all of them through huggingface_hub: its API, and parts of files by its session."""

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
_NO_ANSWER = (TypeError, ValueError, KeyError, AttributeError, RecursionError)
"""What huggingface_hub stumbles with over an answer that has not the form of the hub's."""

T = TypeVar("T")
_setting_up = threading.Lock()


def token() -> str:
    """The user's token: `HF_TOKEN`, or what `hf auth login` keeps; "" when there is none.

    Raises:
        HubError: it cannot be read.
        AccessDenied: it is none.
    """
    from huggingface_hub.utils import get_token_to_send

    try:
        found = get_token_to_send(None) or ""
    except OSError as error:
        raise HubError(f"Cannot read your Hugging Face token: {error.strerror}.", errors.LOGIN) from None
    except UnicodeDecodeError:
        found = "\0"
    if not (found.isascii() and found.isprintable()):
        raise AccessDenied("Your Hugging Face token holds characters that no token has.", errors.LOGIN)
    return found


def headers() -> dict[str, str]:
    """What every request carries: who asks, and the token. Raises as `token`."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(token=token() or False, library_name=_PROGRAM, library_version=_VERSION)


def ask(question: Callable[[HfApi], T], repo: str = "") -> T:
    """What the hub's API answers. `question` must read the answer to its end.

    Args:
        repo: for messages.

    Raises:
        HubError and its kinds: offline, refused, not there, broken off; or no answer of a hub.
    """
    _set_up()
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(endpoint=endpoint(), token=token() or False, library_name=_PROGRAM, library_version=_VERSION)
    try:
        return question(api)
    except (HfHubHTTPError, HFValidationError) as error:  # some of these are ValueErrors
        raise errors.translate(error, repo) from None
    except _NO_ANSWER:
        raise errors.garbage() from None
    except Exception as error:
        raise errors.translate(error, repo) from None


@contextmanager
def get(url: str, repo: str, extra: Mapping[str, str], most: int) -> Iterator[httpx.Response]:
    """A GET whose answer is read as it comes. The token goes to no other host than that of `url`.

    Args:
        repo: for messages.
        extra: headers besides the usual ones.
        most: bytes of the answer that are read at most.

    Raises:
        HubError and its kinds: as `ask`; and broken off while the answer is read.
    """
    _set_up()
    from huggingface_hub.utils import get_session

    from cpuchat.models.hub.limits import Bounds

    bounds = Bounds(most=most).asked()
    try:
        with get_session().stream("GET", url, headers={**headers(), **extra}, extensions=bounds) as answer:
            raise_for_status(answer)
            if answer.status_code not in (200, 206):
                raise errors.garbage()
            yield answer
    except Exception as error:
        raise errors.translate(error, repo) from None


def raise_for_status(answer: httpx.Response) -> None:
    """Raises HfHubHTTPError or one of its kinds, or httpx.HTTPStatusError, for an answer that is no content."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import hf_raise_for_status

    try:
        hf_raise_for_status(answer)
    except HfHubHTTPError:
        raise
    except _NO_ANSWER:  # it looks for words in the answer, and stumbles over JSON of another form
        answer.raise_for_status()
        raise


def _set_up() -> None:
    """Before every request. Raises HubOffline when the user forbids them."""
    if is_offline():
        raise errors.offline_mode()
    with _setting_up:
        _set_up_library()


@cache
def _set_up_library() -> None:
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils.logging import set_verbosity_error

    from cpuchat.models.hub.limits import client

    set_verbosity_error()  # its warnings would be written across the screen
    constants.HF_HUB_DISABLE_TELEMETRY = True  # else it first asks the hub which programs it may be running in
    set_client_factory(client)
