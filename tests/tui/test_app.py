from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.screen import Screen
from textual.widgets import Static

import cpuchat.tui
from cpuchat.base import paths
from cpuchat.chats.store import ChatStore
from cpuchat.config import settings
from cpuchat.tui import keys
from cpuchat.tui.app import ChatApp
from cpuchat.tui.chat.chat_list import Chats
from cpuchat.tui.chat.commands import ChatCommands
from cpuchat.tui.chat.screen import ChatScreen
from cpuchat.tui.chat.status import StatusLine
from cpuchat.tui.chat.transcript import ChatTranscript
from cpuchat.tui.commands import ActionPalette
from cpuchat.tui.compare.agreement import PlacesList
from cpuchat.tui.help import HelpScreen
from cpuchat.tui.keys import Keymap, load_keymap, parse_keys
from cpuchat.tui.markdown.transcript import Transcript
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.settings import SettingsScreen
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.prompt import PromptInput
from cpuchat.tui.widgets.setting_rows import SettingRow
from tests.support.chat_app import SMALL, RunningApp, counting, loaded, running
from tests.support.scripted_backend import ScriptedBackend
from tests.support.snapshots import snapshot


def test_ids_and_keys_are_unique() -> None:
    ids = [key.id for key in keys.KEYS]
    assert len(ids) == len(set(ids))
    for place in {key.place for key in keys.KEYS}:
        single = [k for key in keys.KEYS if key.place == place and key.keys for k in key.keys.split(",")]
        single = [k for k in single if k != "escape"]  # it stops an answer, or goes back where there is none
        assert len(single) == len(set(single)), place
    everywhere = {k for key in keys.KEYS if key.place == "app" and key.keys for k in key.keys.split(",")}
    for place in {key.place for key in keys.KEYS} - {"app", "help"}:
        assert not everywhere & {k for key in keys.KEYS if key.place == place for k in key.keys.split(",") if k}


def test_every_action_of_the_table_exists() -> None:
    def below(kind: type[object]) -> Iterator[type[object]]:
        for one in kind.__subclasses__():
            yield from (one, *below(one))

    for _, name, _ in pkgutil.walk_packages(cpuchat.tui.__path__, "cpuchat.tui."):
        importlib.import_module(name)
    owners: dict[str, type[object]] = {"app": ChatApp, "prompt": PromptInput, "chats": Chats, "transcript": Transcript}
    owners |= {"branches": ChatTranscript, "places": PlacesList}
    owners |= {KEYS: one for one in below(keys.Keyed) if (KEYS := vars(one).get("KEYS"))}
    for key in keys.KEYS:
        place, _, action = key.action.partition("(")[0].rpartition(".")
        owner = ChatScreen if place == "screen" else owners[key.place]
        is_command = owner is ChatScreen and hasattr(ChatCommands, action)
        assert is_command or hasattr(owner, f"action_{action}"), key.id


@pytest.mark.parametrize(
    ("written", "key", "short", "long"),
    [("Ctrl+N", "ctrl+n", "^N", "Ctrl+N"), ("?", "question_mark", "question_mark", "question_mark"),
     ("N", "N", "N", "N"), ("ctrl++", "ctrl+plus", "^plus", "Ctrl+plus"), ("Esc", "escape", "Esc", "Esc"),
     ("PgDn", "pagedown", "PgDn", "PgDn"), ("F6", "f6", "F6", "F6"), ("", "", "", ""),
     ("ctrl+shift+left", "ctrl+shift+left", "Ctrl+Shift+←", "Ctrl+Shift+←"),
     ("ctrl+_", "ctrl+underscore", "^_", "Ctrl+_")],
)  # fmt: skip
def test_keys_are_read_and_shown_as_people_write_them(written: str, key: str, short: str, long: str) -> None:
    assert parse_keys(written) == key
    assert (keys.display(key), keys.display(key, short=False)) == (short, long)


def test_keys_that_no_keyboard_has_are_refused() -> None:
    for written in ("ctrl+nothing", "control+n", "F99", "ctrl", "ab"):
        with pytest.raises(ValueError, match="no key"):
            parse_keys(written)


def write_keymap(text: str) -> None:
    paths.config_dir().mkdir(parents=True, exist_ok=True)
    paths.keymap_file().write_text(text)


