"""`cpuchat completion`: commands, options, models and files by Tab."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete

from cpuchat.base.errors import CpuchatError, UsageError

_EPILOG = """\b
Put the line of your shell into the file that it reads at its start:
  eval "$(cpuchat completion bash)"     ~/.bashrc
  eval "$(cpuchat completion zsh)"      ~/.zshrc
  cpuchat completion fish | source      ~/.config/fish/config.fish"""


class NamesByTab(click.ParamType):
    """Any text, for which Tab offers those of `names` that begin like it."""

    name = "text"

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self._names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(one) for one in self._names() if one.lower().startswith(incomplete.lower())]


def _model_names() -> list[str]:
    from cpuchat.config import settings
    from cpuchat.models.library.library import Library

    library = Library(settings.load().model.folders)
    return library.typed_names(library.local_models())


MODEL = NamesByTab(_model_names)
"""The type of what --model takes."""


class _Bash(BashComplete):
    """Bash splits words at colons, and replaces only what follows the last one."""

    _kept = ""  # what precedes that

    def get_completion_args(self) -> tuple[list[str], str]:
        words, last = super().get_completion_args()
        *words, word = re.sub(r"\0(:+)(?:\0(?=.))?", r"\1", "\0".join([*words, last])).split("\0")
        self._kept = word[: word.rfind(":") + 1] if word != last else ""
        return words, word

    def format_completion(self, item: CompletionItem) -> str:
        return f"{item.type},{item.value.removeprefix(self._kept)}"


_SHELLS = {"bash": _Bash, "zsh": ZshComplete, "fish": FishComplete}


@click.command(epilog=_EPILOG)
@click.argument("shell", type=click.Choice(list(_SHELLS)), required=False)
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print what makes SHELL complete commands, options, models and files."""
    if shell is None:
        raise UsageError("No shell named.", 'Name bash, zsh or fish; in ~/.bashrc: eval "$(cpuchat completion bash)".')
    click.echo(_SHELLS[shell](ctx.find_root().command, {}, "cpuchat", "_CPUCHAT_COMPLETE").source())


def complete(root: click.Command, instruction: str) -> int:
    """Print what completes the line that the shell has in its variables, else that it may be a file; `instruction` is
    that of click's script. Returns the exit code."""
    completer = _SHELLS[instruction.partition("_")[0]](root, {}, "cpuchat", "_CPUCHAT_COMPLETE")
    (words, begun), found = completer.get_completion_args(), list[CompletionItem]()
    with contextlib.suppress(CpuchatError):  # a line that is not valid yet
        found = completer.get_completions(words, begun)
    for one in found or [CompletionItem(begun, type="file")]:
        click.echo(completer.format_completion(one))
    return 0
