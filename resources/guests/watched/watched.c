// A Linux program for a debugger inside a guest: `add` is called with 1 to 100.
#include <stdio.h>

volatile long total;
volatile long limit = 100;

__attribute__((noinline)) void add(long n)
{
    total += n;
}

int main(void)
{
    for (long n = 1; n <= limit; n++)
        add(n);
    printf("total %ld\n", total);
    return 0;
}
