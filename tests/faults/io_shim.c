/* clang-format off
 *
 * Preloaded library that records and disturbs the file operations of unmodified programs below one folder.
 *
 * Record: IO_SHIM_LOG names a file to which every process appends what it did, in the order in which it was done; replay.py
 * makes from it the disk contents that a loss of power at any moment could leave.
 * Disturb: IO_SHIM_FAIL holds faults separated by ';', each  CALLS:N:ERROR[:forever][:path=SUFFIX][:rank=R]:
 *     write:17:ENOSPC           the 17th write, pwrite or writev of the process fails with ENOSPC (once)
 *     fsync:1:EIO:forever       every fsync or fdatasync from the first on fails
 *     rename:2:EIO:path=.json   counts renames to names that end in .json
 *     any:40:EIO                counts all of write, fsync, rename, link, open (for writing), ftruncate, unlink, mkdir
 *   ERROR is ENOSPC, EDQUOT, EIO, EINTR, SHORT (half of the bytes are written) or SKIP (success is reported, nothing is done
 *   or recorded: with fsync, a program that forgot it). A fault that struck appends a line to $IO_SHIM_HITS.
 * Both look only at files below IO_SHIM_FOLDER. The rank is read from IO_SHIM_RANK, OMPI_COMM_WORLD_RANK, PMIX_RANK or
 * SLURM_PROCID.
 *
 * A program may note a moment in the log: it declares `void io_shim_mark(const char *) __attribute__((weak))` and calls it
 * where it exists.
 * Limits: writes through mmap and through stdio's own buffers (fwrite) are not seen; C++ streams are.
 *
 * A record is a line  OP <tab> inode <tab> path <tab> second path <tab> offset <tab> length  and, for W, `length` bytes:
 *   C created (or M made, a folder), O opened for writing, W written, T truncated to offset, S synced, R renamed, L linked,
 *   U unlinked, N note.
 *
 * clang-format on */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(result, name, ...)              \
  static result (*real)(__VA_ARGS__) = NULL; \
  if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

/* ---- set-up ----------------------------------------------------------------------------------- */

enum { SKIP = -1, SHORT = -2 };
struct fault {
  char calls[12], suffix[64], rank[12];
  long visit, seen;
  int error, forever;
};
static struct fault faults[16];
static int fault_count, log_fd = -1;
static char folder[PATH_MAX], hits[PATH_MAX];
static pthread_mutex_t fault_lock = PTHREAD_MUTEX_INITIALIZER;

static int error_number(const char* name) {
  if (!strcmp(name, "ENOSPC")) return ENOSPC;
  if (!strcmp(name, "EDQUOT")) return EDQUOT;
  if (!strcmp(name, "EINTR")) return EINTR;
  if (!strcmp(name, "SHORT")) return SHORT;
  if (!strcmp(name, "SKIP")) return SKIP;
  if (!strcmp(name, "EIO")) return EIO;
  dprintf(2, "io_shim: unknown error %s\n", name);
  _exit(99);
}

static const char* own_rank(void) {
  static const char* names[] = {"IO_SHIM_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"};
  for (unsigned i = 0; i < sizeof names / sizeof *names; ++i)
    if (getenv(names[i])) return getenv(names[i]);
  return "0";
}

static void parse_fault(char* text) {
  struct fault fault = {.visit = 1};
  char *rest = NULL, *word = strtok_r(text, ":", &rest);
  int place = 0;
  for (; word; word = strtok_r(NULL, ":", &rest), ++place) {
    if (place == 0)
      snprintf(fault.calls, sizeof fault.calls, "%s", word);
    else if (place == 1)
      fault.visit = atol(word);
    else if (place == 2)
      fault.error = error_number(word);
    else if (!strcmp(word, "forever"))
      fault.forever = 1;
    else if (!strncmp(word, "path=", 5))
      snprintf(fault.suffix, sizeof fault.suffix, "%s", word + 5);
    else if (!strncmp(word, "rank=", 5))
      snprintf(fault.rank, sizeof fault.rank, "%s", word + 5);
  }
  if (fault_count < 16) faults[fault_count++] = fault;
}

