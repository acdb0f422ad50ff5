// places.h - the memory beside the device's that a run needs: for what, where, and how much of it.
#pragma once

#include <memory>
#include <string>

#include "llmc/elsewhere_disk.h"
#include "llmc/elsewhere_host.h"
#include "llmc/elsewhere_staged.h"

struct Place {
    const char* option;  // that asked for it
    Home home;           // the device where there is none
    size_t bytes;        // 0: there is none
    size_t room_bytes;   // that come or go together,
    size_t rooms;        // and how many times that many are under way at a time

    // Of that, in pinned memory of the host; beside a GPU also what passes through it on the way to a file.
    size_t pinned() const {
        if (home == Home::Host || bytes == 0) return bytes;
        return kHostIsDevice ? 0 : StagedElsewhere::pinned_bytes(room_bytes, rooms);
    }
    // Of that, in a file of the run's own.
    size_t in_file() const { return home == Home::Disk ? bytes : 0; }

    // Takes the memory, zeroed; null where there is none. Fails where it cannot be had.
    std::unique_ptr<Elsewhere> make() const {
        if (bytes == 0) return nullptr;
        if (home == Home::Host) return std::make_unique<HostElsewhere>(bytes);
        auto file = std::make_unique<DiskElsewhere>(temporary_folder(), bytes, option);
        if (kHostIsDevice) return file;
        return std::make_unique<StagedElsewhere>(std::move(file), room_bytes, rooms);
    }
};
