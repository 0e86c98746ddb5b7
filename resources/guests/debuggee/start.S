# The entry point in 64-bit mode (hindsight run --protocol elf): sets up a stack, and calls main().
    .globl _start
    .text
_start:
    lea stack_end(%rip), %rsp
    xor %ebp, %ebp
    call main
halt:
    cli
    hlt
    jmp halt

    .bss
    .balign 16
stack:
    .skip 16384
stack_end:

    .section .note.GNU-stack,"",@progbits
