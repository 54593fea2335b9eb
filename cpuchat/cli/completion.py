"""`cpuchat completion`: commands, options, models and files by Tab."""

from __future__ import annotations

import contextlib

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete

from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.config import settings

_SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_EPILOG = """\b
Put the line of your shell into the file that it reads at its start:
  eval "$(cpuchat completion bash)"     ~/.bashrc
  eval "$(cpuchat completion zsh)"      ~/.zshrc
  cpuchat completion fish | source      ~/.config/fish/config.fish"""


@click.command(epilog=_EPILOG)
@click.argument("shell", type=click.Choice(list(_SHELLS)), required=False)
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print what makes SHELL complete commands, options, models and files."""
    if shell is None:
        raise UsageError("No shell named.", 'Name bash, zsh or fish; in ~/.bashrc: eval "$(cpuchat completion bash)".')
    click.echo(_SHELLS[shell](ctx.find_root().command, {}, "cpuchat", "_CPUCHAT_COMPLETE").source())


def complete(root: click.Command, instruction: str) -> int:
    """Print what completes the line that the shell has in its variables; `instruction` is that of click's script.
    Returns the exit code."""
    completer = _SHELLS[instruction.partition("_")[0]](root, {}, "cpuchat", "_CPUCHAT_COMPLETE")
    (words, begun), found = completer.get_completion_args(), list[CompletionItem]()
    with contextlib.suppress(CpuchatError):  # a line that is not valid yet
        found = completer.get_completions(words, begun)
    if not found:
        from cpuchat.models.library.library import Library

        names = [model.alias or model.path.stem for model in Library(settings.load().model.folders).local_models()]
        found = [CompletionItem(one) for one in dict.fromkeys(names) if one.startswith(begun)]
    for one in found or [CompletionItem(begun, type="file")]:
        click.echo(completer.format_completion(one))
    return 0
