"""`cpuchat ask`: one question, one answer, for the shell and for scripts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from cpuchat.base.errors import CpuchatError, GrammarUnmet, Interrupted, UsageError
from cpuchat.cli import options
from cpuchat.cli.lazy import chat_options
from cpuchat.cli.output import error_json, error_text, json_line
from cpuchat.cli.question import TextCommand, compose, file_text, require_text, standard_input
from cpuchat.cli.terminal import TerminalOutput
from cpuchat.cli.tools import start_tools, tools_of
from cpuchat.grammar.gbnf import check_grammar
from cpuchat.grammar.limits import LONGEST_FORM
from cpuchat.grammar.schema import schema_grammar
from cpuchat.present.answers import full_summary, note, roofline_json, timings_json
from cpuchat.protocol.messages import AnyEvent, Generate, GenerationFinished
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.telemetry.units import plural

if TYPE_CHECKING:
    from cpuchat.chats.records import Attachment
    from cpuchat.cli.session import Session, StreamedAnswer
    from cpuchat.telemetry.roofline import Roofline


_EPILOG = """\b
Examples:
  cpuchat ask "Why is decoding slower than reading the prompt?"
  git diff | cpuchat ask "Write a commit message for this:"
  cpuchat ask --file src/main.py:10-80 --file notes.md "What does this do?"
  cpuchat ask --tools files "Where is the port of the server set?"
  cpuchat ask --json-schema person.json "Who wrote Faust?" | jq .name

