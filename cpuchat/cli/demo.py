"""`cpuchat demo`: try the program without a download."""

from __future__ import annotations

from typing import Any

import click

from cpuchat.base.errors import Interrupted
from cpuchat.cli.options import DEMO, model_path, overridden, placement_options, setting, stacked
from cpuchat.config.settings import Settings

QUESTIONS = ("What is cpuchat?", "How do I stop an answer?", "Why does quantization make a model faster?")
MAX_TOKENS = 160

_EPILOG = """\b
Examples:
  cpuchat demo            chat with the demo model
  cpuchat demo --plain    three questions and answers with their figures, on standard output

The demo model is a toy that knows cpuchat's own manual. For real work, give a GGUF file: cpuchat --model FILE."""


@click.command(epilog=_EPILOG, short_help="Try cpuchat with the bundled demo model.")
@stacked(
    click.option("--plain", is_flag=True, help="Answer three questions on standard output, with figures."),
    placement_options(),
    setting("engine.ctx"),
)
def demo(plain: bool, **values: Any) -> int:
    """Chat with the bundled demo model: no download, no setup."""
    if not plain:
        from cpuchat.cli.app import open_app

        return open_app(DEMO, values)
    import asyncio

    return asyncio.run(_plain(overridden(values)))


async def _plain(chosen: Settings) -> int:
    """Answer each question in a chat of its own, sampled as in the app."""
    from cpuchat.cli.session import Session, StreamedAnswer
    from cpuchat.cli.terminal import TerminalOutput
    from cpuchat.present.answers import full_summary

    terminal = TerminalOutput(plain=True)
    chosen.chat.system_prompt, chosen.chat.max_tokens = "", MAX_TOKENS
    async with Session(chosen, terminal) as session:
        info = await session.load(model_path(DEMO, chosen))
        terminal.line(f"{info.name}, {info.quantization}, {info.n_threads} threads, context {info.n_ctx:,}")
        for question in QUESTIONS:
            terminal.line()
            terminal.line(f"> {question}")
            session.conversation.new_chat()
            try:
                finished = await session.stream(session.conversation.send(question), StreamedAnswer(), terminal)
            finally:
                terminal.end_answer()
            terminal.line(f"  {full_summary(finished.timings, finished.stop_reason)}")
            if session.interrupted:
                return Interrupted.exit_code
    return 0
