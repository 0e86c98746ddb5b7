"""The markdown table, and the comparison with an earlier result."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from hindsight_ci.bench.measure import Row, Spread, compare
from hindsight_ci.project import RunError

Baseline = dict[tuple[str, str, str], dict[str, Any]]


def number(value: float) -> str:
    """A number with three significant digits."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.2e}"


def read_baseline(path: pathlib.Path) -> Baseline:
    """The rows of an earlier bench.json."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return {(row["part"], row["name"], row["against"]): row for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: {error}") from None


def table(rows: Sequence[Row], baseline: Baseline | None = None) -> str:
    """The table of all rows; with a baseline, each beside its earlier self."""
    head = ["measured", "ours", "against", "ratio (quartiles)", "aim", "met"]
    if baseline is not None:
        head.append("to the baseline")
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = cells_of(row)
        if baseline is not None:
            cells.append(baseline_cell(row, baseline))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cells_of(row: Row) -> list[str]:
    """The cells of a row, without the baseline."""
    against, ratio = f"{row.against}: not measured", ""
    if row.ratio:
        against = f"{row.against}: {number(Spread.of(row.reference).median)} {row.unit}"
        quartiles = f"{number(row.ratio.low)}-{number(row.ratio.high)}"
        ratio = f"{number(row.ratio.median)} ({quartiles})"
    met = {None: "", True: "yes", False: "**no**"}[row.met]
    ours = f"{number(Spread.of(row.ours).median)} {row.unit}"
    return [f"{row.part}: {row.name}", ours, against, ratio, row.aim or "", met]


def baseline_cell(row: Row, baseline: Baseline) -> str:
    """The ratio to the earlier result, marked when the row is slower by more than the tolerance."""
    earlier = baseline.get(row.key)
    found = compare(row, earlier) if earlier else None
    if found is None:
        return "new"
    return f"**{found.change:.3f} slower**" if found.slower else f"{found.change:.3f}"


def slower_rows(rows: Sequence[Row], baseline: Baseline) -> list[Row]:
    """The rows that are slower than their earlier selves by more than the tolerance."""
    found = []
    for row in rows:
        earlier = baseline.get(row.key)
        comparison = compare(row, earlier) if earlier else None
        if comparison and comparison.slower:
            found.append(row)
    return found
