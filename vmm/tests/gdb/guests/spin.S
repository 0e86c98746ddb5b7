# In 64-bit mode: counts for ever, until a debugger sets `stop`; then it raises a triple fault.
    .globl _start, count, stop, spin, die
    .text
_start:
    lea stack_end(%rip), %rsp
    # Some hosts cannot stop a guest that loops with IF clear: see docs/internals/labs.md.
    sti
spin:
    incq count(%rip)
    cmpl $0, stop(%rip)
    je spin
die:
    lidt nothing(%rip)
    ud2

    .data
    .balign 8
count:  .quad 0
stop:   .long 0
nothing:
    .word 0
    .quad 0
    .bss
    .skip 4096
stack_end:

    .section .note.GNU-stack,"",@progbits
