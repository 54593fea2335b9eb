"""An answer in words, figures and JSON: its progress, why it stopped, its speed, and what its prompt reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from cpuchat.config.servers import ServerModel, Source, host
from cpuchat.measure.difference import of_answer
from cpuchat.models.gguf.header import known_as
from cpuchat.present.drafts_off import off_words
from cpuchat.protocol.messages import (
    ContextTrimmed,
    Failed,
    GenerationFinished,
    LoadProgress,
    PrefillProgress,
    Reconnecting,
    Sampling,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Reuse, Timings
from cpuchat.telemetry import units
from cpuchat.telemetry.units import plural

if TYPE_CHECKING:
    from cpuchat.chats.records import WhenFull
    from cpuchat.telemetry.roofline import Roofline

_CHANGED = {
    "system": ("the system prompt changed", "system prompt changed"),
    "trimmed": ("the oldest messages were left out", "old messages left out"),
    "message": ("message {:,} was edited", "message {:,} was edited"),
    "template": ("the template changed message {:,}", "message {:,} re-rendered"),
}


def restored(reuse: Reuse) -> str:
    """`restored from disk in 40 ms`; "" for what was in the context already."""
    return f"restored from {reuse.source} in {' '.join(units.duration(reuse.ms / 1e3))}" if reuse.source else ""


def reasons(reuse: Reuse) -> list[str]:
    """Say why not more was reused: `re-evaluated: message 2 was edited`."""
    found = [f"re-evaluated: {_CHANGED[reuse.changed][0].format(reuse.message)}"] if reuse.changed else []
    if reuse.again:
        found.append(f"no checkpoint nearer: {plural(reuse.again, 'token')} re-evaluated")
    return found


def brief_reasons(reuse: Reuse) -> list[str]:
    """Say the same in about 28 characters each: `message 2 was edited`, `210 tokens re-evaluated`."""
    found = [_CHANGED[reuse.changed][1].format(reuse.message)] if reuse.changed else []
    return [*found, *([f"{plural(reuse.again, 'token')} re-evaluated"] if reuse.again else [])]


def note(timings: Timings | None) -> str:
    """Return what is not kept, and which setting helps, as a sentence; "" for nothing."""
    text = timings.reuse.note.rstrip(".") if timings is not None and timings.reuse is not None else ""
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def kept_states(model: ModelInfo | None) -> str:
    """`checkpoints 50.0 MB each, up to 1.9 GB in memory`: what chats may keep; "" for nothing."""
    if model is None or not model.state_memory:
        return ""
    checkpoints = f"checkpoints {units.size(model.partial_state)} each, " if model.partial_state else ""
    return f"{checkpoints}up to {units.size(model.state_memory)} in memory"


# An answer that is simply complete gets no word.
_STOP_REASONS = {
    "end": "",
    "stop_string": "stop string",
    "max_tokens": "token limit reached",
    "context": "context full",
    "cancelled": "stopped",
    "worker_died": "worker crashed",
    "worker_stuck": "worker ended",
    "server_unreachable": "connection lost",
    "server_busy": "server busy",
    "server": "server failed",
}
_PHASES = {
    "reading": "reading the file", "preparing": "laying out weights", "warming": "warming up",
    "measuring": "comparing kernels",
}  # fmt: skip
WHEN_FULL: dict[WhenFull, str] = {"compact": "Summarize", "drop": "Drop oldest turns", "stop": "Stop"}
"""What a chat can do when it no longer fits the context."""
SERVER_PHASES = ("connecting", "waiting")
"""Phases of a load at a server in place of a worker."""
_SERVER_LOADS = "the server is loading the model"


def percent_done(share: float) -> str:
    """Return whole percents, cut off: the same wherever progress is shown."""
    return str(int(100 * min(1.0, share) + 1e-9))


def load_begun(source: Source) -> str:
    """Format the state line of a load that begins: `connecting to 127.0.0.1:8080`, or `loading NAME`."""
    return f"connecting to {host(source.server)}" if isinstance(source, ServerModel) else f"loading {known_as(source)}"


def load_progress(name: str, event: LoadProgress) -> str:
    """Format the state line of a load; the percentage keeps its width."""
    share = f"{percent_done(event.done / event.total):>3} %" if event.total > 1 else ""  # one step has no share
    if event.phase in SERVER_PHASES:
        return f"connecting to {name}" if event.phase == "connecting" else _SERVER_LOADS
    if event.phase == "calibrating":
        return f"loading · calibrating when drafts pay {share}".rstrip()
    phase, _, draft = event.phase.partition(" ")
    what = f"{'draft model, ' if draft else ''}{_PHASES.get(phase, phase)}"
    return f"loading {name} · {what} {share}".rstrip()


def prefill_progress(event: PrefillProgress, left_s: float | None = None) -> str:
    """Format the state line of prefill: `reading the prompt · 512 of 4,097 tokens, 300 cached · 6 s left`; the time
    from one second on, then why not more was reused."""
    told = event.reuse or Reuse()
    cached = f", {event.cache_n:,} {f'from {told.source}' if told.source else 'cached'}" if event.cache_n else ""
    left = units.time_left(left_s) if left_s is not None and left_s >= 1 else ""
    tokens = f"{event.processed:,} of {plural(event.total, 'token')}{cached}"
    return " · ".join(filter(None, ("reading the prompt", tokens, left, *brief_reasons(told)[:1])))


def reconnecting(event: Reconnecting) -> str:
    """Format the state line while a request is not answered: `reconnecting, attempt 2 of 5`."""
    return f"reconnecting, attempt {event.attempt} of {event.attempts}" if event.attempt else _SERVER_LOADS


def options(own: Mapping[str, Any]) -> str:
    """Format what a chat has of its own, by key: `temperature 0.2 · reasoning on, at most 500 tokens`; "" for none."""
    parts = [
        f"{key.removeprefix('sampling.').replace('_', '-')} {value:g}"
        for key, value in own.items()
        if key.startswith("sampling.")
    ]
    choice, budget = own.get("chat.reasoning"), own.get("chat.reasoning_budget")
    if choice is not None or budget is not None:
        limit = "" if budget is None else f"at most {plural(budget, 'token')}" if budget else "no limit"
        parts.append(", ".join(filter(None, (f"reasoning {choice or ''}".rstrip(), limit))))
    if (context := own.get("engine.ctx")) is not None:
        parts.append(f"context {units.tokens(context) if context else 'auto'}")
    return " · ".join(parts)


def context_trimmed(event: ContextTrimmed) -> str:
    """Explain which messages were left out of the context, in one sentence."""
    dropped = f"{plural(event.dropped_messages, 'message')} ({plural(event.dropped_tokens, 'token')})"
    return f"The {event.n_ctx:,}-token context has no room for the oldest {dropped}, left out but kept in the chat."


def left_out(event: ContextTrimmed) -> str:
    """Format the same in a few words, for the line under the answer."""
    return f"without the oldest {plural(event.dropped_messages, 'message')}"


def summarized(finished: GenerationFinished, trimmed: ContextTrimmed | None) -> str:
    """Say what became of the summary of a chat; `trimmed`: what did not fit into the request for it."""
    said = ["Summarized. The summary replaces earlier messages in the context."]
    if trimmed is not None:
        said.append(f"It is without the oldest {plural(trimmed.dropped_messages, 'message')}, which did not fit.")
    if finished.stop_reason in ("max_tokens", "context"):
        said.append(f"It was cut off at {plural(finished.timings.predicted_n, 'token')}.")
    return " ".join(said)


def stop_reason(reason: str) -> str:
    """Return why an answer ended, in words; "" when it is complete."""
    return _STOP_REASONS.get(reason, reason.replace("_", " "))


def failure(event: Failed) -> str:
    """Return what happened, then what to do, in paragraphs of plain text."""
    lines = [event.message or "Request failed."]
    if event.hint:
        lines.append(event.hint)
    if event.code == "worker_died":
        lines.append("The chat is saved. Your next message restarts the model.")
    return "\n\n".join(lines)


def summary(
    timings: Timings | None, reason: str, sampling: Sampling | None = None, default: Sampling | None = None
) -> str:
    """Format the line under an answer: `128 tokens · 41.3 tok/s · 1.64× vs plain · first token 0.21 s · temperature 0 ·
    stopped`. Sampling options are given where they differ from those of `default`, the model's."""
    parts: list[str] = []
    if timings is not None and timings.predicted_n:
        parts += [*_speed(timings), _cores(timings)]
        parts += [_speed_up(timings) if timings.draft_n else "", _first_token(timings)]
    return " · ".join(filter(None, (*parts, *_sampling(sampling, default or Sampling()), stop_reason(reason))))


