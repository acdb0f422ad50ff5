// bad_disk.cpp - a library to preload that makes direct access to files (O_DIRECT) fail, as the environment
// says:
//
//   BAD_DISK_DIRECT=none   no file can be opened with O_DIRECT
//   BAD_DISK_RING=none     there is no io_uring
//   BAD_DISK_FAILS=FILE    as soon as FILE exists, all direct reads and writes fail

#include <cerrno>
#include <cstdarg>
#include <cstdlib>

#include <dlfcn.h>
#include <fcntl.h>
#include <liburing.h>
#include <unistd.h>

namespace {

template <class F>
F* next(F*, const char* name) {
    return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}
bool refuses(int flags) { return (flags & O_DIRECT) && getenv("BAD_DISK_DIRECT"); }
bool fails() {
    const char* file = getenv("BAD_DISK_FAILS");
    return file && access(file, F_OK) == 0;
}
bool fails(int fd) { return (fcntl(fd, F_GETFL) & O_DIRECT) && fails(); }

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
    va_end(more);
    if (!refuses(flags)) return next(open, "open")(path, flags, mode);
    errno = EINVAL;
    return -1;
}
int mkostemp(char* name, int flags) {
    if (!refuses(flags)) return next(mkostemp, "mkostemp")(name, flags);
    errno = EINVAL;
    return -1;
}
ssize_t pread(int fd, void* to, size_t bytes, off_t at) {
    if (!fails(fd)) return next(pread, "pread")(fd, to, bytes, at);
    errno = EIO;
    return -1;
}
ssize_t pwrite(int fd, const void* from, size_t bytes, off_t at) {
    if (!fails(fd)) return next(pwrite, "pwrite")(fd, from, bytes, at);
    errno = EIO;
    return -1;
}

int io_uring_queue_init(unsigned entries, io_uring* ring, unsigned flags) {
    if (getenv("BAD_DISK_RING")) return -EPERM;
    return next(io_uring_queue_init, "io_uring_queue_init")(entries, ring, flags);
}
// io_uring_wait_cqe() calls this.
int __io_uring_get_cqe(io_uring* ring, io_uring_cqe** event, unsigned submit, unsigned wait, sigset_t* mask) {
    const int error = next(__io_uring_get_cqe, "__io_uring_get_cqe")(ring, event, submit, wait, mask);
    if (error == 0 && io_uring_cqe_get_data(*event) && fails()) (*event)->res = -EIO;
    return error;
}

}  // extern "C"
