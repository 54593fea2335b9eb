"""Tests commands that are typed into the prompt."""

from __future__ import annotations

from cpuchat.tui.chat.composer import Paths, commands
from cpuchat.tui.help import HelpScreen
from tests.support.chat_app import counting, loaded


async def test_commands_are_offered_completed_and_run_and_what_is_none_is_a_message_or_stays() -> None:
    async with loaded() as app:
        titles, offered = commands(app.chat), app.chat.query_one(Paths)
        assert {"/help", "/new", "/models", "/copy-code", "/compact", "/quit"} <= set(titles) and "/stop" not in titles
        await app.press("/")
        await app.until(lambda: offered.marks == list(titles))
        assert f"{len(titles)} commands" in app.screen_text  # more than there is room for
        await app.press("r", "e", "g")
        await app.until(lambda: offered.marks == ["/regenerate", "/edit"])  # by their titles
        await app.press("escape", "backspace", "backspace", "backspace", *"hel")
        await app.until(lambda: offered.marks == ["/help"])
        await app.pilot.click(Paths, offset=(3, 0))
        await app.until(lambda: app.prompt.text == "/help" and not offered.marks)
        await app.press("enter")
        await app.opens(HelpScreen)
        await app.press("escape")
        assert app.prompt.text == "" and not app.backend.requests
        await app.press(*"/hel")
        await app.until(lambda: offered.marks == ["/help"])
        await app.press("enter")  # completes and runs
        await app.opens(HelpScreen)
        await app.press("escape")
        await app.closes()
        for text, problem in (
            ("/nothing-of-ours", "Unknown command /nothing-of-ours"),
            ("/Nothing2", "Unknown command /Nothing2"),
            ("/hlep me", "Unknown command /hlep"),
            ("/nothing-of-ours here", "Unknown command /nothing-of-ours"),
            ("/models mine", "/models takes no argument"),
        ):
            await app.send(text, wait=False)
            await app.told(problem)
            assert app.prompt.text == text and not app.backend.requests
            app.prompt.clear()
        await app.send("/usr/bin/env does what?")
        await app.send("/tmp is full")
        questions = [text for role, text in app.stored() if role == "user"]
        assert questions == ["/usr/bin/env does what?", "/tmp is full"]


async def test_a_command_takes_an_argument_and_one_that_has_to_wait_stays_in_the_prompt() -> None:
    async with counting("One.") as (app, gate):
        await app.run("/options")
        await app.told("when the answer is done")
        assert app.prompt.text == "/options"
        gate.open()
        await app.idle()
        app.prompt.clear()
        await app.press(*"/rename Dates")
        assert "Enter runs" in app.screen_text
        await app.press("enter")
        await app.until(lambda: app.open_chat.title == "Dates")
        assert not app.prompt.text
