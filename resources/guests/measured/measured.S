# A Linux program whose performance events are known: hindsight_ci.perf_judge computes them from this code. It has no library,
# so that it executes nothing else at CPL 3.
    .set ROUNDS, 5000
    .set LINES, 512
    .set PASSES, 8
    .set FLUSHES, 2000

    .globl _start
    .text
_start:
    xor %eax, %eax
    mov $ROUNDS, %ecx
again:
    call called
around:
    dec %ecx
again_jump:
    jnz again

    mov $PASSES, %edx
pass:
    mov $LINES, %ecx
    lea buffer(%rip), %rsi
load:
    mov (%rsi), %rbx
store:
    mov %rbx, 8(%rsi)
    add $64, %rsi
    dec %ecx
load_jump:
    jnz load
    dec %edx
pass_jump:
    jnz pass

# Each of these loads misses the caches, because the line was flushed.
    mov $FLUSHES, %ecx
    lea buffer(%rip), %rsi
flush:
    clflush (%rsi)
far_load:
    mov (%rsi), %rbx
    dec %ecx
flush_jump:
    jnz flush

    lock incl (%rsi)
    mov $231, %eax              # exit_group
    xor %edi, %edi
    syscall

called:
    inc %rax
    test %rax, %rax
return:
    ret

    .bss
    .balign 4096
buffer:
    .skip LINES * 64
    .section .note.GNU-stack, "", @progbits
