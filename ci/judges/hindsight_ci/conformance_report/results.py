"""The results of the cases, and what they say of each rule."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from hindsight_ci.conformance_report.rules import InputError, Rule

ENGINES = {"interp": "interp", "kvm": "KVM", "auto": "auto"}
JUDGE = "judge"
# The order of the machines; others follow by name.
MACHINES = ["pvm", "host", "amd", "intel"]


@dataclass
class Store:
    """The results that docs/reports/conformance.json keeps."""

    # The rules that each case names.
    cases: dict[str, list[str]] = field(default_factory=dict)
    # machine -> engine -> case -> result: "pass", "fail: REASON" or "skip: REASON".
    runs: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)

    def columns(self) -> list[tuple[str, str]]:
        """The (machine, engine) pairs of the page, in a fixed order."""
        order = {name: number for number, name in enumerate(MACHINES)}
        names = [name for name in self.runs if name != JUDGE]
        names.sort(key=lambda name: (order.get(name, len(order)), name))
        return [(name, engine) for name in names for engine in ENGINES if engine in self.runs[name]]

    def replace(
        self, machine: str, engine: str, report: Mapping[str, CaseReport], *, merge: bool
    ) -> None:
        """Replaces the results of a machine and engine by those of a report.

        With `merge`, cases that the report does not have keep their results.
        """
        engines = self.runs.setdefault(machine, {})
        results = dict(engines.get(engine, {})) if merge else {}
        results.update({case: report[case].result for case in report})
        engines[engine] = {case: results[case] for case in sorted(results)}
        for case, case_report in report.items():
            self.cases[case] = case_report.rules
        runs = [run for engines in self.runs.values() for run in engines.values()]
        known = {case for run in runs for case in run}
        self.cases = {case: self.cases[case] for case in sorted(known)}


@dataclass
class CaseReport:
    """One case of a JUnit report."""

    rules: list[str]
    result: str


@dataclass
class Verdict:
    """What the cases say of one rule on one machine and engine."""

    # "pass", "fail", "skip", "not run", "untested", or "unassertable".
    status: str
    # The cases that failed.
    failed: list[str] = field(default_factory=list)
    # Why all cases were skipped, or why no guest can assert the rule.
    reasons: list[str] = field(default_factory=list)
    # How many cases passed, of how many.
    passed: int = 0
    total: int = 0

    def in_words(self) -> str:
        """The verdict as one line."""
        if self.status == "pass":
            return f"pass {self.passed}/{self.total}"
        if self.status == "not run":
            return self.status
        return f"{self.status}: {'; '.join(self.failed or self.reasons)}"


def read_junit(path: pathlib.Path) -> dict[str, CaseReport]:
    """The cases of a report that name rules."""
    cases = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        values = [p.get("value", "") for p in case.iter("property") if p.get("name") == "rules"]
        names = [name for value in values for name in value.split(",") if name]
        if names:
            cases[case.get("name", "?")] = CaseReport(names, result_of(case))
    return cases


def result_of(case: ElementTree.Element) -> str:
    """The result of a case: "pass", or a word with the reason that the report gives."""
    for tag, word in (("failure", "fail"), ("error", "fail"), ("skipped", "skip")):
        found = case.find(tag)
        if found is not None:
            return f"{word}: {first_line(found.get('message') or found.text)}"
    return "pass"


def first_line(text: str | None) -> str:
    """The first line of a reason."""
    lines = (text or "").strip().splitlines()
    return lines[0] if lines else "no reason given"


def read_list(path: pathlib.Path) -> dict[str, list[str]]:
    """The rules of each case that names some, from the output of `hindsight test --list`."""
    cases = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        found = re.match(r"(\S+ cpl=\d)\s.*?\brules=(\S+)", line.partition(" about=")[0])
        if found:
            cases[found[1]] = found[2].split(",")
    return cases


def verdict(results: Mapping[str, str]) -> Verdict:
    """The verdict on one rule from the results of its cases."""
    if not results:
        return Verdict("untested", reasons=["no payload asserts it"])
    failed = sorted(case for case, result in results.items() if result.startswith("fail"))
    if failed:
        return Verdict("fail", failed=failed)
    passed = sum(result == "pass" for result in results.values())
    if passed:
        return Verdict("pass", passed=passed, total=len(results))
    return Verdict("skip", reasons=sorted({r.partition(": ")[2] for r in results.values()}))


# rule -> "machine/engine" -> verdict
Verdicts = dict[str, dict[str, Verdict]]


def judge_rules(store: Store, rules: Mapping[str, Rule]) -> Verdicts:
    """The verdict on each rule on each machine and engine."""
    by_rule: dict[str, list[str]] = {rule: [] for rule in rules}
    for case, names in store.cases.items():
        for name in names:
            if name not in by_rule:
                raise InputError(f"{case} names {name}, which is no rule")
            by_rule[name].append(case)
    return {
        rule: {
            f"{machine}/{engine}": judge_rule(store.runs[machine][engine], cases, rules[rule])
            for machine, engine in store.columns()
        }
        for rule, cases in by_rule.items()
    }


def auto_deviations(store: Store, rules: Mapping[str, Rule]) -> Iterator[str]:
    """The rules that hold in the interpreter of a machine and not with `--engine auto`."""
    for rule, verdicts in judge_rules(store, rules).items():
        for column, found in verdicts.items():
            machine, _, engine = column.partition("/")
            exact = verdicts.get(f"{machine}/interp")
            if engine != "auto" or exact is None or exact.status != "pass":
                continue
            # One of the two columns may be older and know fewer cases of the rule.
            if found.status != "pass" or found.passed < min(exact.passed, found.total):
                words = found.in_words()
                yield f"{rule} holds in the interpreter of {machine}, and with auto: {words}"


def judge_rule(run: Mapping[str, str], cases: list[str], rule: Rule) -> Verdict:
    """The verdict on one rule from one run of its cases."""
    found = verdict({case: run[case] for case in cases if case in run})
    if found.status == "untested" and rule.reason:
        return Verdict("unassertable", reasons=[rule.reason])
    if found.status == "untested" and cases:
        return Verdict("not run")
    return found


def load_store(path: pathlib.Path) -> Store:
    """Reads docs/reports/conformance.json, or returns an empty store if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Store()
    return Store(found["cases"], found["runs"])


# How deep the parts of docs/reports/conformance.json are broken into lines.
DEPTHS = {"rules": 1, "cases": 1, "runs": 3}


def json_text(store: Store, rules: Mapping[str, Rule]) -> str:
    """The text of docs/reports/conformance.json: one line for each rule and case."""
    verdicts = judge_rules(store, rules)
    summary = {
        name: {
            "class": rule.grade,
            "title": rule.title,
            "results": {column: v.in_words() for column, v in verdicts[name].items()},
        }
        for name, rule in rules.items()
    }
    whole = {"rules": summary, "cases": store.cases, "runs": store.runs}
    parts = (f'"{key}": {expand(whole[key], depth)}' for key, depth in DEPTHS.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def expand(value: Any, depth: int) -> str:  # noqa: ANN401 - any JSON
    """JSON with one line for each value `depth` levels down."""
    if depth == 0:
        return json.dumps(value, ensure_ascii=False)
    parts = (f"{json.dumps(key)}: {expand(inner, depth - 1)}" for key, inner in value.items())
    inside = ",\n".join(parts)
    return "{\n" + inside + "\n}" if inside else "{}"
