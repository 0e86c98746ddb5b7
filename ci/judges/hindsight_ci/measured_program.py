"""The program of resources/guests/measured, disassembled and executed step by step.

Its instructions, branches and memory accesses are what perf must count and sample.
"""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Periods of the samples in ci/guest/guest-perf: of instructions, and of loads and stores.
INSTRUCTION_PERIOD, ACCESS_PERIOD = 1009, 101
# Entries of the LBR stack.
LBR_ENTRIES = 32
PAGE = 4096
# An access to the stack, whose address differs from process to process.
STACK = "stack"


class Step(NamedTuple):
    """An executed instruction."""

    address: int
    # The mnemonic of a branch, else None.
    branch: str | None
    # The target of a taken branch, else None.
    target: int | None
    # The addresses that it loads from and stores to.
    load: int | str | None
    store: int | str | None
    locked: bool


class Program:
    """The executed instructions of the program, in their order."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads the symbols and the disassembly of the executable."""
        symbols = tool("nm", path).splitlines()
        self.symbols = {name: int(value, 16) for value, _, name in map(str.split, symbols)}
        listing = tool("objdump", "-d", "--no-show-raw-insn", path)
        lines = re.findall(r"^ +([0-9a-f]+):\t(.+)$", listing, re.MULTILINE)
        addresses = [int(address, 16) for address, _ in lines]
        following = dict(zip(addresses, [*addresses[1:], None], strict=True))
        code = {address: text for address, (_, text) in zip(addresses, lines, strict=True)}
        self.steps = list(execute(code, following, self.symbols["_start"]))
        self.branches = [step for step in self.steps if step.branch]
        self.conditional = [step for step in self.branches if (step.branch or "").startswith("j")]
        self.loads = [step for step in self.steps if step.load]
        self.stores = [step for step in self.steps if step.store]

    def edges(self) -> collections.Counter[tuple[int, int]]:
        """How often each branch was taken to each target, without the final system call."""
        return collections.Counter(
            (step.address, step.target) for step in self.branches if step.target
        )

    def contains(self, address: int) -> bool:
        """Whether this is an address of its code."""
        return self.symbols["_start"] <= address <= self.symbols["return"]

    def branch_stacks(self) -> Iterator[list[tuple[int, int]]]:
        """The LBR stack of each sample, newest branch first.

        The IRET from a page fault is in the stack as well, and perf leaves it out: the first load
        from a page and the first store to one fault.
        """
        stack: collections.deque[tuple[int, int] | None] = collections.deque(maxlen=LBR_ENTRIES)
        touched: set[tuple[str, int]] = set()
        for count, step in enumerate(self.steps, 1):
            for kind, address in (("load", step.load), ("store", step.store)):
                if not isinstance(address, int) or (kind, address // PAGE) in touched:
                    continue
                touched.add((kind, address // PAGE))
                stack.appendleft(None)
            if step.target:
                stack.appendleft((step.address, step.target))
            if count % INSTRUCTION_PERIOD == 0:
                yield [branch for branch in stack if branch]


def tool(*command: str | pathlib.Path) -> str:
    """The output of a tool of binutils."""
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def recorded(events: list[Step], period: int) -> list[Step]:
    """The events that PEBS records: with a counter at -period, the one after the overflow."""
    return events[period :: period + 1]


def execute(
    code: Mapping[int, str], following: Mapping[int, int | None], address: int | None
) -> Iterator[Step]:
    """Executes the few kinds of instructions that the program has, from an address on."""
    registers: dict[str, int] = {}
    calls: list[int | None] = []
    zero = False
    while address:
        text = code[address]
        fields = text.replace(",", " ").split()
        locked = fields[0] == "lock"
        name, *operands = fields[locked:]
        branch = target = None
        load: int | str | None = None
        store: int | str | None = None
        memory = re.search(r"(0x[0-9a-f]+)?\((%r(?!ip)\w+)\)", text)
        accessed = memory and registers[memory[2]] + int(memory[1] or "0", 16)
        after = following[address]
        if name == "call":
            branch, store, target = name, STACK, int(operands[0], 16)
            calls.append(after)
        elif name == "ret":
            branch, load, target = name, STACK, calls.pop()
        elif name == "jne":
            branch, target = name, None if zero else int(operands[0], 16)
        elif name == "syscall":
            branch = name
        elif name == "lea":
            registers[operands[1]] = int(text.split("#")[1].split()[0], 16)
        elif name == "add":
            registers[operands[1]] += int(operands[0][1:], 16)
        elif name == "dec":
            registers[operands[0]] -= 1
            zero = registers[operands[0]] == 0
        elif name == "mov" and operands[0][0] == "$":
            registers[operands[1]] = int(operands[0][1:], 16)
        elif name in ("mov", "incl") and memory:
            load = accessed if operands[0] == memory[0] else None
            store = accessed if operands[-1] == memory[0] else None
        elif name not in ("xor", "inc", "test", "clflush"):
            raise ValueError(f"an instruction that the judge does not execute: {text}")
        yield Step(address, branch, target, load, store, locked)
        address = None if name == "syscall" else target or after
