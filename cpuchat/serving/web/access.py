"""Who may open the app in a browser where programs need a token: who gives it once, in the address.

A cookie remembers that. It opens nothing but the pages of the app: other pages could make a browser send it elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.responses import Response

_COOKIE = "cpuchat_web"
COOKIE_SECONDS = 24 * 3600
"""For which a browser is known; then it needs the token once more."""
_OPEN = ("/watch/", "/static/")
"""A spectator's link has an id that nobody guesses."""


class WebAccess:
    """`token` "" = none needed."""

    def __init__(self, token: str) -> None:
        self._token = token

    def lets_in(self, path: str, headers: Headers) -> bool:
        """Return whether a page may be opened without a bearer token; `/` itself checks `is_known`."""
        return path == "/" or path.startswith(_OPEN) or (path.startswith("/chat/") and self.is_known(headers))

    def is_known(self, headers: Headers) -> bool:
        """Return whether no token is needed, or the cookie is there."""
        if not self._token:
            return True
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            return False
        found = cookies.get(_COOKIE)
        until = found.value.partition(".")[0] if found is not None else ""
        if found is None or not hmac.compare_digest(found.value.encode(), self._cookie(until).encode()):
            return False
        return time.time() < int(until)

    def _cookie(self, until: str) -> str:
        """Return the cookie that is valid until then (seconds since 1970): a browser may keep one for longer."""
        return f"{until}.{hmac.new(self._token.encode(), f'cpuchat web {until}'.encode(), 'sha256').hexdigest()}"

    def log_in(self, given: str, response: Response, *, secure: bool) -> bool:
        """Give the browser the cookie if `given` is the token; returns whether it is."""
        digests = (hashlib.sha256(one.encode("utf-8", "replace")).digest() for one in (given, self._token))
        if not hmac.compare_digest(*digests):
            return False
        # Not `strict`: the browser would not send it after a click on a link with the token in a mail or a chat.
        value = self._cookie(str(int(time.time()) + COOKIE_SECONDS))
        response.set_cookie(_COOKIE, value, COOKIE_SECONDS, httponly=True, samesite="lax", secure=secure)
        return True
