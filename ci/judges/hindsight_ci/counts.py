"""Compares how many instructions whole programs retire in the interpreter and in QEMU's TCG.

Each case of a payload runs from its entry to its exit in `hindsight run --engine interp` and in
QEMU, where the plugin counts.c counts. Both must retire the same number of instructions; a
repeated string instruction counts as one. Default: hello/hello and workload/workload, whose
instructions do not depend on time.

Exit status: 0 all equal, 1 some not, 2 wrong usage, or a program could not be run.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence

from hindsight_ci.project import (
    DEBUG_EXIT,
    PAYLOADS,
    PLUGINS,
    RELEASE,
    RunError,
    Word,
    build_release,
    run,
)

QEMU: list[Word] = [
    *"qemu-system-x86_64 -M microvm -nodefaults -no-user-config -display none -no-reboot".split(),
    *DEBUG_EXIT,
    *"-accel tcg -cpu max -m 64M -serial stdio".split(),
]
DEFAULT = ["hello/hello", "workload/workload"]
TIMEOUT = 300


def output(command: Sequence[Word]) -> str:
    """Both outputs of a command, whatever its status, which is the guest's."""
    done = run(command, expected=None, timeout=TIMEOUT)
    return done.stdout + done.stderr


def number(pattern: str, text: str, program: str) -> int:
    """The number that a pattern finds in the output of a program that ran a case to its end."""
    found = re.search(pattern, text)
    if not found or "end passed=1 " not in text:
        raise RunError(f"{program} did not run the case:\n{text[-2000:]}")
    return int(found[1])


def pvh_entry(image: pathlib.Path) -> int:
    """The PVH entry of an image: the value of the Xen note 18."""
    data = image.read_bytes()
    name_size = (4).to_bytes(4, "little")
    start = data.find((18).to_bytes(4, "little") + b"Xen\0")
    if start < 8 or data[start - 8 : start - 4] != name_size:
        raise RunError(f"{image} has no PVH entry")
    size = int.from_bytes(data[start - 4 : start], "little")
    return int.from_bytes(data[start + 8 : start + 8 + min(size, 8)], "little")


def compare(
    name: str, plugin: pathlib.Path, branches: pathlib.Path | None, hindsight: pathlib.Path
) -> bool:
    """Runs a case in both; prints and compares the counts."""
    payload, _, case = name.partition("/")
    image = PAYLOADS / payload
    if not case or not image.exists():
        raise RunError(f"there is no payload case {name}")
    line = f"case={case} cpl=0"
    options = [str(plugin), f"start={pvh_entry(image):#x}"]
    if branches:
        options.append(f"branches={branches / f'{payload}.{case}'}")
    in_qemu = output([*QEMU, "-kernel", image, "-append", line, "-plugin", ",".join(options)])
    ours: list[Word] = [hindsight, "run", image, "--memory", "64M", "--engine", "interp"]
    in_interp = output([*ours, "--stats", "--cmdline", line])
    tcg = number(r"counts: instructions (\d+)", in_qemu, "QEMU")
    taken = number(r"branches (\d+)", in_qemu, "QEMU")
    iterations = number(r"iterations (\d+)", in_qemu, "QEMU")
    interp = number(r"retired (\d+) instructions", in_interp, "hindsight")
    print(
        f"{name}: QEMU {tcg} instructions (without {iterations} further iterations of REP), "
        f"{taken} taken branches; the interpreter {interp}, difference {interp - tcg}"
    )
    return interp == tcg


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="hindsight_ci.counts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--no-build", action="store_true", help="use the binary and the payloads as they are"
    )
    parser.add_argument("--hindsight", type=pathlib.Path, default=RELEASE)
    parser.add_argument(
        "--branches",
        type=pathlib.Path,
        metavar="DIR",
        help="write the taken branches that QEMU saw to DIR/PAYLOAD.CASE: from and to, one a line",
    )
    parser.add_argument("cases", nargs="*", metavar="PAYLOAD/CASE", default=DEFAULT)
    options = parser.parse_args(arguments)
    branches, hindsight = options.branches, options.hindsight.resolve()
    try:
        if branches:
            branches = branches.resolve()
            branches.mkdir(parents=True, exist_ok=True)
        if not options.no_build:
            build_release()
        with tempfile.TemporaryDirectory() as folder:
            plugin = pathlib.Path(folder) / "counts.so"
            flags = "-O2 -shared -fPIC -Wall -Wextra -Werror".split()
            run(["cc", *flags, "-o", plugin, PLUGINS / "counts.c"])
            # A list: every case runs, whatever the result of the one before.
            equal = [compare(name, plugin, branches, hindsight) for name in options.cases]
    except RunError as error:
        print(f"counts: {error}", file=sys.stderr)
        return 2
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
