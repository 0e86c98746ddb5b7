"""Judges what Linux's own perf measures of a program whose events are known, in a guest, and rr.

The guest boots twice with --deterministic and must print the same both times, to the last digit;
--once leaves out the second time. It boots once more for rr. What perf counts must be what the
program does, and its samples must be exactly those that executing the program step by step
gives. With --model, which can be repeated, or --models, it boots once with each of these processor
models instead, and judges the counts, branch records and branch trace that all of them have.
Prints one line a check; exit status 1 if one failed, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from hindsight_ci.checks import Checks
from hindsight_ci.linux_guest import boot, sections
from hindsight_ci.measured_program import (
    ACCESS_PERIOD,
    INSTRUCTION_PERIOD,
    STACK,
    Program,
    Step,
    recorded,
)
from hindsight_ci.project import ROOT

TIMEOUT = 900
# The self-tests of the kernel's ciphers take a while, and are left out.
LINE = (
    "console=ttyS0 quiet panic=-1 nmi_watchdog=0 cryptomgr.notests "
    "hindsight.script=/files/guest-perf"
)
# On a busy host the ticks of the PIT merge, by which Linux tests it where it needs the PIT: without
# the TSC deadline, before Sandy Bridge.
MODEL_LINE = LINE + " no_timer_check hindsight.model"
# Cycles of a load by the level that serves it, in perf's words (docs/reference/pmu.md).
LATENCIES = {"L1 hit": 5, "L2 hit": 14, "L3 hit": 60, "RAM hit": 240}

# perf's own tests, and one that x86 processors have no hardware for.
TESTS = (
    "Read samples using the mmap interface",
    "User space counter reading of instructions",
    "User space counter reading of cycles",
    "Test data source output",
    "Breakpoint overflow signal handler",
    "Breakpoint overflow sampling",
    "Breakpoint accounting",
    "Write Only Watchpoint",
    "Read / Write Watchpoint",
    "Modify Watchpoint",
    "Use a dummy software event to keep tracking",
    "Event times",
    "Read backward ring buffer",
    "TSC support",
    "Perf time to TSC",
    "Sigtrap",
    "x86 bp modify",
    "x86 Sample parsing",
)
SKIPPED = "Read Only Watchpoint"


class Model(NamedTuple):
    """A processor model of another generation."""

    # What Linux's driver says of it.
    phrases: tuple[str, ...]
    # Entries of the LBR stack.
    entries: int
    # The sections whose counts are known, besides those of instructions and branches.
    counted: tuple[str, ...] = ("conditional",)
    # The slots of a cycle, of a model with topdown metrics.
    slots: int = 0
    # Whether it has the second level of the metrics.
    second_level: bool = False


MODELS = {
    "skylake-server": Model(("PEBS fmt3+", "Skylake events", "full-width counters"), 32),
    "icelake-server": Model(
        ("PEBS fmt4+-baseline", "Icelake events", "AnyThread deprecated", "full-width counters"),
        32,
        ("masked",),
        5,
    ),
    "sapphirerapids": Model(
        (
            "Architectural LBR",
            "PEBS fmt4+-baseline",
            "Sapphire Rapids events",
            "AnyThread deprecated",
            "full-width counters",
        ),
        32,
        ("masked",),
        6,
        second_level=True,
    ),
    "cascadelake": Model(("PEBS fmt3+", "Skylake events", "full-width counters"), 32),
    "skylake": Model(("PEBS fmt3+", "Skylake events", "full-width counters"), 32),
    "broadwell": Model(("PEBS fmt2+", "Broadwell events", "full-width counters"), 16),
    "haswell": Model(("PEBS fmt2+", "Haswell events", "full-width counters"), 16),
    "ivybridge": Model(("PEBS fmt1+", "IvyBridge events", "full-width counters"), 16),
    "sandybridge": Model(("PEBS fmt1+", "SandyBridge events", "LBR, Intel PMU driver"), 16),
    "westmere": Model(("PEBS fmt1+", "Westmere events", "LBR, Intel PMU driver"), 16),
    "nehalem": Model(("PEBS fmt1+", "Nehalem events", "LBR, Intel PMU driver"), 16),
    "core2": Model(("PEBS fmt0+", "Core2 events", "LBR, Intel PMU driver"), 4, ("taken",)),
}

# The model of `hindsight run` without `--cpu`.
DEFAULT = "skylake-server"
# The models of which Linux lengthens periods after an interrupt, so that the number of samples is
# not known.
LENGTHENED = ("haswell", "nehalem")

Sections: TypeAlias = dict[str, list[str]]
# A branch: its address and its target.
Edge: TypeAlias = tuple[int, int]


def counts(lines: Sequence[str]) -> list[int | None]:
    """The numbers of perf stat -x, in their order."""
    numbers = [line.split(",")[0] for line in lines if line.count(",") >= 3]
    return [int(number) if number.isdigit() else None for number in numbers]


def known(numbers: Sequence[int | None], length: int) -> list[int] | None:
    """The numbers if there are `length` of them and all were counted, else None."""
    found = [number for number in numbers if number is not None]
    return found if len(numbers) == len(found) == length else None


def addresses(line: str) -> list[int]:
    """The words of a line that are addresses."""
    return [int(word, 16) for word in line.split() if re.fullmatch(r"[0-9a-f]{5,16}", word)]


def judge_counts(checks: Checks, program: Program, found: Sections) -> None:
    """The numbers of perf stat."""
    taken = [step for step in program.branches if step.target]
    checks.same(
        "counts of instructions, branches, near taken and conditional ones",
        counts(found["known"]),
        [len(steps) for steps in (program.steps, program.branches, taken, program.conditional)],
    )
    locked = [step for step in program.loads if step.locked]
    checks.same(
        "counts of loads, stores and locked loads",
        counts(found["memory"]),
        [len(steps) for steps in (program.loads, program.stores, locked)],
    )
    caches, flushes = known(counts(found["caches"]), 4), program.symbols["FLUSHES"]
    passed = False
    if caches:
        missed, references, misses, mispredicted = caches
        passed = (
            flushes <= missed <= flushes + 1100
            and missed <= misses <= references
            and 0 < mispredicted < len(program.branches) // 50
        )
    checks.check("cache misses and mispredicted branches", passed, counts(found["caches"]))
    rings = known(counts(found["counts"]), 3)
    passed = bool(rings and rings[0] > len(program.steps) and rings[1] > len(program.branches))
    checks.check("counts of both rings", passed, counts(found["counts"]))


def branch_stacks(found: Sections) -> list[list[Edge]]:
    """The branches of each sample that has some, the newest first."""
    pairs = [re.findall(r"0x([0-9a-f]+)/0x([0-9a-f]+)/", line) for line in found["branches"]]
    return [[(int(a, 16), int(b, 16)) for a, b in stack] for stack in pairs if stack]


def judge_precise(checks: Checks, program: Program, found: Sections) -> None:
    """The PEBS records of instructions."""
    sampled = [address for line in found["precise"] for address in addresses(line)]
    precise = recorded(program.steps, INSTRUCTION_PERIOD)
    checks.same("samples: precise", sampled, [step.address for step in precise])


def judge_samples(checks: Checks, program: Program, found: Sections) -> None:
    """The samples of perf record."""
    sampled = [address for line in found["plain"] for address in addresses(line)]
    # The interrupt comes before the next instruction.
    after = program.steps[INSTRUCTION_PERIOD::INSTRUCTION_PERIOD]
    checks.same("samples: plain", sampled, [step.address for step in after])
    judge_precise(checks, program, found)
    stacks = branch_stacks(found)
    expected = list(program.branch_stacks())
    # A tick of the kernel's timer replaces a branch; at most one occurs while the program runs.
    both = zip(stacks, expected, strict=False)
    ticks = [n for n, (stack, full) in enumerate(both) if stack == full[:-1]]
    if len(ticks) == 1:
        expected[ticks[0]].pop()
    checks.same("samples: branch stacks", stacks, expected)


def judge_trace(checks: Checks, program: Program, found: Sections) -> None:
    """The branch trace store: each branch of the program, and its ways to the kernel and back.

    perf leaves out the last record of a buffer, which is the system call at the end.
    """
    edges: collections.Counter[tuple[int, int]] = collections.Counter()
    wrong = []
    for line in found["bts"]:
        count, *pair = line.replace("=>", "").split()
        if not count.isdigit():
            continue
        edge = [int(word, 16) for word in pair]
        if len(edge) == 2 and all(map(program.contains, edge)):
            edges[edge[0], edge[1]] += int(count)
        elif not (len(edge) == 2 and program.contains(edge[0]) and edge[1] >> 63):
            wrong.append(line)
    passed = edges == program.edges() and not wrong
    checks.check(
        "samples: branch trace store", passed, f"{edges} of {program.edges()}, {wrong[:5]}"
    )


def judge_accesses(checks: Checks, found: Sections, name: str, steps: list[Step]) -> None:
    """The sampled loads or stores: where the data is, and which instruction accessed it."""
    steps = recorded(steps, ACCESS_PERIOD)
    pairs = [(at[0], at[-1]) for line in found[name] if (at := addresses(line)) and at[1:]]
    accessed = [step.load if name == "loads" else step.store for step in steps]
    both = zip(pairs, accessed, strict=False)
    stack = {pair[0] for pair, address in both if address == STACK}
    checks.check(f"samples: {name} of the stack have one address", len(stack) == 1, stack)
    on_stack = min(stack, default=None)
    expected = [
        (on_stack if address == STACK else address, step.address)
        for step, address in zip(steps, accessed, strict=True)
    ]
    checks.same(f"samples: {name}", pairs, expected)


def judge_memory(checks: Checks, program: Program, found: Sections) -> None:
    """The sampled accesses and their latencies."""
    judge_accesses(checks, found, "loads", program.loads)
    judge_accesses(checks, found, "stores", program.stores)
    lines = [line for line in found["loads"] if "OP LOAD" in line]
    wrong = [
        line
        for line in lines
        if not any(
            f"{level}|" in line and f" {cycles} " in line for level, cycles in LATENCIES.items()
        )
    ]
    checks.check("samples: latencies are those of the levels", bool(lines) and not wrong, wrong[:3])
    far = [line for line in lines if program.symbols["far_load"] in addresses(line)]
    passed = bool(far) and all("RAM hit" in line for line in far)
    checks.check("samples: loads from memory say so", passed, far[:3])


def judge_tests(checks: Checks, found: Sections) -> None:
    """The results of perf's own tests."""
    # perf colours what is skipped.
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(found["tests"]))
    results = dict(re.findall(r"^ *[0-9.]+: (.*?) *: *(\w+)", text, re.MULTILINE))
    expected = {**dict.fromkeys(TESTS, "Ok"), SKIPPED: "Skip"}
    checks.same("perf's own tests", sorted(results.items()), sorted(expected.items()))


