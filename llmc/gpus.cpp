// gpus.cpp - the table of GPUs, to which you may add one, and the search in it by the names that people and
// drivers use.
//
// The figures are from NVIDIA's data sheets and architecture white papers (GA100, GA102, AD102, GH100,
// Blackwell and RTX Blackwell), for dense operands and at the boost clock. Products of bf16 add in fp32,
// which a GeForce's tensor cores do at half the rate of the same chip on a workstation's card. The clock of a
// laptop or an Orin depends on the power that it is given: where one answers, its rates are computed from
// the clock that it reports, and where `--gpu` names one, they are those of the highest clock.
#include "llmc/gpus.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <set>
#include <vector>

#include "llmc/error.h"
#include "llmc/text.h"

// A GeForce from its fp32 TFLOP/s and GB/s: products in bf16 have twice that rate, in TF32 the same.
constexpr KnownGpu geforce(const char* name, int multiprocessors, double memory, double fp32,
                           double bandwidth, double link) {
    return {name,        multiprocessors, memory, 2e12 * fp32, 1e12 * fp32,
            1e12 * fp32, 1e9 * bandwidth, link,   kDesktop};
}
// A workstation's or a server's card with the same chips: four times that rate in bf16, and twice in TF32.
constexpr KnownGpu workstation(const char* name, int multiprocessors, double memory, double fp32,
                               double bandwidth, double link) {
    return {name, multiprocessors, memory, 4e12 * fp32, 2e12 * fp32, 1e12 * fp32, 1e9 * bandwidth, link};
}

// A GeForce in a laptop, at the highest clock that NVIDIA names for it.
constexpr KnownGpu laptop(const char* name, int multiprocessors, double memory, double fp32, double bandwidth,
                          double link = kPcie4 / 2) {
    KnownGpu gpu = geforce(name, multiprocessors, memory, fp32, bandwidth, link);
    gpu.for_plans_only = true;
    return gpu;
}
// A module with an Orin, at its highest clock in Hz. Its memory is the host's; a copy reads and writes it.
constexpr KnownGpu orin(const char* name, int multiprocessors, double memory, double clock,
                        double bandwidth) {
    const double cycles = multiprocessors * clock;
    return {name,          multiprocessors, memory, 2048 * cycles, 1024 * cycles, 256 * cycles, bandwidth,
            bandwidth / 2, bandwidth,       0,      true,          true};
}

constexpr KnownGpu kA100 = {"A100", 108, 79.1, 312e12, 156e12, 19.5e12, 1.94e12, kPcie4, kServer, kNvlink3};

