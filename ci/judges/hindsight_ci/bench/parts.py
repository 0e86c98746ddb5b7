"""The parts of the benchmark that need no debugger: each yields its rows as it measures them."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator

from hindsight_ci.bench import bochs
from hindsight_ci.bench.guests import IDLE, build
from hindsight_ci.bench.measure import Row
from hindsight_ci.bench.process import (
    QEMU,
    PeerError,
    Timed,
    doctor_cost,
    has_kvm,
    idle_memory,
    in_turn,
    qemu_accelerator,
    qemu_command,
    require_tcg,
)
from hindsight_ci.project import GUEST_PASSED, PAYLOADS, RELEASE, ROOT, RunError, Word, run


class Bench:
    """The settings of a run, and the peers that it lacked."""

    def __init__(self, quick: bool) -> None:
        """`quick` takes fewer samples."""
        self.quick = quick
        # peer -> why its rows are left out
        self.missing: dict[str, str] = {}

    def count(self, quick: int, full: int) -> int:
        """The number of samples."""
        return quick if self.quick else full

    def optional(self, measure: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        """Yields the rows of a comparison, or records that its peer is missing."""
        try:
            yield from measure()
        except PeerError as error:
            self.missing.setdefault(error.peer, str(error))


def interp(payload: pathlib.Path, *options: Word) -> Timed:
    """A payload in the interpreter, without output."""
    command: list[Word] = [RELEASE, "run", payload, "--serial", "none", "--engine", "interp"]
    return [*command, *options], GUEST_PASSED


def start(bench: Bench) -> Iterator[Row]:
    """From process start to exit of the smallest payload."""
    payload = PAYLOADS / "hello"
    references: list[tuple[str, Timed]] = []
    accelerator = ""
    try:
        accelerator = qemu_accelerator()
        for name in dict.fromkeys((accelerator, "tcg")):
            command = qemu_command(name, payload)
            references.append((f"QEMU microvm, {name}", (command, GUEST_PASSED)))
    except PeerError as error:
        bench.missing.setdefault(error.peer, str(error))
    references.append(("an empty process (`true`)", (["true"], 0)))
    engines = ["kvm", "interp"] if has_kvm() else ["interp"]
    commands: list[Timed] = [
        ([RELEASE, "run", payload, "--serial", "none", "--engine", engine], GUEST_PASSED)
        for engine in engines
    ]
    samples = in_turn([*commands, *(timed for _, timed in references)], bench.count(15, 61))
    for engine, ours in zip(engines, samples, strict=False):
        for (against, _), reference in zip(references, samples[len(engines) :], strict=True):
            # The aim is for the same way of running.
            comparable = accelerator in (engine, "tcg")
            aim = "<= 0.1" if accelerator and comparable and against == references[0][0] else None
            name = f"smallest payload, start to exit ({engine})"
            yield Row("start", name, "ms", ours, reference, against, aim)


def memory(bench: Bench) -> Iterator[Row]:
    """Resident memory beyond guest RAM while a guest idles in HLT."""
    accelerator = ""
    try:
        accelerator = qemu_accelerator()
    except PeerError as error:
        bench.missing.setdefault(error.peer, str(error))
    taken, reference = [], []
    with tempfile.TemporaryDirectory() as folder:
        image = build(pathlib.Path(folder), "idle", IDLE)
        engine = "kvm" if has_kvm() else "interp"
        ours: list[Word] = [RELEASE, "run", image, "--serial", "none", "--memory", "128M"]
        backend = "memory-backend-memfd,id=ram,size=128M"
        qemu = [*qemu_command(accelerator, image), "-m", "128M", "-object", backend]
        qemu += ["-machine", "memory-backend=ram"]
        for _ in range(bench.count(3, 7)):
            taken.append(idle_memory([*ours, "--engine", engine], "memfd:guest-memory"))
            if accelerator:
                reference.append(idle_memory(qemu, "memfd:memory-backend"))
    name = "resident beyond guest RAM, idle in HLT"
    yield Row("memory", name, "MiB", taken, [8.0] * len(taken), "the aim", "<= 1.0")
    if reference:
        yield Row("memory", name, "MiB", taken, reference, f"QEMU microvm, {accelerator}")


EXITS = {"out": "OUT to a device", "in": "IN from a device", "rdmsr": "RDMSR", "wrmsr": "WRMSR"}


def exits(bench: Bench) -> Iterator[Row]:
    """A port or MSR exit through the whole path, against a bare KVM_RUN loop."""
    if not has_kvm():
        raise PeerError("KVM", "/dev/kvm cannot be used")
    cargo: list[Word] = ["cargo", "bench", "-q", "-p", "hindsight", "--bench", "exit_path"]
    run([*cargo, "--no-run"])
    # On one CPU: the path is measured, not the scheduler's choice of CPU.
    cpu = str(max(os.sched_getaffinity(0)))
    options = ["--json", *(["--quick"] if bench.quick else [])]
    done = run(["taskset", "--cpu-list", cpu, *cargo, "--", *options])
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not cases:
        raise PeerError("KVM", "the benchmark exit_path measured nothing")
    change, cases = cases[-1], cases[:-1]
    for case in cases:
        against, reference = "bare KVM_RUN loop", case["bare_ns"]
        name = EXITS[case["name"]]
        yield Row("exits", name, "ns", case["path_ns"], reference, against, "<= 1.1")
    ours, reference = ([ns / 1e3 for ns in change[key]] for key in ("path_ns", "bare_ns"))
    name = "from KVM to the interpreter and back"
    yield Row("exits", name, "us", ours, reference, "one KVM_GET_REGS", "<= 14")
    for case in cases:
        against, reference = "bare loop with sync regs", case["bare_sync_ns"]
        yield Row("exits", EXITS[case["name"]], "ns", case["path_ns"], reference, against)


def instructions_by_qemu(payload: pathlib.Path) -> int:
    """The number of instructions of the workload, each iteration of a REP counted.

    With -icount shift=0 QEMU's TSC counts instructions, and the payload writes the TSC's advance in
    hexadecimal to the debug console.
    """
    command = [*qemu_command("tcg", payload), "-icount", "shift=0,sleep=off", "-debugcon", "stdio"]
    done = run(command, expected=None, timeout=120)
    try:
        return int(done.stdout, 16)
    except ValueError:
        raise PeerError("QEMU", "it did not count the workload's instructions") from None


def instructions_by_interp(payload: pathlib.Path) -> int:
    """The number of instructions that the interpreter retires, a repeated one counted once."""
    done = run([*interp(payload)[0], "--stats"], expected=None, timeout=120)
    found = re.search(r"retired (\d+) instructions", done.stdout + done.stderr)
    if not found:
        raise RunError("hindsight --stats shows no number of instructions")
    return int(found[1])


def workload(bench: Bench) -> Iterator[Row]:
    """Integer code in the interpreter, against QEMU TCG, single steps of KVM, and Bochs."""
    payload = PAYLOADS / "workload"
    commands = [interp(payload)]
    try:
        require_tcg()
        instructions = instructions_by_qemu(payload)
        commands.append((qemu_command("tcg", payload), GUEST_PASSED))
    except PeerError as error:
        bench.missing.setdefault(error.peer, str(error))
        instructions = instructions_by_interp(payload)
    count = bench.count(2, 5)
    samples = in_turn(commands, count)
    rates = [[instructions / 1e3 / time for time in times] for times in samples]
    ours = rates[0]
    name = f"interpreter, observation off, {instructions / 1e6:.0f} M instructions"
    reference = rates[1] if len(rates) > 1 else []
    yield Row("workload", name, "MIPS", ours, reference, "QEMU TCG", ">= 0.4")
    step = doctor_cost("cost-step")
    if step is not None:
        by_step = [1e3 / step] * count
        against = "KVM single-step (doctor)"
        yield Row("workload", name, "MIPS", ours, by_step, against, ">= 2000")

    def in_bochs() -> Iterator[Row]:
        for program in ("bochs", "grub-mkrescue"):
            if not shutil.which(program):
                raise PeerError("Bochs", f"{program} is not installed")
        try:
            rate = instructions / 1e6 / bochs.seconds(payload)
        except RunError as error:
            raise PeerError("Bochs", str(error)) from None
        yield Row("workload", name, "MIPS", ours, [rate] * count, "Bochs")

    yield from bench.optional(in_bochs)


def armed_workload(word: str, models: str = "off", cpu: str = "skylake-server") -> Timed:
    """The workload with something armed."""
    options = ["--models", models, "--cpu", cpu, "--cmdline", f"arm={word}"]
    return interp(PAYLOADS / "workload", *options)


# Repetitions of the workload; with arm=misses it makes one.
REPETITIONS = 20
# Pairs of WRMSR in the workload with arm=toggle.
TOGGLES = 200_000
# Interrupts of a counter in the workload with arm=pmi.
INTERRUPTS = 100_000

ARMED = [
    ("lbr", "LBR on, without the models", "<= 1.1"),
    ("bts", "BTS into a circular buffer", "<= 1.25"),
    ("watch", "a watchpoint that is not touched", "<= 1.02"),
    ("count", "a counter of instructions", "<= 1.05"),
    ("branches", "a counter of conditional branches", "<= 1.5"),
    ("pebs", "PEBS every 10 000 instructions", "<= 1.15"),
]
MODELLED = [
    ("lbr", "LBR on, with the branch predictor"),
    ("misses", "a counter of misses of the last cache"),
]


def armed(bench: Bench) -> Iterator[Row]:
    """The workload with LBR, BTS or a watchpoint armed by the guest, against nothing armed."""
    programs = [armed_workload(""), *(armed_workload(word) for word, _, _ in ARMED)]
    programs += [armed_workload(word, "on") for word, _ in MODELLED]
    count = bench.count(3, 9)
    off, *ours = in_turn(programs, count)
    ours[-1] = [time * REPETITIONS for time in ours[-1]]
    rows = [(name, aim) for _, name, aim in ARMED] + [(name, None) for _, name in MODELLED]
    for (name, aim), times in zip(rows, ours, strict=True):
        yield Row("armed", name, "ms", times, off, "nothing armed", aim)
    hello = interp(PAYLOADS / "hello")
    programs = [armed_workload("toggle"), armed_workload("pmi"), hello]
    toggles, interrupts, starts = in_turn(programs, count)
    pairs = [(a - b) * 1e6 / TOGGLES for a, b in zip(toggles, starts, strict=True)]
    trips = [(a - b) * 1e6 / INTERRUPTS for a, b in zip(interrupts, starts, strict=True)]
    exit_ns = doctor_cost("cost-msr")
    by_two = [2 * exit_ns] * count if exit_ns else []
    name = "LBR on and off around an empty function"
    yield Row("armed", name, "ns", pairs, by_two, "two MSR exits of this KVM (doctor)")
    # Its handler writes two MSRs and a register of the local APIC.
    by_three = [3 * exit_ns] * count if exit_ns else []
    name = "a counter overflows, its handler makes it overflow again"
    yield Row("armed", name, "ns", trips, by_three, "three MSR exits of this KVM (doctor)")


# Groups of ten stores in the workload with arm=stores and arm=regions.
GROUPS = 200_000


def rtm(bench: Bench) -> Iterator[Row]:
    """A transaction of ten stores, against the ten stores."""
    cpu = "skylake-server,+rtm"
    programs = [armed_workload("regions", cpu=cpu), armed_workload("stores", cpu=cpu)]
    samples = in_turn([*programs, interp(PAYLOADS / "hello")], bench.count(3, 9))
    regions, stores = (
        [(time - begin) * 1e6 / GROUPS for time, begin in zip(times, samples[2], strict=True)]
        for times in samples[:2]
    )
    name = "an RTM transaction of ten stores"
    yield Row("rtm", name, "ns", regions, stores, "the ten stores without it")


def cache(bench: Bench) -> Iterator[Row]:
    """The model of caches, and the misses of a resident program beside a streaming one."""
    programs = [armed_workload("rdt", "on"), armed_workload("rdt", "off")]
    on, off = in_turn(programs, bench.count(3, 9))
    yield Row("cache", "resource monitoring, with the model of caches", "ms", on, off, "without")
    options = ["--memory", "64M", "--cmdline", "case=partition"]
    command: list[Word] = [RELEASE, "run", PAYLOADS / "rdt_cache", "--serial", "stdio"]
    done = run([*command, "--engine", "interp", *options], expected=None, timeout=600)
    values = dict(re.findall(r"^note partition cpl=0 (\w+)=(\w+)", done.stdout, re.MULTILINE))
    try:
        misses = {key: int(values[key], 0) for key in ("shared", "one_way", "two_ways")}
    except (KeyError, ValueError):
        raise RunError("the payload rdt_cache prints no misses") from None
    for key, ways in (("one_way", "one way"), ("two_ways", "two ways")):
        name = f"misses of a resident program of 1.5 ways, with {ways} of its own"
        ours, shared = [float(misses[key])], [float(misses["shared"])]
        against = "three ways that a streaming one fills, too"
        yield Row("cache", name, "lines", ours, shared, against)


def linux(bench: Bench) -> Iterator[Row]:
    """Debian's cloud kernel to power-off in the interpreter, against QEMU TCG."""
    guests = ROOT / "target/guests"
    if not (guests / "vmlinuz").exists():
        run(["cargo", "xtask", "fetch-guests", guests])
    run(["cargo", "xtask", "initramfs", guests / "initrd.gz"])
    line = "console=ttyS0 quiet hindsight.selftest panic=-1"
    ours: list[Word] = [RELEASE, "run", guests / "vmlinuz", "--initrd", guests / "initrd.gz"]
    ours += ["--cmdline", line, "--memory", "512M", "--engine", "interp", "--timeout", "300"]
    commands: list[Timed] = [([*ours, "--serial", "none"], 0)]
    if shutil.which(QEMU):
        # Not microvm: this kernel does not reach its end there.
        machine = "-M pc -accel tcg -m 512M -vga none -net none -display none -monitor none"
        qemu: list[Word] = ["timeout", "300", QEMU, *machine.split(), "-no-reboot"]
        qemu += ["-serial", "null", "-kernel", guests / "vmlinuz"]
        commands.append(([*qemu, "-initrd", guests / "initrd.gz", "-append", line], 0))
    else:
        bench.missing.setdefault("QEMU", f"QEMU: {QEMU} is not installed")
    samples = [[time / 1e3 for time in times] for times in in_turn(commands, bench.count(1, 3))]
    reference = samples[1] if len(samples) > 1 else []
    name = "boot, self-test, power-off (interp)"
    yield Row("linux", name, "s", samples[0], reference, "QEMU pc, tcg", "<= 2.5")
