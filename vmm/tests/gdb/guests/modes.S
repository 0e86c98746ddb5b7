# Starts in real mode at 0x7c00, enters 32-bit and then 64-bit mode, and exits.
    .text
    .code16
    .globl _start, real, protected, long_mode, end
_start:
    cli
    xor %ax, %ax
    mov %ax, %ds
    mov $0x7000, %sp
    ljmp $0x7c0, $(real - _start)
real:
    mov $0x1234, %bx
    movl $0xfeedface, %es:0x500
    lgdtl gdtr
    mov %cr0, %eax
    or $1, %al
    mov %eax, %cr0
    ljmpl $8, $protected
    .code32
protected:
    mov $16, %ax
    mov %ax, %ds
    mov %ax, %es
    mov %ax, %ss
    mov $0x7000, %esp
    # 2 MiB pages for the first GiB: tables at 0x1000, 0x2000, 0x3000.
    mov $0x1000, %edi
    xor %eax, %eax
    mov $0xc00, %ecx
    rep stosl
    movl $0x2003, 0x1000
    movl $0x3003, 0x2000
    mov $0x3000, %edi
    mov $0x83, %eax
    mov $512, %ecx
1:  mov %eax, (%edi)
    add $0x200000, %eax
    add $8, %edi
    loop 1b
    mov $0x1000, %eax
    mov %eax, %cr3
    mov $0x20, %eax
    mov %eax, %cr4
    mov $0xc0000080, %ecx
    mov $0x100, %eax
    xor %edx, %edx
    wrmsr
    mov %cr0, %eax
    or $0x80000000, %eax
    mov %eax, %cr0
    ljmp $24, $long_mode
    .code64
long_mode:
    movabs $0x1122334455667788, %r15
    movl $0x600d, 0x500
    nop
end:
    xor %eax, %eax
    out %al, $0x80
    out %al, $0xf4
2:  hlt
    jmp 2b

    .balign 8
gdt:
    .quad 0
    .quad 0x00cf9b000000ffff
    .quad 0x00cf93000000ffff
    .quad 0x00af9b000000ffff
gdtr:
    .word . - gdt - 1
    .long gdt

    .section .note.GNU-stack,"",@progbits
