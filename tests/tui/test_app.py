from __future__ import annotations

import asyncio

import pytest
from textual.color import Color
from textual.command import CommandList, CommandPalette, Hit, Hits, Provider
from textual.screen import Screen
from textual.widgets import Input, Static

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
from cpuchat.tui.compare.pane import OtherSideScreen
from cpuchat.tui.compare.replay import ReplayScreen
from cpuchat.tui.compare.screen import CompareScreen
from cpuchat.tui.hardware.screen import HardwareScreen
from cpuchat.tui.help import HelpScreen
from cpuchat.tui.keys import Keymap, load_keymap, parse_keys, problem_with
from cpuchat.tui.markdown.transcript import Transcript
from cpuchat.tui.models.downloads import DownloadsScreen
from cpuchat.tui.models.drafts import DraftModelsScreen
from cpuchat.tui.models.quantize import QuantizeScreen, TuneScreen
from cpuchat.tui.models.repository import RepositoryScreen
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.settings import SettingRow, SettingsScreen
from cpuchat.tui.threads import result_of
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from cpuchat.tui.widgets.model_list import DetailsScreen, ListScreen
from cpuchat.tui.widgets.prompt import PromptInput
from tests.support.chat_app import SMALL, RunningApp, running
from tests.support.scripted_backend import Gate, ScriptedBackend, answer
from tests.support.snapshots import snapshot


def test_ids_and_keys_are_unique() -> None:
    ids = [key.id for key in keys.KEYS]
    assert len(ids) == len(set(ids))
    for place in {key.place for key in keys.KEYS}:
        single = [k for key in keys.KEYS if key.place == place and key.keys for k in key.keys.split(",")]
        assert len(single) == len(set(single)), place
    everywhere = {k for key in keys.KEYS if key.place == "app" and key.keys for k in key.keys.split(",")}
    for place in {key.place for key in keys.KEYS} - {"app", "help"}:
        assert not everywhere & {k for key in keys.KEYS if key.place == place for k in key.keys.split(",") if k}


def test_every_action_of_the_table_exists() -> None:
    owners = {"app": ChatApp, "chat": ChatScreen, "prompt": PromptInput, "chats": Chats, "models": ModelsScreen,
              "repository": RepositoryScreen, "downloads": DownloadsScreen,
              "draft_models": DraftModelsScreen, "list": ListScreen,
              "details": DetailsScreen,
              "quantize": QuantizeScreen, "hardware": HardwareScreen, "settings": SettingsScreen, "help": HelpScreen,
              "dialog": ConfirmScreen, "transcript": Transcript, "branches": ChatTranscript, "compare": CompareScreen,
              "places": PlacesList, "replay": ReplayScreen,
              "other_side": OtherSideScreen, "tune": TuneScreen}  # fmt: skip
    for key in keys.KEYS:
        place, _, action = key.action.partition("(")[0].rpartition(".")
        owner = ChatScreen if place == "screen" else owners[key.place]
        is_command = owner is ChatScreen and hasattr(ChatCommands, action)
        assert is_command or hasattr(owner, f"action_{action}"), key.id


@pytest.mark.parametrize(
    ("key", "short", "long"),
    [("ctrl+r", "^R", "Ctrl+R"), ("escape", "Esc", "Esc"), ("f1", "F1", "F1"), ("shift+enter", "Shift+Enter",
     "Shift+Enter"), ("d", "d", "d"), ("ctrl+underscore", "^_", "Ctrl+_"), ("ctrl+home", "^Home", "Ctrl+Home")],
)  # fmt: skip
def test_keys_as_people_write_them(key: str, short: str, long: str) -> None:
    assert (keys.display(key), keys.display(key, short=False)) == (short, long)


def test_no_two_actions_have_the_same_key_where_both_can_be_pressed() -> None:
    assert not [(key.id, problem) for key in keys.KEYS if (problem := problem_with(key, key.keys, {}))]


