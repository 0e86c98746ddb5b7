"""Compares a whole program's branch trace with one derived independently, and names the first
difference.

The payload `workload` runs in the interpreter, where it stores all its branches by BTS and
leaves them on the debug console, and in QEMU TCG, where the plugin taken_branches.c finds the
taken branches of the same code by opcodes and addresses. Both lists must be the same, record for
record; so must the branch trace messages of another run, and in a third run the LBR stack must
hold the last 32 of them.

--kvm FILE also judges the branches that KVM took in single steps. On any machine with KVM, FILE
comes from
    hindsight diff workload --memory 64M --cmdline trace=none --b '--engine kvm' \\
        --branches FILE
and with --part it may end before the program does.

Requires gcc, nm and qemu-system-x86_64. Exit status 0: the same; 1: not; 2: wrong usage; 3: a
tool is missing or a run failed.
"""

from __future__ import annotations

import argparse
import bisect
import pathlib
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from hindsight_ci.project import (
    DEBUG_EXIT,
    GUEST_PASSED,
    PAYLOADS,
    PLUGINS,
    RELEASE,
    RunError,
    Word,
    build_release,
    run,
)

PAYLOAD = PAYLOADS / "workload"
RECORD = struct.Struct("<QQ")
TIMEOUT = 300
LBR_ENTRIES = 32

Branch: TypeAlias = tuple[int, int]


class Symbols:
    """The functions and labels of an image."""

    def __init__(self, image: pathlib.Path) -> None:
        """Reads them with nm."""
        lines = (line.split() for line in run(["nm", "-C", image]).stdout.splitlines())
        table = sorted(
            (int(fields[0], 16), fields[2])
            for fields in lines
            if len(fields) == 3 and fields[1] in "tT"
        )
        self.addresses = [address for address, _ in table]
        self.names = [name for _, name in table]

    def describe(self, address: int) -> str:
        """An address with the symbol before it."""
        index = bisect.bisect_right(self.addresses, address) - 1
        if index < 0:
            return f"{address:#x}"
        return f"{address:#x} {self.names[index]}+{address - self.addresses[index]:#x}"

    def address(self, name: str) -> int:
        """The address of a symbol."""
        if name not in self.names:
            raise RunError(f"{PAYLOAD}: no symbol {name}")
        return self.addresses[self.names.index(name)]


def trace(program: pathlib.Path, facility: str, out: pathlib.Path) -> None:
    """Has the interpreter trace the payload by BTS, LBR or branch trace messages."""
    command: list[Word] = [program, "run", "--engine", "interp", "--memory", "64M"]
    command += ["--cmdline", f"trace={facility}", "--btm", out.with_suffix(".btm")]
    command += ["--debugcon", f"file:{out}", PAYLOAD]
    run(command, expected=GUEST_PASSED, timeout=TIMEOUT)


def trace_by_tcg(symbols: Symbols, plugin: pathlib.Path, out: pathlib.Path) -> None:
    """Has QEMU's TCG trace the payload by the plugin."""
    source = PLUGINS / "taken_branches.c"
    run(["gcc", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", plugin, source])
    first, last = (symbols.address(f"workload_{name}") for name in ("call", "return"))
    machine = "-accel tcg -cpu max -m 64 -display none -serial null -debugcon null -no-reboot"
    command: list[Word] = ["qemu-system-x86_64", *machine.split(), *DEBUG_EXIT]
    command += ["-append", "trace=none", "-kernel", PAYLOAD]
    command += ["-plugin", f"{plugin},first={first:x},last={last:x},out={out}"]
    done = run(command, expected=GUEST_PASSED, timeout=TIMEOUT)
    if "odd=0 done=1" not in done.stderr:
        raise RunError(f"the plugin saw more than branches: {done.stderr.strip()}")


def records(path: pathlib.Path) -> list[Branch]:
    """The records of 16 bytes in a file."""
    data = path.read_bytes()
    if not data or len(data) % RECORD.size:
        raise RunError(f"{path.name}: {len(data)} bytes are no list of records")
    return list(RECORD.iter_unpack(data))


def messages(path: pathlib.Path) -> list[Branch]:
    """Branch trace messages: lines of a processor's number, two addresses, a kind and a level."""
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return [(int(fields[1], 16), int(fields[2], 16)) for fields in lines]


def kvm_branches(path: pathlib.Path, first: Branch) -> list[Branch]:
    """The branches that KVM took, from the first one that the plugin saw."""
    try:
        lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
        taken = [(int(fields[0], 16), int(fields[1], 16)) for fields in lines]
    except (OSError, ValueError, IndexError) as error:
        raise RunError(f"{path}: {error}") from None
    if first not in taken:
        raise RunError(f"{path}: the program's first branch is missing")
    return taken[taken.index(first) :]


def compare(
    symbols: Symbols, name: str, ours: Sequence[Branch], tcg: Sequence[Branch]
) -> Iterator[str]:
    """The lines that describe how two traces differ; none if they do not."""
    for number, (found, expected) in enumerate(zip(ours, tcg, strict=False)):
        if found != expected:
            yield f"{name}: record {number} of {len(tcg)} differs"
            before = ours[number - 1] if number else None
            for label, pair in (("before", before), (name, found), ("tcg", expected)):
                if pair:
                    source, target = map(symbols.describe, pair)
                    yield f"  {label:6} {source} -> {target}"
            return
    if len(ours) != len(tcg):
        yield f"{name} has {len(ours)} records, tcg {len(tcg)}; they agree up to the shorter one"


def judge(options: argparse.Namespace, folder: pathlib.Path) -> int:
    """Makes all traces in a folder and compares them; returns the exit status."""
    symbols = Symbols(PAYLOAD)
    for facility in ("bts", "lbr", "btm"):
        trace(options.hindsight, facility, folder / facility)
    trace_by_tcg(symbols, folder / "taken_branches.so", folder / "tcg")
    bts, lbr, tcg = (records(folder / name) for name in ("bts", "lbr", "tcg"))
    btm = messages(folder / "btm.btm")
    kvm = kvm_branches(options.kvm, tcg[0])[: len(tcg)] if options.kvm else tcg
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        for name in ("bts", "lbr", "btm.btm", "tcg"):
            shutil.copy(folder / name, options.keep / name)
    differences = [
        *compare(symbols, "bts", bts, tcg),
        *compare(symbols, "btm", btm, tcg),
        *compare(symbols, "lbr", lbr, tcg[-LBR_ENTRIES:]),
        *compare(symbols, "kvm", kvm, tcg[: len(kvm)] if options.part else tcg),
    ]
    by_kvm = f", the first {len(kvm)} by KVM" if options.kvm else ""
    equal = f"the same {len(bts)} branches by BTS and BTM{by_kvm}, and the last {len(lbr)} by LBR"
    print("\n".join(differences) or equal)
    return 1 if differences else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="hindsight_ci.branch_judge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--no-build", action="store_true", help="use the binary and the payloads as they are"
    )
    parser.add_argument("--hindsight", type=pathlib.Path, default=RELEASE)
    parser.add_argument("--kvm", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--part", action="store_true", help="FILE may end before the program")
    parser.add_argument("--keep", type=pathlib.Path, metavar="DIR", help="leave the lists in DIR")
    options = parser.parse_args(arguments)
    options.hindsight = options.hindsight.resolve()
    try:
        if not options.no_build:
            build_release()
        with tempfile.TemporaryDirectory() as folder:
            return judge(options, pathlib.Path(folder))
    except RunError as error:
        print(f"branch-judge: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
