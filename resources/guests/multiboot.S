# A multiboot 1 kernel: prints "hello from multiboot" and its command line on COM1, and writes its
# verdict to the debug exit port: 0, or 1 if it was not booted by multiboot. `cargo xtask multiboot` builds it.

    .set COM1, 0x3f8
    .set DEBUG_EXIT, 0xf4
    .set LOADER_MAGIC, 0x2badb002
    .set INFO_CMDLINE, 1 << 2

    .text
    # The header: magic, flags (page-aligned modules, memory information), checksum.
    .align 4
    .long 0x1badb002, 3, -(0x1badb002 + 3)

    .globl _start
_start:
    mov $stack_top, %esp
    cmp $LOADER_MAGIC, %eax
    jne fail
    mov $hello, %esi
    call print
    testl $INFO_CMDLINE, (%ebx)
    jz 1f
    mov $' ', %al
    call put
    mov 16(%ebx), %esi
    call print
1:  mov $'\n', %al
    call put
    xor %eax, %eax
    jmp end

fail:
    mov $1, %eax
end:
    out %eax, $DEBUG_EXIT
    # The port has not ended the run: wait for ever.
1:  cli
    hlt
    jmp 1b

# Prints the string at ESI up to its NUL.
print:
    lodsb
    test %al, %al
    jz 1f
    call put
    jmp print
1:  ret

# Prints AL once the transmitter is empty.
put:
    mov %al, %cl
    mov $COM1 + 5, %dx
1:  in %dx, %al
    test $0x20, %al
    jz 1b
    mov $COM1, %dx
    mov %cl, %al
    out %al, %dx
    ret

    .section .rodata
hello:
    .asciz "hello from multiboot"

    .bss
    .align 16
    .skip 0x1000
stack_top:
