// file_lock.h - file locks that the kernel releases when the process ends, however it ends: flock(2).
#pragma once

#include <cerrno>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

// A lock of a file or folder. Tries once and does not wait.
class FileLock {
  public:
    enum Kind { Shared = LOCK_SH, Exclusive = LOCK_EX };
    enum Outcome {
        Held,
        Busy,        // another process has the lock
        Gone,        // `path` cannot be opened (error() says why), or no longer names the locked file
        Unsupported  // the file system has no locks
    };

    // `flags` are those of open(2). On NFS an exclusive lock needs a file that is open for writing.
    FileLock(const std::string& path, int flags, Kind kind)
        : fd_(open(path.c_str(), flags | O_CLOEXEC, 0666)), error_(fd_ < 0 ? errno : 0) {
        if (fd_ < 0) return;
        int status;
        while ((status = flock(fd_, kind | LOCK_NB)) != 0 && errno == EINTR) continue;
        if (status != 0 && errno == EWOULDBLOCK) {
            outcome_ = Busy;
        } else if (status == 0 || errno != ESTALE) {
            struct stat ours, there;
            const bool same = fstat(fd_, &ours) == 0 && stat(path.c_str(), &there) == 0 &&
                              ours.st_dev == there.st_dev && ours.st_ino == there.st_ino;
            outcome_ = !same ? Gone : status == 0 ? Held : Unsupported;
        }
    }
    FileLock(FileLock&& other) noexcept
        : fd_(std::exchange(other.fd_, -1)), error_(other.error_), outcome_(other.outcome_) {}
    FileLock& operator=(FileLock&& other) noexcept {
        std::swap(fd_, other.fd_);
        std::swap(error_, other.error_);
        std::swap(outcome_, other.outcome_);
        return *this;
    }
    ~FileLock() {
        if (fd_ >= 0) close(fd_);
    }

    int fd() const { return fd_; }
    int error() const { return error_; }
    Outcome outcome() const { return outcome_; }
    // True if it keeps others out, as far as the file system allows.
    bool good() const { return outcome_ == Held || outcome_ == Unsupported; }

  private:
    int fd_, error_;
    Outcome outcome_ = Gone;
};
