# In 64-bit mode: waits until a system-management interrupt was handled, and exits with the number of them.
    .globl _start, spin
    .set SMBASE, 0x30000
    .set HANDLED, 0x7000
    .text
_start:
    lea handler(%rip), %rsi
    mov $SMBASE + 0x8000, %edi
    mov $handler_end - handler, %ecx
    rep movsb
    mov $SMBASE + HANDLED, %ebx
    movl $0, (%rbx)
spin:
    cmpl $0, (%rbx)
    je spin
    mov (%rbx), %eax
    out %eax, $0xf4

    .code16
handler:
    mov %cs, %ax
    mov %ax, %ds
    incl HANDLED
    rsm
handler_end:

    .section .note.GNU-stack,"",@progbits
