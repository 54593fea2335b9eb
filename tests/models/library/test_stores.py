"""Tests the models of Ollama, LM Studio and llama.cpp, as these programs keep and name them."""

from __future__ import annotations

import json
import os
import shlex
import unicodedata
from pathlib import Path

import pytest

from cpuchat.base.errors import ModelNotFound
from cpuchat.models.gguf.header import known_as, read_model
from cpuchat.models.library import places
from cpuchat.models.library.library import Library, short_specs
from cpuchat.models.library.places import grouped, natural
from cpuchat.models.synthetic.model import write_model
from tests.models.library.files import cached
from tests.support.stores import llama_cpp, lmstudio, ollama
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.usefixtures("no_demo")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Path:
    return home / ".ollama" / "models"


def listed(*folders: Path) -> dict[str, str]:
    """Return how models are shown and where they come from."""
    return {(model.alias or model.path.name): model.source for model in Library(folders).local_models()}


def test_each_program_has_its_place_and_its_names(home: Path, store: Path, model: Path, tiny_model: Path) -> None:
    ollama(store, "qwen2.5-coder:7b", model)
    ollama(store, "llama3:8b", tiny_model, "registry.ollama.ai/someone")
    lmstudio(home, "lmstudio-community/Qwen2.5-7B-Instruct-GGUF", "Qwen2.5-7B-Instruct-Q8_0.gguf", model)
    cache = home / ".cache" / "llama.cpp"
    llama_cpp(cache, "ggml-org/gemma-3-4b-it-GGUF", "gemma-3-4b-it-Q8_0.gguf", model)
    (home / "models").mkdir()
    write_tiny_gguf(home / "models" / "mine.gguf")
    assert listed() == {
        "mine.gguf": "folder", "someone/llama3:8b": "ollama", "qwen2.5-coder:7b": "ollama",
        "Qwen2.5-7B-Instruct-Q8_0.gguf": "lmstudio", "ggml-org_gemma-3-4b-it-GGUF_gemma-3-4b-it-Q8_0.gguf": "llama.cpp",
    }  # fmt: skip
    library = Library()
    for name in ("qwen2.5-coder:7b", "Coder:7b", "qwen2.5-coder", "qwen2.5-coder:q8_0"):
        assert library.resolve(name).parent == store / "blobs"
        assert known_as(library.resolve(name)) == "qwen2.5-coder:7b"  # no hash is shown
    for name in ("lmstudio-community/Qwen2.5-7B-Instruct-GGUF", "ggml-org/gemma-3-4b-it-GGUF:Q8_0"):
        assert (path := library.resolve(name)).name.endswith("Q8_0.gguf") and known_as(path) == path.stem
    [one] = [m for m in library.local_models() if m.alias == "qwen2.5-coder:7b"]
    assert library.verify(one).state == "verified"
    refused = {library.deletion(m).refused for m in library.local_models() if m.source != "folder"}
    assert refused == {f"{program} keeps it: delete it there." for program in places.STORES.values()}
    library.opened(one.path)
    assert len(library.local_models()) == 5


