"""`cpuchat tune`: finds the fastest settings for a model on this machine by measuring."""

from __future__ import annotations

import click
import msgspec

from cpuchat.base.errors import Interrupted
from cpuchat.cli.completion import MODEL
from cpuchat.cli.options import model_path, overridden
from cpuchat.cli.output import print_json
from cpuchat.cli.terminal import TerminalOutput, echo_paragraph, echo_table

_EPILOG = """\b
Examples:
  cpuchat tune                          the model used last
  cpuchat tune qwen.gguf
  cpuchat tune qwen.gguf --undo

It tries numbers of threads, NUMA policies, CPU modules, flash attention, micro-batches and drafters, each
against the setting in use. A choice is adopted if it gains more than 2 % and more than the rounds differ, and neither
decoding nor prefill gets slower. What you have set yourself is left alone, except threads and cores. The
result is used from the model's next load. Run it while nothing else computes. `cpuchat doctor` has the settings that
only root can change."""


@click.command(epilog=_EPILOG)
@click.argument("model", required=False, type=MODEL)
@click.option("--undo", is_flag=True, help="Forget what was found for this model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tune(model: str | None, undo: bool, as_json: bool) -> int:
    """Find the fastest settings for MODEL (or -m MODEL; default: the one used last), by measuring for 3 minutes."""
    import asyncio

    from cpuchat.cli.session import stoppable
    from cpuchat.models.gguf.header import known_as
    from cpuchat.models.machine import forget_tuned
    from cpuchat.models.ollama import file_name
    from cpuchat.present import tune as words
    from cpuchat.tune.tuner import Tuner

    chosen = overridden({})
    path = model_path(model, chosen)
    if undo:
        known = forget_tuned(path)
        told = "untuned from the next load." if known else "was not tuned; nothing to undo."
        print_json({"path": str(path), "undone": known}) if as_json else click.echo(f"{known_as(path)}: {told}")
        return 0
    tuner, terminal, said = Tuner(path, chosen), TerminalOutput(), 0

    def tell() -> None:
        nonlocal said
        for one in tuner.choices[said:]:
            said += 1
            if not terminal.moves:
                terminal.note(" · ".join(filter(None, words.row(one))))
        if tuner.what:
            terminal.status(f"{tuner.seconds:3.0f} of {tuner.limit:.0f} s · {tuner.what} · Ctrl+C stops")

    tuner.tell = tell
    try:
        result = asyncio.run(stoppable(tuner.run(), tuner.stop))
    finally:
        terminal.clear_progress()
    if as_json:
        print_json({"path": str(path), **msgspec.to_builtins(result)})
    else:
        echo_table([words.HEADINGS, *map(words.row, result.choices)], words.RIGHT)
        click.echo()
        for line in words.summary(result, undo=f"cpuchat tune {file_name(path)} --undo reverts"):
            echo_paragraph(line)
        echo_paragraph(f"Took {result.seconds:.0f} s.")
    return Interrupted.exit_code if result.stopped else 0
