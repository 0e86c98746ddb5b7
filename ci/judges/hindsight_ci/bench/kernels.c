// Small programs for the part `programs` of the benchmarks: each does one kind of work and prints a checksum.
#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void nbody(void) {
    enum { BODIES = 5 };
    double p[BODIES][3], v[BODIES][3], mass[BODIES];
    for (int i = 0; i < BODIES; i++)
        for (int k = 0; k < 3; k++)
            p[i][k] = i * 1.7 + k, v[i][k] = 0.01 * (i - k), mass[i] = 1.0 + i;
    for (int step = 0; step < 300000; step++) {
        for (int i = 0; i < BODIES; i++)
            for (int j = i + 1; j < BODIES; j++) {
                double d[3], square = 0;
                for (int k = 0; k < 3; k++)
                    d[k] = p[i][k] - p[j][k], square += d[k] * d[k];
                double force = 0.001 / (square * sqrt(square) + 0.01);
                for (int k = 0; k < 3; k++)
                    v[i][k] -= d[k] * mass[j] * force, v[j][k] += d[k] * mass[i] * force;
            }
        for (int i = 0; i < BODIES; i++)
            for (int k = 0; k < 3; k++)
                p[i][k] += 0.001 * v[i][k];
    }
    printf("%.9f\n", p[0][0] + p[4][2]);
}

static void matmul(void) {
    enum { N = 160 };
    static float a[N][N], b[N][N], c[N][N];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++)
            a[i][j] = (i + j) % 7, b[i][j] = (i * j) % 5;
    for (int round = 0; round < 6; round++)
        for (int i = 0; i < N; i++)
            for (int k = 0; k < N; k++)
                for (int j = 0; j < N; j++)
                    c[i][j] += a[i][k] * b[k][j];
    printf("%.0f\n", (double)c[3][5]);
}

__attribute__((target("avx2"))) static void avx2(void) {
    static int32_t data[4096];
    for (int i = 0; i < 4096; i++)
        data[i] = i * 2654435761u;
    __m256i sum = _mm256_setzero_si256();
    for (int round = 0; round < 12000; round++)
        for (int i = 0; i < 4096; i += 8) {
            __m256i x = _mm256_loadu_si256((__m256i *)(data + i));
            sum = _mm256_add_epi32(_mm256_xor_si256(sum, x), _mm256_slli_epi32(x, 3));
        }
    int32_t out[8];
    _mm256_storeu_si256((__m256i *)out, sum);
    printf("%d\n", out[0] ^ out[7]);
}

static void strings(void) {
    static char text[1 << 16], copy[1 << 16];
    memset(text, 'x', sizeof text - 1);
    size_t sum = 0;
    for (int round = 0; round < 6000; round++) {
        text[round * 7 % 60000] = 'a' + round % 20;
        sum += strlen(text + round % 64);
        memcpy(copy, text, sizeof text);
        sum += strchr(copy, 'a') - copy + (size_t)memcmp(copy, text, sizeof text);
    }
    printf("%zu\n", sum);
}

static void x87(void) {
    long double sum = 0;
    for (int i = 1; i < 4000000; i++)
        sum += 1.0L / ((long double)i * i + 0.5L);
    printf("%.15Lf\n", sum);
}

static int compare(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void sort(void) {
    enum { N = 600000 };
    uint32_t *data = malloc(N * sizeof *data), state = 1;
    for (int i = 0; i < N; i++)
        data[i] = state = state * 1664525 + 1013904223;
    qsort(data, N, sizeof *data, compare);
    printf("%u\n", data[N / 3]);
}

static void forks(void) {
    int sum = 0;
    for (int i = 0; i < 400; i++) {
        pid_t child = fork();
        if (child == 0) {
            char *const arguments[] = {"/files/kernels", "true", NULL};
            execv("/files/kernels", arguments);
            _exit(1);
        }
        int status;
        waitpid(child, &status, 0);
        sum += WEXITSTATUS(status);
    }
    printf("%d\n", sum);
}

static void pipes(int count) {
    int to[2], from[2];
    if (pipe(to) || pipe(from))
        exit(1);
    char byte = 1;
    if (fork() == 0) {
        while (read(to[0], &byte, 1) == 1 && byte)
            if (write(from[1], &byte, 1) != 1)
                break;
        _exit(0);
    }
    for (int i = 0; i < count; i++)
        if (write(to[1], &byte, 1) != 1 || read(from[0], &byte, 1) != 1)
            exit(1);
    byte = 0;
    if (write(to[1], &byte, 1) == 1)
        wait(NULL);
    printf("%d\n", count);
}

static uint64_t shared;

static void *count(void *unused) {
    (void)unused;
    uint64_t x = 88172645463325252ull;
    for (int i = 0; i < 20000000; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        if (i % 1024 == 0)
            __atomic_fetch_add(&shared, x & 1, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

static void threads(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, count, NULL);
    count(NULL);
    pthread_join(thread, NULL);
    printf("%d\n", shared > 0);
}

int main(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    if (!strcmp(name, "nbody")) nbody();
    else if (!strcmp(name, "matmul")) matmul();
    else if (!strcmp(name, "avx2")) avx2();
    else if (!strcmp(name, "strings")) strings();
    else if (!strcmp(name, "x87")) x87();
    else if (!strcmp(name, "sort")) sort();
    else if (!strcmp(name, "fork")) forks();
    else if (!strcmp(name, "pipe")) pipes(20000);
    else if (!strcmp(name, "threads")) threads();
    else return strcmp(name, "true") != 0;
    return 0;
}
