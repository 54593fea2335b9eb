"""What the command line prints: answers on stdout, everything about them on stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, TextIO

from cpuchat.cli.output import cleaned
from cpuchat.errors import CpuchatError
from cpuchat.protocol import LoadProgress, PrefillProgress, SpeculationFigures, StopReason, Timings
from cpuchat.telemetry import units
from cpuchat.telemetry.units import size as size
from cpuchat.text import clean, replace_unsafe

if TYPE_CHECKING:
    from cpuchat.telemetry.roofline import Roofline

STOP_WORDS: dict[StopReason, str] = {
    "end": "end",
    "stop_string": "stop string",
    "max_tokens": "token limit",
    "context": "context full",
    "cancelled": "stopped",
}


class OutputClosed(Exception):
    """The reader of our stdout is gone (`| head`): end quietly."""


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


class Terminal:
    """Writes the answer to stdout as it comes; notes, progress and reasoning to stderr.

    All of it is cleaned of what a terminal would act on, into pipes and files too; `raw` leaves the answer as it is.
    `quiet` leaves only answers and errors. `moves`: whether `status` can show a line.
    """

    def __init__(self, *, quiet: bool = False, show_reasoning: bool = False, raw: bool = False) -> None:
        self._out = cleaned(sys.stdout)
        self._err = cleaned(sys.stderr)
        self._raw = raw
        self._out_tty = is_terminal(sys.stdout)
        self._err_tty = is_terminal(sys.stderr)
        self._quiet = quiet
        self._reasoning = show_reasoning or (self._err_tty and not quiet)
        dumb = os.environ.get("TERM", "dumb") == "dumb"
        self.moves = self._err_tty and not dumb
        self._styled = self.moves and not os.environ.get("NO_COLOR")
        self._progress_shown = False
        self._out_open_line = False
        self._err_open_line = False
        self._reasoning_last = False

    def answer(self, text: str) -> None:
        """Print a piece of the answer now.

        Raises:
            OutputClosed: nobody reads stdout any more.
            CpuchatError: stdout cannot be written (disk full).
        """
        if not text:
            return
        self.clear_progress()
        if self._reasoning_last:
            self._end_reasoning()
        self._write_out(text, raw=self._raw)
        self._out_open_line = not text.endswith("\n")

    def reasoning(self, text: str) -> None:
        """Print a piece of what the model thinks aloud, dimmed, if it is wanted."""
        if not text or not self._reasoning:
            return
        self.clear_progress()
        self.end_answer()
        if self._styled:
            self._write_err("\x1b[2m", raw=True)
        self._write_err(text)
        if self._styled:
            self._write_err("\x1b[22m", raw=True)
        self._err_open_line = not text.endswith("\n")
        self._reasoning_last = True

    def end_answer(self) -> None:
        """Finish the last line of the answer."""
        if self._out_open_line:
            self._write_out("\n")
            self._out_open_line = False

    def line(self, text: str = "") -> None:
        """Print one line of our own on stdout."""
        self.clear_progress()
        self._write_out(text + "\n")

    def note(self, text: str) -> None:
        """Print one line on stderr, unless quiet."""
        if not self._quiet:
            self._err_line(text)

    def warn(self, text: str) -> None:
        """Print one line on stderr, quiet or not."""
        self._err_line(text)

    def progress(self, event: LoadProgress | PrefillProgress) -> None:
        """Show how far a load or a prompt is, on one line that the next output replaces; terminals only."""
        match event:
            case LoadProgress(phase=phase, done=done, total=total):
                share = f" {100 * done // total} %" if total else ""
                text = f"{phase} the model{share}"
            case PrefillProgress(processed=processed, total=total):
                text = f"reading the prompt {processed:,} of {total:,} tokens"
        self.status(text)

    def status(self, text: str) -> None:
        """Show one line on stderr that the next output replaces; terminals only."""
        if self._quiet or not self.moves:
            return
        width = shutil.get_terminal_size().columns - 1
        self._write_err("\r\x1b[2K", raw=True)
        self._write_err(clean(text)[:width])
        self._progress_shown = True

    def clear_progress(self) -> None:
        if self._progress_shown:
            self._write_err("\r\x1b[2K", raw=True)
            self._progress_shown = False

    def _end_reasoning(self) -> None:
        self._write_err("\n\n" if self._err_open_line else "\n")
        self._err_open_line = self._reasoning_last = False

    def _err_line(self, text: str) -> None:
        self.clear_progress()
        if self._out_tty:
            self.end_answer()
        if self._err_open_line:
            self._write_err("\n")
            self._err_open_line = False
        self._reasoning_last = False
        self._write_err(text + "\n")

    def _write_out(self, text: str, *, raw: bool = False) -> None:
        if self._out is None:
            raise OutputClosed
        try:
            (self._out.write_raw if raw else self._out.write)(text)
            self._out.flush()
        except BrokenPipeError:
            raise OutputClosed from None
        except OSError as error:
            raise CpuchatError(f"Cannot write to standard output: {error.strerror}.") from None

    def _write_err(self, text: str, *, raw: bool = False) -> None:
        if self._err is None:
            return
        try:
            (self._err.write_raw if raw else self._err.write)(text)
            self._err.flush()
        except OSError:
            self._err = None  # nobody listens; the answer still counts


def paragraph(text: str, first: str = "", rest: str = "") -> list[str]:
    """`text` in lines as wide as the terminal, at most 100 characters; `first` and `rest` are put before them."""
    import textwrap

    return textwrap.wrap(text, columns(), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def columns() -> int:
    """How wide text is to be: as the terminal, 40 to 100 characters; 100 without one."""
    return max(40, min(shutil.get_terminal_size((100, 24)).columns, 100))


def error_text(error: CpuchatError) -> str:
    """The form of every failure on stderr: what happened, and below it what to do."""
    hint = f"\n  {error.hint}" if error.hint else ""
    return clean(f"cpuchat: {error.message}{hint}")


def summary(timings: Timings, stop_reason: StopReason, roofline: Roofline | None = None) -> str:
    """The figures of one answer in one line; `roofline` is that of the answer."""
    tokens = "1 token" if timings.predicted_n == 1 else f"{timings.predicted_n:,} tokens"
    parts = [tokens, _rate(timings.predicted_per_second)]
    if timings.predicted_n:
        parts.append(f"first token {' '.join(units.duration(timings.ttft_ms / 1e3))}")
    parts.append(
        f"prompt {_rate(timings.prompt_per_second)} ({timings.prompt_n:,} new, {timings.cache_n:,} reused)",
    )
    parts += _drafting(timings)
    if roofline is not None:
        parts += _bandwidth(roofline)
    parts.append(STOP_WORDS[stop_reason])
    return " · ".join(parts)


def _drafting(timings: Timings) -> list[str]:
    """`72 % of 410 drafted accepted (3.1 per pass, 1.42×)`, or why nothing was drafted."""
    if timings.draft_n:
        share = f"{100 * timings.draft_n_accepted / timings.draft_n:.0f} %"
        figures = []
        if timings.tokens_per_pass is not None:
            figures.append(f"{timings.tokens_per_pass:.1f} per pass")
        if timings.speed_up is not None:
            figures.append(f"{timings.speed_up:.2f}×")
        return [f"{share} of {timings.draft_n:,} drafted accepted" + (f" ({', '.join(figures)})" if figures else "")]
    reason = timings.speculation.reason if timings.speculation is not None else ""
    return [f"speculation off: {reason.removeprefix('off: ').rstrip('.')}"] if reason else []


def _bandwidth(roofline: Roofline) -> list[str]:
    """`44 of 51 GB/s (86 %)`: what the model read, against the measured peak."""
    if roofline.estimate is None or roofline.peak is None:
        return []
    if roofline.utilization is None:
        return [roofline.why_missing("utilization")]
    share = f"{100 * roofline.utilization:.0f} %{f', {roofline.off}' if roofline.off else ''}"
    return [f"{units.bandwidth(roofline.estimate)} of {units.bandwidth(roofline.peak.bytes_per_s)} GB/s ({share})"]


def _rate(value: float | None) -> str:
    return "n/a tok/s" if value is None else f"{units.rate(value)} tok/s"


def timings_json(timings: Timings) -> dict[str, Any]:
    """The figures in llama-server's field names; null where there is nothing to divide.

    `predicted_ms` runs from the first to the last token, so the rates divide by `predicted_n - 1`.
    """
    spans = timings.predicted_n - 1
    fields: dict[str, Any] = {
        "cache_n": timings.cache_n,
        "prompt_n": timings.prompt_n,
        "prompt_ms": timings.prompt_ms,
        "prompt_per_token_ms": timings.prompt_ms / timings.prompt_n if timings.prompt_n else None,
        "prompt_per_second": timings.prompt_per_second,
        "predicted_n": timings.predicted_n,
        "predicted_ms": timings.predicted_ms,
        "predicted_per_token_ms": timings.predicted_ms / spans if spans > 0 else None,
        "predicted_per_second": timings.predicted_per_second,
    }
    if timings.draft_n:
        fields["draft_n"] = timings.draft_n
        fields["draft_n_accepted"] = timings.draft_n_accepted
    if timings.speculation is not None:
        fields["speculation"] = _speculation_json(timings, timings.speculation)
    return fields


def roofline_json(roofline: Roofline) -> dict[str, Any]:
    """How close the answer came to what this machine can do; null where it is not known.

    Bytes per second; `bandwidth` is what the model reads by its header, `peak` what was measured with the same cores,
    `utilization` the one by the other. `ceilings` in tok/s. `limit`: what takes most of a pass.
    """
    return {
        "bandwidth": roofline.estimate,
        "source": "model",
        "bytes_per_pass": roofline.bytes_per_pass,
        "peak": roofline.peak.bytes_per_s if roofline.peak is not None else None,
        "peak_source": roofline.peak.source if roofline.peak is not None else None,
        "utilization": roofline.utilization,
        "ceilings": {
            "no_draft": roofline.ceiling_plain,
            "this_acceptance": roofline.ceiling_accepted,
            "compute": roofline.ceiling_compute,
        },
        "limit": roofline.limit or None,
        "note": roofline.off or (roofline.why_missing("utilization") if roofline.estimate is not None else ""),
    }


def _speculation_json(timings: Timings, figures: SpeculationFigures) -> dict[str, Any]:
    """`by_position` counts for the first, second, ... token of a draft; `reason` says why nothing is drafted, "" if
    something is."""
    return {
        "passes": figures.passes,
        "tokens_per_pass": timings.tokens_per_pass,
        "speed_up": timings.speed_up,
        "plain_ms": figures.plain_ms,
        "draft_passes": figures.draft_passes,
        "draft_ms": figures.draft_ms,
        "depth": figures.depth,
        "overlap": figures.overlap,
        "by_position": [{"draft_n": n, "draft_n_accepted": accepted} for n, accepted in figures.by_position],
        "drafters": [
            {"name": one.name, "draft_n": one.draft_n, "draft_n_accepted": one.draft_n_accepted}
            for one in figures.by_drafter
        ],
        "reason": figures.reason,
    }


def error_json(error: CpuchatError) -> dict[str, Any]:
    return {"error": {"code": error.code, "message": error.message, "hint": error.hint}}


def json_line(value: Any) -> str:
    """One line of JSON with everything escaped that `clean` would replace: safe to look at, and nothing is lost."""
    return replace_unsafe(json.dumps(value, ensure_ascii=False), lambda character: json.dumps(character)[1:-1])