constexpr KnownGpu kKnownGpus[] = {
    // if two names fit, the first counts
    {"GB200", 148, 184, 2500e12, 1250e12, 80e12, 8.0e12, kNvlinkC2c, kServer, kNvlink5},
    {"B300", 148, 268, 2250e12, 1125e12, 75e12, 8.0e12, kPcie5, kServer, kNvlink5},
    {"B200", 148, 178, 2250e12, 1125e12, 75e12, 8.0e12, kPcie5, kServer, kNvlink5},
    {"GH200 480GB", 132, 94.5, 989e12, 494e12, 67e12, 4.0e12, kNvlinkC2c},
    {"GH200 144G HBM3e", 132, 139.5, 989e12, 494e12, 67e12, 4.9e12, kNvlinkC2c},
    {"H200 NVL", 132, 139.7, 835e12, 417e12, 60e12, 4.8e12, kPcie5},
    {"H200", 132, 139.7, 989e12, 494e12, 67e12, 4.8e12, kPcie5, kServer, kNvlink4},
    {"H100 PCIe", 114, 79.1, 756e12, 378e12, 51e12, 2.0e12, kPcie5},
    {"H100 NVL", 132, 93.1, 835e12, 417e12, 60e12, 3.9e12, kPcie5},
    {"H100", 132, 79.1, 989e12, 494e12, 67e12, 3.35e12, kPcie5, kServer, kNvlink4},
    {"H20", 78, 94.9, 148e12, 74e12, 44e12, 4.0e12, kPcie5, kServer, kNvlink4},
    {"A100-SXM4-80GB", 108, 79.1, 312e12, 156e12, 19.5e12, 2.039e12, kPcie4, kServer, kNvlink3},
    {"A100-SXM4-40GB", 108, 39.3, 312e12, 156e12, 19.5e12, 1.555e12, kPcie4, kServer, kNvlink3},
    {"A100-PCIE-40GB", 108, 39.3, 312e12, 156e12, 19.5e12, 1.555e12, kPcie4},
    {"A100 80GB PCIe", 108, 79.1, 312e12, 156e12, 19.5e12, 1.94e12, kPcie4},
    kA100,
    {"A30", 56, 23.5, 165e12, 82e12, 10.3e12, 0.933e12, kPcie4},
    {"A10G", 80, 22, 70e12, 35e12, 35e12, 0.6e12, kPcie4},
    workstation("A40", 84, 44.3, 37.4, 696, kPcie4),
    workstation("A10", 72, 22, 31.2, 600, kPcie4),
    workstation("A2", 10, 14.5, 4.5, 200, kPcie4 / 2),
    workstation("L40S", 142, 44.3, 91.6, 864, kPcie4),
    {"L40", 142, 44.3, 181e12, 90.5e12, 90.5e12, 0.864e12, kPcie4},
    workstation("L4", 58, 22, 30.3, 300, kPcie4),
    workstation("RTX PRO 6000 Blackwell Workstation Edition", 188, 94.9, 125, 1792, kPcie5),
    workstation("RTX PRO 6000 Blackwell Max-Q Workstation Edition", 188, 94.9, 110, 1792, kPcie5),
    workstation("RTX PRO 6000 Blackwell Server Edition", 188, 94.9, 120, 1597, kPcie5),
    workstation("RTX PRO 5000 Blackwell", 110, 47.3, 73.7, 1344, kPcie5),
    workstation("RTX PRO 4500 Blackwell", 82, 31.3, 54.9, 896, kPcie5),
    workstation("RTX PRO 4000 Blackwell", 70, 23.4, 46.9, 672, kPcie5),
    workstation("RTX 6000 Ada Generation", 142, 47.3, 91.1, 960, kPcie4),
    workstation("RTX 5000 Ada Generation", 100, 31.3, 65.3, 576, kPcie4),
    workstation("RTX 4500 Ada Generation", 60, 23.5, 39.6, 432, kPcie4),
    workstation("RTX 4000 Ada Generation", 48, 19.5, 26.7, 360, kPcie4),
    workstation("RTX A6000", 84, 47.4, 38.7, 768, kPcie4),
    workstation("RTX A5500", 80, 23.5, 34.1, 768, kPcie4),
    workstation("RTX A5000", 64, 23.5, 27.8, 768, kPcie4),
    workstation("RTX A4500", 56, 19.6, 23.7, 640, kPcie4),
    workstation("RTX A4000", 48, 15.5, 19.2, 448, kPcie4),
    geforce("RTX 5090 D", 170, 31.3, 104.8, 1792, kPcie5),
    geforce("RTX 5090", 170, 31.3, 104.8, 1792, kPcie5),
    geforce("RTX 5080", 84, 15.4, 56.3, 960, kPcie5),
    geforce("RTX 5070 Ti", 70, 15.4, 43.9, 896, kPcie5),
    geforce("RTX 5070", 48, 11.5, 30.9, 672, kPcie5),
    geforce("RTX 5060 Ti", 36, 15.4, 23.7, 448, kPcie5 / 2),
    geforce("RTX 5060 Ti 8GB", 36, 7.5, 23.7, 448, kPcie5 / 2),
    geforce("RTX 5060", 30, 7.5, 19.2, 448, kPcie5 / 2),
    geforce("RTX 5050", 20, 7.5, 13.2, 320, kPcie5 / 2),
    geforce("RTX 4090 D", 114, 23.5, 73.5, 1008, kPcie4),
    {"RTX 4090", 128, 23.5, 165e12, 82.6e12, 82.6e12, 1.01e12, kPcie4, kDesktop},
    geforce("RTX 4080 SUPER", 80, 15.5, 52.2, 736, kPcie4),
    geforce("RTX 4080", 76, 15.5, 48.7, 717, kPcie4),
    geforce("RTX 4070 Ti SUPER", 66, 15.5, 44.1, 672, kPcie4),
    geforce("RTX 4070 Ti", 60, 11.6, 40.1, 504, kPcie4),
    geforce("RTX 4070 SUPER", 56, 11.6, 35.5, 504, kPcie4),
    geforce("RTX 4070", 46, 11.6, 29.1, 504, kPcie4),
    geforce("RTX 4060 Ti", 34, 7.6, 22.1, 288, kPcie4 / 2),
    geforce("RTX 4060 Ti 16GB", 34, 15.5, 22.1, 288, kPcie4 / 2),
    geforce("RTX 4060", 24, 7.6, 15.1, 272, kPcie4 / 2),
    geforce("RTX 3090 Ti", 84, 23.5, 40.0, 1008, kPcie4),
    {"RTX 3090", 82, 23.5, 71e12, 35.6e12, 35.6e12, 0.936e12, kPcie4, kDesktop},
    geforce("RTX 3080 Ti", 80, 11.6, 34.1, 912, kPcie4),
    geforce("RTX 3080", 68, 9.6, 29.8, 760, kPcie4),
    geforce("RTX 3080 12GB", 70, 11.6, 30.6, 912, kPcie4),
    geforce("RTX 3070 Ti", 48, 7.6, 21.7, 608, kPcie4),
    geforce("RTX 3070", 46, 7.6, 20.3, 448, kPcie4),
    geforce("RTX 3060 Ti", 38, 7.6, 16.2, 448, kPcie4),
    geforce("RTX 3060", 28, 11.6, 12.7, 360, kPcie4),
    geforce("RTX 3060 8GB", 28, 7.6, 12.7, 240, kPcie4),
    geforce("RTX 3050", 20, 7.6, 9.1, 224, kPcie4 / 2),
    geforce("RTX 3050 6GB", 18, 5.6, 6.8, 168, kPcie4 / 2),
    // Estimated from NVIDIA's 1 PFLOP/s in sparse FP4: an eighth of that. Its memory is the host's.
    {"GB10", 48, 119, 125e12, 62e12, 31e12, 0.273e12, 0.273e12 / 2, 0.273e12, 0, true},
    // Likewise from its 2070 TFLOP/s.
    {"Thor", 20, 122, 258e12, 129e12, 8.1e12, 0.273e12, 0.273e12 / 2, 0.273e12, 0, true},
    orin("Jetson AGX Orin 64GB", 16, 61, 1.3e9, 204.8e9),
    orin("Jetson AGX Orin 32GB", 14, 30, 0.93e9, 204.8e9),
    orin("Jetson Orin NX 16GB", 8, 15, 0.918e9, 102.4e9),
    orin("Jetson Orin Nano 8GB", 8, 7.4, 1.02e9, 102.4e9),
    // fp32 of the 50 series: a 32nd of the sparse FP4 that NVIDIA states, as in its desktop's.
    laptop("RTX 5090 Laptop", 82, 23.5, 57.0, 896, kPcie5 / 2),
    laptop("RTX 5080 Laptop", 60, 15.4, 41.7, 896, kPcie5 / 2),
    laptop("RTX 5070 Ti Laptop", 46, 11.5, 31.0, 672, kPcie5 / 2),
    laptop("RTX 5070 Laptop", 36, 7.5, 24.9, 384, kPcie5 / 2),
    laptop("RTX 4090 Laptop", 76, 15.5, 39.7, 576),
    laptop("RTX 4080 Laptop", 58, 11.6, 33.9, 432),
    laptop("RTX 4070 Laptop", 36, 7.6, 20.0, 256),
    laptop("RTX 4060 Laptop", 24, 7.6, 14.6, 256),
    laptop("RTX 4050 Laptop", 20, 5.6, 12.1, 192),
    laptop("RTX 3080 Ti Laptop", 58, 15.5, 23.6, 512),
    laptop("RTX 3080 Laptop", 48, 15.5, 21.0, 448),
    laptop("RTX 3080 Laptop 8GB", 48, 7.6, 21.0, 448),
    laptop("RTX 3070 Ti Laptop", 46, 7.6, 17.5, 448),
    laptop("RTX 3070 Laptop", 40, 7.6, 16.6, 448),
    laptop("RTX 3060 Laptop", 30, 5.6, 13.1, 336),
    laptop("RTX 3050 Ti Laptop", 20, 3.7, 8.7, 192),
};