def judge_rr(checks: Checks, found: Sections) -> None:
    """What rr replays must be what it recorded: the time and the processes of then."""
    recording, replay = (
        [line for line in found.get(name, []) if not line.startswith("rr:")]
        for name in ("rr-record", "rr-replay")
    )
    passed = "50" in recording and recording == replay
    checks.check("rr records and replays", passed, f"{recording[-5:]}, then {replay[-5:]}")


def finished(output: str) -> bool:
    """Whether the guest measured all that it was to measure."""
    return "perf-judge: complete" in output


def judge(output: str, program: Program, checks: Checks) -> None:
    """Judges the first boot."""
    found: Sections = collections.defaultdict(list, sections(output, "perf-judge"))
    linux = " ".join(found["boot"])
    for phrase in ("Skylake events", "32-deep LBR", "full-width counters"):
        checks.check(f"Linux finds {phrase}", phrase in linux, linux)
    for part in (judge_counts, judge_samples, judge_trace, judge_memory):
        part(checks, program, found)
    judge_tests(checks, found)


def is_run(stack: list[Edge], taken: list[Edge]) -> bool:
    """Whether these branches, the newest first, are consecutive ones of the program."""
    run = stack[::-1]
    starts = (n for n, edge in enumerate(taken) if edge == run[0])
    return any(taken[n : n + len(run)] == run for n in starts)