@pytest.mark.parametrize("where", ["OLLAMA_MODELS", "folder"])
def test_ollamas_store_may_be_anywhere(
    where: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its service has OLLAMA_MODELS in its own environment alone: who pastes the folder finds the models, too."""
    ollama(tmp_path / "disk", "qwen3:8b", model)
    if where == "folder":
        assert listed(tmp_path / "disk") == {"qwen3:8b": "ollama"}
        [one] = Library().in_folder(tmp_path / "disk")
        assert one.alias == "qwen3:8b" and "Ollama keeps it" in Library([tmp_path / "disk"]).deletion(one).refused
        (deep := tmp_path / "disk" / "a" / "b").mkdir(parents=True)
        write_tiny_gguf(deep / "tiny.gguf")
        assert [one.alias for one in Library().in_folder(tmp_path / "disk")] == ["", "qwen3:8b"]
        monkeypatch.setattr("cpuchat.models.library.library._MAX_FOLDERS", 3)  # those of the store, and a
        assert [one.alias for one in Library().in_folder(tmp_path / "disk")] == ["qwen3:8b"]
    else:
        monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "disk"))
        assert listed() == {"qwen3:8b": "ollama"}


def test_other_registries_another_tree_and_two_tags_of_one_file(store: Path, model: Path, tiny_model: Path) -> None:
    ollama(store, "Qwen2.5-7B-GGUF:Q8_0", model, "hf.co/bartowski")
    ollama(store, "qwen3:8b", tiny_model)
    (store / "manifests").rename(store / "manifests-v2")
    ollama(store, "qwen3:latest", tiny_model)
    assert listed() == {"hf.co/bartowski/Qwen2.5-7B-GGUF:Q8_0": "ollama", "qwen3:latest": "ollama"}
    library = Library()
    assert library.resolve("bartowski/Qwen2.5-7B-GGUF") == library.resolve("hf.co/bartowski/qwen2.5-7b-gguf:q8_0")
    assert library.resolve("qwen3:8b") == library.resolve("qwen3") == library.resolve("qwen3:latest")
    ollama(store, "two\nlines:1b", model)
    assert "two lines:1b" in listed()


def test_a_content_that_no_name_leads_to_is_called_as_its_header_says(store: Path, model: Path, tmp_path: Path) -> None:
    lost = ollama(store, "lost:1b", model)
    (store / "manifests").rename(tmp_path / "elsewhere")
    assert known_as(lost) == read_model(model).name
    lost.unlink()
    assert known_as(lost) == read_model(model).name  # which is not read for each line that has it
    (cut := lost.with_name(f"sha256-{'0' * 64}")).write_bytes(b"GGUF")
    assert known_as(cut) == cut.name  # it has none


def test_a_blob_by_its_old_name_and_with_a_projector(store: Path, model: Path, tiny_model: Path) -> None:
    blob = ollama(store, "llava:7b", model, projector=tiny_model)
    older = blob.rename(blob.with_name(blob.name.replace("-", ":")))
    [one] = Library().local_models()
    assert (one.path, one.damaged) == (older, None)
    assert one.projector is not None and one.projector.is_file()


def test_a_manifest_without_its_file_says_what_to_do(store: Path, model: Path) -> None:
    ollama(store, "gemma3:4b", model).unlink()
    [lost] = Library().local_models()
    assert (lost.name, lost.state) == ("gemma3:4b", "damaged") and "ollama pull gemma3:4b" in (lost.damaged or "")
    for name in ("gemma3:4b", "gemma"):
        with pytest.raises(ModelNotFound, match=r"gemma3:4b is gone.*download it again"):
            Library().resolve(name)


def test_what_is_no_manifest_is_left_out(store: Path, model: Path) -> None:
    ollama(store, "good:1b", model)
    folder = store / "manifests" / "registry.ollama.ai" / "library"
    cloud = {"layers": [{"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64}]}
    outside = {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../etc/passwd"}]}
    for name, text in {
        "half": '{"layers": [', "empty": "", "list": "[]", "cloud": json.dumps(cloud), "evil": json.dumps(outside),
        "null": '{"layers": null}', "huge": " " * 2_000_000,
    }.items():  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "latest").write_text(text)
    for name, content in {"bytes": b'{"layers": "\xff"}', "deep": b'{"layers": ' + b"[" * 400_000}.items():
        (folder / name).mkdir()
        (folder / name / "latest").write_bytes(content)
    (folder / ".DS_Store").write_text("{}")
    os.mkfifo(folder / "half" / "pipe")
    assert listed() == {"good:1b": "ollama"}


def test_lm_studio_in_older_and_moved_folders_without_its_tree_and_over_links(
    home: Path, tmp_path: Path, model: Path, tiny_model: Path
) -> None:
    old = home / ".cache" / "lm-studio"
    (old / "models").mkdir(parents=True)
    (old / "models" / "flat.gguf").symlink_to(model)  # LM Studio itself wants two folders above
    (moved := tmp_path / "disk" / "a" / "b").mkdir(parents=True)
    (moved / "deep.gguf").write_bytes(tiny_model.read_bytes())
    (moved / "gone.gguf").symlink_to(tmp_path / "unplugged" / "x.gguf")
    (home / ".lmstudio").mkdir()
    (home / ".lmstudio" / "settings.json").write_text(json.dumps({"downloadsFolder": str(tmp_path / "disk")}))
    assert listed() == {"flat.gguf": "lmstudio", "deep.gguf": "lmstudio", "gone.gguf": "lmstudio"}
    assert Library().resolve("a/b:F32").name == "deep.gguf"
    for damage in (b'{"downloadsFolder": "\xff"}', b'{"downloadsFolder": "\\u0000"}', b'{"x": ' + b"[" * 400_000):
        (old / "settings.json").write_bytes(damage)
        assert len(listed()) == 3
    assert [m.path.name for m in Library().local_models() if "broken link" in (m.damaged or "")] == ["gone.gguf"]


def test_llama_cache_may_be_a_hugging_face_cache(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = cached(tmp_path / "llama", "ggml-org/tiny-GGUF", "tiny-Q8_0.gguf", model)
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    [one] = Library().local_models()
    assert (one.source, one.repo, one.path) == ("huggingface", "ggml-org/tiny-GGUF", link)
    assert Library().resolve("ggml-org/tiny-GGUF:Q8_0") == link
    assert "is outside the Hugging Face cache" in Library().deletion(one).refused
    assert Library(cache=tmp_path / "llama").deletion(one).freed == link.stat().st_size


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_store_of_another_user_is_named(store: Path, model: Path) -> None:
    ollama(store, "qwen3:8b", model)
    store.chmod(0)
    assert places.unavailable() == ["~/.ollama/models belongs to another user and cannot be read"] and not listed()
    store.chmod(0o700)


def test_a_folder_on_a_disk_that_is_not_mounted_is_named(home: Path, model: Path) -> None:
    (home / "mine").mkdir(parents=True)
    assert places.unavailable(["~/mine", "~/gone"]) == ["~/gone does not exist; is its disk mounted?"]


@pytest.mark.parametrize(
    ("unit", "line"),
    [
        ("ollama.service", "Environment=OLLAMA_MODELS={}"),
        (
            "ollama.service.d/override.conf",
            '# Environment="OLLAMA_MODELS=/x"\n[Service]\nEnvironment="OLLAMA_MODELS={}"',
        ),
        ("ollama.service.d/a.conf", 'Environment="PATH=/a b" "OLLAMA_MODELS={}" A=1'),
    ],
    ids=["unit", "drop-in", "several"],
)
def test_ollamas_service_may_have_its_store_elsewhere(
    unit: str, line: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYSTEMD_UNIT_PATH", f"{tmp_path / 'none'}:{tmp_path / 'units'}")
    moved = tmp_path / ("other disk" if '"' in line else "disk")
    ollama(moved, "qwen3:8b", model)
    file = tmp_path / "units" / unit
    file.parent.mkdir(parents=True)
    file.write_text(line.format(moved))
    file.with_name("broken.conf").write_text('Environment="open')
    assert listed() == {"qwen3:8b": "ollama"}


def test_a_hard_link_is_the_same_model(home: Path, model: Path) -> None:
    file = lmstudio(home, "a/b", "m.gguf", model)
    (home / "models").mkdir()
    (home / "models" / "m.gguf").hardlink_to(file)
    assert listed() == {"m.gguf": "folder"}
    (other := home / "models" / "other-name.gguf").hardlink_to(file)
    assert Library().resolve("m") == home / "models" / "m.gguf" and Library().resolve("other-name") == other
    assert Library().resolve("a/b") == file


def test_what_a_browser_saved_is_listed_but_neither_searched_below_nor_deleted(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = home / "Downloads" / "m.gguf"
    (saved.parent / "unpacked").mkdir(parents=True)
    saved.write_bytes(model.read_bytes())
    (saved.parent / "unpacked" / "other.gguf").write_bytes(model.read_bytes())
    assert listed() == {"m.gguf": "folder"}
    library = Library()
    assert library.resolve("m.gguf") == saved
    [one] = [found for found in library.local_models() if found.path == saved]
    assert "outside" in library.deletion(one).refused
    monkeypatch.setattr("sys.platform", "darwin")
    assert not listed()  # looking there opens a question of the system's


def test_a_name_that_is_composed_otherwise_is_found_and_one_that_is_no_utf_8_is_said(home: Path, model: Path) -> None:
    (home / "models").mkdir(parents=True)
    mine = home / "models" / unicodedata.normalize("NFD", "Größer-Q8_0.gguf")
    mine.write_bytes(model.read_bytes())
    for spec in ("größer", "Größer-q8_0.gguf"):
        assert Library().resolve(spec) == mine
    odd = Path(os.fsdecode(os.fsencode(home / "models") + b"/m\xff.gguf"))
    odd.write_bytes(model.read_bytes())
    [one] = [found for found in Library().local_models() if found.path == odd]
    assert one.damaged and "not valid UTF-8" in one.damaged


def test_a_part_of_a_name_is_enough_unless_several_models_have_it(
    home: Path, store: Path, model: Path, tiny_model: Path
) -> None:
    ollama(store, "qwen2.5-coder:7b", model)
    lmstudio(home, "a/b", "qwen3-8b-F32.gguf", tiny_model)
    library = Library()
    with pytest.raises(ModelNotFound, match=r"qwen names 2 files: qwen2\.5-coder:7b, qwen3-8b-f32") as caught:
        library.resolve("qwen")
    assert caught.value.hint == "Use one of these names."
    lmstudio(home, "a/c", "qwen3-8b-q8_0-from-q4.gguf", model)
    with pytest.raises(ModelNotFound, match=r"qwen3 names 2 files: qwen3-8b-f32, synthetic"):
        library.resolve("qwen3")
    (home / ".lmstudio" / "models" / "a" / "c" / "qwen3-8b-q8_0-from-q4.gguf").unlink()
    assert library.resolve("QWEN3").name == "qwen3-8b-F32.gguf"
    again = lmstudio(home, "a/d", "qwen3-8b-F32.gguf", tiny_model)
    assert library.resolve("qwen3-8b-F32").parent != again.parent  # the same file
    again.write_bytes(model.read_bytes())
    with pytest.raises(ModelNotFound, match=r"qwen3-8b-F32 names 2 files: ~/.*/a/b/.*, ~/.*/a/d/"):
        library.resolve("qwen3-8b-F32")
    again.unlink()
    told: list[str] = []
    for file in (model, write_model(home / "c.gguf", "tiny", "Q4_0")):
        lmstudio(home, "a/e", f"coder-{read_model(file).quantization}.gguf", file)
    assert library.resolve("synthetic", told.append).name == "coder-Q4_0.gguf"
    assert told == ["synthetic is synthetic:q4_0, one of 2 files. The other: synthetic:q8_0."]
    for eight in ("synthetic:q8", "synthetic:q8_0", "synthetic@Q8_0"):  # as LM Studio writes it
        assert library.resolve(eight).name == "coder-Q8_0.gguf"
    assert library.resolve("synthetic:tiny").name == "coder-Q4_0.gguf"  # as Ollama would name it
    for nothing in ("llama", "lmstudio"):  # the architecture, a folder
        with pytest.raises(ModelNotFound, match="no model"):
            library.resolve(nothing)
    with pytest.raises(ModelNotFound, match=r"You have synthetic:q4_0, synthetic:q8_0\."):
        library.resolve("synthetic:q6_k")


def test_what_a_list_names_a_file_by_is_short_and_finds_that_file(home: Path, store: Path, tmp_path: Path) -> None:
    for name, kind in (("a-Q4_0", "Q4_0"), ("a-Q8_0", "Q8_0"), ("again", "Q8_0")):
        lmstudio(home, "a/b", f"{name}.gguf", write_model(tmp_path / "made.gguf", "tiny", kind))
    ollama(store, "other:7b", write_tiny_gguf(tmp_path / "tiny.gguf"))
    lmstudio(home, "a/c", "demo.gguf", write_model(tmp_path / "made.gguf", "tiny", "Q5_0"))
    lmstudio(home, "a/d", "of-q4_0.gguf", write_model(tmp_path / "made.gguf", "tiny", "Q6_K"))  # its header says more
    library = Library()
    found = [model for group in grouped(library.local_models()) for model in group]
    named = dict(zip(short_specs(found), (model.path for model in found), strict=True))
    assert {"a-Q8_0", "again", "other:7b"} <= {*named}  # no name of two files: deleting takes one
    assert {spec: library.resolve(spec) for spec in named} == named
    for wrong, listed in (("synthetic", "files: "), ("synthetic:q2_k", "have "), ("agan", "mean ")):
        with pytest.raises(ModelNotFound) as caught:
            library.resolve(wrong)
        words = f"{caught.value.message.rstrip('.')} {caught.value.hint}".partition(listed)[2]
        names = words.partition(" Use")[0].rstrip(".?").replace(" or ", ", ")
        assert {library.resolve(*shlex.split(name)) for name in names.split(", ")} <= {*named.values()}, words


def test_files_of_one_model_stand_together_in_the_order_of_names(tmp_path: Path, home: Path, store: Path) -> None:
    for folder, name in (("a", "x-F32.gguf"), ("b", "y.gguf")):
        (tmp_path / folder).mkdir()
        write_tiny_gguf(tmp_path / folder / name)
    (tmp_path / "b" / "cut.gguf").write_bytes(b"GGUF")
    groups = grouped(Library([tmp_path / "a", tmp_path / "b"]).local_models())
    assert [sorted(model.path.name for model in group) for group in groups] == [["x-F32.gguf", "y.gguf"], ["cut.gguf"]]
    names = ["Qwen2.5 32B", "Qwen2.5 Coder 7B", "qwen2.5-7b", "Llama 3"]
    assert sorted(names, key=natural) == ["Llama 3", "qwen2.5-7b", "Qwen2.5 32B", "Qwen2.5 Coder 7B"]
