"""Starts and times processes, and finds out whether peers can be used."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TypeAlias

from hindsight_ci.project import (
    DEBUG_EXIT,
    PAYLOADS,
    RELEASE,
    RunError,
    Word,
    words,
)

QEMU = "qemu-system-x86_64"
MICROVM: list[Word] = [
    QEMU,
    *"-M microvm -nodefaults -no-user-config -display none -no-reboot".split(),
    *DEBUG_EXIT,
]
MIB = 1 << 20

# How to get each peer.
REMEDIES = {
    "QEMU": "apt-get install qemu-system-x86",
    "gdb": "apt-get install gdb",
    "Bochs": "apt-get install bochs bochs-term bochsbios vgabios grub-common grub-pc-bin xorriso "
    "mtools",
    "KVM": "run it where /dev/kvm can be opened for writing",
}

# A command and the exit status of a run that did what it should.
Timed: TypeAlias = tuple[list[Word], int]


class PeerError(RunError):
    """A peer is missing or does not do what the comparison requires."""

    def __init__(self, peer: str, reason: str) -> None:
        """Names the peer, of which REMEDIES says how to get it."""
        super().__init__(f"{peer}: {reason}")
        self.peer = peer


def say(text: object) -> None:
    """Prints progress."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def spawn(command: Sequence[Word]) -> int:
    """Starts a process whose standard streams are /dev/null; returns its pid."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null, stream) for stream in (0, 1, 2)]
        strings = words(command)
        return os.posix_spawnp(strings[0], strings, os.environ, file_actions=actions)
    except FileNotFoundError:
        raise RunError(f"{command[0]}: not found") from None
    finally:
        os.close(null)


def timed(command: Sequence[Word], status: int) -> float:
    """Seconds from the start of a process to its end."""
    start = time.perf_counter()
    _, found = os.waitpid(spawn(command), 0)
    seconds = time.perf_counter() - start
    code = os.waitstatus_to_exitcode(found)
    if code != status:
        raise RunError(f"{command[0]} ended with status {code}, not {status}")
    return seconds


def in_turn(commands: Sequence[Timed], count: int) -> list[list[float]]:
    """Milliseconds of each command, `count` times, in turn.

    The first turn warms up and is dropped.
    """
    samples: list[list[float]] = [[] for _ in commands]
    for turn in range(count + 1):
        for (command, status), times in zip(commands, samples, strict=True):
            seconds = timed(command, status)
            if turn > 0:
                times.append(seconds * 1e3)
    return samples


def boots(command: Sequence[Word]) -> bool:
    """Whether QEMU runs a payload with this command: the payload must print its verdict.

    The exit status does not show it: QEMU's own failures have that of a passed payload.
    """
    try:
        done = subprocess.run(
            words([*command, "-append", "verbose", "-serial", "stdio"]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"end passed=" in done.stdout


def qemu_command(accelerator: str, payload: pathlib.Path) -> list[Word]:
    """The command by which QEMU's microvm runs a payload."""
    return [*MICROVM, "-accel", accelerator, "-kernel", payload]


def qemu_accelerator() -> str:
    """The accelerator with which QEMU runs payloads on this host."""
    if not shutil.which(QEMU):
        raise PeerError("QEMU", f"{QEMU} is not installed")
    for accelerator in ("kvm", "tcg"):
        if boots(qemu_command(accelerator, PAYLOADS / "hello")):
            return accelerator
    raise PeerError("QEMU", f"{QEMU} does not run the payload hello")


def require_tcg() -> None:
    """Raises PeerError unless QEMU's TCG runs payloads."""
    if not shutil.which(QEMU):
        raise PeerError("QEMU", f"{QEMU} is not installed")
    if not boots(qemu_command("tcg", PAYLOADS / "hello")):
        raise PeerError("QEMU", f"{QEMU} does not run the payload hello in TCG")


def has_kvm() -> bool:
    """Whether this user may use /dev/kvm."""
    return os.access("/dev/kvm", os.W_OK)


def doctor_cost(probe: str) -> float | None:
    """The result of one of doctor's probes of cost, in nanoseconds, or None."""
    done = subprocess.run(
        words([RELEASE, "doctor", "--only", probe, "--json"]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    try:
        (found,) = json.loads(done.stdout)["probes"]
        value, unit = found["detail"].split()
        return float(value) * {"ns": 1.0, "us": 1e3, "ms": 1e6}[unit]
    except (ValueError, KeyError, TypeError):
        return None


def resident(pid: int, mapping: str) -> tuple[int, int]:
    """Resident bytes of a process: all of them, and those of the mappings with this name."""
    everything, inside, counts = 0, 0, False
    smaps = pathlib.Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8")
    for line in smaps.splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            counts = mapping in line
        elif fields[0] == "Rss:":
            everything += int(fields[1]) * 1024
            inside += int(fields[1]) * 1024 if counts else 0
    return everything, inside


def idle_memory(command: Sequence[Word], mapping: str) -> float:
    """MiB beyond guest memory, which is `mapping`, of a monitor whose guest idles."""
    pid: int | None = spawn(command)
    assert pid is not None
    try:
        time.sleep(0.5)
        everything, inside = resident(pid, mapping)
        if os.waitpid(pid, os.WNOHANG)[0] != 0:
            pid = None
            raise RunError(f"{command[0]} ended by itself")
    finally:
        if pid is not None:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    if inside == 0:
        raise RunError(f"{command[0]} has no mapping named {mapping}")
    return (everything - inside) / MIB
