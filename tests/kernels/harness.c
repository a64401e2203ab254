/* Runs compiled kernels on memory that a file describes, and writes the memory back.
 *
 *   harness JOB RESULT
 *
 * JOB, all numbers int64: number of buffers; each one's size and bytes; number of calls; each one's
 * kernel, lo, hi, number of arguments, and per argument a buffer or -1, and an offset or number.
 * RESULT: the bytes of all buffers. KERNELS is made by the test that links this file. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void kernel(int64_t args, int64_t lo, int64_t hi, int64_t tid);

#define K(name) extern kernel name;
#include "kernels.h"
#undef K

static kernel *const table[] = {
#define K(name) name,
#include "kernels.h"
};

static FILE *job;

static int64_t number(void) {
    int64_t value;
    if (fread(&value, sizeof value, 1, job) != 1) exit(3);
    return value;
}

int main(int argc, char **argv) {
    if (argc != 3 || !(job = fopen(argv[1], "rb"))) return 2;
    int64_t n_buffers = number();
    char **buffers = calloc(n_buffers, sizeof *buffers);
    int64_t *sizes = calloc(n_buffers, sizeof *sizes);
    for (int64_t i = 0; i < n_buffers; i++) {
        sizes[i] = number();
        buffers[i] = aligned_alloc(64, (sizes[i] + 127) / 64 * 64);
        if (sizes[i] && fread(buffers[i], 1, sizes[i], job) != (size_t)sizes[i]) return 3;
    }
    for (int64_t calls = number(); calls > 0; calls--) {
        int64_t which = number(), lo = number(), hi = number(), n = number();
        int64_t *args = calloc(n + 1, sizeof *args);
        for (int64_t i = 0; i < n; i++) {
            int64_t buffer = number(), value = number();
            args[i] = buffer < 0 ? value : (int64_t)(intptr_t)(buffers[buffer] + value);
        }
        table[which]((int64_t)(intptr_t)args, lo, hi, 0);
        free(args);
    }
    FILE *result = fopen(argv[2], "wb");
    if (!result) return 2;
    for (int64_t i = 0; i < n_buffers; i++)
        if (fwrite(buffers[i], 1, sizes[i], result) != (size_t)sizes[i]) return 4;
    return fclose(result);
}
