// bad_disk.cpp - a library to preload that makes direct access to files (O_DIRECT) fail, as the environment
// says:
//
//   BAD_DISK_DIRECT=none   no file can be opened with O_DIRECT
//   BAD_DISK_FAILS=FILE    as soon as FILE exists, all direct reads and writes fail

#include <cerrno>
#include <cstdarg>
#include <cstdlib>

#include <dlfcn.h>
#include <fcntl.h>
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

}  // extern "C"