def full_summary(timings: Timings, reason: str, roofline: Roofline | None = None) -> str:
    """Format all figures of an answer in one line; `roofline` is that of the answer."""
    first_token = _first_token(timings) if timings.predicted_n else ""
    parts = [*_speed(timings), _cores(timings), first_token, _prompt(timings)]
    if timings.reuse is not None:
        parts += [restored(timings.reuse), *reasons(timings.reuse)]
    parts += [_drafting(timings), "" if roofline is None else _bandwidth(roofline), stop_reason(reason)]
    return " · ".join(filter(None, parts))


def _sampling(sampling: Sampling | None, default: Sampling) -> list[str]:
    """Format what is not as by default: `temperature 0`, `top-p 0.9`."""
    if sampling is None:
        return []
    changed = [name for name in Sampling.__struct_fields__ if getattr(sampling, name) != getattr(default, name)]
    if not {"repeat_penalty", "presence_penalty", "frequency_penalty"} & {*changed}:
        changed = [name for name in changed if name != "repeat_last_n"]  # it is the window of the penalties
    return [f"{name.replace('_', '-')} {getattr(sampling, name)}".removesuffix(".0") for name in changed]


def _speed(timings: Timings) -> list[str]:
    rate = timings.predicted_per_second
    mark = "≈ " if timings.approximate else ""  # counted by the parts that a server sent
    return [f"{mark}{plural(timings.predicted_n, 'token')}", f"{mark}{units.rate(rate)} tok/s" if rate else ""]


