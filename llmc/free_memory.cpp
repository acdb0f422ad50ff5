// free_memory.cpp - reads the limits of memory from /proc, cgroups and ulimit.
#include "llmc/free_memory.h"

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "llmc/error.h"
#include "llmc/text.h"

size_t library_bytes(const std::string& root) {
    std::ifstream maps(root + "/proc/self/maps");
    std::map<std::string, size_t> sizes;  // by device and inode
    std::set<std::string> with_code;
    for (std::string line; std::getline(maps, line);) {
        unsigned long begin = 0, end = 0, inode = 0;
        char access[5] = "", device[16] = "";
        if (sscanf(line.c_str(), "%lx-%lx %4s %*s %15s %lu", &begin, &end, access, device, &inode) != 5)
            continue;
        if (inode == 0 || access[0] != 'r' || access[1] == 'w')
            continue;  // pages that can be written are copies
        const std::string file = format("%s %lu", device, inode);
        sizes[file] += end - begin;
        if (access[2] == 'x') with_code.insert(file);
    }
    size_t sum = 0;
    for (const std::string& file : with_code) sum += std::min(sizes[file], kMostOfALibrary);
    return sum;
}

std::optional<uint64_t> number_in_file(const std::string& path, const std::string& name) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string first;
        uint64_t number = 0;
        if (words >> first >> number && first == name) return number;
    }
    return std::nullopt;
}

// The number that is the whole content of a file. Nothing if it is a word such as "max".
static std::optional<uint64_t> number_of_file(const std::string& path) {
    std::ifstream file(path);
    uint64_t number = 0;
    if (file >> number) return number;
    return std::nullopt;
}

// Address space that a run maps but does not touch, measured with 1 to 16 threads: for the code that compiles
// products, for heaps, and for the products that a search for the largest batch describes. It counts only if
// address space is limited.
static size_t untouched_bytes(int threads) { return static_cast<size_t>(28 + 4 * threads) << 20; }

ProcessLimits ProcessLimits::now() {
    rlimit address_space{}, data{};
    ProcessLimits limits;
    limits.untouched = untouched_bytes(omp_get_max_threads());
    if (getrlimit(RLIMIT_AS, &address_space) == 0) limits.address_space = address_space.rlim_cur;
    if (getrlimit(RLIMIT_DATA, &data) == 0) limits.data = data.rlim_cur;
    return limits;
}

OwnMemory OwnMemory::now(const std::string& root) {
    const auto status = [&](const char* name) {
        return number_in_file(root + "/proc/self/status", name).value_or(0) << 10;
    };
    return {status("RssAnon:"), status("RssFile:"), library_bytes(root)};
}

// Decodes a path from /proc/self/mountinfo, in which spaces are written as \040.
static std::string unescaped(const std::string& text) {
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

// True if `name` is in a comma-separated list.
static bool has_name(const std::string& list, const std::string& name) {
    return ("," + list + ",").find("," + name + ",") != std::string::npos;
}

// The process's path in a hierarchy, from /proc/self/cgroup: lines like "4:memory:/path", or "0::/path" in
// version 2.
static std::optional<std::string> cgroup_path(const std::string& root, int version) {
    std::ifstream file(root + "/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        const size_t names = line.find(':') + 1, path = line.find(':', names) + 1;
        if (names == 0 || path == 0) continue;
        const std::string list = line.substr(names, path - 1 - names);
        if (version == 2 ? list.empty() : has_name(list, "memory")) return line.substr(path);
    }
    return std::nullopt;
}

// Values from here on mean no limit: version 1 writes a number near 2^63 instead of a word.
constexpr uint64_t kNoCgroupLimit = uint64_t{1} << 60;
// What the kernel takes in a cgroup for a process besides the pages that the process asks for: one page of
// page tables per 512 pages, and some more.
constexpr uint64_t kPageBytes = 4096, kPagesOfATable = 512, kKernelBytes = 1 << 20;

// Adds the limits of one cgroup. Cached files that can be dropped count as free, unless they may be the
// libraries of its processes.
static void add_cgroup_limits(std::vector<MemoryLimit>& all, const std::string& root, int version,
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
            all.push_back(
                {*most, free, free - for_kernel + own.anonymous + own_files, format("%s/%s", folder, name)});
        }
}

