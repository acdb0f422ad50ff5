// disk_room.h - checks before the first step whether everything that a run will write fits on its disks and
// under ulimit -f. A save that fails after the last step would lose the training.
#pragma once

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "llmc/file.h"

// The size of several files together, and of the largest of them.
struct WrittenFiles {
    double bytes = 0;
    size_t largest = 0;
    void add(size_t file) {
        bytes += static_cast<double>(file);
        largest = std::max(largest, file);
    }
};

// Files that an option makes a run write.
struct Written {
    const char* option;
    std::string path;  // a folder, which need not exist yet
    const char* what;  // "a save"
    WrittenFiles each;
    double count = 1;  // how many of them exist at the same time
    double bytes() const { return each.bytes * count; }
};

// The disk that has a folder: its device number and its free bytes; negative if the disk does not tell.
struct Disk {
    dev_t number = 0;
    double free = -1;
};
inline Disk disk_of(std::filesystem::path folder) {
    struct stat info;
    while (stat(folder.empty() ? "." : folder.c_str(), &info) != 0 && folder != folder.parent_path())
        folder = folder.parent_path();
    const char* const path = folder.empty() ? "." : folder.c_str();
    struct statvfs disk;
    if (stat(path, &info) != 0 || statvfs(path, &disk) != 0 || disk.f_blocks == 0) return {};
    return {info.st_dev, static_cast<double>(disk.f_bavail) * static_cast<double>(disk.f_frsize)};
}

// Fails if the disks have too little space for all of it together, or if a file would be larger than ulimit
// -f allows.
inline void check_disk_room(const std::vector<Written>& all) {
    const auto size = [](double bytes) { return size_text(static_cast<size_t>(bytes)); };
    std::map<dev_t, double> taken;  // by disk: the bytes of the entries before
    for (const Written& w : all) {
        const std::string named = format("%s %s: %s", w.option, w.path.c_str(), w.what);
        if (w.each.largest > file_size_limit())
            fail("%s has a file of %zu bytes, and ulimit -f allows %llu", named.c_str(), w.each.largest,
                 static_cast<unsigned long long>(file_size_limit()));
        const Disk disk = disk_of(w.path);
        if (disk.free < 0) continue;
        double& before = taken[disk.number];
        if (before + w.bytes() > disk.free) {
            const std::string times =
                w.count > 1 ? format(", %.0f of them %s", w.count, size(w.bytes()).c_str()) : "";
            const std::string others =
                before > 0 ? format(" beside %s of %s", size(before).c_str(), all[0].option) : "";
            fail("%s takes %s%s%s, and %s are free there", named.c_str(), size(w.each.bytes).c_str(),
                 times.c_str(), others.c_str(), size(disk.free).c_str());
        }
        before += w.bytes();
    }
}