def returns(program: Program, edge: Edge) -> bool:
    """Whether the branch leads from the kernel to the program."""
    return bool(edge[0] >> 63) and program.contains(edge[1])


def judge_stacks(checks: Checks, program: Program, found: Sections, entries: int) -> None:
    """The LBR stacks of samples whose positions in the program are not known.

    A stack may also have the kernel's ways back to the program, from interrupts and page faults.
    """
    taken = [(step.address, step.target) for step in program.branches if step.target]
    stacks = branch_stacks(found)
    own = [[edge for edge in stack if not returns(program, edge)] for stack in stacks]
    wrong = [stack for stack in own if stack and not is_run(stack, taken)]
    full = sum(len(stack) == entries for stack in stacks)
    longest = max(map(len, stacks), default=0)
    passed = bool(stacks) and not wrong
    checks.check("samples: branch stacks are runs of branches", passed, wrong[:3])
    checks.check(
        f"samples: most branch stacks have {entries} entries",
        longest == entries and 2 * full > len(stacks),
        f"{full} of {len(stacks)}, and one {longest}",
    )


def judge_number(checks: Checks, program: Program, found: Sections) -> None:
    """The number of PEBS records, and that they are of instructions of the program.

    These boots are not deterministic: when Linux switches to another process, the record that is
    due is lost, and the later ones are of other instructions.
    """
    sampled = [address for line in found["precise"] for address in addresses(line)]
    executed = {step.address for step in program.steps}
    expected = len(recorded(program.steps, INSTRUCTION_PERIOD))
    checks.within("samples: number of precise ones", len(sampled), expected - 5, expected)
    others = [hex(address) for address in sampled if address not in executed]
    checks.check("samples: precise ones are of the program", not others, others[:5])


