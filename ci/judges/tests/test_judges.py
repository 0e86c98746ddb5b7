"""Tests of the judges: what they read, and what they find."""

import contextlib
import io
import pathlib
import struct
import tempfile
import unittest

from hindsight_ci import branch_judge, counts, lab_table, measured_program, perf_judge, rdt_judge
from hindsight_ci.checks import Checks
from hindsight_ci.linux_guest import sections
from hindsight_ci.project import RunError


def quiet(function, *arguments):
    """The result of a function, and what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = function(*arguments)
    return result, out.getvalue()


class SharedParts(unittest.TestCase):
    def test_failed_check_is_counted_and_explained(self):
        checks = Checks()
        _, out = quiet(checks.within, "size", 5, 1, 3)
        self.assertEqual(out, "FAIL size: 5 is not within 1 and 3\n")
        self.assertEqual(checks.status(), 1)

    def test_first_difference_of_lists_is_shown(self):
        _, out = quiet(Checks().same, "list", [1, 2, 3], [1, 4, 3])
        self.assertIn("number 1 is [2], expected [4]", out)

    def test_sections_hold_the_lines_between_their_markers(self):
        text = "x\njudge: begin one at 2 s\na\nb\njudge: end 0\ny\njudge: begin two\njudge: end 1"
        self.assertEqual(sections(text, "judge"), {"one": ["a", "b"], "two": []})


class BranchJudge(unittest.TestCase):
    class Symbols:
        def describe(self, address):
            return hex(address)

    def compare(self, ours, tcg):
        return list(branch_judge.compare(self.Symbols(), "bts", ours, tcg))

    def test_same_traces_have_no_difference(self):
        self.assertEqual(self.compare([(1, 2)], [(1, 2)]), [])

    def test_first_different_record_is_named(self):
        found = self.compare([(1, 2), (3, 4)], [(1, 2), (3, 5)])
        self.assertEqual(found[0], "bts: record 1 of 2 differs")
        self.assertEqual(found[-1], "  tcg    0x3 -> 0x5")

    def test_shorter_trace_is_reported(self):
        self.assertIn("bts has 1 records, tcg 2", self.compare([(1, 2)], [(1, 2), (3, 4)])[0])

    def test_torn_record_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "bts"
            path.write_bytes(bytes(17))
            with self.assertRaises(RunError):
                branch_judge.records(path)
            path.write_bytes(struct.pack("<QQ", 1, 2))
            self.assertEqual(branch_judge.records(path), [(1, 2)])


class Counts(unittest.TestCase):
    def test_number_requires_a_finished_case(self):
        self.assertEqual(counts.number(r"retired (\d+)", "end passed=1 x retired 7", "us"), 7)
        with self.assertRaises(RunError):
            counts.number(r"retired (\d+)", "retired 7", "us")

    def test_pvh_entry_is_read_from_its_note(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "image"
            head = struct.pack("<III", 4, 4, 18) + b"Xen\0"
            path.write_bytes(bytes(64) + head + struct.pack("<I", 0x100000))
            self.assertEqual(counts.pvh_entry(path), 0x100000)
            path.write_bytes(bytes(64))
            with self.assertRaises(RunError):
                counts.pvh_entry(path)


class PerfJudge(unittest.TestCase):
    def test_counts_of_perf_stat_are_read_in_order(self):
        lines = ["12,,instructions:u,1", "<not counted>,,branches,0", "no number"]
        self.assertEqual(perf_judge.counts(lines), [12, None])
        self.assertIsNone(perf_judge.known([12, None], 2))

    def test_branch_stack_is_a_run_of_taken_branches(self):
        taken = [(1, 2), (3, 1), (1, 2), (5, 6)]
        self.assertTrue(perf_judge.is_run([(5, 6), (1, 2), (3, 1)], taken))
        self.assertTrue(perf_judge.is_run([(1, 2)], taken))
        self.assertFalse(perf_judge.is_run([(1, 2), (5, 6)], taken))
        self.assertFalse(perf_judge.is_run([(5, 6), (3, 1)], taken))

    def test_pebs_records_the_event_after_the_overflow(self):
        self.assertEqual(measured_program.recorded(list(range(10)), 3), [3, 7])

    def test_loop_is_executed_step_by_step(self):
        code = {
            1: "mov    $0x2,%ecx",
            2: "dec    %ecx",
            3: "jne    2 <loop>",
            4: "call   6 <f>",
            5: "syscall",
            6: "ret",
        }
        following = {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: None}
        steps = list(measured_program.execute(code, following, 1))
        self.assertEqual([step.address for step in steps], [1, 2, 3, 2, 3, 4, 6, 5])
        self.assertEqual([step.target for step in steps if step.branch], [2, None, 6, 5, None])

    def test_unknown_instruction_is_refused(self):
        with self.assertRaises(ValueError):
            list(measured_program.execute({1: "cpuid"}, {1: None}, 1))


class RdtJudge(unittest.TestCase):
    def test_repeated_counter_begins_a_new_reading(self):
        lines = ["COS1 llc_occupancy 1", "COS1 mbm_total_bytes 2", "COS1 llc_occupancy 3", "text"]
        self.assertEqual(
            rdt_judge.counters(lines),
            [
                {("COS1", "llc_occupancy"): 1, ("COS1", "mbm_total_bytes"): 2},
                {("COS1", "llc_occupancy"): 3},
            ],
        )

    def test_pqos_table_is_summed(self):
        lines = [
            "Time,Core,LLC[KB],MBT[MB/s]",
            '2026-01-01,"0",1.0,2.0',
            '2026-01-01,"0",3.0,1.0',
        ]
        self.assertEqual(rdt_judge.pqos_totals(lines), (3072.0, 3.0 * (1 << 20)))

    def test_guest_that_does_not_finish_fails(self):
        status, out = quiet(rdt_judge.judge, "panic")
        self.assertEqual(status, 1)
        self.assertIn("did not finish", out)


class LabTable(unittest.TestCase):
    def test_machines_are_merged(self):
        with tempfile.TemporaryDirectory() as folder:
            for machine, outcome in (("amd", ""), ("intel", '<skipped message="no"/>')):
                path = pathlib.Path(folder) / f"{machine}.xml"
                path.write_text(f'<a><testcase name="c">{outcome}</testcase></a>', encoding="utf-8")
            files = [f"{machine}={folder}/{machine}.xml" for machine in ("amd", "intel")]
            status, out = quiet(lab_table.main, files)
        self.assertEqual(status, 0)
        self.assertIn("| case | amd | intel |\n| --- | --- | --- |\n| c | pass | skip: no |", out)
        self.assertIn("intel: 0 passed, 0 failed, 1 skipped", out)

    def test_unreadable_file_is_status_2(self):
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(lab_table.main(["/nonexistent"]), 2)


if __name__ == "__main__":
    unittest.main()
