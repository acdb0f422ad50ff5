// host_memory.h - how much memory this process has, and how much it may have: the least of what the machine
// has, what the cgroups that it is in allow (of version 1 and 2; Docker's and Slurm's limits are such), and
// ulimit -v and -d.
#pragma once

#include <omp.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "llmc/error.h"

// Bytes that are free, and what keeps them from being more. SIZE_MAX where that cannot be told.
struct FreeMemory {
    size_t bytes = SIZE_MAX;
    std::string limit;

    bool known() const { return bytes != SIZE_MAX; }
    void at_most(size_t other, const std::string& other_limit) {
        if (other < bytes) bytes = other, limit = other_limit;
    }
};

// What a run maps and does not touch, measured with 1 to 16 threads: room for products to be compiled in, and
// heaps, and the products that a search for the largest batch describes. It counts where addresses are
// limited, and nowhere else.
inline size_t untouched_bytes(int threads) { return static_cast<size_t>(28 + 4 * threads) << 20; }

// The most of one library that a run reads. oneDNN's has 38 MiB of code and tables for all kinds of machines,
// of which trainings, validations and samples in fp32 and bf16 were seen to read 7.2.
constexpr size_t kMostOfALibrary = size_t{15} << 19;

// The pages of the executable and its libraries that a run has in memory at the most: those that are mapped
// from files with code, as /proc/self/maps lists them. Which of them are there already differs from run to
// run; a plan counts them all. 0 where there is no /proc.
inline size_t library_bytes(const std::string& root = "") {
    std::ifstream maps(root + "/proc/self/maps");
    std::map<std::string, size_t> sizes;  // by device and inode
    std::set<std::string> with_code;
    for (std::string line; std::getline(maps, line);) {
        unsigned long begin = 0, end = 0, inode = 0;
        char access[5] = "", device[16] = "";
        if (sscanf(line.c_str(), "%lx-%lx %4s %*s %15s %lu", &begin, &end, access, device, &inode) != 5)
            continue;
        if (inode == 0 || access[0] != 'r' || access[1] == 'w')
            continue;  // pages that are written are copies
        const std::string file = format("%s %lu", device, inode);
        sizes[file] += end - begin;
        if (access[2] == 'x') with_code.insert(file);
    }
    size_t sum = 0;
    for (const std::string& file : with_code) sum += std::min(sizes[file], kMostOfALibrary);
    return sum;
}

// What the process has of a plan already: memory of its own, and pages of its executable and libraries, as
// far as they are in memory and as a plan counts them.
struct OwnMemory {
    size_t anonymous = 0, resident_files = 0, libraries = 0;

    static OwnMemory now(const std::string& root = "");
};

// The soft limits of this process; RLIM_INFINITY is none. Of what they allow, `untouched` bytes are for no
// plan.
struct ProcessLimits {
    rlim_t address_space = RLIM_INFINITY, data = RLIM_INFINITY;
    size_t untouched = 0;

    static ProcessLimits now() {
        rlimit address_space{}, data{};
        ProcessLimits limits;
        limits.untouched = untouched_bytes(omp_get_max_threads());
        if (getrlimit(RLIMIT_AS, &address_space) == 0) limits.address_space = address_space.rlim_cur;
        if (getrlimit(RLIMIT_DATA, &data) == 0) limits.data = data.rlim_cur;
        return limits;
    }
};

// The number behind `name` on its line of a file: "MemAvailable:   123 kB". Nothing where there is none.
inline std::optional<uint64_t> number_in_file(const std::string& path, const std::string& name) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string first;
        uint64_t number = 0;
        if (words >> first >> number && first == name) return number;
    }
    return std::nullopt;
}

// The number that is all of a file. Nothing where it holds another word, as "max".
inline std::optional<uint64_t> number_of_file(const std::string& path) {
    std::ifstream file(path);
    uint64_t number = 0;
    if (file >> number) return number;
    return std::nullopt;
}