def judge_model(output: str, program: Program, checks: Checks, name: str) -> None:
    """Judges a boot with the processor model of another generation.

    The positions of samples are not compared.
    """
    model = MODELS[name]
    found: Sections = collections.defaultdict(list, sections(output, "perf-judge"))
    linux = " ".join(found["boot"])
    for phrase in (*model.phrases, f"{model.entries}-deep LBR"):
        checks.check(f"{name}: Linux finds {phrase}", phrase in linux, linux)
    taken = [step for step in program.branches if step.target or step.branch == "syscall"]
    expected = {
        "known": [len(program.steps), len(program.branches)],
        "conditional": [len(program.conditional)],
        "masked": [len(program.conditional)],
        "taken": [len(taken)],
    }
    for section in ("known", *model.counted):
        numbers = counts(found[section])
        checks.same(f"{name}: counts: {section}", numbers, expected[section])
    if name not in LENGTHENED:
        judge_number(checks, program, found)
    if model.slots:
        judge_topdown(checks, program, found, model)
    judge_stacks(checks, program, found, model.entries)
    judge_trace(checks, program, found)


def judge_topdown(checks: Checks, program: Program, found: Sections, model: Model) -> None:
    """The metrics add up to the slots, of which every instruction takes one to retire.

    Those of the second level are parts of the first. The program has some taken branches, and far
    ones only where it calls the kernel.
    """
    numbers = known(counts(found["topdown"]), 9 if model.second_level else 5)
    passed = False
    if numbers:
        slots, retiring = numbers[:2]
        first, second = numbers[1:5], numbers[5:]
        # A metric is a multiple of 1/255 of the slots.
        step = slots / 255
        passed = (
            slots >= model.slots * len(program.steps)
            and abs(sum(first) - slots) <= 4
            and abs(retiring - len(program.steps)) <= 2 * step
            and all(part <= whole + 1 for part, whole in zip(second, first, strict=False))
        )
        if second:
            heavy, mispredicts, fetch_latency, memory_bound = second
            passed = passed and (
                heavy <= step
                and mispredicts == first[1]
                and fetch_latency > step
                and memory_bound > 0
            )
    checks.check("topdown metrics", passed, counts(found["topdown"]))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="hindsight_ci.perf_judge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", type=pathlib.Path, help="the folder that `cargo xtask guest-linux --perf` made"
    )
    parser.add_argument("--hindsight", type=pathlib.Path, default=ROOT / "target/debug/hindsight")
    parser.add_argument(
        "--model",
        choices=MODELS,
        action="append",
        default=[],
        help="judge only a boot with this model",
    )
    parser.add_argument(
        "--models",
        dest="model",
        action="store_const",
        const=[name for name in MODELS if name != DEFAULT],
        help="judge only a boot with each model but the default one",
    )
    parser.add_argument("--once", action="store_true", help="leave out the second boot")
    parser.add_argument("--keep", type=pathlib.Path, help="write the output of the guest to a file")
    options = parser.parse_args(arguments)
    directory, hindsight = options.directory, options.hindsight
    if options.model:
        checks = Checks()
        program = Program(directory / "measured")
        for name in options.model:
            engine = ["--engine", "interp", "--cpu", name]
            output = boot(directory, hindsight, engine, MODEL_LINE, TIMEOUT)
            if options.keep:
                options.keep.write_text(output, encoding="utf-8")
            if finished(output):
                judge_model(output, program, checks, name)
            else:
                checks.check(f"{name}: the guest finishes", False, output[-3000:])
        return checks.status()
    deterministic = ["--engine", "interp", "--deterministic"]
    output = boot(directory, hindsight, deterministic, LINE, TIMEOUT)
    if options.keep:
        options.keep.write_text(output, encoding="utf-8")
    if not finished(output):
        print("FAIL the guest did not finish; it printed:\n" + output[-3000:])
        return 1
    checks = Checks()
    judge(output, Program(directory / "measured"), checks)
    # rr requires XSAVE, which the processor of deterministic runs does not have.
    with_rr = boot(directory, hindsight, ["--engine", "interp"], LINE + " hindsight.rr", TIMEOUT)
    judge_rr(checks, sections(with_rr, "perf-judge"))
    if not options.once:
        again = boot(directory, hindsight, deterministic, LINE, TIMEOUT)
        checks.check("the second boot prints the same", again == output, "the outputs differ")
    return checks.status()


if __name__ == "__main__":
    sys.exit(main())
