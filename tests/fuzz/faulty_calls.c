/* Let chosen calls of the C library on the files under one folder fail (LD_PRELOAD).
 *
 * FAULTY_FOLDER names the folder, an absolute path without links. A call is watched if its path
 * begins with the folder, or if its descriptor was opened there. Calls that bypass the C library
 * (syscall(), io_uring, as in kernels/cpu/ring.cpp for offload to NVMe) and those that the library
 * makes itself (fwrite) are not seen. Saves, loads and conversions make none of the former.
 */
#undef _FORTIFY_SOURCE
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { DESCRIPTORS = 1 << 16 };
enum outcome { PASSES, FAILS, IS_SHORT };

static const char *folder;
static atomic_bool watched_descriptors[DESCRIPTORS];
static atomic_long count, first_fault, last_fault;
static atomic_int fault;
static _Atomic(const char *) faulty;

__attribute__((constructor)) static void begin(void) { folder = getenv("FAULTY_FOLDER"); }

/* Count from 0. Calls number `first` to `last`, from 1 on, fail with `error`; 0 instead lets those
 * that read or write move half of their bytes. */
void arm(long first, long last, int error) {
    atomic_store(&first_fault, 0);
    atomic_store(&last_fault, 0);
    atomic_store(&fault, error);
    atomic_store(&count, 0);
    atomic_store(&faulty, NULL);
    atomic_store(&last_fault, last);
    atomic_store(&first_fault, first);
}

/* Return the number of watched calls since `arm`. */
long calls(void) { return atomic_load(&count); }

/* Return the name of the first call that failed since `arm`, or NULL. */
const char *first_faulty(void) { return atomic_load(&faulty); }

static int watches(int fd) {
    return fd >= 0 && fd < DESCRIPTORS && atomic_load(&watched_descriptors[fd]);
}

