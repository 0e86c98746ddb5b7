#include "queue.h"

static struct queue jobs;
long total;

static void out(unsigned short port, unsigned char value)
{
    __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static void print(const char *text)
{
    while (*text)
        out(0x3f8, (unsigned char)*text++);
}

static void work(long count)
{
    for (long job = 1; job <= count; job++) {
        queue_put(&jobs, job * 3);
        if (job % 2 == 0)
            total += queue_take(&jobs);
    }
}

int main(void)
{
    queue_init(&jobs);
    work(20);
    int broken = jobs.guard != GUARD;
    print(broken ? "the guard is broken\n" : "all is well\n");
    out(0xf4, (unsigned char)broken);
    return 0;
}