def _cores(timings: Timings) -> str:
    """Say why an answer was slow whose threads waited for their cores: `cores 34 % yours · other programs ...`."""
    share = timings.cores_share
    return "" if share is None else f"cores {100 * share:.0f} % yours · other programs have the rest"


def _speed_up(timings: Timings) -> str:
    """`1.64× vs plain`, with ≈ where one answer does not tell which is faster."""
    if timings.speed_up is None:
        return ""
    about = "" if of_answer(timings.speed_up).verdict in ("faster", "slower") else "≈"
    return f"{about}{units.factor(timings.speed_up)} vs plain"


def _first_token(timings: Timings) -> str:
    queued = "" if timings.queued_s is None else f" ({' '.join(units.duration(timings.queued_s))} queued)"
    return f"first token {' '.join(units.duration(timings.ttft_ms / 1e3))}{queued}"


def _prompt(timings: Timings) -> str:
    """Format `prompt 262 tok/s (512 new, 1,024 cached)`; `prompt 1,536 tokens` where reused ones are not known."""
    if not timings.reused_known:
        return f"prompt {plural(timings.prompt_n, 'token')}" if timings.prompt_n else ""
    prompt, rate = f"{timings.prompt_n:,} new, {timings.cache_n:,} cached", timings.prompt_per_second
    return f"prompt {prompt}" if rate is None else f"prompt {units.rate(rate)} tok/s ({prompt})"


def _drafting(timings: Timings) -> str:
    """Format `72 % of 410 drafted accepted (3.1 per pass, 1.42× vs plain)`, or why nothing was drafted."""
    if not timings.draft_n:
        off = timings.speculation.off if timings.speculation is not None else None
        return f"drafts off: {off_words(off)}" if off is not None and off.is_verdict else ""
    share = f"{100 * timings.draft_n_accepted / timings.draft_n:.0f} %"
    per_pass = "" if timings.tokens_per_pass is None else f"{timings.tokens_per_pass:.1f} per pass"
    figures = ", ".join(filter(None, (per_pass, _speed_up(timings))))
    accepted = f"{share} of {timings.draft_n:,} drafted accepted"
    return f"{accepted} ({figures})" if figures else accepted


def _bandwidth(roofline: Roofline) -> str:
    """Format `44 of 51 GB/s (86 %)`: what the model read, against the peak; ≈ before an estimated one."""
    read, peak, share = roofline.estimate.value, roofline.peak.value, roofline.utilization
    if read is None or peak is None:
        return ""
    if share.value is None:
        return share.why
    words = f"{100 * share.value:.0f} %{f', {roofline.off}' if roofline.off else ''}"
    return f"{units.bandwidth(read)} of {'≈' * peak.estimated}{units.bandwidth(peak.bytes_per_s)} GB/s ({words})"


def timings_json(timings: Timings) -> dict[str, Any]:
    """Return the figures in llama-server's field names; null where there is nothing to divide."""
    fields: dict[str, Any] = timings.fields()
    if timings.approximate:
        fields["approximate"] = True
    if timings.reuse is not None:
        fields["reuse"] = msgspec.to_builtins(timings.reuse)
    if timings.speculation is not None:
        figures = timings.speculation
        here = {} if figures.source else {
            "draft_passes": figures.draft_passes,
            "draft_ms": figures.draft_ms,
            "depth": figures.depth,
        }  # fmt: skip
        fields["speculation"] = {
            "passes": figures.passes,
            "tokens_per_pass": timings.tokens_per_pass,
            "speed_up": timings.speed_up,
            "plain_ms": figures.plain_ms,
            **here,
            "by_position": [{"draft_n": n, "draft_n_accepted": accepted} for n, accepted in figures.by_position],
            "drafters": msgspec.to_builtins(figures.by_drafter),
            "reason": off_words(figures.off),
            **({"source": figures.source} if figures.source else {}),
        }
    return fields


def roofline_json(roofline: Roofline) -> dict[str, Any]:
    """Return how close the answer came to the limits of this machine; null for unknown figures.

    Bytes per second; `bandwidth` is what the model reads by its header, `peak` what was measured with the same cores,
    `utilization` the one by the other. `ceilings` in tok/s. `limit`: what takes most of a pass."""
    peak = roofline.peak.value
    return {
        "bandwidth": roofline.estimate.value,
        "source": "estimated",
        "bytes_per_pass": roofline.bytes_per_pass.value,
        "peak": peak.bytes_per_s if peak is not None else None,
        "peak_source": peak.source if peak is not None else None,
        "utilization": roofline.utilization.value,
        "ceilings": {
            "no_draft": roofline.ceiling_plain.value,
            "this_acceptance": roofline.ceiling_accepted.value,
        },
        "limit": roofline.limit or None,
        "note": roofline.off or (roofline.utilization.why if roofline.estimate.value is not None else ""),
    }
