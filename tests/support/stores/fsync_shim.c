/* A disk that is slow or fails when it is told to sync, or is full: preloaded before the C library.
 *
 * SYNC_DELAY_MS   how long every sync takes on top of what it takes
 * SYNC_FAIL_FROM  the first sync, counted from 1, that fails with EIO; its data stay in the cache, as on a real disk
 * SYNC_FAIL_COUNT how many fail, 1 if not given
 * SYNC_KILL_AT    the sync, counted from 1, at which the process is killed
 * FULL_FROM       the first write of a block, counted from 1, that fails with ENOSPC
 * FULL_COUNT      how many fail, 1 if not given
 * SYNC_FILES      the end of the names of the files that are meant; all if not given
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static atomic_long syncs, writes;

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int is_among(long number, const char *first, const char *count) {
    long from = setting(first, 0);
    return from && number >= from && number < from + setting(count, 1);
}

static int is_meant(int descriptor) {
    const char *end = getenv("SYNC_FILES");
    char link[64], path[4096];
    if (!end)
        return 1;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path);
    size_t wanted = strlen(end);
    return length >= (ssize_t)wanted && !memcmp(path + length - wanted, end, wanted);
}

static int slowed(const char *name, int descriptor) {
    if (is_meant(descriptor)) {
        long delay = setting("SYNC_DELAY_MS", 0);
        struct timespec time = {delay / 1000, delay % 1000 * 1000000};
        nanosleep(&time, NULL);
        long number = ++syncs;
        if (is_among(number, "SYNC_FAIL_FROM", "SYNC_FAIL_COUNT")) {
            errno = EIO;
            return -1;
        }
        if (number == setting("SYNC_KILL_AT", 0))
            kill(getpid(), SIGKILL);
    }
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    return real(descriptor);
}

int fdatasync(int descriptor) { return slowed("fdatasync", descriptor); }

int fsync(int descriptor) { return slowed("fsync", descriptor); }

static ssize_t written(const char *name, int descriptor, const void *data, size_t size, off64_t offset) {
    if (getenv("FULL_FROM") && is_meant(descriptor) && is_among(++writes, "FULL_FROM", "FULL_COUNT")) {
        errno = ENOSPC;
        return -1;
    }
    ssize_t (*real)(int, const void *, size_t, off64_t) =
        (ssize_t(*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, name);
    return real(descriptor, data, size, offset);
}

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset) {
    return written("pwrite", descriptor, data, size, offset);
}

ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset) {
    return written("pwrite64", descriptor, data, size, offset);
}
