"""What a terminal sends, from bytes to events: whatever it is, nothing of it ends the app or stops the keyboard.

Textual 8.2 raises for bytes that are not UTF-8, collects what it does not know with the text after it, waits for ever
for the end of a paste, and looks at each character of one: seconds for megabytes. Here the input is cut into sequences
first. Textual gets text and what it is known to read; what is neither that nor a key is skipped.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from time import monotonic

from textual import constants
from textual._xterm_parser import XTermParser
from textual.events import Paste, Resize
from textual.message import Message

from cpuchat.tui.terminal.background import background_reported
from cpuchat.tui.terminal.keyboard import keys_of

_PASTE, _PASTED = "\x1b[200~", "\x1b[201~"  # around a pasted text
_BYTE, _TWO = r"[\x00\x20-\x7f\udc80-\udcff]", r"[\x80-\u07ff]"  # of an X10 mouse report
_STRING = r"\x1b(?:\](?=\d)|P(?=[\d>!+$=|])|_G)[^\x00-\x1f\x7f]*"  # OSC, DCS, APC
_CSI = r"\x1b?\x1b\[(?!\[|M|\d+\$(?!y))[ -?]*"
_SEQUENCE = re.compile(
    rf"\x1b\[M(?P<mouse>{_BYTE}(?:{_BYTE}{{2}}|{_TWO}))|\x1b\[\[[A-E]|\x1b\[\d+\$(?!y)|{_CSI}[@-~](?::[1-3])?|"
    rf"\x1b?\x1bO(?:[\d;]*[A-DFHP-S]|[a-dj-yEIMX])|{_STRING}(?:\x07|\x1b\\|\x9c|\udc9c)"
)
_BEGUN = re.compile(rf"{_CSI}|\x1b?\x1b(?:\[(?:\[|M{_BYTE}{{,2}})|O[\d;]*|[\]P_])?|{_STRING}\x1b?")
_CUT = re.compile(rf"{_CSI}|\x1b\[[\[M]|{_STRING}(?:\x1b(?=\x1b|\Z))?")
_C1 = re.compile(r"\udc9b(?=[\d;]*[A-DFHPQSu~])")  # CSI in one byte
_TEXTUALS = re.compile(r"\x1b\[(?:[IO]|<\d{1,4};-?\d{1,5};-?\d{1,5}[Mm]|\?\d{1,5};\d\$y)")  # focus, mouse, modes
_REPORTS = re.compile(rf"(?:{_TEXTUALS.pattern})+")
_URXVT_MOUSE = re.compile(r"\x1b\[(\d{1,4});(\d{1,4});(\d{1,4})M")
_SIZE = re.compile(r"\x1b\[48;(\d{1,4})[:\d]*;(\d{1,4})[:\d]*;(\d{1,5})[:\d]*;(\d{1,5})[:\d]*t")
_WIN32 = re.compile(r"\x1b\[([\d;]{,40})_")  # win32-input-mode, as ConPTY sends it
_WIN32_KEYS = {
    code: name
    for first, names in ((33, "5~ 6~ 1F 1H 1D 1A 1C 1B"), (45, "2~ 3~"), (112, "1P 1Q 13~ 1S 15~ 17~ 18~ 19~ 20~ 21~"))
    for code, name in enumerate(names.split(), first)
} | {122: "23~", 123: "24~", 8: "127u", 9: "9u", 13: "13u", 27: "27u"}
_PLAIN = re.compile(r"[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f\udc9b]+")
_LINES = re.compile(r"[^\r\n][\r\n]+[^\r\n]")
_MARK_BEGUN = re.compile(r"\x1b(?:\[[\d;]*)?\Z")

_ESCAPE_SECONDS = constants.ESCAPE_DELAY + 0.05  # for the rest, after an Esc that may be the key
_SECONDS = 0.5  # for the rest of what has certainly begun, since its last part
_MAX_SECONDS = 3.0  # for all of it: a reply that was cut swallows what is typed
_PASTE_SECONDS = 1.0  # for the rest of a paste; as ends get lost with connections
_TYPED_SECONDS = 0.05  # between keys that are typed; parts of a paste come sooner
_BULK = 64  # characters that nobody types at once
_ENTER_SECONDS = 0.02  # for more lines, after one that came with its Enter: nobody types both at once


class InputParser:
    """Reads what a terminal sends: keys, mouse, pastes and replies. Lines that come at once are a paste without marks,
    as from terminals and multiplexers that have none: typed, each would be sent by its line break."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._decoder = getincrementaldecoder("utf-8")("surrogateescape")
        self._textual = XTermParser()
        self.held = ""  # the beginning of a sequence or of a paste, for which `tick` is to be called soon
        self._begun_at = self._read_at = self._pasted_at = self._escaped_at = float("-inf")
        self._paste: list[str] | None = None  # its parts, while one comes in
        self._was_cut = False  # the last paste, by time
        self._lines_at = float("-inf")  # when the last part of a paste without marks came

    def feed(self, data: bytes) -> Iterator[Message]:
        """Return what has come in with `data`; what may go on is held until it does, or until `tick` finds it late."""
        now, text = self._clock(), self._decoder.decode(data)
        if self._paste is not None and _REPORTS.fullmatch(text):  # the mouse moves over one that does not end
            return
        is_key = len(text) == 1 or _SEQUENCE.fullmatch(text) is not None
        if self._paste is not None and is_key and now - self._read_at > _TYPED_SECONDS:
            if text != "\n" and any("ctrl+" in key.key for key in keys_of(text)):
                yield self._end_paste()
        else:
            self._pasted_at = now
        # A whole sequence is a key of its own: F2 soon after Esc is no Alt+F2.
        if now - self._escaped_at < _SECONDS and text[:1] != "\x1b" and _goes_on(f"\x1b{text}"):
            text = f"\x1b{text}"
        self._read_at, self._escaped_at = now, float("-inf")
        if not self.held:
            self._begun_at = now
        text, self.held = self.held + text, ""
        if _WIN32.search(text):  # in UTF-16
            text = _WIN32.sub(_as_sent, text).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        before = text.partition(_PASTE)[0]
        if self._was_cut and (_PASTED in before or (len(before) > _BULK and "\x1b" not in before)):
            self._paste, self._was_cut = [], False
        if self._paste is None and _PLAIN.fullmatch(text):
            if _LINES.search(text) or (text != "\r" and now - self._lines_at <= _TYPED_SECONDS):
                self._lines_at = now
                yield Paste(_decoded(text))
                return
            if len(text) > 1 and text.endswith("\r"):
                self.held = text
                return
        yield from self._read(text)

    def tick(self) -> Iterator[Message]:
        """Return what was held for too long, as it is."""
        now = self._clock()
        since = now - self._read_at
        if since >= _ESCAPE_SECONDS and (late := self._decoder.decode(b"", final=True)):  # no UTF-8
            text, self.held = self.held + late, ""
            yield from self._read(text)
        if self._paste is not None:
            if now - self._pasted_at >= _PASTE_SECONDS:
                yield self._end_paste()
                self._was_cut = True
        elif self.held == "\x1b" and since >= _ESCAPE_SECONDS:
            self._escaped_at = now
            yield from self._give_up()
        elif self.held.endswith("\r"):
            if since >= _ENTER_SECONDS:
                text, self.held = self.held, ""
                yield from self._read(text)
        elif self.held not in ("", "\x1b") and (since >= _SECONDS or now - self._begun_at >= _MAX_SECONDS):
            yield from self._give_up()

    def _read(self, text: str) -> Iterator[Message]:
        while text:
            if self._paste is not None:
                inside, ends, text = text.partition(_PASTED)
                if not ends and (begun := _MARK_BEGUN.search(inside)):
                    inside, self.held = inside[: begun.start()], begun[0]
                self._paste.append(inside)
                if ends:
                    yield self._end_paste()
                continue
            typed, begins, text = text.partition(_PASTE)
            yield from self._read_typed(_C1.sub("\x1b[", typed))
            if begins:
                yield from self._give_up()
                self._paste, self._was_cut = [], False

    def _end_paste(self) -> Paste:
        """Return what was pasted, without the marks of a paste in it, and go on with what is typed."""
        text = "".join(self._paste or ()).replace(_PASTE, "").replace("\0", "")
        self._paste, self.held = None, ""
        return Paste(_decoded(text))

    def _read_typed(self, text: str) -> Iterator[Message]:
        """Return the events of text and sequences; hold a sequence that is not complete."""
        while text:
            plain, escape, rest = text.partition("\x1b")
            if plain:
                yield from self._textual.feed(_decoded(plain))
            if not (text := escape + rest):
                return
            if found := _SEQUENCE.match(text):
                yield from self._read_sequence(found)
            elif _BEGUN.fullmatch(text):
                self.held = text
                return
            elif (found := _CUT.match(text)) is None:
                yield from keys_of(text[:2])
            text = text[found.end() if found else 2 :]

    def _read_sequence(self, found: re.Match[str]) -> Iterator[Message]:
        """Return what a whole sequence says: nothing if that is unknown."""
        text = found[0]
        if raw := found["mouse"]:
            text = _as_sgr(*raw.encode(errors="surrogateescape"))
        elif mouse := _URXVT_MOUSE.fullmatch(text):
            button, x, y = map(int, mouse.groups())
            text = _as_sgr(button, x + 32, y + 32)
        if size := _SIZE.fullmatch(text):
            rows, columns, height, width = map(int, size.groups())
            if 0 < rows <= min(height, 2000) and 0 < columns <= min(width, 2000):
                yield from self._textual.feed(text)
            elif rows and columns and not height * width:
                yield Resize.from_dimensions((columns, rows), None)
        elif _TEXTUALS.fullmatch(text):
            yield from self._textual.feed(text)
        elif reported := background_reported(text):
            yield reported
        else:
            yield from keys_of(text)

    def _give_up(self) -> Iterator[Message]:
        """Return what is held as keys, if it may be one; a sequence that was cut is skipped."""
        text, self.held = self.held, ""
        if len(text) <= 2 or not _CUT.fullmatch(text):
            yield from keys_of(text[:2])


