"""Reads the rules: spec/rules.tsv, and the pages of spec/ that hold their text."""

from __future__ import annotations

import pathlib
import re
from dataclasses import dataclass

CLASSES = ("A", "M", "C", "T")


class InputError(Exception):
    """What is wrong with an input file, in one line."""


@dataclass
class Rule:
    """One line of spec/rules.tsv."""

    grade: str
    title: str
    # Why no guest can assert it; empty if one can.
    reason: str
    # The page of spec/ that holds its text; empty if there is none.
    page: str = ""


@dataclass
class RuleSet:
    """All rules, in the order of spec/rules.tsv."""

    # The name of each prefix.
    groups: dict[str, str]
    rules: dict[str, Rule]


def read_rules(path: pathlib.Path) -> RuleSet:
    """Reads spec/rules.tsv, and finds the page of each rule beside it."""
    found = RuleSet({}, {})
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = text.rstrip("\n")
        if line.startswith("## "):
            prefix, _, name = line[3:].partition(" ")
            found.groups[prefix] = name
        elif line and not line.startswith("#"):
            identifier, rule = parse_rule(line, f"{path}:{number}")
            if identifier in found.rules:
                raise InputError(f"{path}:{number}: {identifier} is listed twice")
            if identifier.partition("-")[0] not in found.groups:
                raise InputError(f"{path}:{number}: no heading for {identifier}")
            found.rules[identifier] = rule
    for page in sorted(path.parent.glob("*.md")):
        for heading in re.findall(r"^### (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            if heading in found.rules:
                found.rules[heading].page = page.name
    return found


def parse_rule(line: str, location: str) -> tuple[str, Rule]:
    """Splits a line of spec/rules.tsv."""
    fields = line.split("\t")
    if len(fields) not in (3, 4) or not all(fields):
        raise InputError(f"{location}: not three or four fields separated by tabs")
    identifier, grade, title = fields[:3]
    if not re.fullmatch(r"[A-Z][A-Z0-9]*-\d\d", identifier) or grade not in CLASSES:
        raise InputError(f"{location}: bad identifier or class: {identifier} {grade}")
    return identifier, Rule(grade, title, fields[3] if len(fields) == 4 else "")
