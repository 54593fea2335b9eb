"""Tests commands that are typed into the prompt, presets among them."""

from __future__ import annotations

from pathlib import Path

from textual.command import CommandPalette

from cpuchat.tui.chat.composer import Paths, commands
from cpuchat.tui.help import HelpScreen
from cpuchat.tui.widgets.dialogs import AskTextScreen
from tests.support.chat_app import running
from tests.support.looking import configure
from tests.support.presets import write_presets
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
    write_presets('["Code review"]')
    configure(tmp_path, "noise")
    gate = Gate()
    async with running(ScriptedBackend([answer("One.", gate=gate)])) as app:
        await app.count_up_to(gate)
        await app.run("/preset Code review")
        await app.told("when the answer is done")
        assert app.prompt.text == "/preset Code review"
        gate.open()
        await app.idle()
        for command, problem in (
            ("/preset nobody", "No preset named nobody"),
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
        preset = app.conversation.preset
        for command, done in (
            ("/preset Code review", lambda: preset.name == "Code review"),
            ("/preset none", lambda: not preset.name),
            ("/reasoning 200", lambda: preset.reasoning == ("on", 200)),
            ("/tools noise", lambda: "1 tool" in app.status),
            ("/tools noise", lambda: "tool" not in app.status),
        ):
            await app.run(command)
            await app.until(done)
            assert not app.prompt.text


async def test_a_preset_is_chosen() -> None:
    backend = ScriptedBackend([answer("One."), answer("Two.")])
    async with running(backend) as app:
        await app.ready()
        await app.chat.run_action("preset")
        await app.told("There are no presets in ")
        write_presets(
            '[warm]\nsystem_prompt = "Sing."\nsampling.temperature = 1.5\n'
            '[calm]\nmodel = "/models/none.gguf"\nreasoning = "off"\nsampling.temperature = 0.1\n'
        )
        await app.chat.run_action("preset")
        await app.opens(CommandPalette)
        await app.shows("calm")
        await app.press(*"warm")
        await app.until(lambda: "warm" in app.screen_text.split("Preset …")[-1])
        await app.press("enter")
        await app.until(lambda: app.prompt.border_title == "Message · warm")
        await app.send("First")
        assert backend.requests[-1].sampling.temperature == 1.5
        assert backend.requests[-1].messages[0].content == "Sing."
        assert "▸ System prompt of preset warm: Sing. · 1 line (F7)" in app.screen_text

        await app.run("/preset calm")
        await app.until(lambda: app.prompt.border_title == "Message · calm")
        assert "System prompt" not in app.screen_text
        await app.told("none.gguf")  # its model is not here
        await app.send("Second")
        assert backend.requests[-1].sampling.temperature == 0.1


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
