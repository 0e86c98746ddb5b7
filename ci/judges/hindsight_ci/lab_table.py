"""Merges the results of several machines into one markdown table on standard output.

Each FILE is a junit.xml of `hindsight test` or a doctor.json of `hindsight doctor --json`; a
machine may have one of each. Probes are the rows of the first table, test cases those of the
second. Without MACHINE= the name of the file's folder is the machine. Exit status 2 for a file
that cannot be read, else 0.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias
from xml.etree import ElementTree

Rows: TypeAlias = dict[str, str]


def junit_rows(root: ElementTree.Element) -> Iterator[tuple[str, str]]:
    """Yields (case, result) for each case of a JUnit tree."""
    for case in root.iter("testcase"):
        group = case.get("classname") or ""
        name = case.get("name") or "?"
        label = name if not group or name.startswith(group) else f"{group}: {name}"
        yield label, case_result(case)


def case_result(case: ElementTree.Element) -> str:
    """The result of a case: a word, with the first line of the reason."""
    for tag, word in (("failure", "**FAIL**"), ("error", "**ERROR**"), ("skipped", "skip")):
        found = case.find(tag)
        if found is not None:
            lines = (found.get("message") or found.text or "").strip().splitlines()
            return f"{word}: {lines[0]}" if lines else word
    return "pass"


def doctor_rows(report: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - parsed JSON
    """Yields (probe, result) of a doctor report, whose probes are a list or an object."""
    probes = report.get("probes", report) if isinstance(report, dict) else report
    items: Iterable[tuple[str | None, Any]] = (
        probes.items() if isinstance(probes, dict) else ((None, probe) for probe in probes)
    )
    for name, probe in items:
        if not isinstance(probe, dict):
            yield str(name), str(probe)
            continue
        label = name or probe.get("name") or probe.get("probe") or "?"
        result = first(probe, "verdict", "result", "status", "outcome")
        detail = first(probe, "detail", "note", "value", "message")
        if isinstance(result, bool):
            result = "works" if result else "no"
        words = [str(word) for word in (result, detail) if word not in (None, "")]
        yield str(label), ": ".join(words)


def first(probe: dict[str, Any], *keys: str) -> Any:  # noqa: ANN401 - parsed JSON
    """The first of the keys that has a value."""
    return next((probe[key] for key in keys if probe.get(key) is not None), None)


def read(path: pathlib.Path) -> tuple[str, Rows]:
    """Returns "doctor" or "test", and the result of each row of a file."""
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("<"):
        return "test", dict(junit_rows(ElementTree.fromstring(text)))
    return "doctor", dict(doctor_rows(json.loads(text)))


def cell(text: str) -> str:
    """The text on one line, for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(title: str, columns: dict[str, Rows]) -> str:
    """The markdown table of {machine: {row: result}}; rows keep the order in which they appear."""
    rows = list(dict.fromkeys(row for results in columns.values() for row in results))
    lines = [f"| {title} | " + " | ".join(map(cell, columns)) + " |"]
    lines.append("| --- " * (len(columns) + 1) + "|")
    for row in rows:
        cells = [cell(column.get(row, "")) for column in columns.values()]
        lines.append(f"| {cell(row)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(columns: dict[str, Rows]) -> str:
    """The number of cases of each outcome, one line a machine."""
    lines = []
    for machine, results in columns.items():
        passed = sum(result == "pass" for result in results.values())
        skipped = sum(result.startswith("skip") for result in results.values())
        failed = len(results) - passed - skipped
        lines.append(f"{machine}: {passed} passed, {failed} failed, {skipped} skipped  ")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="hindsight_ci.lab_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="[MACHINE=]FILE")
    tables: dict[str, dict[str, Rows]] = {"doctor": {}, "test": {}}
    for argument in parser.parse_args(arguments).files:
        machine, equals, name = argument.partition("=")
        path = pathlib.Path(name if equals else argument)
        if not equals:
            machine = path.resolve().parent.name
        try:
            kind, rows = read(path)
        except (OSError, ValueError, AttributeError, TypeError, ElementTree.ParseError) as error:
            print(f"lab-table: {path}: {error}", file=sys.stderr)
            return 2
        tables[kind].setdefault(machine, {}).update(rows)
    parts = []
    if tables["doctor"]:
        parts.append(table("probe", tables["doctor"]))
    if tables["test"]:
        parts.append(table("case", tables["test"]))
        parts.append(summary(tables["test"]))
    print("\n\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
