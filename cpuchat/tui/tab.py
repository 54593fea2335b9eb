"""The app of one browser tab of `cpuchat serve --web`: `python -P -m cpuchat.tui.tab URL`, started by the server.

It speaks packets on standard input and output instead of drawing on a terminal (textual/drivers/web_driver.py).
"""

from __future__ import annotations

import sys


def main(server: str) -> int:
    """Chat with the model that `server` serves, until the session ends; returns the exit code."""
    from cpuchat import paths, settings
    from cpuchat.backend.remote.keys import KeyRing
    from cpuchat.backend.switching import SwitchingBackend
    from cpuchat.chats.store import ChatStore
    from cpuchat.conversation import Conversation
    from cpuchat.models.library.library import Library
    from cpuchat.servers import ServerModel
    from cpuchat.tui.app import Resume
    from cpuchat.tui.kiosk import KioskApp
    from cpuchat.tui.launch import run

    chosen, keys = settings.load(), KeyRing()

    def make(resume: Resume) -> KioskApp:
        backend = SwitchingBackend(None, keys)
        conversation = Conversation(settings=chosen, backend=backend, store=ChatStore(paths.chats_db()))
        return KioskApp(conversation, Library(()), ServerModel.of(server), text=resume.text, key_ring=keys)

    return run(make)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
