# In 64-bit mode: counts, while the timer of the local APIC interrupts it periodically. Four single steps
# that do not enter handlers increment `count` by one.
    .globl _start, count, ticks, loop, handler
    .text
_start:
    lea stack_end(%rip), %rsp
    lea handler(%rip), %rax
    lea idt+16*0x40(%rip), %rdi
    mov %ax, (%rdi)
    mov %cs, 2(%rdi)
    movw $0x8e00, 4(%rdi)
    shr $16, %rax
    mov %rax, 6(%rdi)
    lidt idtr(%rip)
    # x2APIC; the APIC on; a periodic timer with vector 0x40.
    mov $0x1b, %ecx
    rdmsr
    or $0xc00, %eax
    wrmsr
    xor %edx, %edx
    mov $0x80f, %ecx
    mov $0x1ff, %eax
    wrmsr
    mov $0x83e, %ecx
    mov $0xb, %eax
    wrmsr
    mov $0x832, %ecx
    mov $0x20040, %eax
    wrmsr
    mov $0x838, %ecx
    mov $PERIOD, %eax
    wrmsr
    sti
loop:
    incq count(%rip)
    nop
    nop
    jmp loop

handler:
    incq ticks(%rip)
    push %rax
    push %rcx
    push %rdx
    xor %eax, %eax
    xor %edx, %edx
    mov $0x80b, %ecx
    wrmsr
    pop %rdx
    pop %rcx
    pop %rax
    iretq

    .set PERIOD, 2

    .data
    .balign 8
count:  .quad 0
ticks:  .quad 0
idtr:
    .word 0x7ff
    .quad idt
    .bss
    .balign 16
idt:
    .skip 0x800
    .skip 4096
stack_end:

    .section .note.GNU-stack,"",@progbits
