"""Tests reading what a message names: files, ranges, folders, and what is refused."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.chats.history import sent_text
from cpuchat.chats.records import Attachment
from cpuchat.session.attachments import MAX_BYTES, attach, completions, is_pasted, named, pasted, unfinished


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("one\ntwo\nthree\nfour")
    (tmp_path / "notes.md").write_text("# Notes\n")
    (tmp_path / "my file.txt").write_text("spaced\n")
    (tmp_path / ".hidden").write_text("secret\n")
    return tmp_path


def read(text: str, folder: Path) -> list[tuple[str, str, str]]:
    return [(one.mark, one.title, one.text) for one in attach(text, folder)]


def refusal(text: str, folder: Path) -> str:
    with pytest.raises(UsageError) as raised:
        attach(text, folder)
    return str(raised.value)


def test_files_that_are_named_are_read_in_order_and_once(folder: Path) -> None:
    text = f'Compare @notes.md, @"my file.txt" and @notes.md with @{folder}/src/main.py.'
    assert read(text, folder) == [
        ("@notes.md", "notes.md", "# Notes\n"),
        ('@"my file.txt"', "my file.txt", "spaced\n"),
        (f"@{folder}/src/main.py", f"{folder}/src/main.py", "one\ntwo\nthree\nfour"),
    ]


@pytest.mark.parametrize(
    ("lines", "title", "text"),
    [
        ("2", "line 2", "two\n"),
        ("2-3", "lines 2-3", "two\nthree\n"),
        ("3-", "lines 3-4", "three\nfour"),
        ("3-99", "lines 3-4", "three\nfour"),
        ("0-1", "line 1", "one\n"),
    ],
)
def test_a_range_takes_these_lines(folder: Path, lines: str, title: str, text: str) -> None:
    assert read(f"@src/main.py:{lines}", folder) == [(f"@src/main.py:{lines}", f"src/main.py, {title}", text)]


@pytest.mark.parametrize(("lines", "reason"), [("5-9", "it has 4 lines"), ("3-2", "the last is before the first")])
def test_lines_that_are_not_there_are_refused(folder: Path, lines: str, reason: str) -> None:
    assert reason in refusal(f"@src/main.py:{lines}", folder)


def test_a_file_whose_name_ends_like_a_range_is_read_whole(folder: Path) -> None:
    (folder / "log:10").write_text("all\n")
    assert read("@log:10", folder) == [("@log:10", "log:10", "all\n")]


def test_what_names_no_file_is_text(folder: Path) -> None:
    text = "@property\n@app.route('/x')\nme@example.org @types/node @ @... Thanks @anna!"
    assert read(text, folder) == []
    assert "@property" in named(text)


@pytest.mark.parametrize("name", ["src/mian", "./notes", "src/gone.py:1-5", "missing.py", "gone/missing.toml:3-"])
def test_what_looks_like_a_path_and_is_no_file_is_refused(folder: Path, name: str) -> None:
    assert refusal(f"Explain @{name}", folder).startswith(f"No such file: {name}.")
    assert attach(f"Explain \\@{name}", folder) == ()


def test_a_folder_is_a_listing_that_reads_no_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "secret").write_text("password")
    (folder / "link").symlink_to(elsewhere)
    (folder / "bad\x1b[2J\nname").write_text("x")
    ((_, title, text),) = read("@.", folder)
    assert title == "., a folder"
    assert text.splitlines()[:2] == ["link/", "src/"]
    assert "my file.txt  7 B" in text
    assert "secret" not in text and "main.py" not in text and "\x1b" not in text
    (elsewhere / "secret").unlink()
    assert read(f"@{elsewhere}", folder)[0][2] == "(empty)"


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\0\0", b"\xff\xfeh\0i\0", b"caf\xe9\n", b"%PDF-1.4\n%\n"])
@pytest.mark.parametrize("lines", ["", ":1-2"])
def test_what_is_no_text_is_refused(folder: Path, data: bytes, lines: str) -> None:
    (folder / "data").write_bytes(data)
    assert "is not UTF-8 text. Only text can be attached" in refusal(f"@data{lines}", folder)


def test_a_large_file_is_read_by_range(folder: Path) -> None:
    line = b"x" * 99 + b"\n"
    with (folder / "big.log").open("wb") as file:
        for _ in range(20):
            file.write(line * 10_000)  # 20 MB
        file.write(b"last\n")
    assert "big.log has 20.0 MB; at most 4.0 MB can be attached. Name fewer lines: @big.log:1-200." in refusal(
        "@big.log", folder
    )
    assert "over 4.0 MB" in refusal("@big.log:2-", folder)
    assert read("@big.log:200001-", folder)[0][2] == "last\n"
    assert len(read(f"@big.log:1-{MAX_BYTES // 100}", folder)[0][2]) == MAX_BYTES


def test_what_is_no_regular_file_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert refusal("@pipe", folder).startswith("Cannot read pipe: not a regular file.")
    assert "not a regular file" in refusal("@/dev/null", folder)
    (folder / "broken").symlink_to("nowhere")
    assert refusal("@broken", folder).startswith("Cannot read broken: No such file or directory.")


def test_a_byte_order_mark_and_escape_sequences_are_no_harm(folder: Path) -> None:
    (folder / "esc\x1b[31m").write_bytes(b"\xef\xbb\xbfred \x1b[31m\n")
    (one,) = attach("@esc\x1b[31m", folder)
    assert (one.title, one.text) == ("esc␛[31m", "red \x1b[31m\n")
    assert "\x1b" not in refusal("@src/esc\x1b[31m", folder)


def test_pasted_text_stands_for_itself_until_its_mark_is_deleted(folder: Path) -> None:
    one = pasted("line\r\n" * 57, 1)
    assert (one.mark, one.title, one.text) == ("[Pasted text 1: 57 lines]", "Pasted text 1", "line\n" * 57)
    assert is_pasted(one)
    held = {one.mark: one}
    assert attach(f"What is {one.mark}?", folder, held) == (one,)
    assert attach("What is it?", folder, held) == ()
    assert attach(one.mark, folder) == ()
    pasted("half \ud800", 2).text.encode()


def test_a_file_of_an_edited_message_is_not_read_again(folder: Path) -> None:
    held = {"@notes.md": Attachment(mark="@notes.md", title="notes.md", text="as it was")}
    assert [one.text for one in attach("@notes.md @src/main.py:1", folder, held)] == ["as it was", "one\n"]


def test_the_model_reads_attachments_fenced_before_the_message() -> None:
    attachments = [Attachment(title="a.md", text="```\ncode\n```\n"), Attachment(title="b", text="x")]
    assert sent_text("Why?", attachments) == "a.md:\n````\n```\ncode\n```\n````\n\nb:\n```\nx\n```\n\nWhy?"
    assert sent_text("Why?", ()) == "Why?"


def test_paths_are_completed(folder: Path) -> None:
    assert completions("@", folder) == ["@src/", '@"my file.txt"', "@notes.md"]
    assert completions("@No", folder) == ["@notes.md"]
    assert completions("@file", folder) == ['@"my file.txt"']
    assert completions('@"my f', folder) == ['@"my file.txt"']
    assert completions("@src/", folder) == ["@src/main.py"]
    assert completions(f"@{folder}/src/m", folder) == [f"@{folder}/src/main.py"]
    assert completions("@.h", folder) == ["@.hidden"]
    assert completions("@nowhere/x", folder) == completions("@a\0b/", folder) == []
    (folder / "two words").mkdir()
    assert completions("@two", folder) == ['@"two words/']
    (folder / "esc\x1b[31m").write_text("x")
    assert completions("@esc", folder) == []


@pytest.mark.parametrize("text", [
    "请看@notes.md。", "总结 @notes.md，谢谢", "「@notes.md」を読んで", "@notes.mdを読んで", "파일@notes.md를 읽어",
    "อ่าน@notes.mdด้วย",
    "(@notes.md)", "[@notes.md]", "<@notes.md>", "（@notes.md）", "【@notes.md】", "《@notes.md》",
    'see "@notes.md"', "'@notes.md'", "“@notes.md”", "‘@notes.md’", "«@notes.md»", "„@notes.md“", "『@notes.md』",
    "`@notes.md`", "**@notes.md**", "__@notes.md__", "~~@notes.md~~", "_@notes.md_", "***`@notes.md`***",
    "see @notes.md…", "see @notes.md...", "see @notes.md?!", "see @notes.md's end", "read @notes.md: now",
    "file:@notes.md", "f=@notes.md", "a,@notes.md", "so—@notes.md—yes", "|@notes.md|", "👉@notes.md👈",
    "＠notes.md",
    "look at (see @notes.md, please)", "([@notes.md](x))", "@notes.md：好", "@notes.md、それ", '"@notes.md is good"',
])  # fmt: skip
def test_a_name_is_set_off_by_anything_but_letters(folder: Path, text: str) -> None:
    mark = "＠notes.md" if "＠" in text else "@notes.md"
    assert read(text, folder) == [(mark, "notes.md", "# Notes\n")]
    assert refusal(text.replace("notes.md", "gone.md"), folder).startswith("No such file: gone.md.")


@pytest.mark.parametrize("text", [
    "@my\\ file.txt", "看@my\\ file.txt。", '"@my file.txt"', "“@my file.txt”", "「@my file.txt」", "`@my file.txt`",
    "(@my file.txt)", '@"my file.txt"', "@“my file.txt”", "@'my file.txt'", "@`my file.txt`", "@「my file.txt」を",
])  # fmt: skip
def test_a_name_with_spaces_is_escaped_or_quoted(folder: Path, text: str) -> None:
    assert [(title, content) for _, title, content in read(text, folder)] == [("my file.txt", "spaced\n")]


@pytest.mark.parametrize("text", [
    "user <12345+user@notes.md>",
    "me@notes.md", "first.last@notes.md", "git@notes.md:x", "pkg@notes.md", "имя@notes.md", "ｍｅ＠notes.md",
    "a1@notes.md",     "a_@notes.md", "https://site.org/@notes.md",
    "$@notes.md", "@@notes.md", "\\@notes.md", "@src.fixture", "@src(x=1)",
    "@src_main", "@src-main", "@notes.mdx", "@srcs", "pkg@1.2", "@1.2",
])  # fmt: skip
def test_addresses_versions_and_decorators_name_nothing(folder: Path, text: str) -> None:
    with contextlib.suppress(UsageError):  # some look like a path
        assert attach(text, folder) == ()
    assert attach(text.replace("notes.md", "host"), folder) == ()


def test_the_longest_name_that_is_there_wins(folder: Path) -> None:
    for name in ("笔记", "笔记的", "a,b.txt", "x", "back\\slash"):
        (folder / name).write_text(name)
    for text, names in {
        "@笔记的内容": ["笔记的"], "看@笔记。": ["笔记"], "@a,b.txt,@x": ["a,b.txt", "x"],
        "@x、@笔记、@notes.md": ["x", "笔记", "notes.md"],
        "@notes.md:1的内容": ["notes.md, line 1"], "「@src/main.py:2-3」": ["src/main.py, lines 2-3"],
        "@src里": ["src, a folder"],        "@back\\slash": ["back\\slash"], "(@x and @notes.md)": ["x", "notes.md"],
    }.items():  # fmt: skip
        assert [title for _, title, _ in read(text, folder)] == names, text


@pytest.mark.parametrize(("before", "mark"), [
    ("请看@no", "@no"), ("「@no", "@no"), ("(@src/ma", "@src/ma"), ("**@", "@"), ("@my\\ fi", "@my\\ fi"),
    ("看＠no", "＠no"),
    ("@x、@no", "@no"), ("me@no", None), ("/@no", None), ("@notes.md ", None),
])  # fmt: skip
def test_a_mark_is_completed_wherever_it_is_read(folder: Path, before: str, mark: str | None) -> None:
    assert unfinished(before) == mark
    if mark and len(mark) > 1:
        assert completions(mark, folder)


def test_a_long_text_without_spaces_is_searched_in_no_time_that_grows_with_its_square(folder: Path) -> None:
    for text in ("@notes.md" + "字" * 20_000, "@“" * 8_000, "(@" * 8_000, "@\\" * 8_000, '"@x' * 8_000):
        assert len(attach(text, folder)) <= 1
