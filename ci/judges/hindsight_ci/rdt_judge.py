"""Judges what Linux's resctrl and Debian's pqos measure when they partition the cache of a guest.

The guest boots once with --deterministic, so that its results depend on nothing but the virtual
processor. Programs in it read known amounts of memory: occupancy and traffic must match them,
within the masks of their groups. Prints one line a check; exit status 1 if one failed, 2 for
wrong usage.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import TypeAlias

from hindsight_ci.checks import Checks
from hindsight_ci.linux_guest import boot, sections
from hindsight_ci.project import ROOT

TIMEOUT = 1500
# Linux leaves all but MBA off on this model unless these options name it (rule RDT-13).
LINE = (
    "console=ttyS0 quiet panic=-1 nmi_watchdog=0 rdt=cmt,mbmtotal,mbmlocal,l3cat,l3cdp,mba "
    "hindsight.script=/files/guest-rdt"
)
MIB = 1 << 20
# Bytes of a way of the L3, and of the unit of all counters.
WAY = 36864 * 64
UNIT = 73728
WHOLE = 11 * WAY

Counters: TypeAlias = dict[tuple[str, str], int]
Sections: TypeAlias = dict[str, list[str]]

DETECTED = (
    "L3 allocation detected",
    "MB allocation detected",
    "L3 monitoring detected",
    "cat_l3",
    "cdp_l3",
    "mba",
    "cqm_occup_llc",
    "cqm_mbm_total",
    "cqm_mbm_local",
    "L3/cbm_mask 7ff",
    "L3/min_cbm_bits 1",
    "L3/shareable_bits 600",
    "L3/num_closids 16",
    "L3_MON/num_rmids 144",
    "MB/min_bandwidth 10",
    "MB/bandwidth_gran 10",
    "MB/delay_linear 1",
    "MB/num_closids 8",
)
REFUSED = (
    "L3:0=505 no The mask 505 has non-consecutive 1-bits",
    "L3:0=0 no Mask out of range",
    "L3:0=fff no Mask out of range",
    "MB:0=5 no MB value 5 out of range",
)


def counters(lines: Sequence[str]) -> list[Counters]:
    """The readings of the counters, one dictionary each time the guest printed all of them."""
    readings: list[Counters] = [{}]
    for line in lines:
        fields = line.split()
        if len(fields) == 3 and fields[2].isdigit():
            key = (fields[0], fields[1])
            if key in readings[-1]:
                readings.append({})
            readings[-1][key] = int(fields[2])
    return readings


def pqos_totals(lines: Sequence[str]) -> tuple[float | None, float]:
    """The greatest occupancy and the traffic of a pqos table, in bytes; a row is a second."""
    titles: list[str] = []
    occupancy: list[float] = []
    traffic = 0.0
    for line in lines:
        fields = [field.strip('"') for field in line.split(",")]
        if "LLC[KB]" in fields:
            titles = fields
        elif titles and len(fields) == len(titles) and re.match(r"\d{4}-", fields[0]):
            row = dict(zip(titles, fields, strict=True))
            occupancy.append(float(row["LLC[KB]"]) * 1024)
            traffic += float(row["MBT[MB/s]"]) * MIB
    return max(occupancy, default=None), traffic


def judge_detection(checks: Checks, found: Sections) -> None:
    """The facilities that Linux detects, and the values that it refuses."""
    text = "\n".join(found.get("found", []))
    for phrase in DETECTED:
        checks.check(f"Linux finds {phrase}", phrase in text, text)
    text = "\n".join(found.get("masks", []))
    for phrase in REFUSED:
        checks.check(f"refused: {phrase}", phrase in text, text)
    checks.check("the mask that was set is shown", "L3:0=003" in text, text)


def judge_streaming(checks: Checks, lines: Sequence[str]) -> None:
    """16 MiB are read twice in a group of two ways, and then in a group of all ways."""
    readings = counters(lines)
    if len(readings) != 3 or any(len(reading) != 6 for reading in readings):
        checks.check("counters of the groups", False, lines)
        return
    checks.check("nothing is charged to new groups", not any(readings[0].values()), readings[0])
    narrow = {event: value for (group, event), value in readings[1].items() if group == "COS1"}
    total = narrow["mbm_total_bytes"]
    checks.within("two ways: occupancy", narrow["llc_occupancy"], 1.8 * WAY, 2 * WAY + UNIT)
    checks.within("two ways: every pass comes from memory", total, 30 * MIB, 40 * MIB)
    checks.within("two ways: local traffic", narrow["mbm_local_bytes"], 30 * MIB, total)
    others = [value for (group, _), value in readings[1].items() if group == "COS2"]
    checks.check("nothing is charged to the other group", not any(others), readings[1])
    wide = {event: value for (group, event), value in readings[2].items() if group == "COS2"}
    checks.within("all ways: occupancy", wide["llc_occupancy"], 13 * MIB, WHOLE)
    checks.within(
        "all ways: one pass comes from memory", wide["mbm_total_bytes"], 13 * MIB, 20 * MIB
    )
    last = readings[2]
    checks.check("traffic never falls", last["COS1", "mbm_total_bytes"] >= total, last)
    bounded = last["COS1", "llc_occupancy"] <= 2 * WAY + UNIT
    checks.check("occupancy of two ways stays within them", bounded, last)


def judge_throttling(checks: Checks, lines: Sequence[str]) -> None:
    """2 MiB are read with 100, 50 and 10 percent of the bandwidth, in virtual time."""
    times = [int(found[1]) for line in lines if (found := re.search(r"times in (\d+) us", line))]
    passed = len(times) == 3 and times[0] * 2 <= times[1] and times[1] * 4 <= times[2]
    checks.check("less bandwidth takes longer", passed, times)


def judge_partition(checks: Checks, found: Sections) -> None:
    """2 MiB stay in use while another program streams through 32 MiB, five times."""
    shared, parted = (counters(found.get(name, []))[0] for name in ("shared", "partitioned"))
    if len(shared) != 6 or len(parted) != 6:
        checks.check("counters of a resident and a streaming program", False, (shared, parted))
        return
    read = [reading["resident", "mbm_total_bytes"] for reading in (shared, parted)]
    held = {group: parted[group, "llc_occupancy"] for group in ("resident", "streaming")}
    checks.within("shared ways: the resident program reads it again", read[0], 5 * MIB, 16 * MIB)
    checks.within("own ways: the resident program reads it once", read[1], 1.5 * MIB, 4 * MIB)
    checks.within("own ways: occupancy", held["resident"], 1.8 * MIB, 2 * WAY + UNIT)
    checks.within("own ways: occupancy of the other", held["streaming"], 8 * WAY, 9 * WAY + UNIT)


def judge_pqos(checks: Checks, found: Sections) -> None:
    """The results of pqos through resctrl, and through the MSRs."""
    text = "\n".join(found.get("pqos-shown", []))
    for phrase in (
        "L3CA COS1 => MASK 0x3",
        "L3CA COS2 => MASK 0x7ff",
        "MBA COS1 => 100% available",
    ):
        checks.check(f"pqos shows {phrase}", phrase in text, text)
    for name in ("pqos-watched", "pqos-msr"):
        occupancy, traffic = pqos_totals(found.get(name, []))
        checks.within(f"{name}: occupancy of two ways", occupancy, 1.8 * WAY, 2 * WAY + UNIT)
        checks.within(f"{name}: traffic of two passes", traffic, 30 * MIB, 40 * MIB)
    text = "\n".join(found.get("pqos-msr", []))
    parts = (
        "L3CA COS1 => MASK 0x3",
        "Core 0, L2ID 0, L3ID 0 => COS1",
        "L3CA COS1 => MASK 0x7ff",
        "Core 0, L2ID 0, L3ID 0 => COS0, RMID0",
    )
    positions = [text.find(part) for part in parts]
    in_order = -1 not in positions and positions == sorted(positions)
    checks.check("pqos-msr: set, shown and set back", in_order, text)


def judge_prioritization(checks: Checks, lines: Sequence[str]) -> None:
    """16 MiB are read once in a group with one way for data and the others for code."""
    text = "\n".join(lines)
    passed = "L3DATA:0=001" in text and "L3CODE:0=7fe" in text
    checks.check("masks for data and for code", passed, text)
    occupancy = counters(lines)[0].get(("COS1", "llc_occupancy"))
    # The program has some pages of code.
    checks.within("one way for data: occupancy", occupancy, 0.9 * WAY, WAY + 20 * UNIT)


def judge(output: str) -> int:
    """Judges the output of the guest; returns the exit status."""
    if "rdt-judge: complete" not in output:
        print("FAIL the guest did not finish; it printed:\n" + output[-3000:])
        return 1
    found = sections(output, "rdt-judge")
    checks = Checks()
    judge_detection(checks, found)
    judge_streaming(checks, found.get("streaming", []))
    judge_throttling(checks, found.get("throttled", []))
    judge_partition(checks, found)
    judge_pqos(checks, found)
    judge_prioritization(checks, found.get("prioritized", []))
    return checks.status()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="hindsight_ci.rdt_judge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", type=pathlib.Path, help="the folder that `cargo xtask guest-linux --rdt` made"
    )
    parser.add_argument("--hindsight", type=pathlib.Path, default=ROOT / "target/debug/hindsight")
    parser.add_argument("--keep", type=pathlib.Path, help="write the output of the guest to a file")
    options = parser.parse_args(arguments)
    output = boot(options.directory, options.hindsight, ["--deterministic"], LINE, TIMEOUT)
    if options.keep:
        options.keep.write_text(output, encoding="utf-8")
    return judge(output)


if __name__ == "__main__":
    sys.exit(main())