std::span<const KnownGpu> known_gpus() { return kKnownGpus; }

const KnownGpu* gpu_named(const std::string& name) {
    const auto in_word = [&](size_t i) {
        return i < name.size() && isalnum(static_cast<unsigned char>(name[i]));
    };
    if (name.find(" MIG ") != std::string::npos) return nullptr;
    for (const KnownGpu& gpu : kKnownGpus) {
        if (gpu.for_plans_only) continue;
        const std::string known = gpu.name;
        const size_t begin = name.find(known), end = begin + known.size();
        if (begin == std::string::npos || (begin > 0 && in_word(begin - 1)) || in_word(end)) continue;
        if (known.starts_with("RTX") && end < name.size()) continue;
        return &gpu;
    }
    return nullptr;
}

// FLOPs of one multiprocessor per cycle, by compute capability.
struct FlopsACycle {
    double bf16, tf32, fp32;
};
static FlopsACycle flops_a_cycle(int major, int minor, bool is_geforce) {
    if (major == 8 && minor == 0) return {2048, 1024, 128};
    if (major == 8 && minor == 7) return {2048, 1024, 256};    // Orin
    if (major == 9) return {4096, 2048, 256};                  // Hopper
    if (major == 10 || major == 11) return {8192, 4096, 256};  // Blackwell of servers, and Thor
    return is_geforce ? FlopsACycle{512, 256, 256} : FlopsACycle{1024, 512, 256};  // 8.6, 8.9, 12.x
}

