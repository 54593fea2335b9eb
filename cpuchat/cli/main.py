"""Entry point: runs a command and turns every failure into a message and an exit code.

Commands are imported when they run, so that `cpuchat --help` is fast.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource
from click.exceptions import Abort, NoArgsIsHelpError, NoSuchOption

from cpuchat.base.errors import CpuchatError, Interrupted, ModelNotFound, OutputFailed, UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.completion import MODEL
from cpuchat.cli.lazy import LazyGroup, chat_options
from cpuchat.cli.output import OutputClosed, cleaned_output, error_json, error_text, json_line
from cpuchat.protocol.drafters import CHOICES

SIGPIPE_STATUS = 141
"""Exit code 128 + SIGPIPE, as a shell reports it for a program whose output was closed."""

_COMMANDS = {
    "ask": ("cpuchat.cli.ask", "ask", "Ask one question; the answer streams to standard output."),
    "compare": ("cpuchat.cli.compare", "compare", "Compare two models, or two settings: which is faster, and why."),
    "models": ("cpuchat.cli.models.group", "models", "Find, download, show, quantize and delete models."),
    "doctor": ("cpuchat.cli.machine", "doctor", "Check what slows this machine down, and say how to fix it."),
    "why": ("cpuchat.cli.why", "why", "Prove which settings of a model work."),
    "tune": ("cpuchat.cli.tune", "tune", "Find the fastest settings for a model by measuring."),
    "serve": ("cpuchat.cli.serve", "serve", "Serve a model to other programs (OpenAI- and Anthropic-compatible)."),
    "chats": ("cpuchat.cli.chats", "chats", "List, export and import chats."),
    "plan": ("cpuchat.cli.plan", "plan", "Plan a model on this or another machine: fit, speed, users."),
    "bench": ("cpuchat.cli.bench", "bench", "Measure speed over models, drafters, depths and settings."),
    "quality": ("cpuchat.cli.compare", "quality", "Measure the quality loss of quantized models."),
    "probe": ("cpuchat.cli.machine", "probe", "Measure bandwidth and passes: the basis of all predictions."),
    "docs": ("cpuchat.cli.docs", "docs", "Read the manual."),
    "completion": ("cpuchat.cli.completion", "completion", "Complete commands, models and files by Tab."),
    "speak": ("cpuchat.cli.speak", "speak", "Read a text aloud, or write it to a WAV file."),
}

_EPILOG = """\b
Examples:
  cpuchat                                  chat in the terminal
  cpuchat -m demo                          the bundled model, a toy
  cpuchat -m ~/models/qwen.gguf            a model of yours
  cpuchat --server http://127.0.0.1:8080   a model on a server
  cpuchat --plain                          lines of text, for screen readers
  cpuchat ask "Why is the sky blue?"       answer on standard output
  cpuchat compare demo demo-q4 "Hello"     which is faster, and why