@pytest.mark.parametrize(
    ("written", "parsed"),
    [("Ctrl+N", "ctrl+n"), ("?", "question_mark"), ("N", "N"), ("ctrl++", "ctrl+plus"),
     ("Esc, PgDn", "escape,pagedown"), ("F6", "f6"), ("ctrl+shift+left", "ctrl+shift+left"), ("", "")],
)  # fmt: skip
def test_keys_are_read_as_people_write_them(written: str, parsed: str) -> None:
    assert parse_keys(written) == parsed


@pytest.mark.parametrize("written", ["ctrl+nothing", "control+n", "F99", "ctrl", "ab"])
def test_a_key_that_no_keyboard_has_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="no key"):
        parse_keys(written)


def test_texts_name_keys_as_they_were_moved() -> None:
    moved = {"chat.drafting": "ctrl+b,f5", "chat.models": "ctrl+n", "chat.new": "ctrl+o", "chat.color_drafts": "",
             "chat.sidebar": "ctrl+e"}  # fmt: skip
    assert keys.renamed("(Ctrl+O) Ctrl+N, F9: off; Ctrl+T.", moved) == "(Ctrl+N) Ctrl+O, Ctrl+B: off; the palette."
    assert keys.renamed("F2, then F8, undoes the tuning", moved) == "F2, then F8, undoes the tuning"


def write_keymap(text: str) -> None:
    paths.config_dir().mkdir(parents=True, exist_ok=True)
    paths.keymap_file().write_text(text)


def test_what_a_keymap_cannot_have_is_named_and_left_out() -> None:
    write_keymap(
        '# mine\n[chat]\nnew = "ctrl+b"\nmodels = "ctrl+l"\nfork = "n"\nsing = "f6"\nregenerate = 3\nedit = "F99"\n'
        '[compare]\ntable = "n"\n[app]\nhelp = "f2"\n[models]\ntune = ""\n'
    )
    keymap = load_keymap()
    assert keymap.moved == {"chat.new": "ctrl+b", "models.tune": ""}
    told = "\n".join(keymap.problems)
    taken = "chat.models: Ctrl+L is taken by “Compare two quantizations of the model, side by side” (chat.compare)"
    assert taken in told
    assert "chat.fork: n is typed as text" in told and "chat.sing: no such action" in told
    assert "chat.regenerate: needs keys in quotes" in told and "chat.edit: no key 'F99'" in told
    assert "compare.table: n is taken by “Send the next prompt to both” (compare.next)" in told
    assert "app.help: F2 is taken by “Change settings” (chat.settings)" in told


def test_keys_can_be_swapped() -> None:
    write_keymap('[chat]\nnew = "ctrl+o"\nmodels = "ctrl+n"  # swapped\n')
    assert load_keymap() == Keymap({"chat.new": "ctrl+o", "chat.models": "ctrl+n"})
    write_keymap('[chat]\nmodels = "ctrl+n"\n')
    assert load_keymap().moved == {} and "chat.models: Ctrl+N is taken" in load_keymap().problems[0]


async def test_a_key_that_was_moved_works_and_is_in_help() -> None:
    write_keymap('[chat]\ndownloads = "ctrl+b"\n')
    async with running() as app:
        await app.ready()
        await app.press("ctrl+b")
        await app.until(lambda: isinstance(app.app.screen, DownloadsScreen))
        await app.press("escape", "f1")
        await app.until(lambda: isinstance(app.app.screen, HelpScreen))
        assert any(key.id == "chat.downloads" and key.keys == "ctrl+b" for key in app.app.moved_keys)


async def test_quitting_during_an_answer_keeps_what_was_said_and_exits_with_zero() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One two three never", gate=gate)])
    async with running(backend) as app:
        await app.count_up_to(gate)
        app.press_last("ctrl+q")
        await app.until(lambda: app.app._exit)
        assert backend.closed
        assert app.app.return_code == 0
    store = ChatStore(paths.chats_db())
    try:
        (chat,) = store.chats()
        assert [m.content for m in store.messages(chat.id)] == ["Count", "One two three "]
        assert store.messages(chat.id)[-1].stop_reason == "cancelled"
    finally:
        store.close()