__attribute__((constructor)) static void start(void) {
  const char *where = getenv("IO_SHIM_FOLDER"), *log = getenv("IO_SHIM_LOG"), *fail = getenv("IO_SHIM_FAIL"),
             *hit = getenv("IO_SHIM_HITS");
  if (!where || !realpath(where, folder)) {
    folder[0] = 0;
    return;
  }
  if (hit) snprintf(hits, sizeof hits, "%s", hit);
  if (log) {
    REAL(int, open, const char*, int, ...);
    const int fd = real(log, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0644);
    log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 900); /* out of the way of programs that close low numbers */
    if (log_fd < 0) log_fd = fd;
  }
  if (fail) {
    char *copy = strdup(fail), *rest = NULL;
    for (char* word = strtok_r(copy, ";", &rest); word; word = strtok_r(NULL, ";", &rest)) {
      char* one = strdup(word);
      parse_fault(one);
      free(one);
    }
    free(copy);
  }
}

/* ---- paths: relative to the folder; NULL for what lies outside --------------------------------- */

static const char* inside(const char* absolute) {
  const size_t length = strlen(folder);
  if (!length || strncmp(absolute, folder, length)) return NULL;
  if (absolute[length] == 0) return ".";
  return absolute[length] == '/' ? absolute + length + 1 : NULL;
}

/* The folder part is resolved, the last name is not: it need not exist. */
static const char* inside_at(int dir, const char* path, char* buffer) {
  if (!folder[0] || !path) return NULL;
  char whole[2 * PATH_MAX];
  if (path[0] == '/') {
    snprintf(whole, sizeof whole, "%s", path);
  } else if (dir == AT_FDCWD) {
    if (!getcwd(whole, PATH_MAX)) return NULL;
    snprintf(whole + strlen(whole), PATH_MAX, "/%s", path);
  } else {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    const ssize_t n = readlink(link, whole, PATH_MAX - 1);
    if (n < 0) return NULL;
    snprintf(whole + n, PATH_MAX, "/%s", path);
  }
  char* name = strrchr(whole, '/');
  if (!name) return NULL;
  if (!name[1] || !strcmp(name, "/.")) return realpath(whole, buffer) ? inside(buffer) : NULL;
  *name++ = 0;
  if (!realpath(whole[0] ? whole : "/", buffer)) return NULL;
  const size_t length = strlen(buffer);
  snprintf(buffer + length, PATH_MAX, "/%s", name);
  return inside(buffer);
}

static const char* inside_fd(int fd, char* buffer) {
  if (!folder[0] || fd == log_fd || fd < 0) return NULL;
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, buffer, PATH_MAX - 1);
  if (n <= 0) return NULL;
  buffer[n] = 0;
  return inside(buffer);
}

/* ---- faults ----------------------------------------------------------------------------------- */

static int ends_with(const char* text, const char* suffix) {
  const size_t a = strlen(text), b = strlen(suffix);
  return a >= b && !strcmp(text + a - b, suffix);
}

/* 0: go on; SKIP, SHORT or an errno. */
static int strike(const char* call, const char* path) {
  int result = 0;
  if (!fault_count || !path) return 0;
  pthread_mutex_lock(&fault_lock);
  for (int i = 0; i < fault_count && !result; ++i) {
    struct fault* fault = &faults[i];
    if (strcmp(fault->calls, call) && strcmp(fault->calls, "any")) continue;
    if (fault->suffix[0] && !ends_with(path, fault->suffix)) continue;
    /* Asked here and not at the start: a process may be forked into a rank. */
    if (fault->rank[0] && strcmp(fault->rank, own_rank())) continue;
    ++fault->seen;
    if (fault->seen == fault->visit || (fault->forever && fault->seen > fault->visit)) result = fault->error;
  }
  pthread_mutex_unlock(&fault_lock);
  if (result && hits[0]) {
    REAL(int, open, const char*, int, ...);
    const int fd = real(hits, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0644);
    if (fd >= 0) {
      dprintf(fd, "%d %s %s %d\n", getpid(), call, path, result);
      REAL(int, close, int);
      real(fd);
    }
  }
  return result;
}

