"""Prints checks one a line, and counts those that failed."""

from __future__ import annotations

from collections.abc import Sequence


class Checks:
    """The result of a judge: one line a check on standard output."""

    def __init__(self) -> None:
        """Starts with no check and no failure."""
        self.failed = 0

    def check(self, name: str, passed: bool, found: object = "") -> None:
        """Prints one check; a failed one with what was found instead."""
        print(f"pass {name}" if passed else f"FAIL {name}: {found}", flush=True)
        self.failed += not passed

    def within(self, name: str, found: float | None, low: float, high: float) -> None:
        """Checks that a number was found and lies between two bounds, both included."""
        passed = found is not None and low <= found <= high
        self.check(name, passed, f"{found} is not within {low:.0f} and {high:.0f}")

    def same(self, name: str, found: Sequence[object], expected: Sequence[object]) -> None:
        """Checks that two lists are equal, and shows where they first differ."""
        length = min(len(found), len(expected))
        first = next((n for n in range(length) if found[n] != expected[n]), length)
        self.check(
            name,
            found == expected,
            f"{len(found)} found, {len(expected)} expected; number {first} is "
            f"{list(found[first : first + 1])}, expected {list(expected[first : first + 1])}",
        )

    def status(self) -> int:
        """The exit status: 1 if a check failed, else 0."""
        return 1 if self.failed else 0