async def test_quitting_during_a_load_ends_at_once() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate])
    async with running(backend) as app:
        await app.until(gate.reached.is_set)
        app.press_last("ctrl+q")
        await app.until(lambda: backend.closed)


async def test_ctrl_c_copies_a_selection_then_hints_then_quits() -> None:
    backend = ScriptedBackend()
    async with running(backend) as app:
        await app.ready()
        await app.write("copy me")
        app.prompt.select_all()
        await app.press("ctrl+c")
        assert app.app.clipboard == "copy me"
        app.prompt.clear()
        await app.press("ctrl+c")
        assert any("quits" in notice for notice in app.notices)
        assert not backend.closed
        app.press_last("ctrl+c")
        await app.until(lambda: backend.closed)


async def test_a_key_pressed_while_the_app_ends_is_no_error() -> None:
    async with running() as app:
        await app.ready()
        app.press_last("ctrl+p")
        app.app.exit(0)  # before the key is handled
        await app.until(lambda: not app.app.is_running)
        assert not app.app.crash and app.app.return_code == 0


async def test_a_screen_that_opens_while_the_app_ends_is_no_error() -> None:
    class Opening(Screen[None]):
        async def on_mount(self) -> None:
            self.app.exit(0)
            await self.mount(Static())

    async with running() as app:
        await app.ready()
        app.app.push_screen(Opening())
        await app.until(lambda: not app.app.is_running)
        assert not app.app.crash and app.app.return_code == 0


async def test_a_palette_that_closes_takes_no_other_screen_along_and_searches_no_more() -> None:
    closing = asyncio.Event()

    class Slow(Provider):
        async def search(self, query: str) -> Hits:
            await closing.wait()
            yield Hit(1.0, query, lambda: None)

        async def shutdown(self) -> None:  # its widgets are gone, its searches not yet cancelled
            closing.set()
            await result_of(slow._search)

    async with running() as app:
        await app.ready()
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
        slow = ActionPalette(providers=[Slow])
        await app.app.push_screen(slow)
        slow.post_message(Input.Changed(slow.query_one(Input), "late"))
        slow.dismiss(None)
        await app.until(lambda: not slow.is_attached)
        assert app.app.screen is below


async def test_help_has_every_key_begins_with_those_of_the_screen_and_its_filter_finds_all_others() -> None:
    async with running(size=SMALL) as app:
        await app.ready()
        await app.press("f1")
        await app.until(lambda: isinstance(app.app.screen, HelpScreen) and "Send the message" in app.screen_text)
        await snapshot(app.app, "help-80x24")
        seen = {row[1] for _, rows in app.app.screen._sections for row in rows}
        assert {key.help for key in keys.KEYS} <= seen
        await app.press("pagedown", "f1")
        await app.until(lambda: app.app.screen is app.chat)
        for opened, own in (("", "Send the message"), ("f12", "Select the recommended placement")):
            await app.press(*filter(None, (opened, "f1")))
            await app.until(lambda own=own: isinstance(app.app.screen, HelpScreen) and own in app.screen_text)
            await app.press(*"temperature")
            await app.until(lambda own=own: "Change settings" in app.screen_text and own not in app.screen_text)
            await app.press("f1", *(["escape"] if opened else []))
            await app.until(lambda: app.app.screen is app.chat)


def listed(app: RunningApp) -> bool:
    """Return whether the palette has found all that it will list: before, it forgets a key for its list."""
    return all(worker.is_finished for worker in app.app.workers if worker.node is app.app.screen)