#define FAIL_IF_STRUCK(call, path)         \
  do {                                     \
    const int struck = strike(call, path); \
    if (struck == SKIP) return 0;          \
    if (struck > 0) {                      \
      errno = struck;                      \
      return -1;                           \
    }                                      \
  } while (0)

/* ---- record: one writev to a file opened for appending is one piece, also between processes ---- */

static void record(char op, uint64_t inode, const char* path, const char* second, int64_t offset,
                   const struct iovec* data, int count, int64_t length) {
  if (log_fd < 0 || !path) return;
  const int saved = errno;
  char head[3 * PATH_MAX];
  struct iovec pieces[65];
  pieces[0].iov_base = head;
  pieces[0].iov_len =
      (size_t)snprintf(head, sizeof head, "%c\t%llu\t%s\t%s\t%lld\t%lld\n", op, (unsigned long long)inode, path,
                       second ? second : "-", (long long)offset, (long long)length);
  int used = 1;
  for (int64_t left = length; count > 0 && left > 0 && used < 65; ++data, --count) {
    pieces[used] = *data;
    if ((int64_t)pieces[used].iov_len > left) pieces[used].iov_len = (size_t)left;
    left -= (int64_t)pieces[used++].iov_len;
  }
  REAL(ssize_t, writev, int, const struct iovec*, int);
  ssize_t expected = 0;
  for (int i = 0; i < used; ++i) expected += (ssize_t)pieces[i].iov_len;
  if (real(log_fd, pieces, used) != expected) {
    dprintf(2, "io_shim: cannot record\n");
    _exit(99);
  }
  errno = saved;
}

static uint64_t inode_of(int fd) {
  struct stat status;
  return fstat(fd, &status) ? 0 : (uint64_t)status.st_ino;
}

void io_shim_mark(const char* note) {
  record('N', 0, note, NULL, 0, NULL, 0, 0);
}

/* ---- open ------------------------------------------------------------------------------------- */

static int open_recorded(int dir, const char* path, int flags, mode_t mode) {
  REAL(int, openat, int, const char*, int, ...);
  char buffer[2 * PATH_MAX];
  const int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
  const char* relative = writes ? inside_at(dir, path, buffer) : NULL;
  if (!relative) return real(dir, path, flags, mode);
  const int struck = strike("open", relative);
  if (struck > 0) {
    errno = struck;
    return -1;
  }
  const int existed = faccessat(dir, path, F_OK, 0) == 0;
  const int fd = real(dir, path, flags, mode);
  if (fd < 0) return fd;
  record(existed ? 'O' : 'C', inode_of(fd), relative, NULL, 0, NULL, 0, 0);
  if (existed && (flags & O_TRUNC)) record('T', inode_of(fd), relative, NULL, 0, NULL, 0, 0);
  return fd;
}

#define OPEN(name, large)                                      \
  int name(const char* path, int flags, ...) {                 \
    mode_t mode = 0;                                           \
    if (flags & (O_CREAT | O_TMPFILE)) {                       \
      va_list arguments;                                       \
      va_start(arguments, flags);                              \
      mode = va_arg(arguments, mode_t);                        \
      va_end(arguments);                                       \
    }                                                          \
    return open_recorded(AT_FDCWD, path, flags | large, mode); \
  }
OPEN(open, 0)
OPEN(open64, O_LARGEFILE)
#define OPENAT(name, large)                               \
  int name(int dir, const char* path, int flags, ...) {   \
    mode_t mode = 0;                                      \
    if (flags & (O_CREAT | O_TMPFILE)) {                  \
      va_list arguments;                                  \
      va_start(arguments, flags);                         \
      mode = va_arg(arguments, mode_t);                   \
      va_end(arguments);                                  \
    }                                                     \
    return open_recorded(dir, path, flags | large, mode); \
  }