A model is a GGUF file, or a part of its name in `cpuchat models list` that no other model has (qwen, qwen:q8_0). Until
one has been chosen, the bundled demo model is used. Exit codes: cpuchat docs exit-codes."""

_MORE_THREADS = "Raise the limit: `ulimit -u`, TasksMax of a systemd unit, or pids.max of the control group."
_CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from cpuchat.cli.version import show

        ctx.exit(show())


@click.group(
    cls=LazyGroup, commands_by_name=_COMMANDS, invoke_without_command=True, context_settings=_CONTEXT, epilog=_EPILOG
)
@chat_options
@click.option("--threads", "engine__threads", type=int, metavar="N", help="Compute threads; 0 = automatic.")
@click.option(
    "--cores", "engine__cores", metavar="LIST", help="Compute cores: auto, all, 0-7, l3:0-3, node:0, socket:0 or 4/l3."
)
@click.option(
    "--memory-policy", "engine__memory_policy", metavar="POLICY",
    help="NUMA memory policy: auto, local, interleave, bind:0 or preferred:0.",
)  # fmt: skip
@click.option("--ctx", "engine__ctx", type=int, metavar="N", help="Context size in tokens; 0 = automatic.")
@click.option(
    "--draft-model", "speculation__draft_model", type=MODEL, metavar="FILE|REPO|mtp|none",
    help="Draft model with the same vocabulary, or a draft head; default: the catalog's recommendation.",
)  # fmt: skip
@click.option("--drafters", "speculation__drafters", metavar="NAME", help=f"Drafters: {', '.join(CHOICES)}.")
@click.option("--plain", is_flag=True, help="Chat in lines of text, for screen readers: nothing is redrawn.")
@click.option(
    "--version", "-V", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show versions and the engine's CPU features.",
)  # fmt: skip
@click.pass_context
def cli(ctx: click.Context, model: str | None, server: str | None, plain: bool, **values: Any) -> int:
    """Chat with local language models on the CPU, and see how fast they run.

    Without a command, cpuchat opens the terminal app."""
    for param in ctx.command.params if ctx.invoked_subcommand is not None else ():
        name = param.name or ""
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            hint = _after_command(ctx.obj, str(ctx.invoked_subcommand))
            raise UsageError(f"{param.opts[0]} before a command applies to the chat app only.", hint)
    if ctx.invoked_subcommand is not None or plain:  # the app says it itself
        from cpuchat.config.settings import unknown_keys

        if unknown := ", ".join(map(clean_line, unknown_keys())):
            click.echo(f"cpuchat: config.toml: no setting named {unknown}.", err=True)
    if ctx.invoked_subcommand is not None:
        return 0
    if plain:
        from cpuchat.cli.plain import open_plain

        return open_plain(model, values, server=server)
    from cpuchat.cli.app import open_app

    return open_app(model, values, server=server)


def _after_command(given: Sequence[str], command: str) -> str:
    words = list(given)
    words.remove(command)
    return f"Put it after the command: {shlex.join(['cpuchat', command, *words])}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Never raises."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):  # print `?` for characters that the terminal's encoding lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if os.path.expanduser("~") == "~":  # noqa: PTH111 - a user that the system does not know, without HOME
        os.environ["HOME"] = "/"
    _heed_ctrl_c()
    with cleaned_output():
        if (wanted := os.environ.get("_CPUCHAT_COMPLETE")) and not arguments:  # the script of `cpuchat completion`
            from cpuchat.cli.completion import complete

            return complete(cli, wanted)
        return _run(arguments)


def _run(given: Sequence[str]) -> int:
    line = ["--version"] if given == ["version"] else given
    if given[:1] == ["help"]:
        is_page = given[1:] and given[1] not in ("help", *_COMMANDS) and not cli.hint("cpuchat", given[1])
        line = ["docs", *given[1:]] if is_page else [*(one for one in given[1:] if one != "help"), "--help"]
    arguments = list(line)  # without a text at their end, once it is known (`TextCommand`)
    try:
        result = cli.main(args=list(line), prog_name="cpuchat", standalone_mode=False, obj=arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except NoArgsIsHelpError as error:
        if "--json" in arguments:
            return _fail(UsageError("Missing command.", f"See {error.ctx.command_path} --help."), arguments)
        try:
            print(error.ctx.get_help(), file=sys.stderr, flush=True)
        except BrokenPipeError:
            return _reader_gone()
        return UsageError.exit_code
    except click.ClickException as error:
        return _fail(_from_click(error, given), arguments)
    except OutputFailed as error:
        _reader_gone()
        return _fail(error, [])  # on stderr, even if --json was asked for
    except ModelNotFound as error:
        from cpuchat.models.catalog import load_catalog

        with contextlib.suppress(CpuchatError):  # in the user's own catalog
            command = load_catalog().download_command(error.wanted)
            error.hint = f"Download it: {command}." if command else error.hint
        return _fail(error, arguments)
    except CpuchatError as error:
        return _fail(error, arguments)
    except (Abort, KeyboardInterrupt):
        # After an interrupt in code that is compiled from a string (the methods of a dataclass, while it is imported),
        # `python -m` ends by the signal, whatever is returned, unless other such code has run since.
        exec("")
        return _fail(Interrupted("Stopped."), arguments) if "--json" in arguments else Interrupted.exit_code
    except (BrokenPipeError, OutputClosed, SystemExit):  # click makes an exit of the first
        return _reader_gone()
    except Exception as error:
        if os.environ.get("CPUCHAT_DEBUG"):
            import traceback

            traceback.print_exc()
            return CpuchatError.exit_code
        what = f"Unexpected {type(error).__name__}: {error}. This is a bug."
        hint = "Run it again with CPUCHAT_DEBUG=1 for a traceback."
        if "can't start new thread" in str(error):
            what, hint = "The system refuses to start another thread for cpuchat.", _MORE_THREADS
        return _fail(CpuchatError(what, hint), arguments)


def _heed_ctrl_c() -> None:
    """Restore SIGINT in the foreground of a terminal, even where the parent shell ignored it.

    A background job keeps ignoring it (POSIX: its standard input is not the terminal): the Ctrl+C is for another."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN or not hasattr(os, "tcgetpgrp"):
        return
    try:
        in_foreground = os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # standard input is no terminal, or closed
        return
    if in_foreground:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _from_click(error: click.ClickException, arguments: Sequence[str]) -> UsageError:
    """Return click's message in our form, with the right command for help."""
    from cpuchat.cli.question import no_option_hint

    ctx: click.Context | None = getattr(error, "ctx", None)
    hint = no_option_hint(ctx, getattr(error, "option_name", "") if isinstance(error, NoSuchOption) else "")
    message = error.format_message()
    if isinstance(error, NoSuchOption):
        message = f"No such option: {error.option_name}"
        if ctx is not None and ctx.parent is None and (later := [one for one in arguments if one in _COMMANDS]):
            hint = _after_command(arguments, later[0])
    elif ctx is None and arguments[:1] and arguments[0] in _COMMANDS:  # an option without its value
        hint = f"See {' '.join(['cpuchat', *arguments[: 1 + (arguments[0] in ('models', 'chats'))]])} --help."
    wrong = getattr(error, "command_name", "")  # since click 8.4
    command = ctx.command_path if ctx is not None else ""
    if wrong and ctx is not None and isinstance(ctx.command, LazyGroup):
        hint = ctx.command.hint(command, wrong) or hint
    if wrong.lower().endswith(".gguf") or "/" in wrong or wrong.startswith("demo"):
        hint = f"Open a model with -m: cpuchat -m {wrong}"
    elif command in ("cpuchat", "cpuchat why") and " " in (words := " ".join(arguments)) and " -" not in f" {words}":
        hint = f"{hint} To ask that: {shlex.join(['cpuchat', 'ask', *arguments])}"
    return UsageError(message if message.endswith((".", "?", "!")) else f"{message}.", hint)


def _fail(error: CpuchatError, arguments: Sequence[str]) -> int:
    """Report on stderr, or as an object on stdout when `--json` was asked for."""
    try:
        if "--json" in arguments and sys.stdout is not None:
            print(json_line(error_json(error)), flush=True)
        elif sys.stderr is not None:
            print(error_text(error), file=sys.stderr, flush=True)
    except BrokenPipeError:
        return _reader_gone()
    except OSError:
        return _fail(error, []) if arguments else error.exit_code  # on stderr, if that is not what failed
    return error.exit_code


def _reader_gone() -> int:
    """Redirect stdout to /dev/null, so that Python's final flush cannot fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    return SIGPIPE_STATUS


if __name__ == "__main__":
    sys.exit(main())
