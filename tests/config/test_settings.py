"""Tests what config.toml may hold about drafting, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.base.errors import SettingsError
from cpuchat.cli.options import given_options
from cpuchat.config import settings
from cpuchat.config.settings import SettingSources, parse
from cpuchat.protocol.messages import Sampling
from tests.cli.program import run


@pytest.mark.parametrize(
    ("name", "drafters"),
    [("auto", ("suffix", "draft")), ("draft", ("draft",)), ("suffix", ("suffix",)), ("off", ())],
)
def test_what_the_names_of_drafters_stand_for(name: str, drafters: tuple[str, ...]) -> None:
    section = parse(f'[speculation]\ndrafters = "{name}"\ndraft_model = "some/draft"').speculation
    assert section.speculation().drafters == drafters
    assert section.wanted_draft == ("some/draft" if "draft" in drafters else "none")


def test_nothing_is_measured_when_nothing_is_to_be_drafted() -> None:
    assert parse('[speculation]\ndrafters = "off"').load_options().calibrate is False
    assert parse('[speculation]\ndrafters = "suffix"').load_options().calibrate is True


@pytest.mark.parametrize("cores", ["auto", "all", "0-7", "0,2,4-6", "3-3", "l3:0,2-3", "node:0", "socket:0", "4/l3"])
def test_cores_are_words_places_or_a_list(cores: str) -> None:
    assert parse(f'[engine]\ncores = "{cores}"').engine.cores == cores


def test_an_unknown_key_is_left_out_and_named() -> None:
    file = paths.settings_file()
    file.parent.mkdir(parents=True)
    text = '"engine.threads" = 4\n"x." = 1\n[speculation]\ndept = 1\n"a.b" = 1\n"" = 1\ndepth = 3\n[racing]\nside = 1\n'
    file.write_text(text)
    assert settings.load().speculation.depth == 3
    unknown = ["engine.threads", "x.", "racing", "speculation.dept", "speculation.a.b", "speculation."]
    assert settings.unknown_keys() == unknown
    done = run("models", "list", "--json")
    assert done.returncode == 0 and done.stderr.count(", ".join(unknown)) == 1
    assert settings.update({"speculation": {"depth": 4}}).speculation.depth == 4
    assert file.read_text() == text.replace("depth = 3", "depth = 4")


def test_a_change_keeps_the_users_comments_and_is_refused_when_it_is_wrong(tmp_path: Path) -> None:
    file = paths.settings_file()
    file.parent.mkdir(parents=True)
    file.write_text("# mine\n[speculation]  # how far\ndepth = 3\n")
    settings.update({"engine": {"cores": "all"}, "ui": {"color_drafts": True}})
    text = file.read_text()
    assert "# mine" in text
    assert "# how far" in text
    chosen = settings.load()
    assert (chosen.speculation.depth, chosen.engine.cores, chosen.ui.color_drafts) == (3, "all", True)
    with pytest.raises(SettingsError, match=r"engine\.cores"):
        settings.update({"engine": {"cores": "many"}})
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[speculation]\ndepth = 32", "speculation.depth"),
        ("[speculation]\ndepth = -1", "speculation.depth"),
        ('[speculation]\ndrafters = "psychic"', "speculation.drafters"),
        ("[speculation]\ndraft_model = 5", "speculation.draft_model"),
        ("[engine]\nsaved_kv_gb = inf", "engine.saved_kv_gb"),
        ("[engine]\nsaved_kv_gb = nan", "engine.saved_kv_gb"),
        ("[sampling]\ntemperature = nan", "sampling.temperature"),
        ('[model]\nfolders = ["/a\\u0000b"]', "NUL"),
        ('[speculation]\ndraft_model = "a\\u0000b"', "NUL"),
        ("[model]\nfolders = " + "[" * 5000 + "]" * 5000, "not valid TOML"),
        ("[engine]\nthreads = " + "9" * 5000, "not valid TOML"),
        ("ui = 5", "ui: expected"),
        ("ui = true", "ui: expected"),
        ("[sampling]\ntemperature = " + "9" * 400, "sampling.temperature"),
        *((f'[engine]\ncores = "{cores}"', r"engine\.cores.*(l3:0-3|reversed)") for cores in (
            "", "shared", "4-", "1 2", "0x3", "all,1", "1,7-4", "l3:7-4", "die:0", "l3:0;1", "4/node", "/l3",
            "0-99999999999")),
        *((f'[servers]\nurls = ["http://good:1", "{url}"]', r"servers\.urls.*http://127")
          for url in ("http://host:port", "http://[x", "http://:1", "http://u:secret@host", "host:80")),
    ],
)  # fmt: skip
def test_values_that_no_program_can_use_are_named(text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as refused:
        parse(text)
    assert "regex" not in str(refused.value) and "secret" not in str(refused.value)


def test_a_byte_order_mark_is_left_out() -> None:
    paths.config_dir().mkdir(parents=True)
    paths.settings_file().write_bytes(b"\xef\xbb\xbf[engine]\nthreads = 3\n")
    assert settings.load().engine.threads == 3
    settings.update({"engine": {"threads": 4}})
    assert settings.load().engine.threads == 4


def test_the_home_of_an_unknown_user_is_a_name_like_others() -> None:
    assert paths.expanded("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
    assert paths.expanded("~/x") == Path.home() / "x"


def test_what_the_app_remembers_by_itself_leaves_config_toml_alone() -> None:
    file = paths.settings_file()
    file.parent.mkdir(parents=True)
    written = '# mine\n[model]\nlast = "/from/an/earlier/version.gguf"\n[ui]\nsidebar = false\n'
    file.write_text(written)
    assert settings.load().model.last == "/from/an/earlier/version.gguf"
    assert settings.load().ui.sidebar is False
    settings.update({"model": {"last": "/new.gguf"}})
    settings.update({"ui": {"telemetry": False}})
    settings.update({"ui": {"sidebar": True}})
    chosen = settings.load()
    assert (chosen.model.last, chosen.ui.sidebar, chosen.ui.telemetry) == ("/new.gguf", True, False)
    assert file.read_text() == written
    with pytest.raises(SettingsError, match=r"ui\.sidebar"):
        settings.update({"ui": {"sidebar": "perhaps"}})
    paths.state_file().write_bytes(b"\xff{")
    assert settings.load().model.last == "/from/an/earlier/version.gguf"


def test_a_link_to_the_settings_stays_one(tmp_path: Path) -> None:
    dotfiles = tmp_path / "dotfiles" / "cpuchat.toml"
    dotfiles.parent.mkdir()
    dotfiles.write_text("# mine\n")
    dotfiles.chmod(0o640)
    paths.settings_file().parent.mkdir(parents=True)
    paths.settings_file().symlink_to(dotfiles)
    settings.update({"ui": {"color_drafts": True}})
    assert paths.settings_file().is_symlink()
    assert dotfiles.read_text().startswith("# mine") and settings.load().ui.color_drafts
    assert dotfiles.stat().st_mode & 0o777 == 0o640
    dotfiles.unlink()
    settings.update({"engine": {"threads": 3}})
    assert paths.settings_file().is_symlink() and "threads = 3" in dotfiles.read_text()
    assert dotfiles.stat().st_mode & 0o777 == 0o600


def test_a_setting_without_a_value_leaves_the_file() -> None:
    file = paths.settings_file()
    settings.update({"sampling": {"top_k": 7, "temperature": 0.7}})
    changed = settings.update({"sampling": {"top_k": None, "top_p": None}})
    assert changed.sampling.top_k is None and changed.sampling.temperature == 0.7
    assert "top_k" not in file.read_text() and "temperature = 0.7" in file.read_text()
    assert changed.sampling.sampling() == Sampling()


def test_every_setting_knows_where_its_value_comes_from() -> None:
    settings.update({"engine": {"threads": 2, "batch": 64, "poll": 7}, "model": {"last": "/seen.gguf"}})
    sources = SettingSources(
        given_options({"engine__threads": 3, "engine__memory_policy": "local", "engine__ctx": None})
    )
    assert sources.read() == {
        "engine.threads": "set by --threads",
        "engine.batch": "set in config.toml",
        "engine.poll": "set in config.toml",
        "engine.memory_policy": "set by --memory-policy",
        "model.last": "as in the last run",
    }
    sources.saved({"engine": {"threads": 4}})
    assert sources.read()["engine.threads"] == "set in config.toml"