OPENAT(openat, 0)
OPENAT(openat64, O_LARGEFILE)
int creat(const char* path, mode_t mode) {
  return open_recorded(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
int creat64(const char* path, mode_t mode) {
  return creat(path, mode);
}

/* fopen's own open is inside of libc; C++ streams use it and then write through calls that are seen. */
static FILE* fopen_recorded(const char* path, const char* mode, FILE* (*real)(const char*, const char*)) {
  char buffer[2 * PATH_MAX];
  const int writes = mode[0] != 'r' || strchr(mode, '+');
  const char* relative = writes ? inside_at(AT_FDCWD, path, buffer) : NULL;
  if (!relative) return real(path, mode);
  const int struck = strike("open", relative);
  if (struck > 0) {
    errno = struck;
    return NULL;
  }
  const int existed = access(path, F_OK) == 0;
  FILE* file = real(path, mode);
  if (!file) return NULL;
  record(existed ? 'O' : 'C', inode_of(fileno(file)), relative, NULL, 0, NULL, 0, 0);
  if (existed && mode[0] == 'w') record('T', inode_of(fileno(file)), relative, NULL, 0, NULL, 0, 0);
  return file;
}
FILE* fopen(const char* path, const char* mode) {
  REAL(FILE*, fopen, const char*, const char*);
  return fopen_recorded(path, mode, real);
}
FILE* fopen64(const char* path, const char* mode) {
  REAL(FILE*, fopen64, const char*, const char*);
  return fopen_recorded(path, mode, real);
}

int close(int fd) {
  REAL(int, close, int);
  return fd == log_fd && fd >= 0 ? 0 : real(fd);
}

/* ---- write ------------------------------------------------------------------------------------ */

/* offset < 0: at the current position. */
static ssize_t write_recorded(int fd, const struct iovec* data, int count, int64_t offset) {
  REAL(ssize_t, writev, int, const struct iovec*, int);
  static ssize_t (*real_at)(int, const struct iovec*, int, off_t) = NULL;
  if (!real_at) real_at = (ssize_t(*)(int, const struct iovec*, int, off_t))dlsym(RTLD_NEXT, "pwritev");
  char buffer[PATH_MAX];
  const char* path = inside_fd(fd, buffer);
  struct iovec half;
  const int struck = strike("write", path);
  if (struck > 0) {
    errno = struck;
    return -1;
  }
  if (struck == SHORT && data[0].iov_len > 1) {
    half = data[0];
    half.iov_len /= 2;
    data = &half;
    count = 1;
  }
  if (struck == SKIP) {
    ssize_t total = 0;
    for (int i = 0; i < count; ++i) total += (ssize_t)data[i].iov_len;
    return total;
  }
  const ssize_t written = offset < 0 ? real(fd, data, count) : real_at(fd, data, count, offset);
  if (path && written > 0 && log_fd >= 0) {
    /* After the call: a position before it would be wrong for appending. */
    const int64_t at = offset < 0 ? lseek(fd, 0, SEEK_CUR) - written : offset;
    record('W', inode_of(fd), path, NULL, at, data, count, written);
  }
  return written;
}

ssize_t write(int fd, const void* data, size_t bytes) {
  const struct iovec one = {(void*)data, bytes};
  return write_recorded(fd, &one, 1, -1);
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  const struct iovec one = {(void*)data, bytes};
  return write_recorded(fd, &one, 1, offset);
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t offset) {
  return pwrite(fd, data, bytes, offset);
}
ssize_t writev(int fd, const struct iovec* data, int count) {
  return write_recorded(fd, data, count, -1);
}
ssize_t pwritev(int fd, const struct iovec* data, int count, off_t offset) {
  return write_recorded(fd, data, count, offset);
}
ssize_t pwritev64(int fd, const struct iovec* data, int count, off64_t offset) {
  return write_recorded(fd, data, count, offset);
}

/* ---- the rest --------------------------------------------------------------------------------- */

static int truncate_recorded(int fd, off_t bytes, int (*real)(int, off_t)) {
  char buffer[PATH_MAX];
  const char* path = inside_fd(fd, buffer);
  FAIL_IF_STRUCK("ftruncate", path);
  const int result = real(fd, bytes);
  if (!result) record('T', inode_of(fd), path, NULL, bytes, NULL, 0, 0);
  return result;
}
int ftruncate(int fd, off_t bytes) {
  REAL(int, ftruncate, int, off_t);
  return truncate_recorded(fd, bytes, real);
}
int ftruncate64(int fd, off64_t bytes) {
  REAL(int, ftruncate64, int, off_t);
  return truncate_recorded(fd, bytes, real);
}

static int sync_recorded(int fd, int (*real)(int)) {
  char buffer[PATH_MAX];
  const char* path = inside_fd(fd, buffer);
  FAIL_IF_STRUCK("fsync", path);
  const int result = real(fd);
  if (!result) record('S', inode_of(fd), path, NULL, 0, NULL, 0, 0);
  return result;
}
int fsync(int fd) {
  REAL(int, fsync, int);
  return sync_recorded(fd, real);
}
int fdatasync(int fd) {
  REAL(int, fdatasync, int);
  return sync_recorded(fd, real);
}

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
  REAL(int, renameat2, int, const char*, int, const char*, unsigned);
  char first[2 * PATH_MAX], second[2 * PATH_MAX];
  const char *a = inside_at(from_dir, from, first), *b = inside_at(to_dir, to, second);
  FAIL_IF_STRUCK("rename", b);
  const int result = real(from_dir, from, to_dir, to, flags);
  if (!result && a && b) record('R', 0, a, b, 0, NULL, 0, 0);
  return result;
}
int rename(const char* from, const char* to) {
  return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int renameat(int from_dir, const char* from, int to_dir, const char* to) {
  return renameat2(from_dir, from, to_dir, to, 0);
}

int linkat(int from_dir, const char* from, int to_dir, const char* to, int flags) {
  REAL(int, linkat, int, const char*, int, const char*, int);
  char first[2 * PATH_MAX], second[2 * PATH_MAX];
  const char *a = inside_at(from_dir, from, first), *b = inside_at(to_dir, to, second);
  FAIL_IF_STRUCK("link", b);
  const int result = real(from_dir, from, to_dir, to, flags);
  if (!result && a && b) record('L', 0, a, b, 0, NULL, 0, 0);
  return result;
}
int link(const char* from, const char* to) {
  return linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}

int unlinkat(int dir, const char* path, int flags) {
  REAL(int, unlinkat, int, const char*, int);
  char buffer[2 * PATH_MAX];
  const char* relative = inside_at(dir, path, buffer);
  FAIL_IF_STRUCK("unlink", relative);
  const int result = real(dir, path, flags);
  if (!result) record('U', 0, relative, NULL, 0, NULL, 0, 0);
  return result;
}
int unlink(const char* path) {
  return unlinkat(AT_FDCWD, path, 0);
}
int rmdir(const char* path) {
  return unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}
int remove(const char* path) {
  const int result = unlink(path);
  return result && (errno == EISDIR || errno == EPERM) ? rmdir(path) : result;
}

int mkdirat(int dir, const char* path, mode_t mode) {
  REAL(int, mkdirat, int, const char*, mode_t);
  char buffer[2 * PATH_MAX];
  const char* relative = inside_at(dir, path, buffer);
  FAIL_IF_STRUCK("mkdir", relative);
  const int result = real(dir, path, mode);
  if (!result) record('M', 0, relative, NULL, 0, NULL, 0, 0);
  return result;
}
int mkdir(const char* path, mode_t mode) {
  return mkdirat(AT_FDCWD, path, mode);
}
