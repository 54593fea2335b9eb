"""Tests commands that are typed into the prompt."""

from __future__ import annotations

from cpuchat.config.presets import Preset, save_preset
from cpuchat.tui.chat.composer import Paths, commands
from cpuchat.tui.help import HelpScreen
from tests.support.chat_app import RunningApp, running
from tests.support.scripted_backend import Gate, ScriptedBackend, answer


def offered(app: RunningApp) -> list[str]:
    return app.chat.query_one(Paths).marks


async def test_commands_are_offered_completed_and_run() -> None:
    async with running() as app:
        await app.ready()
        titles = commands(app.chat)
        assert {"/help", "/new", "/models", "/copy-code", "/compact", "/quit"} <= set(titles) and "/stop" not in titles
        await app.press("/")
        await app.until(lambda: offered(app) == list(titles))
        await app.press("r", "e", "g")
        await app.until(lambda: offered(app) == ["/regenerate", "/edit"])  # by their titles
        await app.press("escape", "backspace", "backspace", "backspace", *"hel")
        await app.until(lambda: offered(app) == ["/help"])
        await app.press("tab")
        assert app.prompt.text == "/help" and not offered(app)
        await app.press("enter")
        await app.until(lambda: isinstance(app.app.screen, HelpScreen))
        await app.press("escape")
        assert app.prompt.text == "" and not app.backend.requests
        await app.press(*"/hel")
        await app.until(lambda: offered(app) == ["/help"])
        await app.press("enter")  # completes and runs
        await app.until(lambda: isinstance(app.app.screen, HelpScreen))


async def test_what_is_no_command_stays_in_the_prompt_or_is_a_message() -> None:
    async with running() as app:
        await app.ready()
        await app.send("/nothing-of-ours", wait=False)
        assert any("Unknown command /nothing-of-ours" in notice for notice in app.notices)
        assert app.prompt.text == "/nothing-of-ours" and not app.backend.requests
        await app.send("/usr/bin/env does what?")
        assert app.stored()[0] == ("user", "/usr/bin/env does what?")


async def test_commands_with_an_argument() -> None:
    save_preset(Preset(name="Code review"))
    async with running() as app:
        await app.ready()
        await app.send("Hello")
        await app.press(*"/rename Dates")
        assert "Enter runs" in app.screen_text
        await app.press("enter")
        await app.until(lambda: app.conversation.chat is not None and app.conversation.chat.title == "Dates")
        await app.send("/preset Code review", wait=False)
        await app.until(lambda: app.conversation.preset.name == "Code review")
        await app.send("/preset none", wait=False)
        await app.until(lambda: not app.conversation.preset.name)
        await app.send("/preset nobody", wait=False)
        await app.until(lambda: any("No preset named nobody" in notice for notice in app.notices))
        await app.send("/reasoning 200", wait=False)
        await app.until(lambda: app.conversation.preset.reasoning == ("on", 200))
        await app.send("/reasoning much", wait=False)
        await app.until(lambda: any("Not a choice of reasoning: 'much'" in notice for notice in app.notices))
        await app.send("/tools .", wait=False)
        await app.until(lambda: "3 tools" in app.status)
        await app.send("/tools off", wait=False)
        await app.until(lambda: "tools" not in app.status)
        assert len(app.backend.requests) == 1


async def test_a_refused_command_stays_in_the_prompt() -> None:
    save_preset(Preset(name="Code review"))
    gate = Gate()
    async with running(ScriptedBackend([answer("One.", gate=gate)])) as app:
        await app.count_up_to(gate)
        for command in ("/preset Code review", "/new", "/regenerate"):
            told = len(app.notices)
            await app.write(command)
            await app.press("enter")
            await app.until(lambda told=told: any("when the answer is done" in one for one in app.notices[told:]))
            assert app.prompt.text == command
        gate.open()
        await app.until(lambda: not app.chat.busy)
        for command, problem in (
            ("/preset nobody", "No preset"),
            ("/reasoning x", "Not a choice"),
            ("/tools /x", "/x"),
        ):
            await app.write(command)
            await app.press("enter")
            await app.until(lambda problem=problem: any(problem in notice for notice in app.notices))
            assert app.prompt.text == command
        await app.send("/preset Code review", wait=False)
        await app.until(lambda: app.conversation.preset.name == "Code review")
        assert not app.prompt.text
        await app.write("")
        await app.chat.run_action("preset('nobody')")  # not typed
        await app.until(lambda: sum("No preset" in notice for notice in app.notices) == 2)
        assert not app.prompt.text
