"""Runs the tests of public bug reports of similar programs that were rebuilt here, and prints each report's verdict.

    .venv/bin/python benchmarks/hostile/reports.py [AREA ...] [--processes 3] [--write]

`reports/AREA.toml` lists them: where each was reported, what it says in words of our own, what cpuchat did before, the
verdict, and the test that shows it. `--write` writes benchmarks/reports.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent.parent
LISTS = Path(__file__).parent / "reports"
PAGE = ROOT / "benchmarks" / "reports.md"
ABOUT = """\
# Reports of other programs

What people reported of programs that do the same job, rebuilt small and tried here. "Before" is what cpuchat did when
it was tried first, "now" what it does: *right*, *refused* with the reason and what to do, or a known *limit*.
`benchmarks/hostile/reports.py` runs the tests of all again; they are in `tests/`."""


@dataclass(frozen=True)
class Report:
    """A public report; `test` is the id of the pytest test that shows the verdict."""

    source: str
    what: str
    before: str
    verdict: str
    test: str
    note: str = ""


def reports(areas: list[str]) -> dict[str, list[Report]]:
    """Return the reports of `areas` (none: of all), by area."""
    files = [LISTS / f"{area}.toml" for area in areas] or sorted(LISTS.glob("*.toml"))
    return {file.stem: [Report(**one) for one in tomllib.loads(file.read_text())["report"]] for file in files}


def outcomes(tests: set[str], processes: int) -> dict[str, bool]:
    """Run `tests`; return which of them passed. What did not run is not there."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        call = [sys.executable, "-m", "pytest", "-q", "-n", str(processes), "--dist", "loadfile", f"--junitxml={junit}"]
        subprocess.run([*call, "-o", "junit_family=xunit1", *sorted(tests)], cwd=ROOT, check=False)
        if not junit.exists():
            sys.exit("not run: pytest did not start; see above.")
        cases = ElementTree.parse(junit).getroot().iter("testcase")
        return {
            f"{case.get('file')}::{case.get('name')}": not any(child.tag in ("failure", "error") for child in case)
            for case in cases
        }


def page(found: dict[str, list[Report]]) -> str:
    """Return benchmarks/reports.md."""
    lines = [ABOUT, ""]
    for area, ones in found.items():
        lines += [f"**{area.capitalize()}**", "", "| source | report | before | now | test |", "|---|---|---|---|---|"]
        for one in ones:
            now = f"{one.verdict}: {one.note}" if one.note else one.verdict
            test = one.test.removeprefix("tests/")
            cells = (one.source, one.what, one.before, now, f"`{test}`")
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.write:
        PAGE.write_text(page(reports([])))
        return
    found = reports(given.areas)
    passed = outcomes({one.test for ones in found.values() for one in ones}, given.processes)
    n_failed = 0
    for area, ones in found.items():
        print(f"\n{area}")
        for one in ones:
            verdict = {True: one.verdict, False: "FAILED", None: "NOT RUN"}[passed.get(one.test)]
            n_failed += not passed.get(one.test, False)
            print(f"  {verdict:8} {one.source}: {one.what}")
    n_reports = sum(map(len, found.values()))
    print(f"\n{n_reports} reports, {n_reports - n_failed} as listed")
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()
