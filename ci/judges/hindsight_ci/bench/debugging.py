"""The part of the benchmark that measures gdb."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from hindsight_ci.bench.gdb_session import (
    BACK,
    BY_STUB,
    FORWARDS,
    HITS,
    STEPS,
    WATCHED,
    session,
)
from hindsight_ci.bench.guests import DEBUGGED, build
from hindsight_ci.bench.measure import Row
from hindsight_ci.bench.parts import Bench
from hindsight_ci.bench.process import MICROVM, QEMU, PeerError, say
from hindsight_ci.project import RELEASE, RunError, Word

KINDS = [
    ("step", "stepi", STEPS, "a second"),
    ("condition", "conditional breakpoint, evaluated by gdb", HITS, "a second"),
    ("read", "memory read", 1, "MiB/s"),
]


def gdb(bench: Bench) -> Iterator[Row]:
    """Steps, conditional breakpoints, reads of memory, watchpoints, and reverse execution."""
    if not shutil.which("gdb"):
        raise PeerError("gdb", "gdb is not installed")
    count = bench.count(2, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        guest, socket = build(folder, "guest", DEBUGGED), folder / "socket"
        ours: list[Word] = [RELEASE, "run", guest, "--serial", "none", "--engine", "interp"]
        ours += ["--gdb", f"unix:{socket}", "--gdb-wait"]
        stubs = {"ours": ours, **qemu_stubs(bench, guest, socket)}
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in stubs}
        for _ in range(count):
            for stub, command in stubs.items():
                taken[stub].append(session(command, guest, socket, BY_STUB))
        for key, kind, amount, unit in KINDS:
            rates = {stub: [amount / one[key] for one in times] for stub, times in taken.items()}
            for stub in [*stubs][1:] or ["QEMU's stub"]:
                reference = rates.get(stub, [])
                yield Row("gdb", kind, unit, rates["ours"], reference, stub, ">= 1")
        watched, plain = [], []
        for _ in range(count):
            watched.append(session(ours, guest, socket, WATCHED)["watched"])
            plain.append(session(ours, guest, socket, FORWARDS)["plain"])
        title = "100 M instructions, a watchpoint that is not touched"
        yield Row("gdb", title, "s", watched, plain, "none set", "<= 1.05")
        deterministic = [*ours, "--deterministic"]
        back = [session(deterministic, guest, socket, BACK) for _ in range(count)]
        times, forwards = ([one[key] for one in back] for key in ("back", "forwards"))
        title = "reverse-continue over 100 M instructions"
        yield Row("gdb", title, "s", times, forwards, "the same forwards")


def qemu_stubs(bench: Bench, guest: pathlib.Path, socket: pathlib.Path) -> dict[str, list[Word]]:
    """The ways in which QEMU serves gdb on this host."""
    if not shutil.which(QEMU):
        bench.missing.setdefault("QEMU", f"QEMU: {QEMU} is not installed")
        return {}
    found: dict[str, list[Word]] = {}
    for accelerator in ("tcg", "kvm"):
        command = [*MICROVM, "-accel", accelerator, "-S"]
        command += ["-gdb", f"unix:{socket},server=on,wait=off", "-kernel", guest]
        try:
            # On some hosts KVM stops at no breakpoint.
            session(command, guest, socket, BY_STUB, limit=180)
            found[f"QEMU's stub, {accelerator}"] = command
        except RunError as error:
            say(f"gdb: QEMU's stub, {accelerator}: {error}: left out")
    if not found:
        bench.missing.setdefault("QEMU", "QEMU: gdb cannot use its stub")
    return found
