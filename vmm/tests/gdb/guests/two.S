# In 64-bit mode, with a second processor in real mode: each counts for ever.
    .globl _start, count0, count1, spin0, spin1
    .text
_start:
    lea stack_end(%rip), %rsp
    # Some hosts cannot stop a guest that loops with IF clear: see docs/internals/labs.md.
    sti
    # The second processor's code goes to 0x8000.
    lea ap(%rip), %rsi
    mov $0x8000, %edi
    mov $(ap_end - ap), %ecx
    rep movsb
    # INIT and start-up IPI by the xAPIC page, which the start of ELF images does not map: x2APIC.
    mov $0x1b, %ecx
    rdmsr
    or $0xc00, %eax
    wrmsr
    mov $0x830, %ecx
    mov $1, %edx
    mov $0x4500, %eax
    wrmsr
    mov $0x4608, %eax
    wrmsr
    # When a debugger stops the guest at spin0, both processors count.
1:  cmpl $0, count1
    je 1b
spin0:
    incq count0(%rip)
    jmp spin0

    .code16
ap:
    xor %ax, %ax
    mov %ax, %ds
    sti
spin1:
    incl count1_at
    jmp spin1
ap_end:
    .code64
    .set count1_at, 0x9000
    .set count1, 0x9000

    .data
    .balign 8
count0: .quad 0
    .bss
    .skip 4096
stack_end:

    .section .note.GNU-stack,"",@progbits
