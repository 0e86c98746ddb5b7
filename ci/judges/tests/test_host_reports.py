"""Tests of hindsight_ci.host_reports: from reports of doctor to rows of the page."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest

from hindsight_ci import host_reports


def report(*facilities, auto=""):
    host = {"cpu_vendor": "V", "cpu_model": "CPU", "kernel": "6.1", "modules": ["kvm", "kvm_x"]}
    rows = [{"group": g, "alone": alone, "moving": moving} for g, alone, moving in facilities]
    return {"format": 1, "host": host, "probes": [], "facilities": rows, "auto": auto}


WRONG = {"inexact": "tf/hlt cpl=0: no #DB"}


class Rows(unittest.TestCase):
    def test_group_follows_the_rule_of_its_visibility(self):
        found = host_reports.row(
            "x",
            report(
                ("time", "exact", "unmeasured"),
                ("single-step", WRONG, "exact"),
                ("counters", "unmeasured", "exact"),
                ("io-breakpoints", "exact", WRONG),
                ("debug-registers", WRONG, WRONG),
                ("smm", "unmeasured", "unmeasured"),
                auto="kvm, because it was asked for",
            ),
        )
        self.assertEqual(found[:3], ["[`x`](x.json)", "CPU", "6.1; kvm, kvm_x"])
        self.assertEqual(found[3], "time, I/O breakpoints")
        self.assertEqual(found[4], "single-step, counters")
        self.assertEqual(found[5], "debug registers (tf/hlt cpl=0: no #DB), SMM (not measured)")
        self.assertEqual(found[6], "kvm")

    def test_report_without_facilities_is_not_measured(self):
        found = host_reports.row("old", report())
        self.assertEqual(found[3:], ["-", "-", "not measured", "-"])
        found = host_reports.row("slow", report(auto="interp, because KVM emulates ring 0"))
        self.assertEqual(found[5:], ["not measured: KVM emulates ring 0", "interp"])


class Pages(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        text = f"# Page\n\n{host_reports.BEGIN}\nold\n{host_reports.END}\n\nEnd.\n"
        (self.folder / "README.md").write_text(text, encoding="utf-8")
        (self.folder / "x.json").write_text(json.dumps(report()), encoding="utf-8")

    def run_reports(self, *arguments):
        with contextlib.redirect_stderr(io.StringIO()):
            return host_reports.main(["--folder", str(self.folder), *arguments])

    def test_check_fails_until_the_page_is_made(self):
        self.assertEqual(self.run_reports("--check"), 1)
        self.assertEqual(self.run_reports(), 0)
        self.assertEqual(self.run_reports("--check"), 0)
        page = (self.folder / "README.md").read_text(encoding="utf-8")
        self.assertIn("| [`x`](x.json) | CPU |", page)
        self.assertTrue(page.endswith(f"{host_reports.END}\n\nEnd.\n"))

    def test_unreadable_report_and_page_without_marks_are_refused(self):
        (self.folder / "x.json").write_text("{", encoding="utf-8")
        self.assertEqual(self.run_reports(), 2)
        (self.folder / "x.json").write_text("{}", encoding="utf-8")
        self.assertEqual(self.run_reports(), 2)
        (self.folder / "x.json").unlink()
        (self.folder / "README.md").write_text("# Page\n", encoding="utf-8")
        self.assertEqual(self.run_reports(), 2)


if __name__ == "__main__":
    unittest.main()