KnownGpu computed_gpu(const GpuFacts& facts) {
    const auto [bf16, tf32, fp32] =
        flops_a_cycle(facts.major, facts.minor, facts.name.find("GeForce") != std::string::npos);
    const double cycles = facts.multiprocessors * facts.clock;
    const double transfers = std::max(2 * facts.memory_clock, facts.integrated ? 6.4e9 : 0.0);
    double bandwidth = transfers * facts.bus_bits / 8;
    if (bandwidth <= 0) bandwidth = kA100.bandwidth / kA100.flops * bf16 * cycles;
    constexpr double kUnknown = 0;  // its memory: nothing is planned for it by name
    KnownGpu gpu = {
        "", facts.multiprocessors, kUnknown, bf16 * cycles, tf32 * cycles, fp32 * cycles, bandwidth, kPcie4};
    if (facts.major >= 9) gpu.link = kPcie5;
    if (facts.name.find("Laptop") != std::string::npos) gpu.link /= 2;  // eight lanes
    if (facts.name.find("RTX") != std::string::npos) gpu.host = kDesktop;
    if (facts.integrated) gpu.link = bandwidth / 2, gpu.host = bandwidth;  // a copy reads and writes
    return gpu;
}

// The words of a GPU's name in lower case, without those that only say who makes it or how it is built in. A
// word also ends where digits turn into letters, or three or more letters into digits: "rtx4060ti 16gb" has
// rtx, 4060, ti, 16 and gb; but "a100" is one word.
static std::vector<std::string> words_of_gpu(const std::string& name) {
    const auto letter = [](char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; };
    const auto digit = [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; };
    std::vector<std::string> words;
    char before = ' ';
    for (const char given : name) {
        const char c = static_cast<char>(std::tolower(static_cast<unsigned char>(given)));
        if (letter(c) || digit(c)) {
            const bool goes_on = (letter(before) && letter(c)) || (digit(before) && digit(c)) ||
                                 (letter(before) && words.back().size() < 3);
            if (!goes_on) words.emplace_back();
            words.back() += c;
        }
        before = c;
    }
    for (size_t i = 0; i < words.size(); i++) {
        if (words[i] == "g" || words[i] == "gib") words[i] = "gb";
        if (words[i] == "sxm" && i + 1 < words.size() && words[i + 1].size() == 1)  // "SXM4"
            words.erase(words.begin() + static_cast<ptrdiff_t>(i) + 1);
    }
    static const std::set<std::string> kLeftOut = {"nvidia", "geforce", "tesla", "gpu", "sxm"};
    std::erase_if(words, [](const std::string& w) { return kLeftOut.contains(w); });
    if (words == std::vector<std::string>{"dgx", "spark"}) words = {"gb10"};
    return words;
}

