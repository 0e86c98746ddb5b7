"""Small guests in assembler, and how they are built."""

from __future__ import annotations

import pathlib

from hindsight_ci.project import run

# A guest that sleeps forever: an ELF image with a PVH entry.
IDLE = """
    .section .note.pvh, "a", @note
    .long 4, 4, 18
    .asciz "Xen"
    .long _start
    .text
    .code32
    .globl _start
_start:
    sti
1:  hlt
    jmp 1b
"""

# A guest to be debugged, in the same form: 2000 calls, a loop of 100 million instructions, and an
# endless loop.
DEBUGGED = """
    .section .note.pvh, "a", @note
    .long 4, 4, 18
    .asciz "Xen"
    .long _start
    .text
    .code32
    .globl _start, called, work, done
_start:
    mov $stack_end, %esp
    movl $1, early
    mov $2000, %ecx
1:  call called
    dec %ecx
    jnz 1b
work:
    mov $33333334, %ecx
2:  incl counted
    dec %ecx
    jnz 2b
done:
    jmp done
called:
    ret
    .data
    .globl early, untouched
early: .long 0
counted: .long 0
    # An access to the page of a watchpoint costs more.
    .balign 4096
untouched: .long 0
    .balign 4096
    .bss
    .skip 4096
stack_end:
"""


def build(folder: pathlib.Path, name: str, source: str) -> pathlib.Path:
    """Assembles and links a guest; returns the image."""
    (folder / f"{name}.s").write_text(source, encoding="utf-8")
    run(["as", "--64", "-o", folder / f"{name}.o", folder / f"{name}.s"])
    run(["ld", "-Ttext", "0x100000", "-o", folder / name, folder / f"{name}.o"])
    return folder / name
