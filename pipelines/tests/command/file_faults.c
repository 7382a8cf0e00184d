/* Preloaded into the command: counts the operations that change files below a folder, and lets one of them fail.
 *
 * FAULT_FOLDER  the folder, absolute
 * FAULT_LOG     gets a line for each operation: its name and its path
 * FAULT_AT      the operation that fails, from 1; none without it
 * FAULT_KIND    "kill" before the operation, "tear" it in half and kill, or the number of an errno that it returns
 * FAULT_RANK    the rank that counts and fails; without it, every process does
 * HIDDEN_FROM   a rank that does not find the folder, as one on a host that does not share the disk
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static long count;
/* Operations of several threads are numbered in the order of their lines. */
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

static void die(void) {
    syscall(SYS_kill, getpid(), 9);
    for (;;) pause();
}

static int is_below(const char *path) {
    const char *folder = getenv("FAULT_FOLDER");
    size_t length = folder ? strlen(folder) : 0;
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

/* The path of an open file, or of `name` in an open folder. */
static const char *path_of(int fd, const char *name, char *buffer) {
    if (name && (*name == '/' || fd == AT_FDCWD)) return name;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    if (length < 0) return "";
    buffer[length] = 0;
    if (name) {
        size_t room = PATH_MAX - length;
        snprintf(buffer + length, room, "/%s", name);
    }
    return buffer;
}

/* Whether this process is the rank that `variable` names. */
static int is_rank(const char *variable) {
    const char *named = getenv(variable), *rank = getenv("RANK");
    return named && *named && rank && !strcmp(named, rank);
}

/* Whether this operation fails: 0 if not, the errno if so, -1 if it is torn. */
static int fails(const char *operation, const char *path) {
    if (!is_below(path)) return 0;
    const char *victim = getenv("FAULT_RANK");
    if (victim && *victim && !is_rank("FAULT_RANK")) return 0;
    pthread_mutex_lock(&counting);
    long number = ++count;
    const char *log = getenv("FAULT_LOG"), *at = getenv("FAULT_AT"), *kind = getenv("FAULT_KIND");
    if (log) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%s %s\n", operation, path);
        int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0666);
        if (file >= 0) {
            syscall(SYS_write, file, line, length);
            syscall(SYS_close, file);
        }
    }
    int here = at && kind && number == atol(at);
    if (here && !strcmp(kind, "kill")) die();
    pthread_mutex_unlock(&counting);
    if (!here) return 0;
    if (!strcmp(kind, "tear")) return -1;
    return atoi(kind);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define FAIL(operation, path)                 \
    do {                                      \
        int error = fails(operation, path);   \
        if (error < 0) die();                 \
        if (error) {                          \
            errno = error;                    \
            return -1;                        \
        }                                     \
    } while (0)

/* Whether this process must not find the path. */
static int is_hidden(const char *path) { return is_rank("HIDDEN_FROM") && is_below(path); }

#define HIDE(path)                            \
    do {                                      \
        if (is_hidden(path)) {                \
            errno = ENOENT;                   \
            return -1;                        \
        }                                     \
    } while (0)

static int changes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)); }

#define OPEN(name)                                                          \
    int name(const char *path, int flags, ...) {                            \
        va_list rest;                                                       \
        va_start(rest, flags);                                              \
        mode_t mode = va_arg(rest, mode_t);                                 \
        va_end(rest);                                                       \
        HIDE(path);                                                         \
        if (changes(flags)) FAIL("open", path);                             \
        return NEXT(name)(path, flags, mode);                               \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                        \
    int name(int folder, const char *path, int flags, ...) {                \
        va_list rest;                                                       \
        va_start(rest, flags);                                              \
        mode_t mode = va_arg(rest, mode_t);                                 \
        va_end(rest);                                                       \
        char buffer[2 * PATH_MAX];                                          \
        HIDE(path_of(folder, path, buffer));                                \
        if (changes(flags)) FAIL("open", path_of(folder, path, buffer));    \
        return NEXT(name)(folder, path, flags, mode);                       \
    }
OPENAT(openat)
OPENAT(openat64)

/* Rust asks for the kind of a path by statx, and once without a path whether the system has it. The header says that the path is never
 * null, so that the compiler would drop a plain comparison. */
int statx(int folder, const char *path, int flags, unsigned mask, struct statx *found) {
    char buffer[2 * PATH_MAX];
    const char *volatile asked = path;
    if (asked) HIDE(path_of(folder, path, buffer));
    return NEXT(statx)(folder, path, flags, mask, found);
}

ssize_t write(int fd, const void *bytes, size_t length) {
    char buffer[2 * PATH_MAX];
    int error = fails("write", path_of(fd, NULL, buffer));
    if (error < 0) {
        syscall(SYS_write, fd, bytes, length / 2);
        die();
    }
    if (error) {
        /* As a disk that fills up: what still fits is written. */
        if (length > 1 && error == ENOSPC) syscall(SYS_write, fd, bytes, length / 2);
        errno = error;
        return -1;
    }
    return syscall(SYS_write, fd, bytes, length);
}

#define ON_FILE(name, parameters, arguments)                                \
    int name parameters {                                                   \
        char buffer[2 * PATH_MAX];                                          \
        FAIL(#name, path_of(fd, NULL, buffer));                             \
        return NEXT(name) arguments;                                        \
    }
ON_FILE(fsync, (int fd), (fd))
ON_FILE(fdatasync, (int fd), (fd))
ON_FILE(ftruncate, (int fd, off_t length), (fd, length))
ON_FILE(ftruncate64, (int fd, off64_t length), (fd, length))

#define ON_PATH(name, parameters, arguments)                                \
    int name parameters {                                                   \
        FAIL(#name, path);                                                  \
        return NEXT(name) arguments;                                        \
    }
ON_PATH(mkdir, (const char *path, mode_t mode), (path, mode))
ON_PATH(rmdir, (const char *path), (path))
ON_PATH(unlink, (const char *path), (path))

int rename(const char *from, const char *to) {
    FAIL("rename", to);
    return NEXT(rename)(from, to);
}

int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    char buffer[2 * PATH_MAX];
    FAIL("rename", path_of(to_fd, to, buffer));
    return NEXT(renameat)(from_fd, from, to_fd, to);
}

int link(const char *from, const char *to) {
    FAIL("link", to);
    return NEXT(link)(from, to);
}

int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags) {
    char buffer[2 * PATH_MAX];
    FAIL("link", path_of(to_fd, to, buffer));
    return NEXT(linkat)(from_fd, from, to_fd, to, flags);
}

int unlinkat(int fd, const char *name, int flags) {
    char buffer[2 * PATH_MAX];
    FAIL("unlink", path_of(fd, name, buffer));
    return NEXT(unlinkat)(fd, name, flags);
}
