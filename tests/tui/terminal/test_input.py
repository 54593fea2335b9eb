"""Tests what a terminal may send: it becomes keys, text, pastes and mouse events, or nothing; never an error."""

from __future__ import annotations

import random

import pytest
from textual import events
from textual._xterm_parser import XTermParser
from textual.message import Message

from cpuchat.tui.terminal.input import InputParser

PASTE, PASTED = "\x1b[200~", "\x1b[201~"
WHITE = "\x1b]11;rgb:ffff/ffff/ffff\x1b\\"


class Parser(InputParser):
    """A parser with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(clock=lambda: self.now)

    def read(self, *parts: str | bytes, after: float = 0.0) -> str:
        """Return what the parts give, each `after` the one before: text as it is, keys as <ctrl+c>, pastes in []."""
        found: list[Message] = []
        for part in parts:
            found += self.feed(part.encode() if isinstance(part, str) else part)
            found += self.pass_time(after)
        return "".join(map(named, found))

    def pass_time(self, seconds: float) -> list[Message]:
        """Return what is given up in so many seconds."""
        found = list(self.tick())
        for _ in range(round(seconds / 0.01)):
            self.now += 0.01
            found += self.tick()
        return found

    def finish(self) -> str:
        """Return what is given up when nothing comes any more."""
        found: list[Message] = []
        for _ in range(5):
            self.now += 1.0
            found += self.tick()
        return "".join(map(named, found))


def named(message: Message) -> str:
    if isinstance(message, events.Key):
        return message.character if message.character and message.is_printable else f"<{message.key}>"
    if isinstance(message, events.Paste):
        return f"[{message.text}]"
    if isinstance(message, events.MouseEvent):
        return f"<{type(message).__name__} {message.x:.0f},{message.y:.0f}>"
    if isinstance(message, events.Resize):
        return f"<{message.size.width}x{message.size.height}>"
    return f"<{type(message).__name__}>"


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        # kitty, beside what is reported below: locks, keypad, modifiers alone, keys without a character
        ("\x1b[97;1:2u", "a"), ("\x1b[97;;97u", "a"), ("\x1b[97;1;97:769u", "a\u0301"), ("\x1b[0;;27u", ""),
        ("\x1b[97:::;1:1:1;u", "a"), ("\x1b[27;193u", "<escape>"), ("\x1b[15;129~", "<f5>"),
        ("\x1b[57417;5u", "<ctrl+left>"), ("\x1b[57441;2u", ""), ("\x1b[57376u", "<f13>"), ("\x1b[63743u", ""),
        ("\x1b[1;3:1D", "<alt+left>"), ("\x1b[5;5:3~", ""), ("\x1b[9;2u", "<shift+tab>"), ("\x1b[91;5u", "<escape>"),
        ("\x1b[99;69u", "<ctrl+c>"), ("\x1b[45:95;6u", "<ctrl+underscore>"), ("\x1b[97;9u", "<super+a>"),
        # code points that are none, and fields that are no numbers of a key
        ("\x1b[55296u", ""), ("\x1b[4294967296u", ""), ("\x1b[128;1u", ""), ("\x1b[0u", ""), ("\x1b[97;999u", ""),
        ("\x1b[97;1;1114112u", "a"), ("\x1b[97;0u", "a"), ("\x1b[u", ""), ("\x1b[97;1:99999u", "a"), ("\x1b[-97u", ""),
        pytest.param(f"\x1b[{'9' * 5000}u", "", id="digits"),
        pytest.param(f"\x1b[97;{'1;' * 5000}u", "a", id="fields"),
        # Enter that does not send, and modifyOtherKeys
        ("\x1b\n", "<alt+enter>"), ("\x1b[57414;2u", "<shift+enter>"), ("\x1b[27;130;13~", "<shift+enter>"),
        ("\x1b[27;6;67~", "<ctrl+shift+c>"), ("\x1b[27;2;65~", "A"), ("\x1b[27;1;228~", "ä"),
        ("\x1b[27;5;8~", "<ctrl+backspace>"), ("\x1b[27;5;1114112~", ""), ("\x1b[27;5;~", ""),
        # SS3, Linux console, rxvt, Alt
        ("\x1bO5P", "<ctrl+f1>"), ("\x1bO1;2A", "<shift+up>"), ("\x1bOM", "<enter>"), ("\x1b[[A", "<f1>"),
        ("\x1b[23$", "<f23>"), ("\x1b[3^", "<ctrl+delete>"), ("\x1b[a", "<shift+up>"), ("\x1b\x1b[A", "<alt+up>"),
        ("\x1b\x1bOA", "<alt+up>"), ("\x1bR", "<alt+shift+r>"), ("\x1b\x7f", "<ctrl+w>"),
        ("\x1b\x03", "<escape><ctrl+c>"), ("\x1b[1;7p", "<alt+ctrl+0>"),
        # win32-input-mode
        ("\x1b[67;46;3;1;8;1_", "<ctrl+c>"), ("\x1b[17;29;0;1;8;1_", ""), ("\x1b[37;75;0;1;8;1_", "<ctrl+left>"),
        ("\x1b[81;16;64;1;9;1_", "@"), ("\x1b[81;16;113;1;2;1_", "<alt+q>"), ("\x1b[65;30;55357;1;0;1_", "\ufffd"),
        # the key of the base layout, where there is no Latin letter
        ("\x1b[39::119;5u", "<ctrl+w>"), ("\x1b[47::113;5u", "<ctrl+q>"), ("\x1b[1110;5u", "<ctrl+s>"),
        ("\x1b[1057;6u", "<ctrl+shift+c>"), ("\x1b[1498;5u", "<ctrl+l>"),
        # Latin layouts that are not QWERTY keep their own letters
        ("\x1b[97::113;5u", "<ctrl+a>"), ("\x1b[59::122;5u", "<ctrl+semicolon>"), ("\x1b[228;5u", "<ctrl+ä>"),
    ],
)  # fmt: skip
def test_a_report_of_a_key(sent: str, meant: str) -> None:
    assert Parser().read(f"x{sent}z") == f"x{meant}z"


@pytest.mark.parametrize(
    ("letter", "latin"),
    [*zip("йςضㅂๆქקی", "qwqqqqed", strict=True), *zip("яζئㅋผზז", "zzzzzzz", strict=True)],
    ids=ascii,
)
def test_shortcuts_work_on_layouts_without_latin_letters(letter: str, latin: str) -> None:
    code = ord(letter)
    reports = (f"\x1b[{code};5u", f"\x1b[27;5;{code}~", f"\x1b[{code}::{ord(latin)};5:1u", f"\x1b[{code};69u")
    assert Parser().read(*reports) == f"<ctrl+{latin}>" * 4
    assert Parser().read(f"\x1b{letter}", f"\x1b[{code};3u") == f"<alt+{latin}>" * 2
    assert Parser().read(f"\x1b[{code}u", letter, f"\x1b[{code};;{code}u") == letter * 3  # typed, it stays what it is


@pytest.mark.parametrize(
    "reply",
    [
        "\x1b[?1;2c", "\x1b[>41;370;0c", "\x1b[0n", "\x1b[8;24;80t", "\x1b[24;80R", "\x1b[4;2$y", "\x1b[<5;x",
        "\x1b[1;2;3;4;5z", "\x1b[!p", "\x1bP>|XTerm(370)\x1b\\", "\x1bP0$r\x9c", "\x1b]4;1;rgb:0/0/0\x07",
        "\x1b_Gi=1;OK\x1b\\", "\x1b[48;0;0;0;0t", "\x1b[48;9999;9999;9999;9999t", "\x1b[48;24;80t", "\x1b[M\x00!!",
        "\x1b[<0;-5;-3M", "\x1b[<0;;M", "\x1b[<99999999;1;1M",
    ],
    ids=ascii,
)  # fmt: skip
def test_a_reply_in_the_middle_in_parts_or_cut_is_no_text(reply: str) -> None:
    assert Parser().read(f"a{reply}b") == "ab"
    for cut in range(1, len(reply)):
        assert Parser().read("a", reply[:cut], f"{reply[cut:]}b") == "ab", cut
        assert Parser().read(f"a{reply[:2]}", reply[2:], "b", after=0.1) == "ab"
        if cut > 2 and "\x00" not in reply:
            parser = Parser()
            assert parser.read(f"a{reply[:cut]}", "\x1b[D", "b") == "a<left>b", cut
            assert parser.read(f"a{reply[:cut]}") + parser.finish() + parser.read("b") == "ab", cut


def test_bytes_that_are_no_utf_8_are_replaced() -> None:
    assert Parser().read(b"caf\xe9 ole") == "caf\ufffd ole"
    assert Parser().read(f"{PASTE}gr".encode() + b"\xfc\xdfe" + PASTED.encode()) == "[gr\ufffd\ufffde]"
    for byte in range(0x80, 0x100):
        parser = Parser()
        assert parser.read(b"a" + bytes([byte]) + b"-b") == "a\ufffd-b", byte
        assert parser.read(bytes([byte])) + parser.finish() + parser.read("c") == "\ufffdc", byte  # no lead that waits
    text = "aé‰😀".encode()
    for cut in range(len(text)):
        assert Parser().read(text[:cut], text[cut:]) == "aé‰😀"
    assert Parser().read(b"\x9bA\x9b97;5u") == "<up><ctrl+a>"


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (b"\x1b[M \x21\x21", "<MouseDown 0,0>"), (b"\x1b[M#\x21\x21", "<MouseUp 0,0>"),
        (b"\x1b[M \x21\xe2", "<MouseDown 0,193>"), (b"\x1b[M`\x80\x21", "<MouseScrollUp 95,0>"),
        (b"\x1b[32;120;7M", "<MouseDown 119,6>"), (b"\x1b[35;300;7M", "<MouseUp 299,6>"),
        (b"\x1b[<35;9999;9999M", "<MouseMove 9998,9998>"), (b"\x1b[I", "<AppFocus>"), (b"\x1b[O", "<AppBlur>"),
        (b"\x1b[?2026;2$y", "<TerminalSupportsSynchronizedOutput>"), (b"\x1b[48;24;80;480;800t", "<80x24>"),
        (b"\x1b[48;24:1;80;480;800:2t", "<80x24>"), (WHITE.encode(), "<BackgroundReported>"),
    ],
)  # fmt: skip
def test_mouse_focus_size_and_replies_however_they_are_cut(sent: bytes, meant: str) -> None:
    assert Parser().read(b"a" + sent + "é".encode()) == f"a{meant}é"
    for cut in range(2, len(sent)):
        assert Parser().read(b"a" + sent[:cut], sent[cut:], b"b", after=0.12) == f"a{meant}b", cut


@pytest.mark.parametrize(
    "sequence", ["\x1b[A", "\x1b[1;5D", "\x1bOP", "\x1b[27;2;13~", "\x1b[97;1:1u", "\x1b[<35;10;10M"]
)
def test_a_sequence_in_two_packets_is_one(sequence: str) -> None:
    whole = Parser().read(sequence)
    for cut in range(1, len(sequence)):
        assert Parser().read("a", sequence[:cut], f"{sequence[cut:]}b", after=0.12) == f"a{whole}b", cut
    assert Parser().read(*sequence, after=0.12) == whole
    # Its Esc was taken for the key, but the rest is not typed.
    assert Parser().read("\x1b", f"{sequence[1:]}b", after=0.3) == f"<escape>{whole}b"


def test_escape_acts_quickly_and_what_is_typed_after_it_is_text() -> None:
    parser = Parser()
    assert parser.read("\x1b") == ""
    assert "".join(map(named, parser.pass_time(0.16))) == "<escape>"
    assert parser.read("[", "A", "b", after=0.1) == "[Ab"
    assert parser.read("\x1b", "[hello", "OK", after=0.2) == "<escape>[helloOK"
    assert Parser().read("\x1b", "\x1bOQ", "\x1b[A", after=0.2) == "<escape><f2><up>"
    assert Parser().read("\x1b\x1b", after=0.6) == "<escape>"  # as Windows sends it
    for begun, key in (("[", "alt+left_square_bracket"), ("O", "alt+shift+o"), ("]", "alt+right_square_bracket")):
        assert Parser().read(f"\x1b{begun}", after=0.6) == f"<{key}>"


def test_a_reply_that_was_cut_swallows_no_more_than_seconds() -> None:
    parser = Parser()
    assert 60 < len(parser.read("\x1b]52;c;YWJ", *("x" * 100), after=0.1)) < 75


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 4096])
def test_a_pasted_text_is_taken_out_whole_however_it_is_cut(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    feed = XTermParser.feed
    monkeypatch.setattr(XTermParser, "feed", lambda self, data: (looked_at.append(data), feed(self, data))[1])
    text = "a line\rwith \x1b[200 and \x1b[20 in it, \x1b[31mred, ä\x03\r" * 50
    data = f"x{PASTE}{text}{PASTED}y\x1b[24~".encode()
    parts = [data[at : at + step] for at in range(0, len(data), step)]
    assert Parser().read(*parts) == f"x[{text}]y<f12>"
    assert "".join(looked_at) == "xy"  # else it would take seconds for megabytes


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (f"{PASTE}{PASTE}a{PASTED}b{PASTED}c", "[a]bc"), (f"{PASTE}a{PASTE}b{PASTED}c", "[ab]c"), (f"a{PASTED}b", "ab"),
        (f"{PASTE}{PASTED}b", "[]b"), (f"{PASTE}a\0b\x1b{PASTED}c", "[ab\x1b]c"), 
        (f"\x1b{PASTE}a{PASTED}", "<escape>[a]"),
        (f"\x1b[1;{PASTE}a{PASTED}b", "[a]b"), (f"{PASTE}a\x1b[20{PASTED}b", "[a\x1b[20]b"),
    ],
)  # fmt: skip
def test_marks_of_pastes_that_are_doubled_nested_alone_or_beside_others(sent: str, meant: str) -> None:
    assert Parser().read(sent) == Parser().read(*sent) == meant


def test_a_paste_without_its_end_ends_by_time() -> None:
    parser = Parser()
    assert parser.read(f"{PASTE}one\rtwo\x1b[20") == ""
    assert parser.finish() == "[one\rtwo\x1b[20]".replace("\x1b[20", "")
    assert parser.read("a", "\r", after=0.1) == "a<enter>"
    parser.read(f"{PASTE}one")
    assert parser.read(*("x" * 30), after=0.1).startswith("[onexxx")  # typing into it does not keep it open
    parser.read(f"{PASTE}one")
    assert "[one]" in parser.read(*["\x1b[<35;10;10M\x1b[<35;11;10M"] * 30, after=0.1)  # nor does the mouse
    for key in ("\x03", "\x11", "\x1b[99;5u", "\x1b[1081::113;5u", "\x1b[27;5;113~"):  # Ctrl+C and Ctrl+Q end it
        assert Parser().read(f"{PASTE}abc", key, after=0.2) == f"[abc]{Parser().read(key)}"


def test_the_rest_of_a_paste_that_stalled_is_no_keys() -> None:
    """Typed, its first line break would send half of a message."""
    parser = Parser()
    assert parser.read(f"{PASTE}one\r", after=2.0) == "[one\r]"
    assert parser.read(f"two\rthree{PASTED}\r") == "[two\rthree]<enter>"
    parser.read(f"{PASTE}one\r", after=2.0)
    assert parser.read("two\r" * 20, f"three{PASTED}a") == f"[{'two' + chr(13)}{('two' + chr(13)) * 19}three]a"


def test_any_bytes_at_all_end_nothing() -> None:
    draw = random.Random(1)
    pieces = (
        b"\x1b \x1b[ \x1bO \x1b] \x1bP ; : ? < M m u ~ t $y _ 200~ 201~ 48 27 97 0 - \xc3 \xff \0 a \xc3\xa9".split(
            b" "
        )
    )
    pieces.append(b"9" * 40)
    for _ in range(800):
        parser = Parser()
        parts = [b"".join(draw.choices(pieces, k=draw.randrange(1, 9))) for _ in range(4)]
        parser.read(*parts, after=draw.choice((0.0, 0.0, 0.2)))
        parser.finish()
        assert parser.read("z") == "z", parts


REPORTED: dict[str, tuple[list[str | bytes], float, str]] = {
    "kitty-event-types": (["a\x1b[97;1:1ub"], 0, "aab"),
    "kitty-alternate-keys": (["\x1b[50:64;2u\x1b[97:65;2u"], 0, "@A"),
    "kitty-releases": (["a\x1b[13;1:3u\x1b[127;1:3u\x1b[1;1:3Bb"], 0, "ab"),
    "kitty-release-after-the-key": (["a\x1b[1;1D\x1b[1;1D:3b"], 0, "a<left>b"),
    "kitty-out-of-range": (["a\x1b[1114112ub"], 0, "ab"),
    "kitty-num-lock": (["\x1b[13;129u\x1b[127;129u\x1b[9;129u"], 0, "<enter><backspace><tab>"),
    "kitty-caps-lock": (["\x1b[97;65u\x1b[1078;65u"], 0, "AЖ"),
    "kitty-keypad": (["\x1b[57404;129u\x1b[57411;129u\x1b[57414u"], 0, "5*<enter>"),
    "kitty-shift-space": (["a\x1b[32;2u\x1b[127;2u"], 0, "a <backspace>"),
    "kitty-composed": (["\x1b[0;;229u\x1b[0;;20320:22909u"], 0, "å你好"),
    "kitty-altgr": (["\x1b[113;7;64u\x1b[97;3;229u"], 0, "@å"),
    "cyrillic-base-layout": (["\x1b[1089::99;5:1u\x1b[1074::100;5:1u"], 0, "<ctrl+c><ctrl+d>"),
    "cyrillic-letter-alone": (["\x1b[1089;5u\x1b[27;5;1089~\x1b[1081;5u"], 0, "<ctrl+c><ctrl+c><ctrl+q>"),
    "greek": (["\x1b[968;5u\x1b[59::113;5u"], 0, "<ctrl+c><ctrl+q>"),
    "shift-enter-of-tmux": (["a\x1b[27;2;13~b\x1b\rc"], 0, "a<shift+enter>b<alt+enter>c"),
    "modify-other-keys": (["\x1b[27;5;99~\x1b[27;5;113~"], 0, "<ctrl+c><ctrl+q>"),
    "not-utf-8": ([b"caf\xe9 ole"], 0, "caf\ufffd ole"),
    "x10-mouse": ([b"\x1b[MC\xff\x30\x1b[MC\xc3\xa9a"], 0, "<MouseMove 222,15><MouseMove 162,136>a"),
    "no-pixels": (["\x1b[48;24;80;0;0t\x1b[<35;11;21M"], 0, "<80x24><MouseMove 10,20>"),
    "paste-without-end": ([f"{PASTE}abc", "d", "e"], 1.2, "[abc]de"),
    "paste-that-ends-in-escape": ([f"{PASTE}a\x1b{PASTED}b", f"{PASTE}a\x1b[2{PASTED}b"], 0, "[a\x1b]b[a\x1b[2]b"),
    "paste-in-win32-input-mode": (["".join(f"\x1b[;0;{ord(x)};1;0;1_" for x in f"{PASTE}test{PASTED}")], 0, "[test]"),
    "win32-input-mode": (["\x1b[80;25;112;1;32;1_\x1b[80;25;112;0;32;1_\x1b[13;28;13;1;32;1_"], 0, "p<enter>"),
    "win32-emoji": (["\x1b[0;0;55357;1;0;1_\x1b[0;0;56832;1;0;1_"], 0, "😀"),
    "arrow-in-two-packets": (["\x1b[", "A", "\x1b[1;", "5D"], 0.12, "<up><ctrl+left>"),
    "escape-and-its-rest": (["a\x1b", "[<35;20;5m", "\x1b", "[I"], 0.3, "a<escape><MouseMove 19,4><escape><AppFocus>"),
    "alt-enter-in-two-packets": (["a\x1b", "\rb"], 0.12, "a<alt+enter>b"),
    "lines-without-marks": (["one\r\ttwo\r", "three\r", "\r"], 0, "[one\r\ttwo\r][three\r]<enter>"),
    "first-line-without-marks": (["one\r", "two"], 0, "[one\rtwo]"),
    "line-with-its-enter": (["one\r", "two"], 0.03, "one<enter>two"),
    "replies-in-packets": (["\x1b]10;rgb:eeee/ee", "ee/eeee\x07a\x1b[?62;2", "2cb"], 0.2, "ab"),
    "reply-that-was-cut": (["\x1b]4;1;rgb:eeee/eeee/ee", "a"], 0.6, "a"),
}


@pytest.mark.parametrize(("parts", "after", "meant"), REPORTED.values(), ids=list(REPORTED))
def test_what_people_reported_of_other_programs(parts: list[str | bytes], after: float, meant: str) -> None:
    assert Parser().read(*parts, after=after) == meant
