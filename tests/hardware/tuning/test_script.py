"""Tests the scripts of a plan, really run against a simulated machine."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.hardware.tuning import plan as tuning
from cpuchat.hardware.tuning.knobs import Change
from cpuchat.hardware.tuning.plan import NAMES, TuningPlan, effect, make_plan
from tests.hardware.tuning.machine import CPUFREQ, TOPOLOGY, resctrl, run, server, snapshot, write

pytestmark = pytest.mark.slow

GOVERNOR = CPUFREQ.format(3) + "/scaling_governor"
# `sh` may be one of the others.
SHELLS = {Path(found).resolve(): shell for shell in ("sh", "bash", "dash") if (found := shutil.which(shell))}.values()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder whose name breaks every unquoted use."""
    return resctrl(server(tmp_path / "it's a $root"))


def saved_plan(root: Path, *wanted: str) -> tuning.SavedPlan:
    return tuning.save_plan(make_plan(TOPOLOGY, root, wanted, target_cpus=(0, 1, 4, 5)), root)


@pytest.mark.parametrize("shell", SHELLS)
def test_there_and_back_again(root: Path, shell: str) -> None:
    before = snapshot(root)
    saved = saved_plan(root, *NAMES)
    assert snapshot(root) == before, "planning changes nothing"

    done = run(saved.apply, root, shell)
    assert done.returncode == 0, done.stderr
    assert (root / GOVERNOR).read_text() == "performance\n"
    assert (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text() == "[always] madvise never\n"
    assert (root / "proc/sys/kernel/numa_balancing").read_text() == "0\n"
    assert (root / "sys/fs/resctrl/cpuchat/schemata").read_text() == "L3:0=f;1=f\n"
    assert (root / "sys/fs/resctrl/cpuchat/cpus_list").read_text() == "0-1,4-5\n"
    assert all(now == wanted > 0 for now, wanted in effect(saved.plan, root).values())
    applied = snapshot(root)

    again = run(saved.apply, root, shell)
    assert again.returncode == 0, again.stderr
    assert snapshot(root) == applied

    done = run(saved.revert, root, shell)
    assert done.returncode == 0, done.stderr
    assert snapshot(root) == before
    assert all(now == 0 for now, _ in effect(saved.plan, root).values())

    again = run(saved.revert, root, shell)
    assert again.returncode == 0, again.stderr
    assert snapshot(root) == before


def test_values_that_were_changed_since_the_plan_stop_it_before_anything_is_changed(root: Path) -> None:
    saved = saved_plan(root, "governor", "thp")
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always madvise [never]\n")
    before = snapshot(root)
    done = run(saved.apply, root)
    assert done.returncode == 1
    assert "transparent_hugepage/enabled is now 'never', not 'madvise': make a new plan." in done.stderr
    assert "nothing was changed" in done.stderr
    assert snapshot(root) == before


def test_a_cpu_that_went_away_stops_it_too(root: Path) -> None:
    saved = saved_plan(root, "governor")
    shutil.rmtree(root / "sys/devices/system/cpu/cpu5")
    before = snapshot(root)
    done = run(saved.apply, root)
    assert done.returncode == 1
    assert "cpu5/cpufreq/energy_performance_preference no longer exists: make a new plan." in done.stderr
    assert snapshot(root) == before


def test_a_half_applied_plan_is_finished_by_running_it_again_and_undone_by_the_other_script(root: Path) -> None:
    before = snapshot(root)
    saved = saved_plan(root, "governor", "boost", "numa-balancing")
    for cpu in range(4):
        (root / CPUFREQ.format(cpu) / "energy_performance_preference").write_text("performance\n")
    done = run(saved.revert, root)
    assert (done.returncode, snapshot(root)) == (0, before)

    (root / CPUFREQ.format(0) / "energy_performance_preference").write_text("performance\n")
    assert run(saved.apply, root).returncode == 0
    assert effect(saved.plan, root) == {"epp": (8, 8), "governor": (8, 8), "numa-balancing": (1, 1)}
    assert run(saved.revert, root).returncode == 0
    assert snapshot(root) == before


def test_a_file_that_takes_no_value_stops_it_and_says_how_to_go_back(tmp_path: Path) -> None:
    # What is written to /dev/null is never read back, as when a driver ignores it.
    root = server(tmp_path / "root")
    saved = saved_plan(root, "governor")
    deaf = '> "$(case "$1" in */cpu6/cpufreq/scaling_governor) echo /dev/null;; *) echo "$1";; esac)"'
    saved.apply.write_text(saved.apply.read_text().replace('> "$1"', deaf))
    done = run(saved.apply, root)
    assert done.returncode == 1
    assert "cpu6/cpufreq/scaling_governor rejected 'performance'." in done.stderr
    assert "stopped midway. To revert: sh " in done.stderr
    assert str(saved.revert) in done.stderr


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("signal", ["INT", "TERM"])
def test_who_stops_it_is_told_where_it_stands(root: Path, shell: str, signal: str) -> None:
    before = snapshot(root)
    saved = saved_plan(root, "governor")
    script, stopped = saved.apply.read_text(), f"kill -{signal} $$"
    saved.apply.write_text(
        script.replace("    changed=1\n", f'    changed=1\n    case "$1" in */cpu5/*) {stopped};; esac\n')
    )
    done = run(saved.apply, root, shell)
    assert done.returncode == 130
    assert "stopped midway. To revert: sh " in done.stderr
    assert snapshot(root) != before
    script = saved.revert.read_text()
    saved.revert.write_text(
        script.replace(
            "    printf '%s\\n' \"$2\" >", f'    case "$1" in */cpu4/*) {stopped};; esac\n    printf \'%s\\n\' "$2" >'
        )
    )
    done = run(saved.revert, root, shell)
    assert done.returncode == 130
    assert "stopped midway: run it again." in done.stderr
    saved.revert.write_text(script)
    assert run(saved.revert, root, shell).returncode == 0
    assert snapshot(root) == before


def test_going_back_overrules_what_others_changed_since_and_says_so(root: Path) -> None:
    before = snapshot(root)
    saved = saved_plan(root, "governor")
    assert run(saved.apply, root).returncode == 0
    (root / GOVERNOR).write_text("schedutil\n")
    done = run(saved.revert, root)
    assert done.returncode == 0
    assert "cpu3/cpufreq/scaling_governor was 'schedutil', which the plan had not set" in done.stderr
    assert snapshot(root) == before


def test_going_back_goes_on_after_a_file_that_is_gone_but_fails_in_the_end(root: Path) -> None:
    saved = saved_plan(root, "governor")
    assert run(saved.apply, root).returncode == 0
    (root / GOVERNOR).unlink()
    done = run(saved.revert, root)
    assert done.returncode == 1
    assert "cpu3/cpufreq/scaling_governor no longer exists." in done.stderr
    assert (root / CPUFREQ.format(0) / "scaling_governor").read_text() == "powersave\n"


def test_values_with_spaces_quotes_and_wildcards_are_written_as_they_were(tmp_path: Path) -> None:
    strange = "two words  'quoted' $HOME * \\n `id`"
    root = write(tmp_path / "root", {"sys/a b/c": strange, "sys/devices/system/cpu/cpu0/d e": strange})
    changes = tuple(
        Change(knob="thp", path=path, old=strange, new="new  value;*")
        for path in ("/sys/a b/c", "/sys/devices/system/cpu/cpu0/d e")
    )
    before = snapshot(root)
    saved = tuning.save_plan(TuningPlan(changes=changes), root)
    assert run(saved.apply, root).returncode == 0
    assert (root / "sys/a b/c").read_text() == "new  value;*\n"
    assert (root / "sys/devices/system/cpu/cpu0/d e").read_text() == "new  value;*\n"
    assert run(saved.revert, root).returncode == 0
    assert snapshot(root) == before


def test_others_who_divide_the_cache_since_stop_it(root: Path) -> None:
    saved = saved_plan(root, "governor", "l3")
    (root / "sys/fs/resctrl/database").mkdir()
    before = snapshot(root)
    done = run(saved.apply, root)
    assert done.returncode == 1
    assert "partitions the L3 now" in done.stderr
    assert snapshot(root) == before


def test_a_file_system_that_is_mounted_no_more_stops_it(root: Path) -> None:
    saved = saved_plan(root, "l3", "governor")
    shutil.rmtree(root / "sys/fs/resctrl")
    before = snapshot(root)
    done = run(saved.apply, root)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "cpuchat: resctrl is no longer mounted: make a new plan.", "cpuchat: nothing was changed.",
    ]  # fmt: skip
    assert snapshot(root) == before


