"""Tests where API keys come from, and where they do not get to."""

from __future__ import annotations

import pytest

from cpuchat.base import paths
from cpuchat.base.errors import ServerError, UsageError
from cpuchat.config.servers import KeyRing, ServerModel, is_local, normalized, source
from tests.support.chatting import chat, collect
from tests.support.remote_server import Reply, remote_server

SERVER = "https://llm.example.com"


def stored(text: str, mode: int = 0o600) -> None:
    paths.data_dir().mkdir(parents=True)
    paths.keys_file().write_text(text)
    paths.keys_file().chmod(mode)


def test_a_stored_key_is_for_its_server_alone_and_one_that_is_no_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stored(f'"{SERVER}" = "sk-one"\n"https://no.text" = {{keyring = true}}\n')
    assert KeyRing().key(SERVER) == "sk-one"
    assert KeyRing().key("https://other.example.com") == ""
    with pytest.raises(ServerError, match="keyrings are not read"):
        KeyRing().key("https://no.text")
    monkeypatch.setenv("CPUCHAT_API_KEY", "sk-env")
    assert KeyRing("https://no.text").key("https://no.text") == "sk-env"


@pytest.mark.parametrize(("mode", "reason"), [(0o644, "chmod 600"), (0o600, "not valid TOML")])
def test_a_file_that_others_may_read_or_that_is_broken_is_refused_without_showing_it(mode: int, reason: str) -> None:
    stored('"https://a" = sk-secret', mode)
    with pytest.raises(ServerError, match=reason) as raised:
        KeyRing().key(SERVER)
    assert "sk-secret" not in str(raised.value)


def test_the_key_of_the_environment_is_for_the_chosen_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUCHAT_API_KEY", "sk-env")
    assert KeyRing(SERVER).key(SERVER) == "sk-env"
    assert KeyRing(SERVER).key("https://other.example.com") == ""
    assert KeyRing().key(SERVER) == ""


def test_a_key_cannot_add_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUCHAT_API_KEY", "sk\r\nX-Evil: 1")
    with pytest.raises(ServerError) as raised:
        KeyRing(SERVER).key(SERVER)
    assert "Evil" not in str(raised.value)


async def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from cpuchat.backend.remote.backend import RemoteBackend
    from cpuchat.protocol.messages import LoadOptions

    async def refuse(reply: Reply) -> None:
        await reply.json({"error": {"message": "no"}}, 401)

    monkeypatch.setenv("CPUCHAT_API_KEY", "sk-secret")
    async with remote_server(answer=refuse) as server:
        backend = RemoteBackend(KeyRing(server.url))
        events = [event async for event in backend.load(ServerModel(server.url), LoadOptions())]
        got = await collect(backend.generate(chat("Hello")))
        await backend.close()
        assert {one.headers.get("authorization") for one in server.asked} == {"Bearer sk-secret"}
    assert "sk-secret" not in repr(events) + repr(got.events)
    assert "wrong or expired" in got.failed.hint


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("HTTP://Host:80/", "http://host:80"),
        ("http://host/v1", "http://host"),
        ("http://host/v1/chat/completions", "http://host"),
        ("https://host/api/v1/", "https://host/api"),
        ("http://[::1]:8080/v1/models", "http://[::1]:8080"),
    ],
)
def test_addresses_have_one_form(given: str, wanted: str) -> None:
    assert normalized(given) == wanted
    assert normalized(normalized(given)) == wanted


@pytest.mark.parametrize(
    "wrong", ["", "host:8080", "ftp://host", "http://host:port", "http://u:p@host", "http://host?key=1"]
)
def test_other_addresses_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError):
        normalized(wrong)


def test_an_address_names_a_model() -> None:
    model = ServerModel.of("http://host:1/v1#org/name:Q4")
    assert (model.server, model.name, model.stem) == ("http://host:1", "org/name:Q4", "name:Q4")
    assert source(str(model)) == model
    assert ServerModel("http://host:1").stem == "host:1"


def test_only_this_machine_is_local() -> None:
    assert all(is_local(url) for url in ("http://localhost:1", "http://127.0.0.2", "http://[::1]:8"))
    assert not any(is_local(url) for url in ("http://192.168.0.4", "http://127.0.0.1.example.com", "http://host"))
