"""Writes docs/reports/conformance.md."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hindsight_ci.conformance_report.results import ENGINES, JUDGE, Store, Verdict, judge_rules
from hindsight_ci.conformance_report.rules import Rule, RuleSet

INTRO = """# Conformance

This page shows which rule of the virtual processor holds in which engine, on which machine.
`ci/conformance` makes it and [conformance.json](conformance.json) from runs of the payloads
([testing.md](../internals/testing.md#conformance)); nothing here is written by hand. The
identifier of a rule links to its text.

The engines are *interp* and *KVM* (`--engine interp` and `--engine kvm`). *auto* is `--engine auto`,
where every rule of the interpreter must hold. The machines `amd` and `intel` are the
[labs](../internals/labs.md); `pvm` is the machine on which the project is developed.

| cell | meaning |
| --- | --- |
| pass | a payload asserts the rule there, and it holds |
| pass n/m | n of its m assertions hold; the others need what this KVM does not do |
| **FAIL** | an assertion does not hold |
| *name* | this KVM does not do what the assertion needs: a probe of `hindsight doctor`, explained [below](#needs) |
| [n] | why it is not asserted there, [below](#reasons) |
| - | no guest can assert it, for the reason that is given |
| not run | it is asserted elsewhere, and was not run there yet |
| **no test** | no payload asserts it yet |

Classes: A is guaranteed by the architecture, M is this model's behaviour, C is a choice of this project, T is a
row of the tables of MSRs, resets and CPUID.
"""  # noqa: E501 - the text of a page


class Reasons:
    """Why cases were skipped: a need that a KVM does not meet, or the case's own reason."""

    def __init__(self) -> None:
        """Starts without any."""
        # need -> machine -> what the probe found
        self.needs: dict[str, dict[str, str]] = {}
        # reason -> number
        self.numbers: dict[str, int] = {}

    def label(self, machine: str, reason: str) -> str:
        """The text of a cell for a reason, which a later section explains."""
        found = re.match(r"this KVM: ([a-z0-9-]+)(?:: (.*))?$", reason)
        if not found:
            return f"[{self.numbers.setdefault(reason, len(self.numbers) + 1)}]"
        self.needs.setdefault(found[1], {})[machine] = found[2] or "no"
        return f"*{found[1]}*"

    def sections(self, machines: list[str]) -> list[str]:
        """The sections that explain all labels."""
        lines = []
        if self.needs:
            lines += ["", "## Needs", ""]
            lines += ["The results of the probes of `hindsight doctor` that do not suffice.", ""]
            lines += table_head(["need", *machines])
            for need, found in sorted(self.needs.items()):
                lines.append(row([f"`{need}`", *(found.get(machine, "") for machine in machines)]))
        if self.numbers:
            lines += ["", "## Reasons", ""]
            lines += [f"{number}. {escape(reason)}" for reason, number in self.numbers.items()]
        return lines


def escape(text: str) -> str:
    """The text on one line, for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def row(cells: Iterable[object]) -> str:
    """A row of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def table_head(names: list[str]) -> list[str]:
    """The first two lines of a table."""
    return [row(names), "|" + " --- |" * len(names)]


def cell(found: Verdict, machine: str, reasons: Reasons) -> str:
    """The cell of a rule on a machine."""
    if found.status == "pass":
        whole = found.passed == found.total
        return "pass" if whole else f"pass {found.passed}/{found.total}"
    if found.status == "fail":
        return "**FAIL**"
    if found.status == "skip":
        return " ".join(dict.fromkeys(reasons.label(machine, reason) for reason in found.reasons))
    return {"unassertable": "-", "not run": "not run"}.get(found.status, "**no test**")


def passed_text(passed: int, failed: int) -> str:
    """A number of rules that pass, and of those that fail if there are any."""
    return f"{passed}, **{failed} fail**" if failed else str(passed)


def rule_link(name: str, rule: Rule) -> str:
    """The identifier of a rule, linked to its text."""
    return f"[{name}](../spec/{rule.page}#{name.lower()})" if rule.page else name


class Page:
    """The parts of the page."""

    def __init__(self, store: Store, rule_set: RuleSet) -> None:
        """Judges all rules."""
        self.store = store
        self.rule_set = rule_set
        self.columns = store.columns()
        self.verdicts = judge_rules(store, rule_set.rules)
        self.reasons = Reasons()
        self.payloads: dict[str, set[str]] = {rule: set() for rule in rule_set.rules}
        for case, names in store.cases.items():
            for name in names:
                self.payloads[name].add(case.partition("/")[0])

    def column_names(self) -> list[str]:
        """The heads of the columns."""
        return [f"{machine} {ENGINES[engine]}" for machine, engine in self.columns]

    def overview(self) -> list[str]:
        """One row for each prefix: how many rules it has, and how many pass on which machine."""
        lines = table_head(["", "rules", "no guest can", "no test", *self.column_names()])
        total = [0] * (3 + len(self.columns))
        fails = [0] * len(self.columns)
        for prefix, name in self.rule_set.groups.items():
            verdicts = [v for rule, v in self.verdicts.items() if rule.partition("-")[0] == prefix]
            keys = [f"{machine}/{engine}" for machine, engine in self.columns]
            statuses = [[found[key].status for found in verdicts] for key in keys]
            everywhere = [{found[key].status for key in keys} for found in verdicts]
            counts = [
                len(verdicts),
                everywhere.count({"unassertable"}),
                everywhere.count({"untested"}),
            ]
            passes = [column.count("pass") for column in statuses]
            failed = [column.count("fail") for column in statuses]
            total = [a + b for a, b in zip(total, counts + passes, strict=True)]
            fails = [a + b for a, b in zip(fails, failed, strict=True)]
            link = f"[{prefix}](#{prefix.lower()}) {name}"
            lines.append(row([link, *counts, *map(passed_text, passes, failed)]))
        lines.append(row(["all", *total[:3], *map(passed_text, total[3:], fails)]))
        return lines

    def group(self, prefix: str, name: str) -> list[str]:
        """The table of the rules with a prefix."""
        lines = ["", f"## {prefix}", "", f"{name}.", ""]
        lines += table_head(["rule", "", "what", *self.column_names(), "payloads"])
        for identifier, rule in self.rule_set.rules.items():
            if identifier.partition("-")[0] != prefix:
                continue
            verdicts = self.verdicts[identifier]
            cells = [cell(verdicts[f"{m}/{e}"], m, self.reasons) for m, e in self.columns]
            title = escape(rule.title)
            if "-" in cells:
                title += f" ({escape(rule.reason)})"
            payloads = " ".join(sorted(self.payloads[identifier]))
            link = rule_link(identifier, rule)
            lines.append(row([link, rule.grade, title, *cells, payloads]))
        return lines

    def judges(self) -> list[str]:
        """How far other emulators agree, on the rules that real processors are held to."""
        lines = []
        for name, run in sorted(self.store.runs.get(JUDGE, {}).items()):
            asserted = {case for case in run if self.is_portable(case)}
            passed = sorted(case for case in asserted if run[case] == "pass")
            failed = sorted(case for case in asserted if run[case].startswith("fail"))
            total = len(passed) + len(failed)
            lines += [
                "",
                f"**{name}** agrees with {len(passed)} of the {total} cases that it runs.",
            ]
            if failed:
                lines += ["", *table_head(["case", "rules"])]
                lines += [row([f"`{case}`", " ".join(self.store.cases[case])]) for case in failed]
        if not lines:
            return []
        return [
            "",
            "## Judges",
            "",
            "Emulators that have nothing to do with this project run the same cases.",
            "[spec-decisions.md](spec-decisions.md) settles each disagreement.",
            *lines,
        ]

    def is_portable(self, case: str) -> bool:
        """Whether a case asserts a rule of class A or M."""
        return any(self.rule_set.rules[rule].grade in "AM" for rule in self.store.cases[case])

    def render(self) -> str:
        """The whole page."""
        lines = [INTRO, *self.overview()]
        verdicts = [verdict for found in self.verdicts.values() for verdict in found.values()]
        failing = sorted({case for verdict in verdicts for case in verdict.failed})
        if failing:
            names = ", ".join(f"`{case}`" for case in failing)
            lines += ["", f"Cases that fail somewhere: {names}."]
        for prefix, name in self.rule_set.groups.items():
            lines += self.group(prefix, name)
        lines += self.reasons.sections(list(dict.fromkeys(machine for machine, _ in self.columns)))
        lines += self.judges()
        return "\n".join(lines) + "\n"
