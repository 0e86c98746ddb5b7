# In 64-bit mode: writes a buffer with one repeated instruction, and raises a page fault, which is a triple fault.
    .globl _start, writer, bad, buffer
    .text
_start:
    lea stack_end(%rip), %rsp
    lidt nothing(%rip)
    lea buffer(%rip), %rdi
    mov $100, %ecx
    mov $7, %al
    nop
writer:
    rep stosb
    nop
    movabs $0xffff800000000000, %rbx
bad:
    mov (%rbx), %eax

    .data
nothing:
    .word 0
    .quad 0
    .bss
buffer:
    .skip 100
    .skip 4096
stack_end:

    .section .note.GNU-stack,"",@progbits