def test_what_a_keymap_cannot_have_is_named_and_left_out() -> None:
    write_keymap(
        '# mine\n[chat]\nnew = "ctrl+b"\nmodels = "ctrl+l"\ncopy = "n"\nsing = "f6"\nregenerate = 3\nedit = "F99"\n'
        '[compare]\ntable = "n"\n[app]\nhelp = "f2"\n[models]\nquantize = ""\n'
    )
    keymap = load_keymap()
    assert keymap.moved == {"chat.new": "ctrl+b", "models.quantize": ""}
    told = "\n".join(keymap.problems)
    taken = "chat.models: Ctrl+L is taken by “Compare two quantizations of the model, side by side” (chat.compare)"
    assert taken in told
    assert "chat.copy: n is typed as text" in told and "chat.sing: no such action" in told
    assert "chat.regenerate: needs keys in quotes" in told and "chat.edit: no key 'F99'" in told
    assert "compare.table: n is taken by “Send the next prompt to both” (compare.next)" in told
    assert "app.help: F2 is taken by “Change settings” (chat.settings)" in told
    write_keymap('[chat]\nnew = "ctrl+o"\nmodels = "ctrl+n"  # swapped\n')
    assert load_keymap() == Keymap({"chat.new": "ctrl+o", "chat.models": "ctrl+n"})
    write_keymap('[chat]\nmodels = "ctrl+n"\n')
    assert load_keymap().moved == {} and "chat.models: Ctrl+N is taken" in load_keymap().problems[0]


async def test_a_key_that_was_moved_works_and_is_in_help_and_a_setting_that_is_none_is_named() -> None:
    write_keymap('[chat]\ndownloads = "ctrl+b"\ncompare = ""\n')
    paths.settings_file().write_text("[engine]\nturbo = 1\n")
    async with loaded() as app:
        await app.told("no setting named engine.turbo")
        await app.until(lambda: app.app.screen.query_one(KeyFooter).keys)
        assert "compare" not in [one.description for one in app.app.screen.query_one(KeyFooter).keys]
        await app.press("ctrl+b")
        await app.opens(ModelsScreen)
        await app.press("escape", "f1")
        await app.opens(HelpScreen)
        assert any(key.id == "chat.downloads" and key.keys == "ctrl+b" for key in app.app.moved_keys)


async def test_quitting_during_an_answer_keeps_what_was_said_and_exits_with_zero() -> None:
    async with counting("One two three never") as (app, _):
        app.press_last("ctrl+q")
        await app.until(lambda: app.backend.closed and app.app.return_code == 0)
    with contextlib.closing(ChatStore(paths.chats_db())) as store:
        (chat,) = store.chats()
        assert [m.content for m in store.messages(chat.id)] == ["Count", "One two three "]
        assert store.messages(chat.id)[-1].stop_reason == "cancelled"


async def test_keys_and_screens_that_come_while_the_app_ends_are_no_error() -> None:
    class Opening(Screen[None]):
        async def on_mount(self) -> None:
            self.app.exit(0)
            await self.mount(Static())

    def end(app: RunningApp) -> None:
        app.press_last("ctrl+p")
        app.app.exit(0)  # before the key is handled

    for ends in (end, lambda app: app.app.push_screen(Opening())):
        async with loaded() as app:
            ends(app)
            await app.until(lambda: not app.app.is_running)
            assert not app.app.crash and app.app.return_code == 0


async def test_a_palette_that_closes_takes_no_other_screen_along() -> None:
    async with loaded() as app:
        await app.press("f1", "ctrl+p")
        below, palette = app.app.screen_stack[-2:]
        assert isinstance(palette, ActionPalette)
        app.app.push_screen(opening := ActionPalette())
        opening.dismiss(None)  # too early: it would look for the screen below
        await app.until(lambda: opening.has_class("-ready"))
        opening.dismiss(None)
        await app.until(lambda: not opening.is_attached)
        palette.dismiss(None)
        palette.dismiss(None)  # a click and Enter, say
        await app.until(lambda: not palette.is_attached)
        assert app.app.screen is below


