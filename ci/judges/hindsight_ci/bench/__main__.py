"""Measures how fast the monitor is, as ratios within one run, and prints a markdown table.

  start     process start to exit of the smallest payload, against QEMU's microvm
  memory    resident memory beyond guest RAM while a guest idles in HLT
  exits     a port or MSR exit through the whole path, against a bare KVM_RUN loop
  workload  integer code in the interpreter, against QEMU TCG, single-steps of KVM, and Bochs
  armed     the same code with LBR, BTS or a watchpoint armed by the guest, against nothing armed;
            and arming and disarming the LBR around an empty function
  cache     the same code with resource monitoring, with the model of caches against without; and
            the misses of a resident program beside a streaming one, with capacity masks against
            without
  rtm       a transaction of ten stores, against the ten stores
  gdb       single steps, conditional breakpoints and reads of memory by gdb, against QEMU's stub;
            the cost of a watchpoint; reverse execution over 100 million instructions
  linux     Debian's cloud kernel to power-off in the interpreter, against QEMU TCG

All parts run unless some are named. What is compared runs alternately, so that other load on the
machine affects both; the ratio is the median of the ratios of neighbours. The table goes to
standard output, all samples to target/bench.json. A peer that is missing (QEMU, gdb, Bochs, KVM)
costs only its own rows: a line at the end says how to get it.

Exit status 2 for wrong usage, 1 when hindsight itself could not be built or measured, else 0:
neither a missed aim nor a missing peer nor a row that is slower than the baseline is a failure.
docs/reports/performance.md explains the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator, Sequence

from hindsight_ci.bench import debugging, parts, programs
from hindsight_ci.bench.measure import Row
from hindsight_ci.bench.process import REMEDIES, PeerError, say
from hindsight_ci.bench.report import Baseline, read_baseline, slower_rows, table
from hindsight_ci.project import ROOT, RunError, build_release

RESULT = ROOT / "target/bench.json"
PARTS: dict[str, Callable[[parts.Bench], Iterator[Row]]] = {
    "start": parts.start,
    "memory": parts.memory,
    "exits": parts.exits,
    "workload": parts.workload,
    "armed": parts.armed,
    "cache": parts.cache,
    "rtm": parts.rtm,
    "gdb": debugging.gdb,
    "linux": parts.linux,
    "programs": lambda bench: programs.measure(bench.count(1, 3)),
    "observed": lambda bench: programs.observed(bench.count(1, 3)),
}


def measure(bench: parts.Bench, names: Sequence[str]) -> tuple[list[Row], int]:
    """The rows of the named parts, and the exit status."""
    rows: list[Row] = []
    status = 0
    for name in names:
        say(name)
        try:
            # One by one: a part that fails keeps the rows before.
            for row in PARTS[name](bench):
                rows.append(row)
        except PeerError as error:
            bench.missing.setdefault(error.peer, str(error))
        except (RunError, OSError) as error:
            say(f"{name}: {error}")
            status = 1
    return rows, status


def save(rows: Sequence[Row], quick: bool) -> str:
    """Writes target/bench.json; returns its text."""
    load = os.getloadavg()[0]
    host = {"kernel": platform.release(), "cpus": os.cpu_count(), "load": load}
    result = {"host": host, "quick": quick, "rows": [row.to_json() for row in rows]}
    text = json.dumps(result, indent=1) + "\n"
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text, encoding="utf-8")
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="ci/bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="take fewer samples")
    parser.add_argument("--no-build", action="store_true", help="use the programs as they are")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument(
        "--baseline",
        type=pathlib.Path,
        metavar="FILE",
        help="an earlier target/bench.json: shows each row's ratio to it, and marks the rows "
        "that are slower by more than 2 %%",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = parse(arguments)
    baseline: Baseline | None = None
    try:
        # Before the run, which may replace the file.
        if options.baseline:
            baseline = read_baseline(options.baseline)
    except RunError as error:
        say(error)
        return 2
    try:
        if not options.no_build:
            say("building")
            build_release()
    except RunError as error:
        say(error)
        return 1
    bench = parts.Bench(options.quick)
    rows, status = measure(bench, options.parts or list(PARTS))
    text = save(rows, options.quick)
    print(text if options.json else table(rows, baseline), end="" if options.json else "\n")
    for row in slower_rows(rows, baseline or {}):
        say(f"slower than the baseline: {row.part}: {row.name}, against {row.against}")
    for peer, reason in bench.missing.items():
        say(f"left out: {reason}; {REMEDIES[peer]}")
    return status


if __name__ == "__main__":
    sys.exit(main())
