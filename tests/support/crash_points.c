/* Preloaded into a process, kills it at its n-th change to files below a directory.
 *
 * A write is first done by half. Every change and every fsync is logged, one line each, so that
 * what was never synced can be taken away afterwards, as a power cut would. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char root[PATH_MAX];
static int fatal, calls, journal = -1;

/* Watch `directory`, and die at the call of this number; 0 only counts. */
void crash_at(const char *directory, int number, int log) {
    strncpy(root, directory, sizeof root - 1);
    fatal = number;
    journal = log;
    calls = 0;
}

int crash_calls(void) { return calls; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int absolute(int directory, const char *path, char *out) {
    char link[64];
    ssize_t length = 0;
    if (path && path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return 1;
    }
    if (directory == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    length = readlink(link, out, PATH_MAX - 1);
    if (length < 0) return 0;
    out[length] = 0;
    if (path && path[0]) snprintf(out + length, PATH_MAX - length, "/%s", path);
    return 1;
}

/* Return 1 where a call on this path is the fatal one, which the caller may do by half first. */
static int step(char kind, int directory, const char *path, const char *target) {
    char name[PATH_MAX], other[PATH_MAX] = "", line[2 * PATH_MAX + 8];
    if (!root[0] || !absolute(directory, path, name)) return 0;
    if (strncmp(name, root, strlen(root))) return 0;
    if (target) absolute(directory, target, other);
    int number = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (number == fatal) return 1;
    int length = snprintf(line, sizeof line, "%c\t%s\t%s\n", kind, name, other);
    if (journal >= 0) (void)!REAL(write)(journal, line, length);
    return 0;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    pause();
}

#define GUARD(kind, directory, path, target) \
    if (step(kind, directory, path, target)) die()

#define OPEN(name, directory, path, flags, call)           \
    va_list list;                                          \
    va_start(list, flags);                                 \
    mode_t mode = va_arg(list, int);                       \
    va_end(list);                                          \
    if (flags & (O_CREAT | O_TRUNC)) GUARD('c', directory, path, NULL); \
    return call

int open(const char *path, int flags, ...) {
    OPEN(open, AT_FDCWD, path, flags, REAL(open)(path, flags, mode));
}
int open64(const char *path, int flags, ...) {
    OPEN(open64, AT_FDCWD, path, flags, REAL(open64)(path, flags, mode));
}
int openat(int directory, const char *path, int flags, ...) {
    OPEN(openat, directory, path, flags, REAL(openat)(directory, path, flags, mode));
}
int openat64(int directory, const char *path, int flags, ...) {
    OPEN(openat64, directory, path, flags, REAL(openat64)(directory, path, flags, mode));
}
ssize_t write(int file, const void *data, size_t size) {
    if (step('w', file, NULL, NULL)) { (void)!REAL(write)(file, data, size / 2); die(); }
    return REAL(write)(file, data, size);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) {
    if (step('w', file, NULL, NULL)) { (void)!REAL(pwrite)(file, data, size / 2, offset); die(); }
    return REAL(pwrite)(file, data, size, offset);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    if (step('w', file, NULL, NULL)) { (void)!REAL(pwrite64)(file, data, size / 2, offset); die(); }
    return REAL(pwrite64)(file, data, size, offset);
}
int fsync(int file) { GUARD('s', file, NULL, NULL); return REAL(fsync)(file); }
int fdatasync(int file) { GUARD('s', file, NULL, NULL); return REAL(fdatasync)(file); }
int ftruncate(int file, off_t size) { GUARD('w', file, NULL, NULL); return REAL(ftruncate)(file, size); }
int ftruncate64(int file, off64_t size) { GUARD('w', file, NULL, NULL); return REAL(ftruncate64)(file, size); }
int rename(const char *from, const char *to) { GUARD('r', AT_FDCWD, from, to); return REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) {
    GUARD('r', a, from, to);
    return REAL(renameat)(a, from, b, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    GUARD('r', a, from, to);
    return REAL(renameat2)(a, from, b, to, flags);
}
int mkdir(const char *path, mode_t mode) { GUARD('m', AT_FDCWD, path, NULL); return REAL(mkdir)(path, mode); }
int mkdirat(int d, const char *path, mode_t mode) { GUARD('m', d, path, NULL); return REAL(mkdirat)(d, path, mode); }
int unlink(const char *path) { GUARD('u', AT_FDCWD, path, NULL); return REAL(unlink)(path); }
int unlinkat(int d, const char *path, int flags) { GUARD('u', d, path, NULL); return REAL(unlinkat)(d, path, flags); }
int rmdir(const char *path) { GUARD('u', AT_FDCWD, path, NULL); return REAL(rmdir)(path); }
int link(const char *from, const char *to) { GUARD('c', AT_FDCWD, to, NULL); return REAL(link)(from, to); }