def _decoded(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _goes_on(text: str) -> bool:
    """Return whether what came after an Esc, all at once, is the rest of a sequence that nobody types."""
    found = _SEQUENCE.match(text)
    return found is not None and (len(found[0]) > 3 or bool(keys_of(found[0]) or _TEXTUALS.fullmatch(found[0])))


def _as_sgr(button: int, x: int, y: int) -> str:
    """Return a mouse report of an older form, all of whose numbers are 32 higher, in the one that Textual reads."""
    button -= 32
    is_up = button & 3 == 3 and not button & 96
    return f"\x1b[<{0 if is_up else button};{x - 32};{y - 32}{'m' if is_up else 'M'}"


def _as_sent(found: re.Match[str]) -> str:
    """Return a record of win32-input-mode (key, scan code, character, is down, state) as other terminals send it."""
    key, _, unit, down, state, *_ = (*(int(field or 0) for field in found[1].split(";")), 0, 0, 0, 0, 0)
    if not down or unit > 0xFFFF:
        return ""
    alt, ctrl = bool(state & 3), bool(state & 12)
    modifiers = 1 + bool(state & 16) + 2 * alt + 4 * ctrl
    if name := _WIN32_KEYS.get(key):
        return f"\x1b[{name[:-1]};{modifiers}{name[-1]}"
    if not unit or not key or alt == ctrl:  # of a sequence that ConPTY passed on, or AltGr
        return chr(unit) if unit else ""
    return f"\x1b[{key + 32 if 65 <= key <= 90 else unit};{modifiers}u"
