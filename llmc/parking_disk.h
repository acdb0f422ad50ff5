// parking_disk.h - inputs of blocks parked in a file without a name, past the page cache.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "llmc/device_rates.h"
#include "llmc/disk_threads.h"
#include "llmc/file.h"
#include "llmc/parking.h"

class DiskParking : public ParkingPlace {
  public:
    // Makes the file in `folder`, with room for so many inputs. Fails where there is none, or where its file
    // system has no such files.
    DiskParking(const std::string& folder, int layers, size_t input_bytes)
        : folder_(folder),
          bytes_(input_bytes),
          file_(open_file(folder)),
          memory_(DiskThreads::kStagingBytes, "what is parked on the disk"),
          threads_(memory_.data()) {
        const auto all = static_cast<off_t>(whole_sectors(bytes_) * static_cast<size_t>(layers));
        if (const int error = posix_fallocate(file_.fd(), 0, all); error != 0)
            fail("--park: %.0f MiB cannot be had in %s (TMPDIR names another folder): %s",
                 static_cast<double>(all) / 1048576, folder.c_str(), std::strerror(error));
    }

    void store(int layer, const char* slot, Stream) override {
        start(layer, [this, slot](uint64_t at, size_t first, size_t count, char* staging) {
            std::memcpy(staging, slot + first, count);
            std::memset(staging + count, 0, whole_sectors(count) - count);
            const size_t bytes = whole_sectors(count);
            for (size_t done = 0; done < bytes;) {
                const ssize_t n =
                    pwrite(file_.fd(), staging + done, bytes - done, static_cast<off_t>(at + first + done));
                if (n < 0 && errno == EINTR) continue;
                if (n <= 0)
                    fail("%s: what is parked cannot be written: %s", folder_.c_str(), std::strerror(errno));
                done += static_cast<size_t>(n);
            }
        });
    }
    void load(int layer, char* slot, Stream) override {
        start(layer, [this, slot](uint64_t at, size_t first, size_t count, char* staging) {
            const size_t bytes = whole_sectors(count);
            if (read_at(file_.fd(), at + first, bytes, staging) != static_cast<ssize_t>(bytes))
                fail("%s: what was parked cannot be read: %s", folder_.c_str(), std::strerror(errno));
            std::memcpy(slot + first, staging, count);
        });
    }
    void join(Stream) override {
        const WallClock clock;
        threads_.wait();
        seconds_waited += clock.seconds();
    }

  private:
    static int open_file(const std::string& folder) {
        std::string path = folder + "/train-XXXXXX";
        const int fd = mkostemp(path.data(), O_CLOEXEC | O_DIRECT);
        if (fd < 0)
            fail("--park: no file past the page cache can be made in %s (TMPDIR names another folder): %s",
                 folder.c_str(), std::strerror(errno));
        unlink(path.c_str());
        return fd;
    }
    // Has move(at, first, count, staging) called for the pieces of the input that lies `at` bytes into the
    // file.
    template <class Move>
    void start(int layer, Move move) {
        const uint64_t at = static_cast<uint64_t>(layer) * whole_sectors(bytes_);
        threads_.start((bytes_ + kRequestBytes - 1) / kRequestBytes, [=, this](size_t i, char* staging) {
            const size_t first = i * kRequestBytes;
            move(at, first, std::min(kRequestBytes, bytes_ - first), staging);
        });
    }

    const std::string folder_;
    const size_t bytes_;
    OpenFile file_;
    DeviceBuffer memory_;
    DiskThreads threads_;  // the last: they end before the memory does
};
