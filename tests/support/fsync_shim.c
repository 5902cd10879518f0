/* A disk that is slow or fails when it is told to sync: preloaded before the C library.
 *
 * SYNC_DELAY_MS   how long every sync takes on top of what it takes
 * SYNC_FAIL_FROM  the first sync, counted from 1, that fails with EIO; its data stay in the cache, as on a real disk
 * SYNC_FAIL_COUNT how many fail, 1 if not given
 * SYNC_KILL_AT    the sync, counted from 1, at which the process is killed
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

static atomic_long syncs;

static long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
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
        long number = ++syncs, from = setting("SYNC_FAIL_FROM", 0);
        if (from && number >= from && number < from + setting("SYNC_FAIL_COUNT", 1)) {
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
