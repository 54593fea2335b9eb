"""The app of one browser tab of `cpuchat serve --web`, which starts it: `python -P -m cpuchat.tui.tab URL FOLDER`.

It speaks packets on standard input and output instead of drawing on a terminal (textual/drivers/web_driver.py).
"""

from __future__ import annotations

import shutil
import sys


def main(server: str, folder: str) -> int:
    """Chat with the model that `server` serves, until the session ends; returns the exit code.

    `folder` has everything that the app writes. The server removes it; the app does where the server was killed.
    """
    from cpuchat.backend.remote.keys import KeyRing
    from cpuchat.backend.switching import SwitchingBackend
    from cpuchat.base import paths
    from cpuchat.chats.store import ChatStore
    from cpuchat.config import settings
    from cpuchat.config.servers import ServerModel
    from cpuchat.models.library.library import Library
    from cpuchat.session.conversation import Conversation
    from cpuchat.tui.kiosk import KioskApp
    from cpuchat.tui.launch import run_once

    keys = KeyRing()
    # The cores are the server's.
    chosen = settings.with_changes(settings.load(), {"hardware": {"probe": False, "counters": False}})
    conversation = Conversation(
        settings=chosen, backend=SwitchingBackend(None, keys), store=ChatStore(paths.chats_db())
    )
    app = KioskApp(conversation, Library(()), ServerModel.of(server), key_ring=keys)
    try:
        run_once(app)
    finally:
        if app.abandoned:
            shutil.rmtree(folder, ignore_errors=True)
    if app.crash is not None:
        print(f"internal error ({app.crash.what})", file=sys.stderr)
        return 1
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
