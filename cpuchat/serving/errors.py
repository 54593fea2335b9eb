"""Requests that are not answered: why, and the error object that a client gets, in the form of its dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from cpuchat.base.text import clean_line
from cpuchat.protocol.messages import Failed

_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 501: "not_supported_error",
    503: "unavailable_error",
}  # fmt: skip
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    503: "overloaded_error",
}  # fmt: skip
ANTHROPIC_PATH = "/v1/messages"
_BY_CODE = {
    "context_full": (400, "context_length_exceeded"),
    "usage": (400, "invalid_request"),
    "template": (400, "chat_template_failed"),
    "grammar_unmet": (400, "invalid_grammar"),
    "does_not_fit": (503, "does_not_fit"),
    "interrupted": (503, "shutting_down"),
}


@dataclass(eq=False)
class Refusal(Exception):
    """Raised when a request is refused or fails. `message`: what happened, and what to do. `code`: a stable word for
    programs ("context_length_exceeded"). `param`: the field of the request that is at fault. `retry_after`: seconds; 0:
    a retry is of no use. `more`: further fields of the error object. `hint`: for whoever runs the server; not sent."""

    status: int
    message: str
    code: str = "invalid_request"
    param: str | None = field(default=None, kw_only=True)
    retry_after: int = field(default=0, kw_only=True)
    more: dict[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    hint: str = field(default="", kw_only=True)

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of(cls, failed: Failed, n_ctx: int) -> Refusal:
        """Return the refusal for a failure of the engine, whose context has `n_ctx` tokens."""
        status, code = _BY_CODE.get(failed.code, (500, failed.code))
        # Hints name options of the program and places of files: of no use over the network.
        more: dict[str, Any] = {}
        if failed.code == "context_full":
            more = {"n_ctx": n_ctx, **({"n_prompt_tokens": failed.n_tokens} if failed.n_tokens else {})}
        return cls(status, failed.message, code, more=more, hint=failed.hint if status >= 500 else "")

    @property
    def logged(self) -> str:
        """Return what the log says: of a client's error only its code and field, because its message may quote."""
        if self.status >= 500:
            return clean_line(self.message)
        return f"{self.code} ({self.param})" if self.param else self.code

    def anthropic(self) -> dict[str, Any]:
        """Return the error object in Anthropic's form."""
        message = self.message
        if self.code == "context_length_exceeded" and "n_prompt_tokens" in self.more:  # words that agents look for
            message = f"prompt is too long: {self.more['n_prompt_tokens']} tokens > {self.more['n_ctx']} maximum"
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        """Return the error object in OpenAI's form, as JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        if self.code == "context_length_exceeded":
            kind = "exceed_context_size_error"  # as llama-server; the code is OpenAI's
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.more}
        return msgspec.json.encode({"error": error})

    def response(self, headers: Mapping[str, str] | None = None, path: str = "") -> Response:
        """Return the response to a request of `path`, with these headers too."""
        found = {**(headers or {}), "content-type": "application/json"}
        if self.retry_after:
            found["retry-after"] = str(self.retry_after)
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        body = msgspec.json.encode(self.anthropic()) if path.startswith(ANTHROPIC_PATH) else self.body
        return Response(body, self.status, found)


def field_error(param: str, reason: str, code: str = "invalid_request") -> Refusal:
    """Return the refusal of a field."""
    return Refusal(400, f"`{param}`: {reason}.", code, param=param)
