/* A Linux program that reads one byte of each cache line of a buffer, PASSES times. A buffer that is larger than the
 * caches is read from memory in each pass, a smaller one stays in the caches. ci/guest/guest-rdt runs the program, and
 * hindsight_ci.rdt_judge computes what it reads.
 *
 * usage: walk BYTES PASSES PAUSE_MS
 *
 * It stops itself after it has allocated the buffer, until it receives SIGCONT. It sleeps PAUSE_MS after each pass, and
 * prints at the end how long the passes took, without the pauses. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 64 };

static unsigned long long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

int main(int count, char **words)
{
    if (count != 4) {
        fprintf(stderr, "usage: walk BYTES PASSES PAUSE_MS\n");
        return 2;
    }
    size_t bytes = strtoul(words[1], NULL, 0);
    unsigned long passes = strtoul(words[2], NULL, 0);
    unsigned long pause = strtoul(words[3], NULL, 0);
    volatile char *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("walk");
        return 1;
    }
    raise(SIGSTOP);
    unsigned long long taken = 0;
    for (unsigned long pass = 0; pass < passes; pass++) {
        unsigned long long start = now();
        for (size_t at = 0; at < bytes; at += LINE) {
            (void)memory[at];
        }
        taken += now() - start;
        usleep(pause * 1000);
    }
    printf("walked %zu bytes %lu times in %llu us\n", bytes, passes, taken / 1000);
    return 0;
}