Options go before the question: from its first word that is no option on, all belongs to it. One that looks like an
option goes after --: cpuchat ask -- --help me. Options default to those of --preset, then to config.toml. The answer
goes to standard output, everything else to standard error. Ctrl+C stops and keeps the partial answer. Control
characters in the answer are replaced by visible ones, also in pipes and files; --json escapes them. Exit codes:
cpuchat docs exit-codes."""


@click.command(cls=TextCommand, epilog=_EPILOG)
@click.argument("question", nargs=-1)
@chat_options
@click.option("--system", metavar="TEXT", help="System prompt; empty = none.")
@click.option(
    "--file", "files", multiple=True, metavar="FILE",
    help="Send this text file too, or FILE:10-80 of it, or the names in a folder; may be given several times.",
)  # fmt: skip
@click.option("--allow-tools", is_flag=True, help="Do not ask before calls of tools that only read.")
@options.section_options("chat", "sampling")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop string; may be given several times.")
@click.option("--json-schema", metavar="FILE", help="The answer is JSON that is valid under this JSON schema.")
@click.option("--grammar", metavar="FILE", help="The answer matches this grammar (GBNF).")
@options.section_options("engine", "speculation")
@click.option("--raw", is_flag=True, help="Plain completion: no chat template; special tokens in the text are parsed.")
@click.option("--show-reasoning", is_flag=True, help="Print the reasoning on standard error.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when the answer is complete.")
@click.option("--quiet", "-q", is_flag=True, help="Print only the answer, warnings and errors.")
def ask(
    question: tuple[str, ...], model: str | None, server: str | None, system: str | None, files: tuple[str, ...],
    raw: bool, stop: tuple[str, ...], json_schema: str | None, grammar: str | None, as_json: bool,
    show_reasoning: bool, quiet: bool, **values: Any,
) -> int:  # fmt: skip
    """Ask one question and print the answer as it is written.

    QUESTION may also come from standard input; if both are given, standard input follows. Files are sent before."""
    base, model = options.with_preset(values["preset"], model, server)
    served = options.server_model(server, model, values)
    chosen = options.overridden({**values, "chat__system_prompt": system}, base)
    sent, form = _checked(model, system, files, raw, stop), AnswerForm.read(json_schema, grammar, stop)
    wants_drafts = any(values[f"speculation__{name}"] for name in ("drafters", "draft_model"))
    if strict := values["speculation__draft_model"] is not None:
        options.require_draft_in_use(chosen)
    on_server = options.server_model(server, model, values, chosen.model.last)
    prompt = compose(" ".join(question), standard_input(quiet), raw=raw)
    from cpuchat.backend.switching import SwitchingBackend

    local = None if on_server else options.prepared_backend(chosen)
    backend = SwitchingBackend(local, options.key_ring(chosen, served))
    try:
        from cpuchat.cli.session import Session, tell_notes

        terminal = TerminalOutput(quiet=quiet, show_reasoning=show_reasoning)
        tools = tools_of(values, terminal, raw=raw, has_form=form is not None)
        path = on_server or options.model_path(model, chosen)
    except BaseException:
        backend.kill()
        raise

    async def run() -> int:
        async with Session(chosen, terminal, backend) as session:
            await start_tools(tools, session.conversation, terminal, session)
            info = await session.load(path, strict=strict, calibrate="load" if wants_drafts else "never")
            tell_notes(session.conversation, info, terminal, "cpuchat: ")
            held = {} if form is None else {"grammar": form.grammar, "json_schema": form.schema}
            rules: dict[str, Any] = {"stop": stop, **held}
            if raw:
                used = session.conversation.in_effect
                rules |= used.sampling.request_options() | used.chat.request_options()
                request = Generate(prompt=prompt, speculation=used.speculation.speculation(), **rules)
                events = session.conversation.generate_detached(request)
            else:
                events = session.conversation.send(prompt, attach=lambda: sent, **rules)
            return await _print_answer(session, events, info, form, as_json=as_json)

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
    if not files:
        return ()
    from cpuchat.session.attachments import read_file

    return tuple(read_file(name, Path.cwd()) for name in files)


def _as_json(
    answer: StreamedAnswer, finished: GenerationFinished, info: ModelInfo, roofline: Roofline
) -> dict[str, Any]:
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "stop_reason": finished.stop_reason,
        "model": info.name or info.path,
        **({"server": info.server} if info.server else {}),
        **({"draft_model": info.draft} if info.draft else {}),
        "seed": finished.timings.seed,
        "timings": timings_json(finished.timings),
        **({} if info.server else {"roofline": roofline_json(roofline)}),
    }


async def _print_answer(
    session: Session, events: AsyncGenerator[AnyEvent, None], info: ModelInfo, form: AnswerForm | None, *, as_json: bool
) -> int:
    """Print the answer that `events` stream, and return the exit code."""
    from cpuchat.cli.session import StreamedAnswer
    from cpuchat.models.machine import reach_of
    from cpuchat.telemetry.roofline import Reach, after_answer

    answer, terminal = StreamedAnswer(), session.terminal
    try:
        try:
            finished = await session.stream(events, answer, prints=not as_json)
        finally:
            terminal.end_answer()
    except CpuchatError as error:
        if not as_json or not answer.text:
            raise
        terminal.line(json_line({**error_json(error), "text": answer.text, "reasoning": answer.reasoning}))
        return error.exit_code
    engine, computes_here = session.conversation.backend.engine, not info.server
    reach = reach_of(info, engine.memory_policy if engine is not None else "") if computes_here else Reach()
    roofline = after_answer(info, finished.timings, reach)
    unmet = form.unmet(answer.text, finished, served=bool(info.server)) if form else None
    valid = {"valid": False if unmet else finished.matches_grammar} if form else {}
    if not as_json:
        summary = full_summary(finished.timings, finished.stop_reason, None if info.server else roofline)
        unverified = "form not verified: the server enforces it" if valid.get("valid", True) is None else ""
        terminal.note(" · ".join(filter(None, (summary, finished.note, unverified))))
    if told := note(finished.timings):
        terminal.note(f"cpuchat: {told}")
    if as_json:
        terminal.line(json_line({**_as_json(answer, finished, info, roofline), **valid}))
    if unmet is not None and finished.stop_reason != "cancelled":
        terminal.warn(error_text(unmet))
        return unmet.exit_code
    if finished.stop_reason == "context":
        remedy = "start the server with a larger one" if info.server else "raise --ctx"
        terminal.warn(f"cpuchat: context full; {remedy} for a longer answer.")
    return Interrupted.exit_code if finished.stop_reason == "cancelled" else 0


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@dataclass(frozen=True)
class AnswerForm:
    """Form of an answer: `grammar` as of `Generate`, a file's own or that of a JSON schema, whose text is `schema`."""

    grammar: str
    schema: str = ""

    @classmethod
    def read(cls, schema_file: str | None, grammar_file: str | None, stop: tuple[str, ...]) -> Self | None:
        """Read one of the two files; None for neither. Raises UsageError: an option forbids it, or it is invalid."""
        if schema_file is not None and grammar_file is not None:
            raise UsageError("--json-schema and --grammar exclude each other.", "Give one of them.")
        file = grammar_file if schema_file is None else schema_file
        if file is None:
            return None
        if stop:
            raise UsageError("--stop cannot be used with a schema or grammar: that ends the answer.", "Leave it out.")
        text = file_text(file, LONGEST_FORM)
        if schema_file is None:
            check_grammar(text, file)
            return cls(text)
        try:
            schema = json.loads(text, parse_constant=_refuse)
        except RecursionError:
            raise UsageError(f"{file}: nested too deeply.", "Simplify the schema.") from None
        except ValueError as error:
            raise UsageError(f"{file}: {error}.", "Correct the JSON of the schema.") from None
        return cls(schema_grammar(schema, file), json.dumps(schema))

    def unmet(self, text: str, finished: GenerationFinished, *, served: bool) -> GrammarUnmet | None:
        """Return why the answer does not match, None if it does or, `served` by a server, may.

        Only the engine of this machine checks its answers against the grammar."""
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
            return GrammarUnmet(f"{message}: the model ended within its reasoning.", "Ask again, with another --seed.")
        if self.schema:
            try:
                json.loads(text)
            except (ValueError, RecursionError) as error:
                return GrammarUnmet(f"{message}: it is not JSON: {error}.", "Ask again, with another --seed.")
        return None