inline OwnMemory OwnMemory::now(const std::string& root) {
    const auto status = [&](const char* name) {
        return number_in_file(root + "/proc/self/status", name).value_or(0) << 10;
    };
    return {status("RssAnon:"), status("RssFile:"), library_bytes(root)};
}

// A hierarchy of cgroups that may limit memory: where it is mounted, and where in it this process is.
struct MemoryCgroups {
    int version;
    std::string mounted_at;
    std::string folder;  // below it: "/a/b", or empty
};

// A path of /proc/self/mountinfo, whose spaces are written as \040.
inline std::string unescaped(const std::string& text) {
    std::string plain;
    for (size_t i = 0; i < text.size(); i++) {
        const bool escaped =
            text[i] == '\\' && i + 3 < text.size() &&
            std::all_of(&text[i + 1], &text[i + 4], [](char c) { return c >= '0' && c <= '7'; });
        plain += escaped ? static_cast<char>(strtol(text.substr(i + 1, 3).c_str(), nullptr, 8)) : text[i];
        if (escaped) i += 3;
    }
    return plain;
}

// The names between commas.
inline bool has_name(const std::string& list, const std::string& name) {
    return ("," + list + ",").find("," + name + ",") != std::string::npos;
}

// The process's path in a hierarchy, from /proc/self/cgroup: lines of "4:memory:/path", of version 2
// "0::/path".
inline std::optional<std::string> cgroup_path(const std::string& root, int version) {
    std::ifstream file(root + "/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        const size_t names = line.find(':') + 1, path = line.find(':', names) + 1;
        if (names == 0 || path == 0) continue;
        const std::string list = line.substr(names, path - 1 - names);
        if (version == 2 ? list.empty() : has_name(list, "memory")) return line.substr(path);
    }
    return std::nullopt;
}

// The hierarchies that are mounted here, from /proc/self/mountinfo. A mount may show a part of a hierarchy,
// as in a container: then its own path is cut off the process's; where that lies elsewhere, only the mount is
// seen.
inline std::vector<MemoryCgroups> memory_cgroups(const std::string& root) {
    std::vector<MemoryCgroups> all;
    std::ifstream file(root + "/proc/self/mountinfo");
    for (std::string line; std::getline(file, line);) {
        const size_t behind = line.find(" - ");
        if (behind == std::string::npos) continue;
        std::istringstream before(line), after(line.substr(behind + 3));
        std::string word, mounted, at, type, source, options;
        before >> word >> word >> word >> mounted >> at;
        after >> type >> source >> options;
        const int version = type == "cgroup2" ? 2 : type == "cgroup" && has_name(options, "memory") ? 1 : 0;
        if (version == 0) continue;
        const auto path = cgroup_path(root, version);
        if (!path) continue;
        std::string prefix = unescaped(mounted), folder;
        if (prefix == "/") prefix.clear();
        if (path->compare(0, prefix.size(), prefix) == 0) folder = path->substr(prefix.size());
        if (folder == "/" || (!folder.empty() && folder[0] != '/') || folder.find("/..") == 0) folder.clear();
        all.push_back({version, unescaped(at), folder});
    }
    return all;
}

// From here on a limit of version 1 is none: it has no word for that, but a number near 2^63.
constexpr uint64_t kNoCgroupLimit = uint64_t{1} << 60;

// One limit of memory: all that it allows, what of that is free now, and what this process may have in all,
// with what it has already.
struct MemoryLimit {
    size_t most, free, in_all;
    std::string name;
};

// What the kernel takes in a cgroup for a process beside the pages that it asks for: one page of tables for
// 512 of them, and some more.
constexpr uint64_t kPageBytes = 4096, kPagesOfATable = 512, kKernelBytes = 1 << 20;