// Adds the limits of this process's cgroups in the hierarchies that are mounted, from /proc/self/mountinfo,
// and of the cgroups above them. A mount may show only a part of a hierarchy, as in a container; then the
// mounted part's path is removed from the process's path. If the process is outside that part, only the
// mount's root is used.
static void add_limits_of_cgroups(std::vector<MemoryLimit>& all, const std::string& root,
                                  const OwnMemory& own) {
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
        const std::string mounted_at = unescaped(at);
        for (; !folder.empty(); folder.resize(folder.rfind('/')))
            add_cgroup_limits(all, root, version, mounted_at + folder, own);
        add_cgroup_limits(all, root, version, mounted_at, own);
    }
}

std::vector<MemoryLimit> memory_limits(const std::string& root, const ProcessLimits& limits,
                                       const OwnMemory& own) {
    std::vector<MemoryLimit> all;
    if (const auto kib = number_in_file(root + "/proc/meminfo", "MemAvailable:")) {
        const uint64_t free = *kib << 10;  // MemAvailable includes pages of files, even mapped ones
        all.push_back({number_in_file(root + "/proc/meminfo", "MemTotal:").value_or(*kib) << 10, free,
                       free + own.anonymous, "this machine's memory"});
    }
    add_limits_of_cgroups(all, root, own);
    const auto limit_by = [&](rlim_t most, const char* name, const char* option) {
        const auto kib = number_in_file(root + "/proc/self/status", name);
        if (most == RLIM_INFINITY || !kib) return;
        const uint64_t used = (*kib << 10) + limits.untouched, free = most - std::min<uint64_t>(most, used);
        all.push_back({most, free, free + own.anonymous + own.libraries,
                       format("ulimit %s %lu", option, most >> 10), true});
    };
    limit_by(limits.address_space, "VmSize:", "-v");
    limit_by(limits.data, "VmData:", "-d");
    return all;
}

FreeMemory host_memory_free(const std::string& root, const ProcessLimits& limits) {
    FreeMemory free;
    for (const MemoryLimit& limit : memory_limits(root, limits, OwnMemory()))
        free.at_most(limit.free, limit.name);
    return free;
}

FreeMemory host_memory_in_all(const std::vector<MemoryLimit>& limits) {
    FreeMemory free;
    for (const MemoryLimit& limit : limits) free.at_most(limit.in_all, limit.name);
    return free;
}

std::vector<MemoryLimit> shared_limits(std::vector<MemoryLimit> limits, int ranks) {
    for (MemoryLimit& limit : limits) {
        if (limit.of_process || ranks == 1) continue;
        for (size_t* bytes : {&limit.most, &limit.free, &limit.in_all}) *bytes /= static_cast<size_t>(ranks);
        limit.name += format(", shared by %d ranks", ranks);
    }
    return limits;
}

FreeMemory available_of(size_t bytes, const std::vector<MemoryLimit>& limits) {
    FreeMemory free{bytes, ""};
    for (const MemoryLimit& limit : limits)
        if (limit.most + kPageBytes > bytes && limit.in_all < bytes)  // a cgroup's limit is whole pages
            free.at_most(limit.in_all >> 20 << 20, limit.name);
    return free;
}

bool limited_address_space() {
    rlimit limit{};
    return getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}

void require_memory_for(size_t bytes, const char* what) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p != MAP_FAILED) {
        munmap(p, bytes);
        return;
    }
    rlimit limit{};
    getrlimit(RLIMIT_AS, &limit);
    const std::string said = limit.rlim_cur == RLIM_INFINITY
                                 ? "and the system refuses"
                                 : format("beyond ulimit -v %lu", limit.rlim_cur >> 10);
    fail("out of memory: %s takes up to %s more, %s", what, size_text(bytes), said);
}
