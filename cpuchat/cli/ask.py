"""`cpuchat ask`: one question, one answer, for the shell and for scripts."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from cpuchat.base.errors import CpuchatError, GrammarUnmet, Interrupted, UsageError
from cpuchat.cli.options import (
    answering_backend,
    answering_model_option,
    engine_options,
    file_option,
    key_ring,
    model_path,
    overridden,
    require_draft_in_use,
    section_options,
    server_model,
    server_option,
    setting,
    stacked,
    with_preset,
)
from cpuchat.cli.output import error_json, error_text, json_line
from cpuchat.cli.question import TextCommand, attached, compose, require_text, standard_input
from cpuchat.cli.tools import start_tools, tools_of, tools_options
from cpuchat.grammar.gbnf import check_grammar
from cpuchat.grammar.limits import LONGEST_FORM
from cpuchat.grammar.schema import schema_grammar
from cpuchat.protocol.messages import AnyEvent, Generate, GenerationFinished
from cpuchat.telemetry.units import plural

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from cpuchat.chats.records import Attachment
    from cpuchat.cli.aloud import Aloud
    from cpuchat.cli.session import Session, Sink, StreamedAnswer
    from cpuchat.cli.terminal import TerminalOutput
    from cpuchat.config.settings import Settings
    from cpuchat.protocol.model_info import ModelInfo
    from cpuchat.session.conversation import Conversation
    from cpuchat.speech.speaker import Speaker
    from cpuchat.telemetry.roofline import Roofline


_EPILOG = """\b
Examples:
  cpuchat ask "Why is decoding slower than reading the prompt?"
  cpuchat ask --model ~/models/qwen.gguf --temperature 0 "Name a prime number"
  git diff | cpuchat ask "Write a commit message for this:"
  cpuchat ask --file src/main.py:10-80 --file notes.md "What does this do?"
  cpuchat ask --server http://127.0.0.1:8080 "Hello"
  cpuchat ask --preset review "$(git diff)"
  cpuchat ask --tools files "Where is the port of the server set?"
  cpuchat ask --speak "Tell me a short story"
  cpuchat ask --json "Hello" | jq .timings.predicted_per_second
  cpuchat ask --json-schema person.json "Who wrote Faust? Answer as JSON: name, born" | jq .name

Options go before the question: from its first word that is no option on, all belongs to it. One that looks like an
option goes after --: cpuchat ask -- --help me. Options default to those of --preset, then to config.toml. The answer
goes to standard output, everything else to standard error. Ctrl+C stops and keeps the partial answer. Control
characters in the answer are replaced by visible ones, also in pipes and files (not with --raw-output); --json escapes
them.

