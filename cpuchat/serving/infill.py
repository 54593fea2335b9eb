"""llama-server's /infill: what stands between two texts, for the plug-ins of editors (llama.vim, llama.vscode)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cpuchat.protocol.messages import AnyEvent, FillIn, Generate, GenerationFinished, PrefillProgress, TextDelta
from cpuchat.serving.replies import Reply, sent_event
from cpuchat.serving.requests import INT32, ParsedRequest, RequestBody, RequestReader, Unsupported

_STOP_TYPES = {"end": "eos", "stop_string": "word"}
_NO_FORM = "answers of a form are not filled in; send the request to /v1/completions with a `suffix`"


class ExtraText(msgspec.Struct):
    text: str
    filename: str | None = None


class InfillBody(RequestBody, kw_only=True):
    """`prompt` is the beginning of the text that is asked for; `n_predict` 0 evaluates the prompt only."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraText] | None = None
    prompt: str | None = None
    n_predict: int | None = None
    n_indent: Annotated[int, Meta(ge=0)] | None = None
    t_max_predict_ms: int | None = None
    stop: str | list[str] | None = None
    response_fields: list[str] | None = None
    lora: Annotated[Any, Unsupported("adapters are not supported", ([],))] = None
    grammar: Annotated[Any, Unsupported(_NO_FORM, ("",))] = None
    json_schema: Annotated[Any, Unsupported(_NO_FORM, ({},))] = None


def read_infill(reader: RequestReader, data: bytes) -> ParsedRequest:
    """Read the body of a request to fill in. It is greedy unless it has a temperature. Raises Refusal."""
    reader.require_fill_in(501)
    body = reader.body(data, InfillBody)
    if body.temperature is None:
        body.temperature = 0.0
    files = [one for one in body.input_extra or () if one.text]
    fill = FillIn(
        suffix=body.input_suffix,
        files=tuple((one.filename or "tmp", one.text) for one in files),
        n_indent=min(body.n_indent or 0, reader.n_ctx),
        max_ms=max(min(body.t_max_predict_ms or 0, INT32), 0),
    )
    return reader.parsed(
        body,
        Generate(prompt=body.input_prefix + (body.prompt or ""), fill=fill),
        "input_prefix",
        max_tokens=1 if body.n_predict == 0 else body.n_predict,
        stop=body.stop,
        prompt_only=body.n_predict == 0,
        fields=tuple(body.response_fields or ()),
    )


class InfillReply(Reply):
    """An answer of /infill, in the form of llama-server's /completion."""

    def whole(self) -> bytes:
        return msgspec.json.encode(self._ending(self.progress.text))

    def rendered(self, event: AnyEvent) -> bytes | None:
        match event:
            case TextDelta() if not self.parsed.prompt_only:
                return sent_event({"index": 0, "content": event.text, "stop": False})
            case GenerationFinished():
                return sent_event(self._ending(""))
            case PrefillProgress():
                return b"" if event.processed == event.cache_n else None
        return None

    def _ending(self, content: str) -> dict[str, Any]:
        """Return the last object; `a/b` of the fields that are asked for is a value inside `a`."""
        end, timings = self.progress.finished, self.progress.timings
        assert end is not None
        word = end.stop_string if end.stop_string in self.parsed.request.stop else ""  # else it ends at a line
        reason = "limit" if end.stop_reason == "stop_string" and not word else _STOP_TYPES.get(end.stop_reason, "limit")
        found: dict[str, Any] = {
            "index": 0,
            "content": "" if self.parsed.prompt_only else content,
            "stop": True,
            "model": self.model,
            "tokens_predicted": timings.predicted_n,
            "tokens_evaluated": timings.cache_n + timings.prompt_n,
            "tokens_cached": timings.n_past,
            "truncated": False,
            "stop_type": reason,
            "stopping_word": word,
            "timings": self.progress.timing_fields,
        }
        if not self.parsed.fields:
            return found
        flat = found | {f"timings/{name}": value for name, value in found["timings"].items()}
        return {name: flat[name] for name in self.parsed.fields if name in flat}