async def test_help_has_every_key_begins_with_those_of_the_screen_and_its_filter_finds_all_others() -> None:
    async with loaded(size=SMALL) as app:
        await app.press("f1")
        await app.opens(HelpScreen)
        await app.shows("Send the message")
        await snapshot(app.app, "help-80x24")
        assert {key.help for key in keys.KEYS} <= {row[1] for _, rows in app.app.screen.sections for row in rows}
        await app.press("pagedown", "f1")
        await app.closes()
        for opened, own in (("", "Send the message"), ("f12", "Load the model in this placement")):
            await app.press(*filter(None, (opened, "f1")))
            await app.opens(HelpScreen)
            assert own in [text for _, text, _ in app.app.screen.sections[0][1]]
            await app.shows(own)
            await app.press(*"temperature")
            await app.until(lambda own=own: "Change settings" in app.screen_text and own not in app.screen_text)
            await app.press("f1", *(["escape"] if opened else []))
            await app.closes()


async def test_enter_in_the_palette_acts_on_the_rows_of_its_text() -> None:
    async with loaded() as app:
        for query, opens in (("settings", SettingsScreen), ("help", HelpScreen)):
            for key in ("ctrl+p", *query, "enter"):  # in one read
                app.app.simulate_key(key)
            await app.opens(opens)
            await app.press("escape")
            await app.closes()


async def test_notices_are_shown_once_and_beside_the_list_of_commands() -> None:
    async with loaded() as app:
        await app.press("/")
        await app.until(lambda: "/regenerate" in app.screen_text)
        app.app.notify("Something happened.", timeout=600)
        await app.until(lambda: "Something happened." in app.screen_text)
        assert app.screen_text.index("Something happened.") < app.screen_text.index("/regenerate")
        app.app.push_screen(ConfirmScreen("Delete", "This chat?"))
        await app.until(lambda: "This chat?" in app.screen_text)
        await app.until(lambda: app.screen_text.count("Something happened.") == 1)
        await app.press("escape")
        await app.pilot.resize_terminal(60, 20)
        app.app.clear_notifications()
        await app.until(lambda: app.screen_text.splitlines()[-1].rstrip().endswith("^P commands"))
        assert "Esc back" in app.screen_text.splitlines()[-1]


async def test_a_screenshot_is_saved_where_there_is_no_folder_of_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DOWNLOAD_DIR", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    async with running(ScriptedBackend()) as app:
        app.app.action_screenshot()
        await app.until(lambda: "Saved screenshot" in app.screen_text)
    assert len(list(tmp_path.glob("*.svg"))) == 1


async def test_a_bad_theme_file_is_one_notice_and_no_crash() -> None:
    folder = paths.user_themes_dir()
    folder.mkdir(parents=True)
    (folder / "bad.toml").write_text('name = "bad"\n[colors]\nprimary = "blurple"\n')
    (folder / "mine.toml").write_text('name = "mine"\n[colors]\nprimary = "#445566"\n')
    settings.update({"ui": {"theme": "nowhere"}})
    async with loaded() as app:
        assert app.app.theme == "cpuchat"
        assert "mine" in app.app.available_themes
        (notice,) = [text for text in app.notices if "bad.toml" in text]
        assert "colors.primary" in notice and "nowhere" in notice
        app.app.theme = "mine"
        assert app.app.get_css_variables()["primary"] == "#445566"


async def test_sixteen_colors_and_no_motion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLORTERM")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    settings.update({"ui": {"motion": False}})
    async with loaded() as app:
        assert app.app.theme == "terminal" and app.app.no_color
        prompt = app.app.screen.query_one(PromptInput)
        assert prompt.has_focus and not prompt.cursor_blink
        await app.press("f2")
        await app.until(lambda: isinstance(app.app.screen, SettingsScreen) and app.app.screen.query(SettingRow))
        app.app.screen.query_one("#row-chat-max_tokens", SettingRow).put(9)
        await app.press("ctrl+s")
        await app.until(lambda: app.conversation.settings.chat.max_tokens == 9)
        assert app.app.theme == "terminal" and settings.load().ui.theme == "auto"


async def test_the_first_paint_does_not_wait_for_the_chats(
    drawn_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chats and the model are read only after the screen has been drawn once."""
    order: list[str] = []

    def watch(owner: type[object], name: str) -> None:
        original = getattr(owner, name)

        def called(*args: object, **more: object) -> object:
            order.append(name)
            return original(*args, **more)

        monkeypatch.setattr(owner, name, called)

    watch(ChatStore, "chats")
    watch(StatusLine, "render")
    async with running() as app:
        await app.ready()
    assert order[0] == "render" and "chats" in order
