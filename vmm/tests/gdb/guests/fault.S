# In 64-bit mode: counts to 1000, and raises a triple fault.
    .globl _start, count, die
    .text
_start:
    lea stack_end(%rip), %rsp
again:
    incq count(%rip)
    cmpq $1000, count(%rip)
    jb again
    # Runs long enough for a checkpoint before the fault.
    mov $6000000, %ecx
wait:
    dec %ecx
    jnz wait
die:
    lidt nothing(%rip)
    ud2

    .data
    .balign 8
count:  .quad 0
nothing:
    .word 0
    .quad 0
    .bss
    .skip 4096
stack_end:

    .section .note.GNU-stack,"",@progbits
