"""Makes the table of measured KVMs in docs/reports/hosts/README.md from the reports beside it.

Each report of `hindsight doctor --report` in that folder gives a row. --check writes nothing, and
ends with status 1 if the page does not show what the reports say. Exit status 2 for a report that
cannot be read.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from hindsight_ci.project import ROOT

FOLDER = ROOT / "docs/reports/hosts"
BEGIN = "<!-- begin: table of reports -->"
END = "<!-- end -->"
HEAD = ["KVM", "processor", "kernel, modules", "exact", "exact until armed", "not exact", "`auto`"]

# What a guest uses with an exit that shows it (docs/guide/exactness.md, "The rule").
SEEN_BY_MSR = {"branches", "counters", "rdt"}
SEEN_BY_EXIT = {"single-step", "debug-registers", "io-breakpoints"}

NAMES = {
    "branches": "branch recording",
    "debug-registers": "debug registers",
    "io-breakpoints": "I/O breakpoints",
    "rdt": "RDT",
    "smm": "SMM",
    "system-registers": "system registers",
}


def column(facility: dict[str, Any]) -> tuple[str, str]:
    """The column of HEAD to which a group belongs, and its text there."""
    group = facility["group"]
    name = NAMES.get(group, group)
    alone, moving = facility["alone"], facility["moving"]
    if group not in SEEN_BY_MSR and alone == "exact":
        return "exact", name
    seen = group in SEEN_BY_MSR | SEEN_BY_EXIT
    if seen and moving == "exact":
        return "exact until armed", name
    verdict = moving if seen else alone
    if isinstance(verdict, dict):
        return "not exact", f"{name} ({verdict['inexact']})"
    return "not exact", f"{name} (not measured)"


def row(name: str, report: dict[str, Any]) -> list[str]:
    """The cells of a report."""
    host = report["host"]
    cells: dict[str, list[str]] = {title: [] for title in HEAD[3:6]}
    for facility in report.get("facilities", []):
        title, text = column(facility)
        cells[title].append(text)
    engine, _, because = report.get("auto", "").partition(", because ")
    if not any(cells.values()):
        cells["not exact"].append(f"not measured: {because}" if because else "not measured")
    kernel = f"{host['kernel']}; {', '.join(host['modules'])}"
    listed = [", ".join(texts) or "-" for texts in cells.values()]
    return [f"[`{name}`]({name}.json)", host["cpu_model"], kernel, *listed, engine or "-"]


def table(reports: dict[str, dict[str, Any]]) -> str:
    """The table of all reports, by name."""
    rows = [HEAD, ["---"] * len(HEAD), *(row(name, reports[name]) for name in sorted(reports))]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in rows]
    return "\n".join(lines) + "\n"


def insert(page: str, text: str) -> str:
    """The page with the text between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no '{BEGIN}' with an '{END}' after it")
    return f"{before}{begin}\n{text}{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="hindsight_ci.host_reports",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER)
    options = parser.parse_args(arguments)
    try:
        files = options.folder.glob("*.json")
        reports = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
        path = options.folder / "README.md"
        page = path.read_text(encoding="utf-8")
        made = insert(page, table(reports))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"host-reports: {error}", file=sys.stderr)
        return 2
    if made == page:
        return 0
    if options.check:
        print(f"{path} is not what the reports say: run cargo xtask hosts-page", file=sys.stderr)
        return 1
    path.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