std::pair<int, std::string> count_in_name(const std::string& name) {
    std::string text = joined(words_of_gpu(name), " ");
    constexpr std::pair<std::string_view, const char*> kNumbers[] = {
        {"dual ", "2 "}, {"two ", "2 "}, {"four ", "4 "}, {"quad ", "4 "}, {"eight ", "8 "}, {"dgx ", "8 "}};
    for (const auto& [word, number] : kNumbers)
        if (text.starts_with(word)) text.replace(0, word.size(), number);
    int count = -1, end = 0;
    const auto rest = [&](size_t begin) { return text.substr(begin + static_cast<size_t>(end)); };
    const size_t sign = text.rfind(" x");
    if (sign != text.npos && sscanf(&text[sign], " x%2d%n", &count, &end) == 1 && rest(sign).empty())
        return {count, text.substr(0, sign)};
    if (sscanf(text.c_str(), "%4d %n", &count, &end) != 1 || rest(0).starts_with("gb")) return {-1, name};
    if (rest(0)[0] == 'x') return {count, rest(1)};
    return count < 100 ? std::pair{count, rest(0)} : std::pair{-1, name};
}

// If the last words are an amount of memory, as in "16 gb", removes them and returns the GB; else 0.
static double take_memory(std::vector<std::string>& words) {
    if (words.size() < 3 || words.back() != "gb") return 0;
    const std::string& number = words[words.size() - 2];
    if (number.size() > 4 || number.find_first_not_of("0123456789") != number.npos) return 0;
    const double memory = std::stod(number);
    words.resize(words.size() - 2);
    return memory;
}

// The known GPU with these words, in any order; else the first whose name begins with them. "RTX" and
// "Jetson" may be left out. Null if there is none.
static const KnownGpu* gpu_with_words(const std::vector<std::string>& words) {
    if (words.empty() || words.back() == "rtx") return nullptr;
    const KnownGpu* begins = nullptr;
    for (const KnownGpu& gpu : kKnownGpus) {
        std::vector<std::string> known = words_of_gpu(gpu.name);
        if ((known[0] == "rtx" || known[0] == "jetson") && words[0] != known[0]) known.erase(known.begin());
        if (std::is_permutation(words.begin(), words.end(), known.begin(), known.end())) return &gpu;
        if (begins || words.size() >= known.size() || !std::equal(words.begin(), words.end(), known.begin()))
            continue;
        // "RTX 4060" is no "RTX 4060 Ti", but "RTX 6000 Ada" is an "RTX 6000 Ada Generation".
        static const std::set<std::string> kOtherChips = {"ti", "super", "d", "nvl", "pcie"};
        if (!kOtherChips.contains(known[words.size()])) begins = &gpu;
    }
    return begins;
}

