"""Samples, their ratios, and rows of the result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# A row is slower than its baseline when its ratio differs by more than this.
TOLERANCE = 0.02
# Units of which more is better; of all others less is.
RATES = ("MIPS", "a second", "MiB/s")


@dataclass
class Spread:
    """Median and quartiles of samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Computes them."""
        ordered = sorted(samples)

        def quantile(part: float) -> float:
            return ordered[min(len(ordered) - 1, int(part * len(ordered)))]

        return cls(statistics.median(ordered), quantile(0.25), quantile(0.75))


@dataclass
class Row:
    """One measurement: our samples, and those of the peer that were taken in turn.

    `reference` is empty when the peer is missing; then there is no ratio.
    """

    part: str
    name: str
    unit: str
    ours: list[float]
    reference: list[float]
    against: str
    # Such as "<= 1.1": what the ratio must satisfy.
    aim: str | None = None
    ratio: Spread | None = field(init=False)

    def __post_init__(self) -> None:
        """Divides each sample by its neighbour."""
        pairs = zip(self.ours, self.reference, strict=False)
        ratios = [a / b for a, b in pairs]
        self.ratio = Spread.of(ratios) if ratios else None

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the row in another result."""
        return self.part, self.name, self.against

    @property
    def met(self) -> bool | None:
        """Whether the ratio reaches the aim; None without either."""
        if self.aim is None or self.ratio is None:
            return None
        sense, limit = self.aim.split()
        value = self.ratio.median
        return value <= float(limit) if sense == "<=" else value >= float(limit)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON, with all samples."""
        return {
            "part": self.part,
            "name": self.name,
            "unit": self.unit,
            "against": self.against,
            "aim": self.aim,
            "ours": asdict(Spread.of(self.ours)),
            "reference": asdict(Spread.of(self.reference)) if self.reference else None,
            "ratio": asdict(self.ratio) if self.ratio else None,
            "met": self.met,
            "samples": {"ours": self.ours, "reference": self.reference},
        }


@dataclass
class Comparison:
    """A row beside the same row of an earlier result."""

    # This ratio, divided by the earlier one.
    change: float
    slower: bool


def compare(row: Row, earlier: dict[str, Any]) -> Comparison | None:
    """Compares a row with its earlier self: their ratios, or our medians where one has no ratio."""
    before = earlier.get("ratio")
    if row.ratio and before:
        change = row.ratio.median / before["median"]
    elif earlier.get("ours"):
        change = Spread.of(row.ours).median / earlier["ours"]["median"]
    else:
        return None
    worse = 1 / change if row.unit in RATES else change
    return Comparison(change, worse > 1 + TOLERANCE)
