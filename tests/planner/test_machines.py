"""The machines to plan for: their figures and sources, names, and files of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.base.errors import UsageError
from cpuchat.models.catalog import load_catalog
from cpuchat.planner.plan import MachineSpec, all_machines, find_machine, find_model, machines, read_machine
from cpuchat.present.plan import machine_figures
from tests.costs.made_up import decode_rate

OWN = """
name = "Lab server"
kind = "server"
cpu = "zen4"
cores = 48
clock_ghz = 3.1
memory_gb = { value = 384, source = "12 × 32 GB" }
measured = { value = 350, low = 340, high = 360, source = "cpuchat probe" }
"""


@pytest.mark.parametrize("machine", machines(), ids=lambda one: one.id)
def test_every_figure_has_a_source(machine: MachineSpec) -> None:
    figures = [getattr(machine, name) for name in machine.__struct_fields__]
    figures = [one for one in figures if hasattr(one, "source")]
    assert len(figures) >= 6
    assert all(one.source for one in figures)
    assert machine.measured.value < machine.theoretical.value


@pytest.mark.parametrize(
    ("wanted", "said"), [("9745", "epyc-9754"), ("toaster", "Known are"), ("ryzen", "ryzen-7950x or ryzen-9950x")]
)
def test_unknown_machines_get_the_nearest_names(wanted: str, said: str) -> None:
    with pytest.raises(UsageError, match=r"Unknown machine|ambiguous") as error:
        find_machine(wanted)
    assert said in error.value.hint


def test_a_machine_of_your_own(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(OWN)
    machine = read_machine(file)
    assert machine.cores.value == 48
    shown = dict(machine_figures(machine))
    assert (shown["cores"], shown["memory"]) == ("48, of lab.toml", "384 GB, estimate: 12 × 32 GB")
    assert shown["read bandwidth"] == "350 GB/s (340–360), measured: cpuchat probe"
    assert decode_rate(machine.profile(), find_model("8b", load_catalog()).work) > 30
    file.write_text(OWN.replace("measured =", "theoretical ="))
    assert read_machine(file).read_gbs.value == pytest.approx(0.8 * 350)


def test_machines_of_the_config_folder_are_known_by_name() -> None:
    folder = paths.user_machines_dir()
    folder.mkdir(parents=True)
    (folder / "Lab 1.toml").write_text(OWN)
    (folder / "mine.toml").write_text(OWN.replace('name = "Lab server"', 'id = "epyc-9754"\nname = "My 9754"'))
    (folder / "broken.toml").write_text("cores = 3")
    (folder / "gone.toml").symlink_to(folder / "moved away.toml")
    known, problems = all_machines()
    assert len(known) == len(machines()) + 1
    assert find_machine("lab-1").name == find_machine("Lab server").name == "Lab server"
    assert find_machine("epyc-9754").name == "My 9754"
    assert len(problems) == 2 and problems[1].endswith("gone.toml is empty, or a link to nothing.")
    with pytest.raises(UsageError, match="Unknown machine") as error:
        find_machine("broken")
    assert "broken.toml" in error.value.hint


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("value = 350, low = 340", "value = 0, low = 0", "measured.value"),
        ("low = 340", "low = 355", "rising order"),
        ("cores = 48", 'cores = "many"', "cores"),
        ('"zen4"', '"zen44"', "zen4"),
        ("measured =", "bandwidth =", "bandwidth"),
        ("high = 360", "high = 900 }\ntheoretical = { value = 400", "measured: exceeds"),
        ("cores = 48", "cores = 48\nfitted = 1", "fitted"),
        ("name =", "name = =", "not valid TOML"),
    ],
)
def test_impossible_machines_get_a_sentence(tmp_path: Path, old: str, new: str, said: str) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(OWN.replace(old, new))
    with pytest.raises(UsageError) as error:
        read_machine(file)
    assert said in error.value.message
    assert "lab.toml" in error.value.message
