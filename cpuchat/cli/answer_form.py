"""The form of an answer that `ask` demands: a JSON schema or a grammar, read from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cpuchat.errors import GrammarUnmet, UsageError
from cpuchat.grammar.gbnf import LONGEST_FORM, check_grammar
from cpuchat.grammar.schema import schema_grammar
from cpuchat.protocol import GenerationFinished
from cpuchat.telemetry.units import plural


@dataclass(frozen=True)
class AnswerForm:
    """Form of an answer: `grammar` (GBNF), a file's own or that of a JSON schema, whose text is `schema`."""

    grammar: str
    schema: str = ""

    @classmethod
    def read(cls, schema_file: str | None, grammar_file: str | None, stop: tuple[str, ...]) -> Self:
        """Read one of the two files.

        Raises:
            UsageError: both are given, stop strings are, or the file is invalid; the message names the place in it.
        """
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
