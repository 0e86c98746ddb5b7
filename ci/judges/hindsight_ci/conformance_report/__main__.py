"""Makes conformance.json and conformance.md in docs/reports from the reports of `hindsight test`.

update  takes reports (`hindsight test --junit`), replaces the results of these machines and
        engines, and writes both files. ENGINE is interp, kvm or auto; the machine "judge" stands
        for other emulators. Several reports of one machine and engine are parts of one run.
merge   does the same and keeps the results of cases that are not in the reports.
render  writes both files again, after a change of spec/.
check   compares with the output of `hindsight test --list` in LIST: every rule that a case names
        exists, the cases are those of the last run, and conformance.md is what the results
        say; and every rule that holds in a machine's interpreter holds there with auto.

--rules, --json and --markdown before the command name other files than those of the project.
Exit status: 1 when check finds something, 2 for wrong arguments or unreadable files.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from hindsight_ci.conformance_report.page import Page
from hindsight_ci.conformance_report.results import (
    ENGINES,
    JUDGE,
    CaseReport,
    Store,
    auto_deviations,
    json_text,
    load_store,
    read_junit,
    read_list,
)
from hindsight_ci.conformance_report.rules import InputError, RuleSet, read_rules
from hindsight_ci.project import ROOT


def write(options: argparse.Namespace, store: Store, rule_set: RuleSet) -> None:
    """Writes both files."""
    options.json.write_text(json_text(store, rule_set.rules), encoding="utf-8")
    options.markdown.write_text(Page(store, rule_set).render(), encoding="utf-8")


def update(options: argparse.Namespace, rule_set: RuleSet) -> int:
    """Replaces the results of the reports' machines and engines, or with `merge` their cases."""
    store = load_store(options.json)
    runs: dict[tuple[str, str], dict[str, CaseReport]] = {}
    for argument in options.reports:
        column, equals, path = argument.partition("=")
        machine, slash, engine = column.partition("/")
        known = engine in ENGINES or machine == JUDGE
        if not (equals and slash and machine and known):
            raise InputError(f"not MACHINE/ENGINE=JUNIT: {argument}")
        runs.setdefault((machine, engine), {}).update(read_junit(pathlib.Path(path)))
    for (machine, engine), run in runs.items():
        store.replace(machine, engine, run, merge=options.merge)
    write(options, store, rule_set)
    return 0


def render(options: argparse.Namespace, rule_set: RuleSet) -> int:
    """Writes both files from the results that are known."""
    write(options, load_store(options.json), rule_set)
    return 0


def check(options: argparse.Namespace, rule_set: RuleSet) -> int:
    """Prints every finding."""
    findings = list(find(options, rule_set))
    for finding in findings:
        print(f"conformance-report: {finding}", file=sys.stderr)
    return 1 if findings else 0


def find(options: argparse.Namespace, rule_set: RuleSet) -> Iterator[str]:
    """What is out of date: first the cases, and if those are right, the files."""
    store = load_store(options.json)
    listed = read_list(options.list)
    findings = [
        f"{case} names {rule}, which is not in {options.rules}"
        for case, names in sorted(listed.items())
        for rule in names
        if rule not in rule_set.rules
    ]
    remedy = "run ci/conformance"
    for case in sorted(listed.keys() - store.cases.keys()):
        findings.append(f"{case} was not run for the page: {remedy}")
    for case in sorted(store.cases.keys() - listed.keys()):
        findings.append(f"{case} is on the page but no case: {remedy}")
    for case in sorted(listed.keys() & store.cases.keys()):
        if listed[case] != store.cases[case]:
            findings.append(f"{case} names other rules now: {remedy}")
    yield from findings
    if findings:
        return
    yield from auto_deviations(store, rule_set.rules)
    texts = {
        options.json: json_text(store, rule_set.rules),
        options.markdown: Page(store, rule_set).render(),
    }
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            yield f"{path} is not what the results say: run cargo xtask conformance-page"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="hindsight_ci.conformance_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rules", type=pathlib.Path, default=ROOT / "spec/rules.tsv")
    reports = ROOT / "docs/reports"
    parser.add_argument("--json", type=pathlib.Path, default=reports / "conformance.json")
    parser.add_argument("--markdown", type=pathlib.Path, default=reports / "conformance.md")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in ("update", "merge"):
        command = commands.add_parser(name)
        command.add_argument("reports", nargs="+", metavar="MACHINE/ENGINE=JUNIT")
        command.set_defaults(run=update, merge=name == "merge")
    commands.add_parser("render").set_defaults(run=render)
    command = commands.add_parser("check")
    command.add_argument("list", type=pathlib.Path, metavar="LIST")
    command.set_defaults(run=check)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = parse(arguments)
    try:
        status: int = options.run(options, read_rules(options.rules))
    except (InputError, OSError, ValueError, KeyError, ElementTree.ParseError) as error:
        print(f"conformance-report: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
