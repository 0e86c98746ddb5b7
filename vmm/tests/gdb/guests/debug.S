# In 64-bit mode: uses its own debug registers, single-step and INT3. Exits with 0 if it got all of its
# own debug exceptions and no other.
    .globl _start, watched, mine, handler, end
    .text
_start:
    lea stack_end(%rip), %rsp
    lea idt(%rip), %rdi
    lea handler(%rip), %rax
    call gate1
    lea breakpoint(%rip), %rax
    lea idt+32(%rip), %rdi
    call gate1
    lidt idtr(%rip)
    lea mine(%rip), %rax
    mov %rax, %dr0
    lea watched(%rip), %rax
    mov %rax, %dr1
    # DR0: execution of `mine`. DR1: writes of 8 bytes to `watched`.
    mov $0x00900402, %eax
    or $0x8, %eax
    mov %rax, %dr7
    xor %ebx, %ebx
    mov $3, %ecx
again:
    incl plain(%rip)
mine:
    nop
    incq watched(%rip)
    loop again
    # Six single steps, up to the second POPFQ.
    pushfq
    orq $0x100, (%rsp)
    popfq
    nop
    nop
    andq $~0x100, (%rsp)
    pushfq
    andq $~0x100, (%rsp)
    popfq
    int3
end:
    # Three exceptions for each of DR0 and DR1, and six single steps.
    mov seen0(%rip), %eax
    sub $3, %eax
    mov seen1(%rip), %edx
    sub $3, %edx
    or %edx, %eax
    mov seen3(%rip), %edx
    dec %edx
    or %edx, %eax
    mov steps(%rip), %edx
    sub $6, %edx
    or %edx, %eax
    jz 1f
    mov $1, %al
1:  out %al, $0xf4
2:  hlt
    jmp 2b

gate1:
    # A 64-bit interrupt gate to rax at rdi + 16.
    mov %ax, 16(%rdi)
    mov %cs, 18(%rdi)
    movw $0x8e00, 20(%rdi)
    shr $16, %rax
    mov %rax, 22(%rdi)
    movw $0, 30(%rdi)
    ret

handler:
    push %rax
    mov %dr6, %rax
    test $1, %al
    jz 1f
    incl seen0(%rip)
    # RF: the instruction is executed on return.
    orl $0x10000, 24(%rsp)
1:  test $2, %al
    jz 2f
    incl seen1(%rip)
2:  test $0x4000, %eax
    jz 3f
    incl steps(%rip)
3:  mov $0xffff0ff0, %eax
    mov %rax, %dr6
    pop %rax
    iretq

breakpoint:
    incl seen3(%rip)
    iretq

    .data
    .balign 8
watched: .quad 0
plain:  .long 0
seen0:  .long 0
seen1:  .long 0
seen3:  .long 0
steps:  .long 0
idtr:
    .word 4095
    .quad idt
    .bss
    .balign 16
idt:
    .skip 4096
    .skip 4096
stack_end:

    .section .note.GNU-stack,"",@progbits
