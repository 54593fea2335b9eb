"""`cpuchat why`: proves which settings of a model work on this machine."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import msgspec

from cpuchat.cli.completion import MODEL
from cpuchat.cli.lazy import SectionedCommand
from cpuchat.cli.options import model_path, overridden, section_options
from cpuchat.cli.output import print_json
from cpuchat.cli.terminal import TerminalOutput, columns, echo_paragraph, echo_table

_EPILOG = """\b
Examples:
  cpuchat why                          the model used last
  cpuchat why qwen.gguf --json > today.json

Proofs are read after the load and a short test answer: from llama.cpp's buffers and log, and from /proc. "no effect" is
a setting that does nothing here, ✗ marks what does not work as set. `cpuchat tune` measures which are faster."""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("model", required=False, type=MODEL)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@section_options("engine", "speculation")
def why(model: str | None, as_json: bool, **values: Any) -> int:
    """Prove which settings of MODEL (or -m MODEL; default: the one used last) work on this machine."""
    from cpuchat.bench.results import read_environment
    from cpuchat.bench.why import SettingFacts, prove
    from cpuchat.cli.session import Session
    from cpuchat.present import why as words

    chosen = overridden(values)
    path = model_path(model, chosen)
    terminal = TerminalOutput()

    async def gather() -> SettingFacts:
        """Load the model as a chat does, let it answer, and read what works. Raises CpuchatError."""
        async with Session(chosen, terminal) as session:
            await session.load(path)
            return await prove(session.conversation)

    facts = asyncio.run(gather())
    terminal.clear_progress()
    settings = words.rows(facts)
    environment = read_environment(facts.engine, (facts.model.path, facts.model.draft_path), facts.chosen)
    if as_json:
        report = {"model": facts.model.name, "path": facts.model.path, "environment": environment, "settings": settings}
        print_json(msgspec.to_builtins(report))
    else:
        for label, text in words.about(facts, environment):
            echo_paragraph(f"{label}: {text}", rest="  ")
        click.echo()
        echo_table([words.HEADINGS, *words.wrapped(settings, columns())])
    return int(any(row.state == "fails" for row in settings))
