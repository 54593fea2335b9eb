"""Tests models larger than memory: where their weights stay on disk, what is said of them, and what stays refused."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.base.errors import DoesNotFit, UsageError
from cpuchat.models import fit
from cpuchat.models.prediction import predict
from cpuchat.models.synthetic.model import header_of
from cpuchat.models.traffic import bytes_per_token, slowness, where_needed
from cpuchat.protocol.messages import LoadOptions
from tests.models.test_prediction import MACHINE

DENSE = header_of("8b", "Q4_K_M")
OPTIONS = LoadOptions(n_ctx=4096, from_disk=True)
IN_MEMORY = msgspec.structs.replace(OPTIONS, from_disk=False)
SMALL = fit.required_memory(DENSE, OPTIONS, 4096).min_bytes
ALL = fit.required_memory(DENSE, IN_MEMORY, 4096).min_bytes


def test_only_cache_and_buffers_have_to_fit() -> None:
    need = fit.required_memory(DENSE, OPTIONS, 4096)
    assert (need.repack, need.min_bytes) == (0, need.kv + need.compute)
    fit.check_fit(need, SMALL, DENSE, OPTIONS)
    with pytest.raises(DoesNotFit) as caught:
        fit.check_fit(need, SMALL - 1, DENSE, OPTIONS)
    assert "weights" not in caught.value.message and "--from-disk" not in caught.value.hint
    assert fit.largest_context(DENSE, OPTIONS, SMALL) == 4096


def test_a_model_that_fits_is_loaded_as_ever() -> None:
    assert where_needed(DENSE, OPTIONS, ALL) == IN_MEMORY
    assert where_needed(DENSE, OPTIONS, ALL - 1) == OPTIONS
    assert where_needed(DENSE, IN_MEMORY, 0) == IN_MEMORY


@pytest.mark.parametrize("more", [{"mlock": True}, {"load_mode": "read"}])
def test_options_that_contradict_it(more: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="--from-disk"):
        where_needed(DENSE, msgspec.structs.replace(OPTIONS, **more), ALL)
    with pytest.raises(DoesNotFit) as caught:
        options = msgspec.structs.replace(IN_MEMORY, **more)
        fit.check_fit(fit.required_memory(DENSE, options, 4096), ALL // 2, DENSE, options)
    assert "--from-disk" not in caught.value.hint


def test_a_refusal_names_it_where_it_works() -> None:
    need = fit.required_memory(DENSE, IN_MEMORY, 4096)
    for available, works in ((SMALL, True), (SMALL - 1, False)):
        with pytest.raises(DoesNotFit) as caught:
            fit.check_fit(need, available, DENSE, IN_MEMORY)
        assert ("--from-disk" in caught.value.hint) is works


def test_lists_go_on_calling_it_too_large() -> None:
    machine = msgspec.structs.replace(MACHINE, available=ALL - 1)
    assert predict(DENSE, OPTIONS, machine).verdict == predict(DENSE, IN_MEMORY, machine).verdict == "too large"


def test_its_note_says_how_slow_it_is() -> None:
    need, used = fit.required_memory(DENSE, OPTIONS, 4096), bytes_per_token(DENSE)
    half = need.min_bytes + DENSE.size // 2
    note = slowness(DENSE, need, half, 1e9)
    assert f"about {used / 2e9:.2g} s per token" in note
    assert f"{used / 2e9:.1f} of {used / 1e9:.1f} GB are read from disk for each token at 1 GB/s" in note
    assert "per token, as" not in slowness(DENSE, need, half, None)


def test_of_a_mixture_only_used_experts_are_read() -> None:
    mixture = header_of("30b-a3b", "Q4_K_M")
    need = fit.required_memory(mixture, OPTIONS, 4096)
    used = bytes_per_token(mixture)
    assert used < mixture.size / 5
    assert f"{used / 1e9:.1f} of {used / 1e9:.1f} GB" in slowness(mixture, need, need.min_bytes, 1e9)
