"""Paths of the checkout, and how the package runs programs."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Sequence
from typing import TypeAlias

ROOT = pathlib.Path(__file__).resolve().parents[3]
PAYLOADS = ROOT / "guest-tests/target/payloads"
RELEASE = ROOT / "target/release/hindsight"
PLUGINS = ROOT / "ci/judges/plugins"

Word: TypeAlias = "str | pathlib.Path"

# The process status of a guest that reports success: isa-debug-exit turns code 0 into (0 << 1) | 1.
GUEST_PASSED = 1
DEBUG_EXIT = ["-device", "isa-debug-exit,iobase=0xf4,iosize=4"]


class RunError(Exception):
    """A program is missing, failed, or printed something that cannot be understood."""


def words(command: Sequence[Word]) -> list[str]:
    """The command with its paths as strings."""
    return [str(word) for word in command]


def run(
    command: Sequence[Word],
    *,
    expected: int | None = 0,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command without input and captures its output.

    Raises RunError if the program is missing, exceeds `timeout` seconds, or ends with another
    status than `expected`; None accepts any status.
    """
    try:
        done = subprocess.run(
            words(command),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        raise RunError(f"{command[0]}: not found") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]}: not finished after {timeout} s") from None
    except OSError as error:
        raise RunError(f"{command[0]}: {error}") from None
    if expected is not None and done.returncode != expected:
        raise RunError(f"{command[0]}: status {done.returncode}\n{done.stderr.strip()[-2000:]}")
    return done


def build_release() -> None:
    """Builds the release binary and the payloads."""
    run(["cargo", "build", "--quiet", "--release", "--package", "hindsight"])
    run(["cargo", "xtask", "payloads"])
