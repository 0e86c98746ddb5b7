"""Ordinary programs in a Linux guest: processor time, against QEMU's TCG.

One boot runs all of them. The guest prints a line before and after each, and the processor time of
the monitor's process is read when the line arrives, so that other load on the machine does not count.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from hindsight_ci.bench.measure import Row
from hindsight_ci.bench.process import QEMU, PeerError, say
from hindsight_ci.project import RELEASE, ROOT, RunError, Word, run, words

KERNELS = pathlib.Path(__file__).parent / "kernels.c"
WORK = ROOT / "target/guests-programs"
# Seconds that one boot may take.
LIMIT = 1200
MARKER = "bench-program:"

# Programs of kernels.c.
OWN = ["nbody", "matmul", "avx2", "strings", "x87", "sort", "fork", "pipe"]
# Programs of this machine, with the command that the guest runs. /tmp/text has 2 MiB.
TOOLS = {
    "xz": "xz -3 -c /tmp/text | wc -c",
    "gzip": "gzip -c /tmp/text | wc -c",
    "zstd": "zstd -q -5 -c /tmp/text | wc -c",
    "openssl": "openssl dgst -sha256 /tmp/text; openssl enc -aes-256-ctr -K 00 -iv 00 "
    "-in /tmp/text | openssl dgst -sha1",
    "sqlite3": "sqlite3 :memory: 'create table t(a, b); with recursive n(i) as (select 1 union "
    "all select i + 1 from n where i < 60000) insert into t select i, i * 7919 % 1000 from n; "
    "select sum(a), b % 10 from t group by b % 10 order by 2 limit 1'",
    "awk": "mawk '{ for (i = 1; i <= NF; i++) n[$i]++ } END { print length(n) }' /tmp/text",
    "grep": "grep -c 'a.*e.*9' /tmp/text",
}
# What the shell command of a tool starts, where that has another name.
BINARIES = {"awk": "mawk"}


def libraries(program: pathlib.Path) -> list[pathlib.Path]:
    """The shared libraries of a program, and its loader."""
    listed = subprocess.run(
        words(["ldd", program]), capture_output=True, text=True, check=False
    ).stdout
    return [pathlib.Path(path) for path in re.findall(r"(/\S+\.so\S*)", listed)]


def script(names: Sequence[str]) -> str:
    """The shell script that the guest runs."""
    lines = [
        "export PATH=/files:$PATH",
        "awk 'BEGIN { for (i = 0; i < 60000; i++) { x = (x * 1103515245 + 12345) % 2147483648; "
        'printf "%d line of text %d for the %s\\n", i, x % 997, x % 3 ? "tools" : "judges" } }\' '
        "> /tmp/text",
    ]
    for name in names:
        command = f"/files/kernels {name}" if name in OWN else TOOLS[name]
        lines += [f"echo '{MARKER} begin {name}'", command, f"echo '{MARKER} end {name}'"]
    return "\n".join(lines) + "\n"


def prepare() -> pathlib.Path:
    """Makes the initramfs with the programs."""
    WORK.mkdir(parents=True, exist_ok=True)
    kernels = WORK / "kernels"
    run(["gcc", "-O2", "-static", "-pthread", "-o", kernels, KERNELS, "-lm"])
    names = list(OWN)
    if "avx2" not in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        names.remove("avx2")
    files: dict[str, pathlib.Path] = {"files/kernels": kernels}
    for name in TOOLS:
        found = shutil.which(BINARIES.get(name, name))
        if found is None:
            say(f"{name} is not installed: left out")
            continue
        names.append(name)
        program = pathlib.Path(found).resolve()
        files[f"files/{BINARIES.get(name, name)}"] = program
        for library in libraries(program):
            files[str(library).lstrip("/")] = library.resolve()
    commands = WORK / "commands"
    commands.write_text(script(names), encoding="utf-8")
    files["files/commands"] = commands
    initramfs = WORK / "initramfs"
    options: list[Word] = []
    for guest, host in files.items():
        options += ["--with", f"{host}:{guest}"]
    run(["cargo", "xtask", "initramfs", *options, initramfs])
    return initramfs


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used, in seconds."""
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = stat.rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def times(command: Sequence[Word]) -> dict[str, float]:
    """Processor seconds of each program in one boot; 0 for those that did not end."""
    found: dict[str, float] = {}
    begun: dict[str, float] = {}
    with subprocess.Popen(
        words(["timeout", "--foreground", str(LIMIT), *command]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            words_of_line = line.split()
            if words_of_line[:1] != [MARKER]:
                continue
            children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
            pid = int(children.read_text(encoding="utf-8").split()[0])
            _, event, name = words_of_line
            if event == "begin":
                begun[name] = processor_seconds(pid)
            else:
                found[name] = processor_seconds(pid) - begun[name]
    if not found:
        raise RunError(f"{command[0]}: the guest ran no program")
    return found


def command_lines(initramfs: pathlib.Path) -> tuple[list[Word], list[Word]]:
    """What boots the guest with us, and with QEMU."""
    kernel = ROOT / "target/guests/vmlinuz"
    if not kernel.exists():
        run(["cargo", "xtask", "fetch-guests", kernel.parent])
    line = "console=ttyS0 quiet hindsight.script=/files/commands panic=-1"
    ours: list[Word] = [RELEASE, "run", kernel, "--initrd", initramfs, "--cmdline", line]
    ours += ["--memory", "1G", "--engine", "interp"]
    machine = "-M pc -cpu max -accel tcg,thread=multi -m 1G -vga none -net none -display none"
    qemu: list[Word] = [QEMU, *machine.split(), "-monitor", "none", "-no-reboot"]
    qemu += ["-serial", "stdio", "-kernel", kernel, "-initrd", initramfs, "-append", line]
    return ours, qemu


def compare(
    part: str, suffix: str, against: str, aim: str, pair: Sequence[Sequence[Word]], turns: int
) -> Iterator[Row]:
    """Rows of two commands that boot the same guest in turn, and of the mean of their ratios."""
    samples: dict[str, list[list[float]]] = {}
    for _ in range(turns):
        for which, command in enumerate(pair):
            for name, seconds in times(command).items():
                samples.setdefault(name, [[], []])[which].append(seconds)
    ratios: list[float] = []
    for name, (mine, theirs) in samples.items():
        yield Row(part, f"{name} ({suffix})", "s", mine, theirs, against, aim)
        if mine and theirs:
            ratios.append(min(mine) / max(min(theirs), 0.01))
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        yield Row(part, f"geometric mean ({suffix})", "", [mean], [1.0], against, None)


def measure(turns: int) -> Iterator[Row]:
    """Each program with nothing armed."""
    ours, qemu = command_lines(prepare())
    if not shutil.which(QEMU):
        raise PeerError("QEMU", f"{QEMU} is not installed")
    yield from compare("programs", "interp", "QEMU pc, tcg", "<= 2", [ours, qemu], turns)


def observed(turns: int) -> Iterator[Row]:
    """Each program while all of its branches are recorded, against the same without."""
    plain, _ = command_lines(prepare())
    for name, options, aim in [
        ("deterministic", ["--deterministic"], "<= 1.3"),
        ("recorded", ["--record", "branches"], "<= 1.6"),
    ]:
        watched = [*plain, *options]
        yield from compare("observed", name, "unobserved", aim, [watched, plain], turns)