static int watches_path(int at, const char *path) {
    size_t length = folder ? strlen(folder) : 0;
    if (!length || !path) return 0;
    if (path[0] != '/') return watches(at);
    return !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static void watch(int fd, int on) {
    if (fd >= 0 && fd < DESCRIPTORS) atomic_store(&watched_descriptors[fd], on);
}

static enum outcome outcome_of(const char *call) {
    long at = atomic_fetch_add(&count, 1) + 1, first = atomic_load(&first_fault);
    const char *none = NULL;
    if (!first || at < first || at > atomic_load(&last_fault)) return PASSES;
    atomic_compare_exchange_strong(&faulty, &none, call);
    errno = atomic_load(&fault);
    return errno ? FAILS : IS_SHORT;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Calls that fail before they do anything. */
#define CALL(type, failure, name, parameters, arguments, watched) \
    type name parameters { \
        REAL(name); \
        if ((watched) && outcome_of(#name) == FAILS) return failure; \
        return real arguments; \
    }

#define PATH_CALL(name, parameters, arguments) \
    CALL(int, -1, name, parameters, arguments, watches_path(AT_FDCWD, path))
#define PATH_AT_CALL(name, parameters, arguments) \
    CALL(int, -1, name, parameters, arguments, watches_path(at, path))
#define TWO_PATHS_CALL(name, parameters, arguments) \
    CALL(int, -1, name, parameters, arguments, watches_path(at, path) || watches_path(to, target))
#define FD_CALL(name, parameters, arguments) \
    CALL(int, -1, name, parameters, arguments, watches(fd))

PATH_CALL(creat, (const char *path, mode_t mode), (path, mode))
PATH_CALL(mkdir, (const char *path, mode_t mode), (path, mode))
PATH_CALL(rmdir, (const char *path), (path))
PATH_CALL(unlink, (const char *path), (path))
PATH_CALL(truncate64, (const char *path, off64_t size), (path, size))
PATH_CALL(stat64, (const char *restrict path, struct stat64 *restrict found), (path, found))
PATH_CALL(lstat64, (const char *restrict path, struct stat64 *restrict found), (path, found))
PATH_AT_CALL(unlinkat, (int at, const char *path, int flags), (at, path, flags))
PATH_AT_CALL(mkdirat, (int at, const char *path, mode_t mode), (at, path, mode))
CALL(int, -1, rename, (const char *path, const char *target), (path, target),
     watches_path(AT_FDCWD, path) || watches_path(AT_FDCWD, target))
CALL(int, -1, link, (const char *path, const char *target), (path, target),
     watches_path(AT_FDCWD, path) || watches_path(AT_FDCWD, target))
CALL(int, -1, symlink, (const char *target, const char *path), (target, path),
     watches_path(AT_FDCWD, path))
TWO_PATHS_CALL(renameat, (int at, const char *path, int to, const char *target),
               (at, path, to, target))
TWO_PATHS_CALL(renameat2, (int at, const char *path, int to, const char *target, unsigned flags),
               (at, path, to, target, flags))
TWO_PATHS_CALL(linkat, (int at, const char *path, int to, const char *target, int flags),
               (at, path, to, target, flags))
CALL(DIR *, NULL, opendir, (const char *path), (path), watches_path(AT_FDCWD, path))
PATH_AT_CALL(fstatat64, (int at, const char *restrict path, struct stat64 *restrict found,
                         int flags), (at, path, found, flags))
FD_CALL(fsync, (int fd), (fd))
FD_CALL(fdatasync, (int fd), (fd))
FD_CALL(ftruncate, (int fd, off_t size), (fd, size))
FD_CALL(ftruncate64, (int fd, off64_t size), (fd, size))
FD_CALL(fallocate64, (int fd, int mode, off64_t at, off64_t size), (fd, mode, at, size))
FD_CALL(fstat64, (int fd, struct stat64 *found), (fd, found))

#define OPEN(name, parameters, at, arguments) \
    int name parameters { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        int watched = watches_path(at, path); \
        if (watched && outcome_of(#name) == FAILS) return -1; \
        int fd = real arguments; \
        watch(fd, watched); \
        return fd; \
    }

OPEN(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPEN(openat, (int at, const char *path, int flags, ...), at, (at, path, flags, mode))
OPEN(openat64, (int at, const char *path, int flags, ...), at, (at, path, flags, mode))

#define FOPEN(name) \
    FILE *name(const char *restrict path, const char *restrict mode) { \
        REAL(name); \
        int watched = watches_path(AT_FDCWD, path); \
        if (watched && outcome_of(#name) == FAILS) return NULL; \
        FILE *file = real(path, mode); \
        if (file) watch(fileno(file), watched); \
        return file; \
    }

FOPEN(fopen)
FOPEN(fopen64)

/* Linux closes the descriptor even if close() fails. */
#define CLOSE(name, parameter, fd, argument) \
    int name(parameter) { \
        REAL(name); \
        int watched = watches(fd), failing = watched && outcome_of(#name) == FAILS; \
        int error = errno; \
        watch(fd, 0); \
        int result = real(argument); \
        if (!failing) return result; \
        errno = error; \
        return EOF; \
    }

CLOSE(close, int fd, fd, fd)
CLOSE(fclose, FILE *file, fileno(file), file)

/* Calls that may also move a part of their bytes: `size` is halved. */
#define MOVE(name, parameters, arguments, size) \
    ssize_t name parameters { \
        REAL(name); \
        enum outcome outcome = watches(fd) ? outcome_of(#name) : PASSES; \
        if (outcome == FAILS) return -1; \
        if (outcome == IS_SHORT && size > 1) size /= 2; \
        return real arguments; \
    }

MOVE(read, (int fd, void *data, size_t size), (fd, data, size), size)
MOVE(pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at), size)
MOVE(write, (int fd, const void *data, size_t size), (fd, data, size), size)
MOVE(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), size)
MOVE(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), size)
MOVE(preadv64v2, (int fd, const struct iovec *parts, int size, off64_t at, int flags),
     (fd, parts, size, at, flags), size)
MOVE(writev, (int fd, const struct iovec *parts, int size), (fd, parts, size), size)
MOVE(sendfile64, (int fd, int from, off64_t *at, size_t size), (fd, from, at, size), size)