Exit codes: 0 answered, 2 wrong usage or settings, 3 no such model, 4 damaged or unsupported model,
5 not enough memory, 6 question longer than the context, 7 chat template failed, 8 worker crashed,
9 llama.cpp is missing or unsupported, 10 generation failed, 12 draft model mismatch, 21 server failed
or not reached, 22 API key refused, 23 speech failed, 24 the answer does not match the schema or grammar,
25 an MCP server failed, 130 stopped by Ctrl+C, 1 anything else."""


@click.command(cls=TextCommand, epilog=_EPILOG, short_help="Ask one question; the answer streams to standard output.")
@click.argument("question", nargs=-1)
@stacked(
    answering_model_option(),
    server_option(),
    click.option("--system", metavar="TEXT", help="System prompt; empty = none."),
    setting("chat.preset"),
    click.option(
        "--file",
        "files",
        multiple=True,
        metavar="FILE",
        help="Send this text file too, or FILE:10-80 of it, or the names in a folder; may be given several times.",
    ),
    tools_options(),
    click.option(
        "--raw", is_flag=True, help="Plain completion: no chat template; special tokens in the text are parsed."
    ),
    section_options("sampling"),
    setting("chat.max_tokens"),
    setting("chat.reasoning"),
    setting("chat.reasoning_budget"),
    click.option("--stop", multiple=True, metavar="TEXT", help="Stop string; may be given several times."),
    click.option("--json-schema", metavar="FILE", help="The answer is JSON that is valid under this JSON schema."),
    click.option("--grammar", metavar="FILE", help="The answer matches this grammar (GBNF)."),
    engine_options(),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object when the answer is complete."),
    click.option(
        "--raw-output",
        is_flag=True,
        help="Do not replace control characters in the answer; the terminal will interpret them.",
    ),
    click.option("--speak", is_flag=True, help="Read the answer aloud while it is written; see cpuchat speak --help."),
    file_option("--speak-output", help="Write the speech to a WAV file instead of playing it."),
    click.option("--show-reasoning", is_flag=True, help="Print the reasoning on standard error."),
    click.option("--quiet", "-q", is_flag=True, help="Print only the answer, warnings and errors."),
)
def ask(
    question: tuple[str, ...],
    model: str | None,
    server: str | None,
    system: str | None,
    files: tuple[str, ...],
    raw: bool,
    stop: tuple[str, ...],
    json_schema: str | None,
    grammar: str | None,
    as_json: bool,
    raw_output: bool,
    speak: bool,
    speak_output: Path | None,
    show_reasoning: bool,
    quiet: bool,
    **values: Any,
) -> int:
    """Ask one question and print the answer as it is written.

    QUESTION may also come from standard input; if both are given, standard input follows. Files are sent before.
    """
    base, model = with_preset(values["chat__preset"], model, server)
    served, chosen = server_model(server, model, values), overridden({**values, "chat__system_prompt": system}, base)
    strict = values["speculation__draft_model"] is not None
    sent = _checked(model, system, files, raw, stop)
    form = AnswerForm.read(json_schema, grammar, stop, spoken=speak or speak_output is not None)
    chosen.hardware.probe = False  # one question does not pay for that; what the app has measured is used
    calibrate = any(values[f"speculation__{name}"] for name in ("drafters", "draft_model"))
    if strict:
        require_draft_in_use(chosen)
    on_server = server_model(server, model, values, chosen.model.last)
    prompt = compose(" ".join(question), standard_input(quiet), raw=raw)
    backend = answering_backend(chosen, on_server, key_ring(chosen, served))
    try:
        import asyncio

        from cpuchat.cli.session import Session
        from cpuchat.cli.terminal import TerminalOutput

        terminal = TerminalOutput(quiet=quiet, show_reasoning=show_reasoning, raw=raw_output)
        tools = tools_of(values, terminal, raw=raw, has_form=form is not None)
        path = on_server or model_path(model, chosen)
    except BaseException:
        backend.kill()
        raise

    async def run() -> int:
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(Session(chosen, terminal, backend))
            await start_tools(tools, session.conversation, terminal, session)
            aloud = await _aloud(stack, session, chosen, speak_output) if speak or speak_output else None
            info = await session.load(path, strict=strict, calibrate=calibrate)
            for note in filter(None, (session.conversation.draft_problem, *info.notes)):
                terminal.note(f"cpuchat: {note}")
            events = _events(session.conversation, prompt, stop, form, sent, raw=raw)
            return await _print_answer(session, events, info, terminal, form, aloud, as_json=as_json)

    return asyncio.run(run())


def _checked(
    model: str | None, system: str | None, files: tuple[str, ...], raw: bool, stop: tuple[str, ...]
) -> tuple[Attachment, ...]:
    """Return the files to send. Raises UsageError for options that cannot be used."""
    if raw and system:
        raise UsageError(
            "--system cannot be used with --raw, which skips the chat template.",
            "Put the text at the start of the prompt.",
        )
    if raw and files:
        raise UsageError("--file cannot be used with --raw, which sends the prompt as it is.", "Pipe the file in.")
    if not all(stop):
        raise UsageError("--stop is empty.", "Give a stop string, or omit the option.")
    for name, text in (("--system", system or ""), ("--stop", "".join(stop)), ("--model", model or "")):
        require_text(text, name)
    return attached(files)


def _events(
    conversation: Conversation, prompt: str, stop: tuple[str, ...], form: AnswerForm | None,
    attachments: tuple[Attachment, ...], *, raw: bool,
) -> AsyncGenerator[AnyEvent, None]:  # fmt: skip
    grammar, schema = (form.grammar, form.schema) if form is not None else ("", "")
    if not raw:
        return conversation.send(prompt, attach=lambda: attachments, stop=stop, grammar=grammar, json_schema=schema)
    chosen = conversation.in_effect
    options = {**chosen.sampling.request_options(), **chosen.chat.request_options()}
    speculation = chosen.speculation.speculation()
    return conversation.generate_detached(
        Generate(prompt=prompt, **options, stop=stop, speculation=speculation, grammar=grammar, json_schema=schema)
    )


async def _finish_speech(
    aloud: Aloud, terminal: TerminalOutput, *, as_json: bool
) -> tuple[dict[str, Any], CpuchatError | None]:
    """Wait until the answer was heard; returns its figures for JSON, and why it was not heard to its end, if so."""
    from cpuchat.present import chats as words

    aloud.speaker.finish()
    try:
        figures = await aloud.wait()
    except CpuchatError as error:
        if not as_json:
            terminal.warn(error_text(error))
        return {"speech": error_json(error)}, error
    if not as_json:
        terminal.note(words.speech_summary(figures, aloud.where))
    return {"speech": words.as_json(figures, aloud.where)}, None


class _Silent:
    """Discards deltas, for answers that are printed once complete."""

    def answer(self, text: str) -> None: ...

    def reasoning(self, text: str) -> None: ...


async def _aloud(stack: contextlib.AsyncExitStack, session: Session, chosen: Settings, output: Path | None) -> Aloud:
    """Return what reads the answer until Ctrl+C. Raises SpeechFailed, UsageError."""
    from cpuchat.cli.aloud import Aloud

    aloud = await stack.enter_async_context(Aloud(chosen.speech, output))
    session.on_interrupt = aloud.speaker.stop
    return aloud


class _ReadAloud:
    """Reads the answer aloud, beside what another sink does with it."""

    def __init__(self, sink: Sink, speaker: Speaker) -> None:
        self._sink = sink
        self._speaker = speaker
        self.reasoning = sink.reasoning

    def answer(self, text: str) -> None:
        self._sink.answer(text)
        self._speaker.feed(text)


def _as_json(
    answer: StreamedAnswer, finished: GenerationFinished, info: ModelInfo, roofline: Roofline
) -> dict[str, Any]:
    from cpuchat.present.answers import roofline_json, timings_json

    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "stop_reason": finished.stop_reason,
        "model": info.name or Path(info.path).stem,
        **({"server": info.server} if info.server else {}),
        **({"draft_model": info.draft} if info.draft else {}),
        "seed": finished.timings.seed,
        "timings": timings_json(finished.timings),
        **({} if info.server else {"roofline": roofline_json(roofline)}),
    }


async def _print_answer(
    session: Session,
    events: AsyncGenerator[AnyEvent, None],
    info: ModelInfo,
    terminal: TerminalOutput,
    form: AnswerForm | None,
    aloud: Aloud | None,
    *,
    as_json: bool,
) -> int:
    """Print the answer that `events` stream, read it if asked to, and return the exit code."""
    from cpuchat.cli.session import StreamedAnswer
    from cpuchat.models.machine import reach_of
    from cpuchat.present.answers import full_summary, note
    from cpuchat.telemetry.roofline import Reach, after_answer

    answer = StreamedAnswer()
    sink: Sink = _Silent() if as_json else terminal
    if aloud is not None:
        aloud.prepare(info)
        aloud.speaker.begin(time.monotonic())
        sink = _ReadAloud(sink, aloud.speaker)
    try:
        try:
            finished = await session.stream(events, answer, sink)
        finally:
            terminal.end_answer()
    except CpuchatError as error:
        if not as_json or not answer.text:
            raise
        terminal.line(json_line({**error_json(error), "text": answer.text, "reasoning": answer.reasoning}))
        return error.exit_code
    engine, computes_here = session.conversation.backend.engine, not (info.server or info.engine)
    reach = reach_of(info, engine.memory if engine is not None else "") if computes_here else Reach()
    roofline = after_answer(info, finished.timings, reach)
    unmet = form.unmet(answer.text, finished, served=bool(info.server)) if form else None
    valid = {"valid": False if unmet else finished.matches_grammar} if form else {}
    if not as_json:
        summary = full_summary(finished.timings, finished.stop_reason, None if info.server else roofline)
        unverified = "form not verified: the server enforces it" if valid.get("valid", True) is None else ""
        terminal.note(" · ".join(filter(None, (summary, finished.note, unverified))))
    if told := note(finished.timings):
        terminal.note(f"cpuchat: {told}")
    if finished.stop_reason == "cancelled":
        unmet = None
    if unmet is not None:
        terminal.warn(error_text(unmet))
    speech, silent = await _finish_speech(aloud, terminal, as_json=as_json) if aloud is not None else ({}, None)
    if as_json:
        terminal.line(json_line({**_as_json(answer, finished, info, roofline), **valid, **speech}))
    if unmet is not None:
        return unmet.exit_code
    if finished.stop_reason == "context":
        remedy = "start the server with a larger one" if info.server else "raise --ctx"
        terminal.warn(f"cpuchat: context full; {remedy} for a longer answer.")
    if finished.stop_reason == "cancelled" or (aloud is not None and session.interrupted):
        return Interrupted.exit_code
    return silent.exit_code if silent is not None else 0


@dataclass(frozen=True)
class AnswerForm:
    """Form of an answer: `grammar` as of `Generate`, a file's own or that of a JSON schema, whose text is `schema`."""

    grammar: str
    schema: str = ""

    @classmethod
    def read(
        cls, schema_file: str | None, grammar_file: str | None, stop: tuple[str, ...], *, spoken: bool
    ) -> Self | None:
        """Read one of the two files; None for neither. Raises UsageError: an option forbids it, or it is invalid."""
        if schema_file is None and grammar_file is None:
            return None
        if schema_file is not None and spoken:
            raise UsageError(
                "--speak cannot be used with --json-schema: JSON is not for reading aloud.", "Leave one out."
            )
        if schema_file is not None and grammar_file is not None:
            raise UsageError("--json-schema and --grammar exclude each other.", "Give one of them.")
        if stop:
            raise UsageError(
                "--stop cannot be used with a schema or grammar, which says where the answer ends.", "Leave it out."
            )
        if schema_file is not None:
            schema = _json(_text(schema_file), schema_file)
            return cls(schema_grammar(schema, schema_file), json.dumps(schema))
        assert grammar_file is not None
        text = _text(grammar_file)
        check_grammar(text, grammar_file)
        return cls(text)

    def unmet(self, text: str, finished: GenerationFinished, *, served: bool) -> GrammarUnmet | None:
        """Return why the answer does not match, None if it does or, `served` by a server, may.

        Only the engine of this machine checks its answers against the grammar.
        """
        what = "schema" if self.schema else "grammar"
        message = f"The answer does not match the {what}"
        if finished.matches_grammar is False:
            tokens = plural(finished.timings.predicted_n, "token")
            match finished.stop_reason:
                case "max_tokens":
                    return GrammarUnmet(f"{message}: it was cut off after {tokens}.", "Raise --max-tokens.")
                case "context":
                    hint = "Start the server with a larger context." if served else "Raise --ctx."
                    return GrammarUnmet(f"{message}: the context was full after {tokens}.", hint)
                case "cancelled":
                    return GrammarUnmet(f"{message}: it was stopped.")
            return GrammarUnmet(f"{message}: the model ended within its reasoning.", "Ask again, with another --seed.")
        if self.schema:
            try:
                json.loads(text)
            except (ValueError, RecursionError) as error:
                return GrammarUnmet(f"{message}: it is not JSON: {error}.", "Ask again, with another --seed.")
        return None


def _text(file: str) -> str:
    try:
        with Path(file).expanduser().open("rb") as stream:
            data = stream.read(LONGEST_FORM + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"Cannot read {file}: {reason}.") from None
    if len(data) > LONGEST_FORM:
        raise UsageError(
            f"{file} is larger than {LONGEST_FORM >> 20} MiB.", "Choose the file of a schema or a grammar."
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{file}, line {line}: not valid UTF-8 text.", "Convert it, for example with iconv.") from None


def _json(text: str, file: str) -> Any:
    def refuse(name: str) -> None:
        raise UsageError(f"{file}: {name} is not JSON.", "Correct the file.")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{file}, line {error.lineno}, column {error.colno}: {error.msg}.", "Correct the JSON of the schema."
        ) from None
    except RecursionError:
        raise UsageError(f"{file}: nested too deeply.", "Simplify the schema.") from None
    except ValueError as error:  # an integer of thousands of digits
        raise UsageError(f"{file}: {error}.", "Correct the JSON of the schema.") from None
