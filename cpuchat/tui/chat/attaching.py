"""Files in the prompt: paths are completed after @, and what a message would send is shown before it is sent. Commands
are completed after /.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from textual.content import Content
from textual.widgets import OptionList

from cpuchat.attachments import MissingFile, attach, completions, estimated_tokens, named, require_files, unfinished
from cpuchat.base.errors import UsageError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.chats.history import Attach, sent_text
from cpuchat.chats.records import Attachment, storable
from cpuchat.protocol.messages import ANSWER_SHARE
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.telemetry.units import plural, time_left
from cpuchat.tui.chat.composer import Composer, Outgoing
from cpuchat.tui.chat.slash import is_command, matching, with_argument
from cpuchat.tui.widgets.prompt import Prompt

_PAUSE_SECONDS = 0.15  # in typing, before files are read and tokens counted
_COUNTED = 200  # characters from which the tokens of a message without attachments are shown
_LEAST_WAIT = 2.0  # seconds to read a message from which they are shown
_LONGEST_TOKENS = 8  # characters per token; a text with more than the context has of these is not counted exactly


class Paths(OptionList, can_focus=False):
    """The paths or commands that continue what is typed; the prompt keeps the focus and its keys choose."""

    def __init__(self) -> None:
        super().__init__(id="paths", compact=True)
        self.marks: list[str] = []
        self.on_chosen: Callable[[], object] = lambda: None

    def offer(self, marks: list[str], titles: Sequence[str] = (), highlights: bool = True) -> None:
        """Show these, beside their `titles` if given, or nothing when there are none. `highlights`: the first one."""
        self.marks = marks
        self.clear_options()
        if titles:
            rows = zip(marks, titles, strict=True)
            self.add_options([Content.assemble(f"{mark:<18}", (title, "dim")) for mark, title in rows])
        else:
            self.add_options([Content(mark) for mark in marks])
        self.highlighted = 0 if marks and highlights else None
        self.set_class(bool(marks), "-open")
        self.screen.set_class(bool(marks), "-offering")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.on_chosen()


class Attaching:
    """Reads nothing but what the prompt names. `model` returns the loaded model, `count` the tokens that a text has for
    it, None when it cannot, `used` the tokens of the chat, `seconds` how long it takes to read so many tokens,
    None if that is not known. `show` is called when `Composer.attached` changes. Paths
    begin at `folder`; None: no file is read. `commands` returns the titles of the commands that can be used now, by
    name.
    """

    def __init__(
        self,
        prompt: Prompt,
        paths: Paths,
        composer: Composer,
        model: Callable[[], ModelInfo | None],
        count: Callable[[str], Awaitable[int | None]],
        used: Callable[[], int],
        seconds: Callable[[int], float | None],
        show: Callable[[], None],
        folder: Path | None,
        commands: Callable[[], dict[str, str]],
    ) -> None:
        self._prompt = prompt
        self._paths = paths
        self._composer = composer
        self._model = model
        self._count_tokens = count
        self._used = used
        self._seconds = seconds
        self._known_counts: tuple[ModelInfo | None, dict[str, int]] = (None, {})
        self._show = show
        self._typed = ""  # the mark or command that is completed
        self._accepted = ""  # the file that was completed last, with the space after it
        self._seen: tuple[list[str], bool, str] = ([], False, "")
        self._known: set[str] = set()  # marks that named something since the last message
        self._held_back = ""  # what was not sent because it names a file that is missing; the second time it is sent
        self._folder = folder
        self._commands = commands
        paths.on_chosen = self._clicked
        prompt.completer = self

    def changed(self) -> None:
        """Follow a change of the prompt."""
        self._begin_range()
        if self._held_back and self._held_back != self._prompt.text.strip():
            self._held_back, self._composer.holds_back = "", False
            self._show()
        text = self._prompt.text if self._composer.attaches else ""
        typed = text and text != self._prompt.placed  # not a message that was recalled
        mark = self._unfinished() if typed else None
        runs = self._composer.editing is None and (is_command(text) or with_argument(text) is not None)
        if runs != self._composer.is_command:
            self._composer.is_command = runs
            self._show()
        if typed and runs and is_command(text):
            self._offer_commands(text)
        elif mark is None:
            self.close()
        else:
            self._prompt.run_worker(self._complete(mark), exclusive=True, group="paths")
        marks = named(text)
        seen = marks, mark is not None, text if marks or len(text) >= _COUNTED else ""
        if seen != self._seen:
            self._seen = seen
            self._prompt.run_worker(self._count(*seen), exclusive=True, group="attachments")

    def hold_back(self, text: str) -> bool:
        """Return True, and show why, if the message in the prompt names a file that is missing; False the second time:
        then it is sent as text.
        """
        if self._folder is None or not self._composer.attaches or text == self._held_back:
            return False
        try:
            require_files(text, self._folder, self._composer.held, self._known)
        except MissingFile as error:
            self._held_back, self._composer.holds_back, self._composer.attached = text, True, error.message
            self._show()
            return True
        return False

    def take(self, text: str) -> Outgoing:
        """Return the message that is in the prompt, with what reads the files that it names when it is sent."""
        read = self._reading(text) if named(text) else None
        self._known, self._held_back, self._composer.holds_back = set(), "", False
        self.close()
        return self._composer.take(text, read)

    def _reading(self, text: str) -> Attach:
        held, known, skips = self._composer.held, frozenset(self._known), text == self._held_back
        return lambda: attach(text, self._folder, held, known, skips_missing=skips)

    async def read(self, text: str) -> str:
        """Return `text`, which is in the prompt, with what it names, as the model gets it. Raises CpuchatError."""
        return sent_text(text, await run_in_daemon_thread(self._reading(text)))

    # Completion

    @property
    def offers(self) -> bool:
        """Return whether paths are shown to choose from."""
        return bool(self._paths.marks)

    def accept(self, sends: bool = False) -> bool:
        """Complete with what is highlighted; a space follows a file. False if nothing was completed, or, if the prompt
        is to be sent then (`sends`), a command, which is whole.
        """
        index = self._paths.highlighted
        if not self.offers or index is None:
            return False
        chosen = self._paths.marks[index]
        if is_command(self._typed):
            return self._accept_command(chosen) and not sends
        if (mark := self._unfinished()) != self._typed:
            return False
        self.close()
        row, column = self._prompt.cursor_location
        rest = self._prompt.document.get_line(row)[column:]
        insert = chosen if chosen.endswith("/") or rest.startswith(" ") else f"{chosen} "
        start = column - len(mark or "")
        self._prompt.replace(insert, (row, start), (row, column))
        self._prompt.move_cursor((row, start + len(insert)))
        self._accepted = insert if insert.endswith(" ") else ""
        return True

    def _begin_range(self) -> None:
        """Let a range follow a completed file (`@file:10-80`): remove the space between them."""
        row, column = self._prompt.cursor_location
        file, colon, lines = self._prompt.document.get_line(row)[:column].rpartition(":")
        if colon and self._accepted and file.endswith(self._accepted) and not lines.strip("0123456789-"):
            self._accepted = ""
            self._prompt.replace("", (row, len(file) - 1), (row, len(file)))

    def _accept_command(self, name: str) -> bool:
        typed = self._typed
        self.close()
        if self._prompt.text != typed:
            return False
        self._prompt.put(name)
        return True

    def _clicked(self) -> None:
        if is_command(self._typed) and self.accept():
            self._prompt.action_submit()
        else:
            self.accept()

    def _offer_commands(self, typed: str) -> None:
        titles = self._commands()
        names = [name for name in matching(typed, titles) if name != typed]
        self._typed = typed
        self._paths.offer(names, [titles[name] for name in names], highlights=typed not in ("/", *titles))

    def move(self, step: int) -> bool:
        """Highlight the next path, or the one before."""
        if not self.offers:
            return False
        (self._paths.action_cursor_down if step > 0 else self._paths.action_cursor_up)()
        return True

    def close(self) -> bool:
        """Offer nothing more for what is typed."""
        was_open, self._typed = self.offers, ""
        if was_open:
            self._paths.offer([])
        return was_open

    def _unfinished(self) -> str | None:
        """Return the mark before the cursor."""
        row, column = self._prompt.cursor_location
        return unfinished(self._prompt.document.get_line(row)[:column]) if self._prompt.selection.is_empty else None

    async def _complete(self, mark: str) -> None:
        folder = self._folder
        found = await run_in_daemon_thread(lambda: completions(mark, folder)) if folder is not None else []
        if self._unfinished() == mark and self._prompt.has_focus:
            self._typed = mark
            self._paths.offer([] if found == [mark] else found)

    # Before sending

    async def _count(self, marks: list[str], typing: bool, text: str) -> None:
        attached = ""
        if text:
            await asyncio.sleep(_PAUSE_SECONDS)
            held = self._composer.held
            try:
                found = await run_in_daemon_thread(lambda: attach(text, self._folder, held))
            except MissingFile as error:  # one that is being typed may still become right
                attached = "" if typing and not self._held_back else error.message
            except UsageError as error:
                attached = error.message
            else:
                self._known.update(attachment.mark for attachment in found)
                attached = await self._summary(text, found)
        if attached != self._composer.attached:
            self._composer.attached = attached
            self._show()

    async def _summary(self, text: str, found: tuple[Attachment, ...]) -> str:
        """Format `2 attachments, 3,400 tokens`, with a warning when that does not fit, alone or with the chat."""
        if not found and len(text) < _COUNTED:
            return ""
        parts = [*(sent_text("", [attachment]) + "\n\n" for attachment in found), text]
        model = self._model()
        exact = await self._counted(parts, model) if model is not None else None
        n_tokens = sum(map(estimated_tokens, parts)) if exact is None else exact
        tokens = f"{'≈' if exact is None else ''}{plural(n_tokens, 'token')}"
        room = model.n_ctx - model.n_ctx // ANSWER_SHARE if model is not None else 0
        if model is not None and 0 < room < n_tokens:
            tokens = f"{tokens}: too long for the context of {model.n_ctx:,}"
        elif model is not None and 0 < room < n_tokens + self._used():
            tokens = f"{tokens}: with this chat {n_tokens + self._used():,} of {model.n_ctx:,}"
        if (seconds := self._seconds(n_tokens)) is not None and seconds > _LEAST_WAIT and "too long" not in tokens:
            tokens = f"{tokens} · ≈{time_left(seconds).removesuffix(' left')} to read"
        if not found:
            return tokens
        return f"{clean_line(found[0].title) if len(found) == 1 else plural(len(found), 'attachment')}, {tokens}"

    async def _counted(self, parts: list[str], model: ModelInfo) -> int | None:
        """Return the tokens of these texts; None when they cannot be counted. While a text is part of the message it is
        counted once.
        """
        if sum(map(len, parts)) > model.n_ctx * _LONGEST_TOKENS:
            return None
        known = self._known_counts[1] if self._known_counts[0] is model else {}
        counts = dict[str, int]()
        for part in parts:
            n_tokens = known.get(part)
            if n_tokens is None and (n_tokens := await self._count_tokens(storable(part))) is None:
                return None
            counts[part] = n_tokens
        self._known_counts = model, counts
        return sum(counts[part] for part in parts)
