"""Boots a Linux guest that prints named sections, and splits its output into them."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Sequence

from hindsight_ci.project import Word, words


def boot(
    directory: pathlib.Path,
    hindsight: pathlib.Path,
    options: Sequence[str],
    command_line: str,
    timeout: int,
) -> str:
    """Boots `vmlinuz` and `initramfs`; returns the output of the guest and of the monitor."""
    command: list[Word] = [
        hindsight,
        "run",
        directory / "vmlinuz",
        "--initrd",
        directory / "initramfs",
        "--memory",
        "512M",
        *options,
        "--timeout",
        str(timeout),
        "--cmdline",
        command_line,
    ]
    done = subprocess.run(
        words(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    return done.stdout.replace("\r", "") + done.stderr


def sections(output: str, marker: str) -> dict[str, list[str]]:
    """The lines of each section, from `MARKER: begin NAME` to `MARKER: end`."""
    found: dict[str, list[str]] = {}
    name = None
    for line in output.splitlines():
        if line.startswith(f"{marker}: begin "):
            name = line.split()[2]
            found.setdefault(name, [])
        elif line.startswith(f"{marker}: end"):
            name = None
        elif name:
            found[name].append(line)
    return found
