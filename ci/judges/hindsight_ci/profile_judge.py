"""Judges profiles of a program in a Linux guest by what BOLT makes of them.

A generated C program has much code that is never executed between the code that is. It runs once in
a guest under `hindsight exec --trace-out`, whose trace becomes a perf.data; perf2bolt must find no
branch in it that does not fit the program, and llvm-bolt must make the program faster on this
machine, without KVM or a PMU. Prints one line a check; exit status 1 if one failed, 2 if a tool is
missing.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import re
import resource
import statistics
import subprocess
import sys

from hindsight_ci.checks import Checks
from hindsight_ci.project import RELEASE, ROOT, RunError, run, words

FUNCTIONS = 1500
COLD_STATEMENTS = 16
# Rounds of the traced run in the guest, and of the runs that are timed.
TRACED_ROUNDS = 30
TIMED_ROUNDS = 40_000
TIMED_RUNS = 9
# How much faster the program must become; on idle machines it is more.
SPEEDUP_MIN = 1.2

MAIN = """
int main(int argc, char **argv) {
  u64 rounds = 0, x = 1;
  for (char *c = argc > 1 ? argv[1] : "1"; *c; c++) rounds = rounds * 10 + (*c - '0');
  while (rounds--) x = turn(x);
  printf("%lu\\n", x);
  return 0;
}
"""


def source() -> str:
    """The program: functions that are called one after another, each with a cold part."""
    parts = ["#include <stdio.h>", "typedef unsigned long u64;", "static volatile u64 sink[64];"]
    for number in range(FUNCTIONS):
        cold = "".join(
            f" sink[{(number * 7 + k) % 64}] += x * {number * k + 3}UL;"
            f" x ^= sink[{(number + k * 5) % 64}];"
            for k in range(COLD_STATEMENTS)
        )
        parts.append(
            f"__attribute__((noinline)) static u64 f{number}(u64 x) {{"
            f" if ((x >> 11 & 0xffff) == {number * 13 % 65536}) {{{cold} }}"
            f" return x * 6364136223846793005UL + {2 * number + 1}UL; }}"
        )
    order = list(range(FUNCTIONS))
    random.Random(1).shuffle(order)
    calls = "".join(f" x = f{number}(x);" for number in order)
    parts.append(f"static u64 turn(u64 x) {{{calls} return x; }}")
    return "\n".join(parts) + MAIN


def bolt_folder() -> pathlib.Path:
    """The folder of the newest BOLT that Debian's packages have installed."""
    folders = [path.parent for path in pathlib.Path("/usr/lib").glob("llvm-*/bin/perf2bolt")]
    if not folders:
        raise RunError("perf2bolt: not found; install bolt-19 (or bolt-16)")
    return max(folders, key=lambda folder: int(folder.parent.name.removeprefix("llvm-")))


def user_seconds(program: pathlib.Path) -> tuple[float, str]:
    """Processor time and output of one run on this machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(
        words([program, str(TIMED_ROUNDS)]), capture_output=True, text=True, check=True
    )
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before, done.stdout


def compare(checks: Checks, name: str, plain: pathlib.Path, guided: pathlib.Path) -> None:
    """Times both programs in turn, and checks that the guided one is faster."""
    times: dict[pathlib.Path, list[float]] = {plain: [], guided: []}
    outputs = set()
    for _ in range(TIMED_RUNS):
        for program, found in times.items():
            seconds, output = user_seconds(program)
            found.append(seconds)
            outputs.add(output)
    before, after = (statistics.median(found) for found in times.values())
    print(f"{name}: {before:.3f} s -> {after:.3f} s, {before / after:.2f} times as fast")
    checks.check(f"{name}: the results are the same", len(outputs) == 1, outputs)
    checks.check(f"{name}: at least {SPEEDUP_MIN} times as fast", before >= SPEEDUP_MIN * after)


def trace(hindsight: pathlib.Path, program: pathlib.Path, work: pathlib.Path) -> pathlib.Path:
    """Traces the program in a guest; returns the perf.data of its user code."""
    recorded, data = work / "guided.trace", work / "perf.data"
    run(
        [
            *(hindsight, "exec", "--deterministic", "--trace-out", recorded),
            *("--trace-process", program.name, "--", program, str(TRACED_ROUNDS)),
        ],
        timeout=600,
    )
    run([hindsight, "export", "perf", recorded, "-o", data])
    return data


def judge(hindsight: pathlib.Path, work: pathlib.Path) -> int:
    """Runs all checks; returns the number of failed ones."""
    checks = Checks()
    folder = bolt_folder()
    work.mkdir(parents=True, exist_ok=True)
    text, program, fast = work / "guided.c", work / "guided", work / "guided.bolt"
    text.write_text(source())
    run(["gcc", "-O2", "-static", "-Wl,--emit-relocs", "-o", program, text])
    data, profile = trace(hindsight, program, work), work / "guided.fdata"
    found = run([folder / "perf2bolt", "-p", data, "-o", profile, program])
    report = found.stdout + found.stderr
    for name in ("traces mismatching disassembled function contents", "samples .* were ignored"):
        bad = re.search(rf"{name}: (\d+)|(\d+) {name}", report)
        number = bad and next(group for group in bad.groups() if group is not None)
        checks.check(f"perf2bolt: no {name.split(' .*')[0]}", number == "0", number)
    calls = re.findall(r"^1 turn\S* \w+ 1 f\d+\S* 0 \d+ (\d+)$", profile.read_text(), re.M)
    checks.check(
        "perf2bolt: every function is called as often as the program calls it",
        len(calls) == FUNCTIONS and set(calls) == {str(TRACED_ROUNDS)},
        f"{len(calls)} calls with counts {sorted(set(calls))}",
    )
    options = ["-reorder-blocks=ext-tsp", "-reorder-functions=hfsort", "-split-functions"]
    run([folder / "llvm-bolt", program, "-o", fast, "-data", profile, *options, "-split-all-cold"])
    compare(checks, "BOLT", program, fast)
    return checks.failed


def main() -> int:
    """Runs the judge from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hindsight", type=pathlib.Path, default=RELEASE)
    parser.add_argument("--work", type=pathlib.Path, default=ROOT / "target/profile-judge")
    arguments = parser.parse_args()
    try:
        return 1 if judge(arguments.hindsight, arguments.work) else 0
    except RunError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
