/* A program of Linux that reads one byte of each cache line of so much memory, again and again: with more memory than
 * the caches hold it streams, with less it is resident. ci/rdt-judge and what runs in the guest know what it reads.
 *
 * usage: walk BYTES PASSES BEFORE_MS
 *
 * It sleeps BEFORE_MS after the memory is there, so that somebody can begin to watch; then it works, and says so. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LINE = 64 };

int main(int count, char **words)
{
    if (count != 4) {
        fprintf(stderr, "usage: walk BYTES PASSES BEFORE_MS\n");
        return 2;
    }
    size_t bytes = strtoul(words[1], NULL, 0);
    unsigned long passes = strtoul(words[2], NULL, 0);
    unsigned long before = strtoul(words[3], NULL, 0);
    volatile char *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("walk");
        return 1;
    }
    usleep(before * 1000);
    for (unsigned long pass = 0; pass < passes; pass++) {
        for (size_t at = 0; at < bytes; at += LINE) {
            (void)memory[at];
        }
    }
    printf("walked %zu bytes %lu times\n", bytes, passes);
    return 0;
}