def test_what_resctrl_refuses_is_reported(root: Path) -> None:
    before = snapshot(root)
    saved = saved_plan(root, "l3")
    (root / "sys/fs/resctrl/info/last_cmd_status").write_text("Invalid mask\n")
    done = run(saved.apply, root)
    assert done.returncode == 1
    assert "resctrl: Invalid mask" in done.stderr
    (root / "sys/fs/resctrl/info/last_cmd_status").write_text("ok\n")
    assert run(saved.revert, root).returncode == 0
    assert snapshot(root) == before


def test_on_the_real_machine_only_root_gets_through(root: Path) -> None:
    plan = make_plan(TOPOLOGY, root, ("governor",))
    saved = tuning.save_plan(plan, Path("/"))
    for script in (saved.apply, saved.revert):
        text = script.read_text()
        assert '[ "$(id -u)" -eq 0 ] || ' in text
        assert "/sys/devices/system/cpu/cpu" in text
        assert str(root) not in text
    assert "sudo sh" in saved.apply.read_text()
    assert saved.command(saved.revert) == f"sudo sh {saved.revert}"


@pytest.mark.parametrize("shell", SHELLS)
def test_both_scripts_are_sound_and_private(root: Path, shell: str) -> None:
    saved = saved_plan(root, *NAMES)
    assert stat.S_IMODE(saved.folder.stat().st_mode) == 0o700
    for script in (saved.apply, saved.revert):
        assert stat.S_IMODE(script.stat().st_mode) == 0o700
        assert "set -eu" in script.read_text()
        subprocess.run([shell, "-n", str(script)], check=True)