async def test_enter_in_the_palette_acts_on_the_rows_of_its_text() -> None:
    async with running() as app:
        await app.ready()
        await app.press("ctrl+p")
        await app.until(lambda: "Summarize the chat" in app.screen_text)
        await app.press(*"settings")
        await app.until(
            lambda: "Change settings" in app.screen_text and "Regenerate" not in app.screen_text and listed(app)
        )
        await app.press("enter")
        await app.until(lambda: isinstance(app.app.screen, SettingsScreen))
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)
        for key in ("ctrl+p", *"help", "enter"):  # in one read
            app.app.simulate_key(key)
        await app.until(lambda: isinstance(app.app.screen, HelpScreen))


async def test_themes_are_previewed_kept_and_given_back() -> None:
    async with running() as app:
        await app.ready()
        app.app.action_change_theme()
        await app.until(lambda: "okabe-ito" in app.screen_text)
        await app.press("down", "down")  # auto, cpuchat
        await app.until(lambda: app.app.theme != "cpuchat")
        await app.press("escape")
        await app.until(lambda: app.app.theme == "cpuchat")
        app.app.action_change_theme()
        await app.until(lambda: "okabe-ito" in app.screen_text and listed(app))
        await app.press(*"cpuchat-light")
        await app.until(lambda: app.app.theme == "cpuchat-light")  # the palette has the colors that it previews
        await app.until(lambda: app.app.screen.query_one(CommandList).styles.background == _background(app))
        await app.until(lambda: app.app.screen.query_one("#--input").styles.background == _background(app))
        await app.press("escape")
        await app.until(lambda: app.app.theme == "cpuchat")
        app.app.action_change_theme()
        await app.until(lambda: isinstance(app.app.screen, CommandPalette))
        await app.press(*"okabe")
        await app.until(lambda: app.app.theme == "okabe-ito")
        await app.press("enter")
        await app.until(lambda: app.conversation.settings.ui.theme == "okabe-ito")
        assert app.app.theme == "okabe-ito"
    assert settings.load().ui.theme == "okabe-ito"


def _background(app: RunningApp) -> Color:
    return Color.parse(app.app.get_css_variables()["background"])


async def test_notices_are_shown_once_and_beside_the_list_of_commands() -> None:
    async with running() as app:
        await app.ready()
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
        assert "Esc stop" in app.screen_text.splitlines()[-1]


async def test_a_bad_theme_file_is_one_notice_and_no_crash() -> None:
    folder = paths.user_themes_dir()
    folder.mkdir(parents=True)
    (folder / "bad.toml").write_text('name = "bad"\n[colors]\nprimary = "blurple"\n')
    (folder / "mine.toml").write_text('name = "mine"\n[colors]\nprimary = "#445566"\n')
    settings.update({"ui": {"theme": "nowhere"}})
    async with running() as app:
        await app.ready()
        assert app.app.theme == "cpuchat"
        assert "mine" in app.app.available_themes
        (notice,) = [text for text in app.notices if "bad.toml" in text]
        assert "colors.primary" in notice and "nowhere" in notice
        app.app.theme = "mine"
        assert app.app.get_css_variables()["primary"] == "#445566"


async def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with running() as app:
        await app.ready()
        assert app.app.no_color
        await app.send("Hello")
        assert "Hello there." in app.screen_text


async def test_sixteen_colors_and_no_motion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLORTERM")
    monkeypatch.setenv("TERM", "xterm")
    settings.update({"ui": {"motion": False}})
    async with running() as app:
        await app.ready()
        assert app.app.theme == "terminal"
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
    backend = ScriptedBackend()
    original = ChatStore.chats

    def chats(self: ChatStore, *args: int, **more: int):  # type: ignore[no-untyped-def]
        order.append("chats")
        return original(self, *args, **more)

    monkeypatch.setattr(ChatStore, "chats", chats)
    paint = StatusLine.render

    def render(self: StatusLine):  # type: ignore[no-untyped-def]
        if "paint" not in order:
            order.append("paint")
        return paint(self)

    monkeypatch.setattr(StatusLine, "render", render)
    async with running(backend) as app:
        await app.ready()
    assert order[0] == "paint", order
