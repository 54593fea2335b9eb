"""Tests file names as models: of the usual publishers, of split files, and names that must not become files."""

from __future__ import annotations

import ntpath
import posixpath
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuchat.base.errors import HubError
from cpuchat.models.hub.repository import HubFile, models_of, safe_path


def files(paths: Sequence[str]) -> list[HubFile]:
    """Return files of 1, 2, 3, ... bytes."""
    return [HubFile(path=path, size=n, sha256=f"{n:064x}") for n, path in enumerate(paths, 1)]


@pytest.mark.parametrize(
    ("path", "quantization"),
    [
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Q4_K_M"),  # bartowski
        ("google_gemma-3-12b-it-qat-Q4_0.gguf", "QAT-Q4_0"),
        ("Qwen_Qwen3-8B-bf16.gguf", "BF16"),
        ("UD-IQ2_XXS/DeepSeek-V3-UD-IQ2_XXS-00001-of-00005.gguf", "UD-IQ2_XXS"),
        ("Athene-V2-Chat.i1-IQ3_M.gguf", "IQ3_M"),  # mradermacher
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),  # ggml-org
        ("qwen2.5-1.5b-instruct-fp16.gguf", "F16"),
        ("llama-2-7b-chat.Q2_K.GGUF", "Q2_K"),  # TheBloke
        ("Model-F16-Q5_K_M.gguf", "Q5_K_M"),
        ("Meta-Llama-3-8B.gguf", ""),
        ("Qwen3-8B-IQ4_XSmall.gguf", ""),
    ],
)
def test_the_quantization_is_read_from_the_names_of_the_usual_publishers(path: str, quantization: str) -> None:
    [model] = models_of(files([path]))
    assert model.quantization == quantization


def test_the_parts_of_a_split_model_are_one_model_in_order() -> None:
    paths = [f"Q8_0/Big-Q8_0-{number:05d}-of-00005.gguf" for number in (3, 1, 5, 2, 4)]
    [model] = models_of(files(paths))
    assert model.name == "Big-Q8_0"
    assert [file.path for file in model.files] == sorted(paths)
    assert model.size == 1 + 2 + 3 + 4 + 5
    assert model.complete


@pytest.mark.parametrize("numbers", [(2, 3), (1, 2), (0, 1, 2), (2, 3, 4)])
def test_missing_parts_make_a_model_incomplete(numbers: tuple[int, ...]) -> None:
    [model] = models_of(files([f"Big-{number:05d}-of-00003.gguf" for number in numbers]))
    assert not model.complete


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("Qwen3-VL-8B-Q4_K_M.gguf", "model"),
        ("mmproj-F16.gguf", "projector"),
        ("Qwen3-VL-8B.mmproj-Q8_0.gguf", "projector"),
        ("imatrix_unsloth.gguf", "imatrix"),
        ("Qwen3-VL-8B-imatrix-Q5_K_M.gguf", "model"),
        ("mtp-Qwen3.5-27B-Q8_0.gguf", "head"),
        ("Qwen3-8B_eagle3-F16.gguf", "head"),
        ("MTP/head-Q8_0.gguf", "head"),
        ("Qwen3.5-27B-MTP-Q4_K_M.gguf", "model"),  # holds its head itself
        ("mtpilot-Q8_0.gguf", "model"),
    ],
)
def test_names_tell_what_is_no_model(path: str, kind: str) -> None:
    assert [model.kind for model in models_of(files([path]))] == [kind]


@pytest.mark.parametrize(
    "path",
    [
        "../evil.gguf",
        "C:\\evil.gguf",
        "a//b.gguf",
        "",
        "a\0.gguf",
        "a\x1b[31m.gguf",
        "model\u202efugg.exe",
        "sub/nul.gguf",
        "trailing. ",
        "x" * 252 + ".gguf",
        "/".join(["folder"] * 200),
    ],
)
def test_names_that_leave_the_folder_or_cannot_be_written_are_refused(path: str) -> None:
    with pytest.raises(HubError) as caught:
        safe_path(path)
    assert caught.value.message.isprintable()


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=st.sampled_from("./\\:aC\0\n~ "), max_size=12) | st.text(max_size=20))
def test_whatever_passes_stays_inside_the_folder_everywhere(path: str) -> None:
    try:
        safe_path(path)
    except HubError:
        return
    assert posixpath.normpath(posixpath.join("/cache/repo", path)).startswith("/cache/repo/")
    assert ntpath.normpath(ntpath.join("D:\\cache\\repo", path)).startswith("D:\\cache\\repo\\")
