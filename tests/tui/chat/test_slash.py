"""Tests commands that are typed into the prompt."""

from __future__ import annotations

from pathlib import Path

from cpuchat.tui.chat.composer import Paths, commands
from cpuchat.tui.help import HelpScreen
from cpuchat.tui.widgets.dialogs import AskTextScreen
from tests.support.chat_app import running
from tests.support.looking import configure
from tests.support.scripted_backend import Gate, ScriptedBackend, answer


async def test_commands_are_offered_completed_and_run_and_what_is_none_is_a_message_or_stays() -> None:
    async with running() as app:
        await app.ready()
        titles, offered = commands(app.chat), app.chat.query_one(Paths)
        assert {"/help", "/new", "/models", "/copy-code", "/compact", "/quit"} <= set(titles) and "/stop" not in titles
        await app.press("/")
        await app.until(lambda: offered.marks == list(titles))
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


async def test_commands_take_arguments_and_a_refused_one_stays_in_the_prompt(tmp_path: Path) -> None:
    configure(tmp_path, "noise")
    gate = Gate()
    async with running(ScriptedBackend([answer("One.", gate=gate)])) as app:
        await app.count_up_to(gate)
        await app.run("/system-prompt Sing.")
        await app.told("when the answer is done")
        assert app.prompt.text == "/system-prompt Sing."
        gate.open()
        await app.idle()
        for command, problem in (
            ("/reasoning much", "Not a choice of reasoning: 'much'."),
            ("/tools /x", "There is no MCP server /x. Known: noise."),
        ):
            await app.run(command)
            await app.told(problem)
            assert app.prompt.text == command
        app.prompt.clear()
        await app.press(*"/rename Dates")
        assert "Enter runs" in app.screen_text
        await app.press("enter")
        await app.until(lambda: app.conversation.chat is not None and app.conversation.chat.title == "Dates")
        session = app.chat.session
        for command, done in (
            ("/system-prompt Sing.", lambda: session.system_prompt == "Sing."),
            ("/reasoning 200", lambda: session.conversation.options.reasoning == ("on", 200)),
            ("/tools noise", lambda: "1 tool" in app.status),
            ("/tools noise", lambda: "tool" not in app.status),
        ):
            await app.run(command)
            await app.until(done)
            assert not app.prompt.text


async def test_a_chat_reasons_as_was_chosen_for_it_and_answers_now() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One.", reasoning="Let me see.", gate=gate)])
    async with running(backend) as app:
        await app.ready()
        await app.chat.run_action("chat_reasoning")
        await app.opens(AskTextScreen)
        await app.shows("Now: auto")
        await app.press(*"300", "enter")
        await app.until(lambda: app.prompt.border_title == "Message · reasoning on, at most 300 tokens")
        await app.send("First", wait=False)
        await app.shows("▾ reasoning · 3 words · F10 answers now")
        assert (backend.requests[-1].reasoning, backend.requests[-1].reasoning_budget) == (True, 300)
        await app.press("f10")
        await app.until(lambda: backend.reasoning_ended)
        gate.open()
        await app.idle()
        await app.press("f10", "ctrl+n")
        await app.told("The model is not reasoning")
        await app.until(lambda: app.prompt.border_title == "Message")
