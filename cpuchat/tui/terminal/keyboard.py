"""Keys from escape sequences: kitty's reports with all sub-fields, modifyOtherKeys, Alt, and shortcuts on layouts that
have no Latin letters.

Textual 8.2 reads no sub-fields, types the letter of a modifyOtherKeys report, and raises for code points that are none.
"""

from __future__ import annotations

import re

from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual._keyboard_protocol import FUNCTIONAL_KEYS, MODIFIER_FUNCTIONAL_KEYS
from textual.events import Key
from textual.keys import _character_to_key

# Fields, final character, and the event type where Windows Terminal puts it.
_REPORT = re.compile(r"\x1b\[([\d:;]*)([u~A-FHPQRS])(?::(\d))?")
_SS3 = re.compile(r"\x1bO(?:1;)?(\d)([A-DFHP-S])")
_MODIFIERS = ("shift", "alt", "ctrl", "super", "hyper", "meta")
_CAPS, _MAX = 1 << 6, (1 << 8) - 1  # Caps Lock; all modifiers and locks
_OTHERS = {"8u": "backspace", "10u": "enter"}  # of modifyOtherKeys
_KEYPAD = dict(zip([*range(57399, 57414), 57415, 57416], "0123456789./*-+=,", strict=True))
_ALONE = frozenset(MODIFIER_FUNCTIONAL_KEYS) | {"caps_lock", "scroll_lock", "num_lock"}
_PRIVATE = range(57344, 63744)  # in place of keys without a character
_LATIN = {
    theirs: latin
    for row, latin_row in (
        ("йцукенгшщзхъфывапролджэячсмитьбю", "qwertyuiop[]asdfghjkl;'zxcvbnm,."),  # Russian
        ("іїєўљњђћјџќ", "s]'oqw['jx'"),  # Ukrainian, Belarusian, Serbian, Macedonian
        ("ςερτυθιοπασδφγηξκλζχψωβνμ", "wertyuiopasdfghjklzxcvbnm"),  # Greek
        ("קראטוןםפשדגכעיחלךףזסבהנמצתץ", "ertyuiopasdfghjkl;zxcvbnm,."),  # Hebrew
        ("ضصثقفغعهخحجشسيبلاتنمكئءؤرىةوطدزیکگپچذ", "qwertyuiop[asdfghjkl;zxcvnm,xncd;'m]b"),  # Arabic, Persian
        ("ㅂㅈㄷㄱㅅㅛㅕㅑㅐㅔㅁㄴㅇㄹㅎㅗㅓㅏㅣㅋㅌㅊㅍㅠㅜㅡ", "qwertyuiopasdfghjklzxcvbnm"),  # Korean
        ("ๆไำพะัีรนยฟหกดเ้่าสผปแอิืท", "qwertyuiopasdfghjklzxcvbnm"),  # Thai
        ("ქწერტყუიოპასდფგჰჯკლზხცვბნმ", "qwertyuiopasdfghjklzxcvbnm"),  # Georgian
    )
    for theirs, latin in zip(row, latin_row, strict=True)
}
"""The Latin letters at the places of others, for terminals that do not report them."""
_AT_A_LETTER = {(";", "q"), ("/", "q"), ("'", "w")}  # Greek, Hebrew: ASCII where no Latin layout has it


def keys_of(sequence: str) -> list[Key]:
    """Return the keys of an escape sequence: none for a release, for modifiers alone, and for what is no key."""
    if (report := _REPORT.fullmatch(sequence)) and (keys := _reported(*report.groups())) is not None:
        return keys
    if ss3 := _SS3.fullmatch(sequence):
        return keys_of("\x1b[1;{}{}".format(*ss3.groups()))
    known = ANSI_SEQUENCES_KEYS.get(sequence)
    if isinstance(known, str):
        return [_typed(known)]
    if isinstance(known, tuple):
        return [Key("alt+" * (len(known) - 1) + known[-1].value, None)]
    if sequence[:2] == "\x1b\x1b":
        return [_named({"alt", *key.key.split("+")[:-1]}, key.key.rpartition("+")[2]) for key in keys_of(sequence[1:])]
    if len(sequence) != 2:
        return []
    character = sequence[1]
    if name := {"\r": "enter", "\n": "enter", "\b": "backspace"}.get(character):
        return [_named({"alt"}, name)]
    if character < " ":  # Esc, and then a control key
        return [_named(set(), "escape"), *keys_of(character)]
    return [_shortcut({"alt"}, character)]


def _reported(parameters: str, final: str, event: str | None) -> list[Key] | None:
    """Return the keys of a report, None if it is that of no key of the protocol."""
    if max(map(len, re.split("[:;]", parameters))) > 7:
        return []
    fields = [[int(part or 0) for part in field.split(":")] for field in parameters.split(";")]
    if final == "~" and fields[0] == [27] and len(fields) == 3:  # modifyOtherKeys
        fields, final = [fields[2][:1] * 2, fields[1]], "u"
    (code, shifted, base), (modifiers, kind) = (*fields[0], 0, 0)[:3], (*(fields[1:2] or [[1]])[0], 1)[:2]
    bits = max(modifiers, 1) - 1
    if kind == 3 or event == "3" or bits > _MAX:
        return []
    held = {name for bit, name in enumerate(_MODIFIERS) if bits >> bit & 1}
    text = "".join(map(chr, filter(_is_text, fields[2] if len(fields) > 2 else [])))
    if code in _KEYPAD and final == "u":
        code, text = ord(_KEYPAD[code]), text or _KEYPAD[code]
    elif name := FUNCTIONAL_KEYS.get(f"{code or 1 - (final == 'u')}{final}") or _OTHERS.get(f"{code}{final}"):
        return [] if name in _ALONE else [_named(held, name)]
    elif final != "u":
        return None
    character = chr(code) if _is_text(code) and code not in _PRIVATE else ""
    # AltGr is Ctrl and Alt, and Option is Alt: what they type comes as text of its own.
    if (text and text != character and "alt" in held) or not held - {"shift"}:
        if "shift" in held and _is_text(shifted):
            character = chr(shifted)
        elif bool(held) != bool(bits & _CAPS):
            character = character.upper()
        return list(map(_typed, text or character))
    if not character:
        return []
    if chr(base % 128) > " " and base < 127 and (not character.isascii() or (character, chr(base)) in _AT_A_LETTER):
        character = chr(base)
    elif "shift" in held and _is_text(shifted) and not character.isalpha():
        character, held = chr(shifted), held - {"shift"}
    return [_shortcut(held, character)]


def _is_text(code: int) -> bool:
    return 32 <= code < 127 or 160 <= code < 0xD800 or 0xE000 <= code <= 0x10FFFF


def _typed(character: str) -> Key:
    return Key(_character_to_key(character), character)


def _shortcut(held: set[str], character: str) -> Key:
    """Return what a character is with Ctrl, Alt and others held, on a Latin layout."""
    letter = _LATIN.get(character.lower(), character.lower())
    if letter == "[" and held == {"ctrl"}:
        return _named(set(), "escape")
    if held == {"alt"} and character.isupper():
        held = {"alt", "shift"}
    return _named(held, _character_to_key(letter))


def _named(held: set[str], name: str) -> Key:
    """Return a key that is no text; with Shift, some are what they are on terminals that do not tell."""
    if held == {"shift"} and name in ("backspace", "escape"):
        held = set()
    elif name == "enter" and "shift" in held and "ctrl" not in held:
        held = {"shift"}
    return Key("+".join([*sorted(held), name]), None)
