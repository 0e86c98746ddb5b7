"""Tests of hindsight_ci.conformance_report: from reports to the page, and what `check` finds."""

import contextlib
import io
import json
import os
import tempfile
import unittest

from hindsight_ci.conformance_report import __main__ as report
from hindsight_ci.conformance_report.rules import read_rules
from hindsight_ci.project import ROOT

RULES = (
    "## TF Single step\nTF-01\tA\tsteps\nTF-02\tA\tnot twice\n## GD General detect\nGD-01\tM\tdetects\n"
    "GD-02\tC\tadvice\tadvice for software\nGD-03\tA\tnobody asks\n"
)

PASS = ""
FAIL = '<failure message="1 assertion failed"/>'
NEED = '<skipped message="this KVM: gd: no #DB"/>'
OWN = '<skipped message="CPUID does not announce GD"/>'


def junit(**cases):
    """A report; each case is named by NAME_LEVEL and gives (rules, what the report says)."""
    text = "".join(
        f'<testcase name="steps/{name[:-2]} cpl={name[-1]}"><properties><property name="rules" value="{rules}"/>'
        f"</properties>{outcome}</testcase>"
        for name, (rules, outcome) in cases.items()
    )
    return f'<testsuites><testsuite name="steps">{text}</testsuite></testsuites>'


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.write("rules.tsv", RULES)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        return self.path(name)

    def read(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def run_report(self, *arguments):
        """The status and the messages of the program."""
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            status = report.main(
                [
                    "--rules",
                    self.path("rules.tsv"),
                    "--json",
                    self.path("out.json"),
                    "--markdown",
                    self.path("out.md"),
                    *arguments,
                ]
            )
        return status, errors.getvalue()

    def update(self, place, **cases):
        file = self.write("report.xml", junit(**cases))
        self.assertEqual(self.run_report("update", f"{place}={file}"), (0, ""))

    def row(self, rule):
        rows = [line for line in self.read("out.md").splitlines() if line.startswith(f"| {rule} |")]
        self.assertEqual(len(rows), 1)
        return [cell.strip() for cell in rows[0].split("|")[1:-1]]


class Update(Files):
    def test_each_outcome_has_its_cell(self):
        self.update(
            "amd/interp", step_0=("TF-01,TF-02", PASS), step_3=("TF-01", NEED), gd_0=("GD-01", NEED)
        )
        self.assertEqual(self.row("TF-01")[3:], ["pass 1/2", "steps"])
        self.assertEqual(self.row("TF-02")[3:], ["pass", "steps"])
        self.assertEqual(self.row("GD-01")[3:], ["*gd*", "steps"])
        self.assertEqual(self.row("GD-02")[2:], ["advice (advice for software)", "-", ""])
        self.assertEqual(self.row("GD-03")[3:], ["**no test**", ""])
        self.assertIn("| `gd` | no #DB |", self.read("out.md"))

    def test_one_failing_case_fails_the_rule(self):
        self.update("amd/kvm", step_0=("TF-01", PASS), step_3=("TF-01", FAIL))
        self.assertEqual(self.row("TF-01")[3], "**FAIL**")
        self.assertIn("Cases that fail somewhere: `steps/step cpl=3`.", self.read("out.md"))

    def test_reason_of_a_skipped_case_is_numbered(self):
        self.update("amd/kvm", gd_0=("GD-01", OWN))
        self.assertEqual(self.row("GD-01")[3], "[1]")
        self.assertIn("1. CPUID does not announce GD", self.read("out.md"))

    def test_report_replaces_only_its_machine_and_engine(self):
        self.update("intel/kvm", step_0=("TF-01", FAIL))
        self.update("amd/kvm", step_0=("TF-01", PASS))
        self.update("amd/interp", step_0=("TF-01", PASS))
        self.assertEqual(self.row("TF-01")[3:6], ["pass", "pass", "**FAIL**"])
        self.update("intel/kvm", step_0=("TF-01", PASS))
        self.assertEqual(self.row("TF-01")[3:6], ["pass", "pass", "pass"])

    def test_reports_of_one_column_are_parts_of_one_run(self):
        one = self.write("one.xml", junit(step_0=("TF-01", PASS)))
        two = self.write("two.xml", junit(two_0=("TF-02", FAIL)))
        found = self.run_report("update", f"amd/auto={one}", f"amd/auto={two}")
        self.assertEqual(found, (0, ""))
        self.assertEqual(self.row("TF-01")[3], "pass")
        self.assertEqual(self.row("TF-02")[3], "**FAIL**")
        self.update("amd/auto", step_0=("TF-01", PASS))
        self.assertEqual(self.row("TF-02")[3], "**no test**")

    def test_merge_keeps_cases_that_did_not_run_again(self):
        self.update("amd/auto", step_0=("TF-01", FAIL), two_0=("TF-02", PASS))
        again = self.write("again.xml", junit(step_0=("TF-01", PASS)))
        self.assertEqual(self.run_report("merge", f"amd/auto={again}"), (0, ""))
        self.assertEqual([self.row("TF-01")[3], self.row("TF-02")[3]], ["pass", "pass"])

    def test_case_in_no_run_is_removed(self):
        self.update("amd/kvm", old_0=("TF-01", PASS))
        self.update("amd/kvm", new_0=("TF-02", PASS))
        self.assertEqual(list(json.loads(self.read("out.json"))["cases"]), ["steps/new cpl=0"])
        self.assertEqual(self.row("TF-01")[3], "**no test**")

    def test_overview_counts_rules(self):
        self.update("amd/kvm", step_0=("TF-01", PASS), two_0=("TF-02", FAIL))
        self.assertIn("| [TF](#tf) Single step | 2 | 0 | 0 | 1, **1 fail** |", self.read("out.md"))
        self.assertIn("| [GD](#gd) General detect | 3 | 1 | 2 | 0 |", self.read("out.md"))
        self.assertIn("| all | 5 | 1 | 2 | 1, **1 fail** |", self.read("out.md"))

    def test_judge_is_no_column(self):
        self.update("amd/kvm", step_0=("TF-01", PASS))
        self.update("judge/qemu", step_0=("TF-01", FAIL))
        self.assertEqual(self.row("TF-01")[3:], ["pass", "steps"])
        self.assertIn("**qemu** agrees with 0 of the 1 cases that it runs.", self.read("out.md"))
        self.assertIn("| `steps/step cpl=0` | TF-01 |", self.read("out.md"))

    def test_unknown_rule_and_bad_input_are_refused(self):
        for cases, text in (
            (junit(step_0=("TF-99", PASS)), "TF-99, which is no rule"),
            ("<broken", "unclosed token"),
        ):
            status, message = self.run_report(
                "update", f"amd/kvm={self.write('report.xml', cases)}"
            )
            self.assertEqual(status, 2)
            self.assertIn(text, message)
        self.assertEqual(self.run_report("update", "amd=x.xml")[0], 2)
        self.assertEqual(self.run_report("update", "amd/tcg=x.xml")[0], 2)


class Rules(Files):
    def test_rule_with_a_page_links_to_its_text(self):
        self.write("chapter.md", "# Chapter\n\n### TF-01\n\nClass A. Text.\n")
        self.update("amd/interp", step_0=("TF-01", PASS))
        self.assertIn(
            "| [TF-01](../spec/chapter.md#tf-01) | A | steps | pass |", self.read("out.md")
        )

    def test_bad_line_of_rules_tsv_is_refused(self):
        for line in (
            "TF-1\tA\tshort",
            "TF-01\tB\tclass",
            "TF-01\tA",
            "XX-01\tA\tno heading",
            "TF-01\tA\tone\nTF-01\tA\ttwo",
        ):
            self.write("rules.tsv", f"## TF Single step\n{line}\n")
            self.assertEqual(self.run_report("render")[0], 2, line)

    def test_project_has_text_for_every_rule(self):
        found = read_rules(ROOT / "spec/rules.tsv")
        self.assertGreater(len(found.rules), 600)
        self.assertEqual(len(found.groups), len({rule.partition("-")[0] for rule in found.rules}))
        self.assertEqual([name for name, rule in found.rules.items() if not rule.page], [])


class Check(Files):
    LIST = "steps/step cpl=0 vcpus=1 rules=TF-01,GD-01 about=it names rules=TF-99\nsteps/plain cpl=0 vcpus=1 about=x\n"

    def check(self, text):
        return self.run_report("check", self.write("list", text))

    def test_up_to_date_page_passes(self):
        self.update("amd/kvm", step_0=("TF-01,GD-01", PASS))
        self.assertEqual(self.check(self.LIST), (0, ""))

    def test_changed_case_is_named(self):
        self.update("amd/kvm", step_0=("TF-01,GD-01", PASS))
        for text, message in (
            (self.LIST.replace("TF-01", "TF-77"), "names TF-77"),
            (self.LIST.replace("GD-01", "GD-03"), "names other rules now"),
            (self.LIST + "steps/new cpl=3 vcpus=1 rules=TF-02 about=y\n", "new cpl=3 was not run"),
            ("", "is on the page but no case"),
        ):
            status, found = self.check(text)
            self.assertEqual(status, 1)
            self.assertIn(message, found)

    def test_rule_that_fails_only_with_auto_is_named(self):
        good = self.write("good.xml", junit(step_0=("TF-01", PASS)))
        bad = self.write("bad.xml", junit(step_0=("TF-01", FAIL)))
        listed = self.write("list", "steps/step cpl=0 vcpus=1 rules=TF-01 about=x\n")
        status, errors = self.run_report("update", f"amd/interp={good}", f"amd/auto={bad}")
        self.assertEqual((status, errors), (0, ""))
        status, errors = self.run_report("check", listed)
        self.assertEqual(status, 1)
        self.assertIn("TF-01 holds in the interpreter of amd, and with auto", errors)
        self.run_report("update", f"amd/auto={good}")
        self.assertEqual(self.run_report("check", listed)[0], 0)

    def test_case_that_ran_only_with_auto_is_no_deviation(self):
        cases = {"step_0": ("TF-01", PASS)}
        older = self.write("older.xml", junit(**cases))
        cases["more_0"] = ("TF-01", PASS)
        newer = self.write("newer.xml", junit(**cases))
        self.run_report("update", f"amd/interp={older}", f"amd/auto={newer}")
        listed = "".join(
            f"steps/{name} cpl=0 vcpus=1 rules=TF-01 about=x\n" for name in ("step", "more")
        )
        self.assertEqual(self.check(listed), (0, ""))

    def test_page_changed_by_hand_is_found(self):
        self.update("amd/kvm", step_0=("TF-01,GD-01", FAIL))
        self.write("out.md", self.read("out.md").replace("**FAIL**", "pass"))
        status, found = self.check(self.LIST)
        self.assertEqual(status, 1)
        self.assertIn("out.md is not what the results say", found)


if __name__ == "__main__":
    unittest.main()
