from __future__ import annotations

import re

from cpuchat.chats.export import file_name, to_markdown
from cpuchat.chats.store import Chat, ChatStore
from cpuchat.timings import Timings


def test_a_chat_as_markdown(tmp_path):
    store = ChatStore(tmp_path / "chats.db")
    chat = store.create_chat("Qwen", "Be brief.", title="Two\nlines")
    store.add_message(chat.id, "user", "Hi")
    store.add_message(
        chat.id, "assistant", "```python\nprint(1)", reasoning="hm", model="Qwen", stop_reason="max_tokens",
        timings=Timings(predicted_n=11, predicted_ms=500),
    )  # fmt: skip
    store.add_message(chat.id, "assistant", "Bye", stop_reason="end")
    text = to_markdown(chat, store.messages(chat.id))
    store.close()
    body = re.sub(r"\*\d{4}-\d\d-\d\d \d\d:\d\d · Qwen\*", "*date*", text)
    assert body == (
        "# Two lines\n\n*date*\n\n## System\n\nBe brief.\n\n## You\n\nHi\n\n## Qwen\n\n"
        "<details><summary>Reasoning</summary>\n\nhm\n\n</details>\n\n"
        "```python\nprint(1)\n```\n\n*11 tokens at 20.0 tok/s · ended: max tokens*\n\n## Answer\n\nBye\n"
    )


def test_file_names_are_safe():
    chat = Chat(id="1", title="../../etc: Größe? " + "x" * 200, created=0.0, updated=0.0, model="", system_prompt="")
    name = file_name(chat)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-etc-größe-x+\.md", name)
    assert len(name) < 80
    assert file_name(Chat(id="1", title="???", created=0.0, updated=0.0, model="", system_prompt="")).endswith(
        "-chat.md"
    )
