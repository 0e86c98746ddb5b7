"""Tests of hindsight_ci.bench: ratios, the table, baselines, and missing peers."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest
from unittest import mock

from hindsight_ci.bench import __main__ as bench
from hindsight_ci.bench import parts
from hindsight_ci.bench.measure import Row, Spread
from hindsight_ci.bench.process import PeerError
from hindsight_ci.bench.report import read_baseline, slower_rows, table
from hindsight_ci.project import RunError


def row(ours=(2.0,), reference=(1.0,), unit="ms", aim=None, name="name"):
    return Row("part", name, unit, list(ours), list(reference), "peer", aim)


class Measure(unittest.TestCase):
    def test_spread_is_median_and_quartiles(self):
        self.assertEqual(Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]), Spread(3.0, 2.0, 4.0))

    def test_ratio_is_the_median_of_the_ratios_of_neighbours(self):
        self.assertEqual(row([1.0, 4.0, 9.0], [1.0, 2.0, 3.0]).ratio, Spread(2.0, 1.0, 3.0))

    def test_row_without_peer_has_no_ratio(self):
        self.assertIsNone(row(reference=[], aim="<= 1").ratio)
        self.assertIsNone(row(reference=[], aim="<= 1").met)

    def test_aim_bounds_the_ratio(self):
        self.assertTrue(row(aim="<= 2").met)
        self.assertFalse(row(aim=">= 2.1").met)


class Report(unittest.TestCase):
    def baseline(self, *rows):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "bench.json"
            path.write_text(json.dumps({"rows": [one.to_json() for one in rows]}), encoding="utf-8")
            return read_baseline(path)

    def test_table_shows_ratio_and_aim(self):
        line = table([row(aim="<= 1")]).splitlines()[-1]
        self.assertEqual(line, "| part: name | 2 ms | peer: 1 ms | 2 (2-2) | <= 1 | **no** |")

    def test_table_shows_row_without_peer(self):
        self.assertIn("| 2 ms | peer: not measured |  |", table([row(reference=[])]))

    def test_row_that_takes_3_percent_longer_is_slower(self):
        baseline = self.baseline(row())
        self.assertIn("**1.030 slower**", table([row([2.06])], baseline))
        self.assertEqual(len(slower_rows([row([2.06])], baseline)), 1)

    def test_row_within_2_percent_is_not_slower(self):
        self.assertEqual(slower_rows([row([2.03])], self.baseline(row())), [])

    def test_lower_rate_is_slower(self):
        baseline = self.baseline(row(unit="MIPS"))
        self.assertEqual(len(slower_rows([row([1.9], unit="MIPS")], baseline)), 1)
        self.assertEqual(slower_rows([row([2.1], unit="MIPS")], baseline), [])

    def test_row_that_the_baseline_lacks_is_new(self):
        self.assertIn("| new |", table([row(name="other")], self.baseline(row())))

    def test_damaged_baseline_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "bench.json"
            path.write_text("{}", encoding="utf-8")
            with self.assertRaises(RunError):
                read_baseline(path)


class CommandLine(unittest.TestCase):
    def run_bench(self, part, *arguments):
        """The status, standard output and standard error of a run with one part."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        out, errors = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(bench.PARTS, {"start": part}),
            mock.patch.object(bench, "RESULT", pathlib.Path(folder.name) / "target/bench.json"),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(errors),
        ):
            status = bench.main(["--no-build", *arguments, "start"])
        return status, out.getvalue(), errors.getvalue()

    def test_missing_peer_costs_only_its_rows(self):
        def part(_):
            yield row()
            raise PeerError("QEMU", "qemu is not installed")

        status, out, errors = self.run_bench(part)
        self.assertEqual(status, 0)
        self.assertIn("| part: name |", out)
        self.assertIn("left out: QEMU: qemu is not installed; apt-get install", errors)

    def test_failure_of_hindsight_keeps_earlier_rows(self):
        def part(_):
            yield row()
            raise RunError("hindsight ended with status 2")

        status, out, _ = self.run_bench(part)
        self.assertEqual(status, 1)
        self.assertIn("| part: name |", out)

    def test_json_goes_to_standard_output(self):
        _, out, _ = self.run_bench(lambda _: iter([row()]), "--json")
        self.assertEqual(json.loads(out)["rows"][0]["ratio"]["median"], 2.0)

    def test_optional_comparison_records_its_missing_peer(self):
        def measure():
            raise PeerError("Bochs", "bochs is not installed")
            yield

        settings = parts.Bench(quick=True)
        self.assertEqual(list(settings.optional(measure)), [])
        self.assertEqual(settings.missing, {"Bochs": "Bochs: bochs is not installed"})

    def test_unknown_part_is_refused(self):
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit) as raised:
            bench.parse(["nothing"])
        self.assertEqual(raised.exception.code, 2)


if __name__ == "__main__":
    unittest.main()