// Adds the limits of one cgroup. Files that were read and may be dropped count as free, unless they may be
// the libraries of its processes.
inline void add_cgroup_limits(std::vector<MemoryLimit>& all, const std::string& root, int version,
                              const std::string& folder, const OwnMemory& own) {
    const std::string at = root + folder;
    const auto used = number_of_file(at + (version == 2 ? "/memory.current" : "/memory.usage_in_bytes"));
    if (!used) return;
    const auto in_stat = [&](const char* name) {
        return number_in_file(at + "/memory.stat", name).value_or(0);
    };
    const uint64_t files = in_stat(version == 2 ? "inactive_file" : "total_inactive_file"),
                   mapped = in_stat(version == 2 ? "file_mapped" : "total_mapped_file");
    const uint64_t own_files = std::min<uint64_t>(mapped, own.resident_files);
    const uint64_t kept = *used - std::min(*used, files - std::min(files, own_files));
    const auto names =
        version == 2 ? std::vector{"memory.max", "memory.high"} : std::vector{"memory.limit_in_bytes"};
    for (const char* name : names)
        if (const auto most = number_of_file(at + "/" + name); most && *most < kNoCgroupLimit) {
            const uint64_t free = *most - std::min(*most, kept);
            const uint64_t for_kernel = std::min(free, free / kPagesOfATable + kKernelBytes);
            all.push_back({*most, free, free - for_kernel + own.anonymous + own_files,
                           format("%s/%s", folder.c_str(), name)});
        }
}

// All limits that hold for this process now. `root` is put in front of every path, for tests.
inline std::vector<MemoryLimit> memory_limits(const std::string& root = "",
                                              const ProcessLimits& limits = ProcessLimits::now(),
                                              const OwnMemory& own = OwnMemory::now()) {
    std::vector<MemoryLimit> all;
    if (const auto kib = number_in_file(root + "/proc/meminfo", "MemAvailable:")) {
        const uint64_t free = *kib << 10;  // pages of files are available, mapped ones too
        all.push_back({number_in_file(root + "/proc/meminfo", "MemTotal:").value_or(*kib) << 10, free,
                       free + own.anonymous, "this machine's memory"});
    }
    for (const MemoryCgroups& cgroups : memory_cgroups(root)) {
        std::string folder = cgroups.folder;
        while (true) {
            add_cgroup_limits(all, root, cgroups.version, cgroups.mounted_at + folder, own);
            if (folder.empty()) break;
            folder.resize(folder.rfind('/'));
        }
    }
    const auto limit_by = [&](rlim_t most, const char* name, const char* option) {
        const auto kib = number_in_file(root + "/proc/self/status", name);
        if (most == RLIM_INFINITY || !kib) return;
        const uint64_t used = (*kib << 10) + limits.untouched, free = most - std::min<uint64_t>(most, used);
        all.push_back({most, free, free + own.anonymous + own.libraries,
                       format("ulimit %s %llu", option, static_cast<unsigned long long>(most >> 10))});
    };
    limit_by(limits.address_space, "VmSize:", "-v");
    limit_by(limits.data, "VmData:", "-d");
    return all;
}

// What is free for this process now, beside what it has.
inline FreeMemory host_memory_free(const std::string& root = "",
                                   const ProcessLimits& limits = ProcessLimits::now()) {
    FreeMemory free;
    for (const MemoryLimit& limit : memory_limits(root, limits, OwnMemory()))
        free.at_most(limit.free, limit.name);
    return free;
}

// What this process may have in all, with what it has already: what a plan may take.
inline FreeMemory host_memory_in_all(const std::vector<MemoryLimit>& limits) {
    FreeMemory free;
    for (const MemoryLimit& limit : limits) free.at_most(limit.in_all, limit.name);
    return free;
}

// What there really is of a number of bytes that somebody would have the process take: less than that where a
// limit that allows as many has less left now. Whole MiB, so that a plan and its run see the same. A limit
// that is smaller than those bytes is another machine's than the one they are meant for.
inline FreeMemory available_of(size_t bytes, const std::vector<MemoryLimit>& limits) {
    FreeMemory free{bytes, ""};
    for (const MemoryLimit& limit : limits)
        if (limit.most + kPageBytes > bytes && limit.in_all < bytes)  // a cgroup's limit is whole pages
            free.at_most(limit.in_all >> 20 << 20, limit.name);
    return free;
}