def test_cpus_that_change_alike_share_a_line(root: Path) -> None:
    text = saved_plan(root, "governor").apply.read_text()
    assert text.count("scaling_governor") == 1
    assert "for n in 0 1 2 3 4 5 6 7; do" in text


def test_the_preference_changes_while_the_other_governor_is_in_force(root: Path) -> None:
    # Under the performance governor the kernel refuses it.
    saved = saved_plan(root, "governor")
    there, back = saved.apply.read_text(), saved.revert.read_text()
    assert there.index("energy_performance_preference") < there.index("scaling_governor")
    assert back.index("scaling_governor") < back.index("energy_performance_preference")


def test_the_way_back_is_saved_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    really = tuning.write_atomically

    def full_disk(path: Path, content: str | bytes, **more: int) -> None:
        if written:
            raise OSError(28, "No space left on device", str(path))
        written.append(path.name)
        really(path, content, **more)

    monkeypatch.setattr(tuning, "write_atomically", full_disk)
    with pytest.raises(CpuchatError, match="No space left on device"):
        saved_plan(root, "governor")
    assert written == ["revert.sh"]
    assert [path.name for path in tuning.plans_dir().glob("*/*")] == ["revert.sh"]


def test_plans_are_found_again_newest_last(root: Path) -> None:
    first, second = saved_plan(root, "governor"), saved_plan(root, "thp")
    assert first.name != second.name
    assert [saved.name for saved in tuning.saved_plans()] == [first.name, second.name]
    assert tuning.find_plan() == second
    assert tuning.find_plan(first.name).plan == first.plan
    with pytest.raises(UsageError, match="Unknown tuning plan: nonsense"):
        tuning.find_plan("nonsense")


def test_damaged_plans_are_passed_over(root: Path) -> None:
    saved = saved_plan(root, "governor")
    (saved.folder / "plan.json").write_text("{")
    assert tuning.saved_plans() == []
    with pytest.raises(UsageError, match="No tuning plan found"):
        tuning.find_plan()


def test_no_folder_for_plans_is_a_plain_error(root: Path) -> None:
    data = Path(os.environ["CPUCHAT_DATA_DIR"])
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("a file")
    with pytest.raises(CpuchatError, match="Cannot save the plan"):
        saved_plan(root, "governor")
