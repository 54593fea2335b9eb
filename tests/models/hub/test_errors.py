"""Tests what huggingface_hub and httpx raise, in our own words."""

from __future__ import annotations

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

from cpuchat.base.errors import AccessDenied, HubError, HubOffline, RateLimited, TooSlow
from cpuchat.models.hub.errors import seconds_to_wait, translate

SIGNED = "https://cdn.example/file?X-Amz-Signature=0123secret"


def refused(status: int, headers: dict[str, str] | None = None, *, token: bool = True) -> HfHubHTTPError:
    sent = {"authorization": "Bearer hf_secret"} if token else {}
    answer = httpx.Response(status, headers=headers, request=httpx.Request("GET", SIGNED, headers=sent))
    return HfHubHTTPError(f"{status} for {SIGNED} with hf_secret", response=answer)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 503])
def test_neither_tokens_nor_signed_addresses_get_into_a_message(status: int) -> None:
    echo = "Bearer hf_secret and hf_secret were refused \x1b[31m"
    told = str(translate(refused(status, {"x-error-message": echo}), "o/n"))
    assert "secret" not in told
    assert "cdn.example" not in told
    assert "\x1b" not in told


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OfflineModeIsEnabled("offline"), HubOffline),
        (httpx.ConnectError("[Errno 111] Connection refused"), HubOffline),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), HubOffline),
        (httpx.ReadTimeout("slow"), TooSlow),
        (httpx.TooManyRedirects("20"), HubError),
        (refused(429), RateLimited),
        (refused(401), AccessDenied),
        (GatedRepoError("gated", response=refused(403).response), AccessDenied),
        (RuntimeError("something else"), HubError),
    ],
)  # fmt: skip
def test_every_error_becomes_one_of_ours_with_a_hint(error: Exception, kind: type[HubError]) -> None:
    told = translate(error, "o/n")
    assert type(told) is kind
    assert told.message.endswith(".")
    assert told.hint.endswith(".")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "12"}, 12.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"ratelimit": '"api";r=0;t=55'}, 55.0),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 -2359"}, None),
        ({"ratelimit": f'"api";r=0;t={"9" * 5000}'}, None),
        ({"retry-after": "7", "ratelimit": '"api";r=0;t=55'}, 7.0),
    ],
)
def test_how_long_a_server_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert seconds_to_wait(httpx.Headers(headers)) == seconds