// The known GPUs whose names share a telling word with these: "A, B".
static std::string gpus_like(const std::vector<std::string>& words) {
    constexpr const char* kCommon = "rtx gb ti super d pro generation edition laptop max";
    std::string names;
    for (const KnownGpu& gpu : kKnownGpus) {
        const std::vector<std::string> known = words_of_gpu(gpu.name);
        const bool is_like = std::ranges::any_of(words, [&](const std::string& w) {
            return !has_word(kCommon, w) && w.size() > 2 && std::ranges::find(known, w) != known.end();
        });
        if (is_like) names += (names.empty() ? "" : ", ") + std::string(gpu.name);
    }
    return names;
}

// True for the names of GPUs of Apple, AMD and Intel.
static bool is_of_another_maker(const std::vector<std::string>& words) {
    static const std::set<std::string> kTheirs = {"apple", "amd", "radeon", "instinct", "rx", "intel", "arc"};
    return std::ranges::any_of(words, [](const std::string& w) {
        const bool is_model_of_m = w.starts_with("m") && w.size() == 2 && isdigit(w[1]);  // "M2"
        return kTheirs.contains(w) || is_model_of_m || (w.starts_with("mi") && w.size() > 2 && isdigit(w[2]));
    });
}

const KnownGpu& find_gpu(const std::string& name) {
    std::vector<std::string> words = words_of_gpu(count_in_name(name).second);
    const KnownGpu* gpu = gpu_with_words(words);
    const double memory = gpu ? 0 : take_memory(words);  // GB
    if (!gpu) gpu = gpu_with_words(words);
    if (!gpu) gpu = gpu_named(name);  // a driver's name, with more words
    if (!gpu && is_of_another_maker(words))
        fail("--gpu %s: this trains on GPUs of NVIDIA, and on CPUs", name);
    if (!gpu) {
        const std::string like = gpus_like(words);
        fail(
            "--gpu %s: no GPU of this name is known (and none before compute capability 8.0 can be used); "
            "there are %s",
            name,
            like.empty()
                ? "RTX 3060, RTX 4090, RTX 5090, RTX 6000 Ada, L40S, A100 40GB, H100, and others like these"
                : like);
    }
    constexpr double kReported = 0.97;  // GiB that drivers report of a GB on the package, about
    if (memory > 0 && std::abs(memory * kReported / gpu->memory - 1) > 0.1)
        fail("--gpu %s: the %s that is known has %.1f GiB; --memory SIZE plans for less", name, gpu->name,
             gpu->memory);
    return *gpu;
}

FreeMemory free_memory_of(const KnownGpu& gpu) {
    return {memory_of(gpu) - cuda_context_bytes(gpu), format("the memory of the %s", gpu.name)};
}
FreeMemory usable_memory_of(const KnownGpu& gpu) {
    return with_reserve(free_memory_of(gpu), cuda_context_bytes(gpu));
}

std::string gpus_with_room(size_t bytes, size_t pinned) {
    std::vector<const KnownGpu*> all;
    for (const KnownGpu& gpu : known_gpus()) {
        if (gpu.for_plans_only) continue;
        const size_t usable = with_reserve(free_memory_of(gpu), 0).bytes;
        if (usable >= bytes + (gpu.integrated ? pinned : 0)) all.push_back(&gpu);
    }
    std::ranges::stable_sort(all, [](const KnownGpu* a, const KnownGpu* b) { return a->memory < b->memory; });
    std::vector<std::string> names;  // at most three, one of each size
    double last = 0;
    for (const KnownGpu* gpu : all)
        if (gpu->memory >= last + 2 && names.size() < 3) {
            names.push_back(format("%s (%.0f GiB)", gpu->name, gpu->memory));
            last = gpu->memory;
        }
    const bool takes_host = pinned > size_t{1} << 30;  // more than a little of its memory
    const std::string with =
        takes_host ? format(" with %.1f GiB of the host's memory", gibibytes(pinned)) : "";
    return names.empty() ? "" : "GPUs that have room" + with + ": " + joined(names, ", ");
}
