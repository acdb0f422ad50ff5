// rates_gpus.h - what GPUs can do according to their maker: a table by name, and formulas for a GPU that is
// not in it. Read this to add a GPU, or to see where the rates of a plan without --rates come from.
//
// The figures are from NVIDIA's data sheets and architecture white papers (GA100, GA102, AD102, GH100,
// Blackwell and RTX Blackwell), for dense operands and at the boost clock. Products of bf16 add in fp32,
// which a GeForce's tensor cores do at half the rate of the same chip on a workstation's card. A laptop's
// clock depends on the power that its maker allows: laptops are computed from the clock that the device
// reports.
#pragma once

#include <algorithm>
#include <cctype>
#include <string>

// The bytes/s of 16 lanes of PCI Express, each way, and of NVLink between a GPU and its own CPU.
constexpr double kPcie4 = 32e9, kPcie5 = 64e9, kNvlinkC2c = 450e9;
// The bytes/s of the NVLinks of a GPU to the others of its machine, each way, by generation.
constexpr double kNvlink3 = 300e9, kNvlink4 = 450e9, kNvlink5 = 900e9;
// Bytes/s of the memory of the host that a GPU is assumed to be in: eight channels of DDR4-3200, or two of
// DDR5-5600.
constexpr double kServer = 205e9, kDesktop = 90e9;

// FLOP/s of dense products in bf16, in TF32 and in fp32 without tensor cores; bytes/s of the GPU's memory, of
// its link to the host, each way, of the host's memory, and of NVLink to all other GPUs of its machine, each
// way; without that they reach each other over the link to the host.
struct KnownGpu {
    const char* name;  // empty: computed, not in the table
    double flops, tf32, fp32, bandwidth, link, host = kServer, nvlink = 0;
};

// A GeForce from its fp32 TFLOP/s and GB/s: products in bf16 have twice that rate, in TF32 the same.
constexpr KnownGpu geforce(const char* name, double fp32, double bandwidth, double link) {
    return {name, 2e12 * fp32, 1e12 * fp32, 1e12 * fp32, 1e9 * bandwidth, link, kDesktop};
}
// A workstation's or a server's card with the same chips: four times that rate in bf16, and twice in TF32.
constexpr KnownGpu workstation(const char* name, double fp32, double bandwidth, double link) {
    return {name, 4e12 * fp32, 2e12 * fp32, 1e12 * fp32, 1e9 * bandwidth, link};
}

// What a build plans for if no GPU answers: one of several that NVLink connects.
constexpr KnownGpu kA100 = {"A100", 312e12, 156e12, 19.5e12, 1.94e12, kPcie4, kServer, kNvlink3};

constexpr KnownGpu kKnownGpus[] = {
    // if two names fit, the first counts
    {"GB200", 2500e12, 1250e12, 80e12, 8.0e12, kNvlinkC2c, kServer, kNvlink5},
    {"B300", 2250e12, 1125e12, 75e12, 8.0e12, kPcie5, kServer, kNvlink5},
    {"B200", 2250e12, 1125e12, 75e12, 8.0e12, kPcie5, kServer, kNvlink5},
    {"GH200 480GB", 989e12, 494e12, 67e12, 4.0e12, kNvlinkC2c},
    {"GH200 144G HBM3e", 989e12, 494e12, 67e12, 4.9e12, kNvlinkC2c},
    {"H200 NVL", 835e12, 417e12, 60e12, 4.8e12, kPcie5},
    {"H200", 989e12, 494e12, 67e12, 4.8e12, kPcie5, kServer, kNvlink4},
    {"H100 PCIe", 756e12, 378e12, 51e12, 2.0e12, kPcie5},
    {"H100 NVL", 835e12, 417e12, 60e12, 3.9e12, kPcie5},
    {"H100", 989e12, 494e12, 67e12, 3.35e12, kPcie5, kServer, kNvlink4},
    {"H20", 148e12, 74e12, 44e12, 4.0e12, kPcie5, kServer, kNvlink4},
    {"A100-SXM4-80GB", 312e12, 156e12, 19.5e12, 2.039e12, kPcie4, kServer, kNvlink3},
    {"A100-SXM4-40GB", 312e12, 156e12, 19.5e12, 1.555e12, kPcie4, kServer, kNvlink3},
    {"A100-PCIE-40GB", 312e12, 156e12, 19.5e12, 1.555e12, kPcie4},
    {"A100 80GB PCIe", 312e12, 156e12, 19.5e12, 1.94e12, kPcie4},
    kA100,
    {"A30", 165e12, 82e12, 10.3e12, 0.933e12, kPcie4},
    {"A10G", 70e12, 35e12, 35e12, 0.6e12, kPcie4},
    workstation("A40", 37.4, 696, kPcie4),
    workstation("A10", 31.2, 600, kPcie4),
    workstation("A2", 4.5, 200, kPcie4 / 2),
    workstation("L40S", 91.6, 864, kPcie4),
    {"L40", 181e12, 90.5e12, 90.5e12, 0.864e12, kPcie4},
    workstation("L4", 30.3, 300, kPcie4),
    workstation("RTX PRO 6000 Blackwell Workstation Edition", 125, 1792, kPcie5),
    workstation("RTX PRO 6000 Blackwell Max-Q Workstation Edition", 110, 1792, kPcie5),
    workstation("RTX PRO 6000 Blackwell Server Edition", 120, 1597, kPcie5),
    workstation("RTX PRO 5000 Blackwell", 73.7, 1344, kPcie5),
    workstation("RTX PRO 4500 Blackwell", 54.9, 896, kPcie5),
    workstation("RTX PRO 4000 Blackwell", 46.9, 672, kPcie5),
    workstation("RTX 6000 Ada Generation", 91.1, 960, kPcie4),
    workstation("RTX 5000 Ada Generation", 65.3, 576, kPcie4),
    workstation("RTX 4500 Ada Generation", 39.6, 432, kPcie4),
    workstation("RTX 4000 Ada Generation", 26.7, 360, kPcie4),
    workstation("RTX A6000", 38.7, 768, kPcie4),
    workstation("RTX A5500", 34.1, 768, kPcie4),
    workstation("RTX A5000", 27.8, 768, kPcie4),
    workstation("RTX A4500", 23.7, 640, kPcie4),
    workstation("RTX A4000", 19.2, 448, kPcie4),
    geforce("RTX 5090 D", 104.8, 1792, kPcie5),
    geforce("RTX 5090", 104.8, 1792, kPcie5),
    geforce("RTX 5080", 56.3, 960, kPcie5),
    geforce("RTX 5070 Ti", 43.9, 896, kPcie5),
    geforce("RTX 5070", 30.9, 672, kPcie5),
    geforce("RTX 5060 Ti", 23.7, 448, kPcie5 / 2),
    geforce("RTX 5060", 19.2, 448, kPcie5 / 2),
    geforce("RTX 5050", 13.2, 320, kPcie5 / 2),
    geforce("RTX 4090 D", 73.5, 1008, kPcie4),
    {"RTX 4090", 165e12, 82.6e12, 82.6e12, 1.01e12, kPcie4, kDesktop},
    geforce("RTX 4080 SUPER", 52.2, 736, kPcie4),
    geforce("RTX 4080", 48.7, 717, kPcie4),
    geforce("RTX 4070 Ti SUPER", 44.1, 672, kPcie4),
    geforce("RTX 4070 Ti", 40.1, 504, kPcie4),
    geforce("RTX 4070 SUPER", 35.5, 504, kPcie4),
    geforce("RTX 4070", 29.1, 504, kPcie4),
    geforce("RTX 4060 Ti", 22.1, 288, kPcie4 / 2),
    geforce("RTX 4060", 15.1, 272, kPcie4 / 2),
    geforce("RTX 3090 Ti", 40.0, 1008, kPcie4),
    {"RTX 3090", 71e12, 35.6e12, 35.6e12, 0.936e12, kPcie4, kDesktop},
    geforce("RTX 3080 Ti", 34.1, 912, kPcie4),
    geforce("RTX 3080", 29.8, 760, kPcie4),
    geforce("RTX 3070 Ti", 21.7, 608, kPcie4),
    geforce("RTX 3070", 20.3, 448, kPcie4),
    geforce("RTX 3060 Ti", 16.2, 448, kPcie4),
    geforce("RTX 3060", 12.7, 360, kPcie4),
    geforce("RTX 3050", 9.1, 224, kPcie4 / 2),
    // Estimated from NVIDIA's 1 PFLOP/s in sparse FP4: an eighth of that. Its memory is the host's.
    {"GB10", 125e12, 62e12, 31e12, 0.273e12, 0.273e12 / 2, 0.273e12},
    // Likewise from its 2070 TFLOP/s.
    {"Thor", 258e12, 129e12, 8.1e12, 0.273e12, 0.273e12 / 2, 0.273e12},
};

// The known GPU that a driver's name refers to; null if there is none. The known name must occur in it as
// whole words: an "RTX A1000" is no A100. A suffix makes an RTX another GPU ("Ti", "D", "Laptop GPU"); for
// others it says how the GPU is built in.
inline const KnownGpu* gpu_named(const std::string& name) {
    const auto in_word = [&](size_t i) {
        return i < name.size() && isalnum(static_cast<unsigned char>(name[i]));
    };
    for (const KnownGpu& gpu : kKnownGpus) {
        const std::string known = gpu.name;
        const size_t begin = name.find(known), end = begin + known.size();
        if (begin == std::string::npos || (begin > 0 && in_word(begin - 1)) || in_word(end)) continue;
        if (known.starts_with("RTX") && end < name.size()) continue;
        return &gpu;
    }
    return nullptr;
}

// What a device reports of itself.
struct GpuFacts {
    std::string name;
    int major, minor, multiprocessors;
    double clock, memory_clock;  // Hz
    int bus_bits;
    bool integrated;  // its memory is the host's
};

// FLOPs of one multiprocessor per cycle, by compute capability.
struct FlopsACycle {
    double bf16, tf32, fp32;
};
inline FlopsACycle flops_a_cycle(int major, int minor, bool is_geforce) {
    if (major == 8 && minor == 0) return {2048, 1024, 128};
    if (major == 8 && minor == 7) return {2048, 1024, 256};    // Orin
    if (major == 9) return {4096, 2048, 256};                  // Hopper
    if (major == 10 || major == 11) return {8192, 4096, 256};  // Blackwell of servers, and Thor
    return is_geforce ? FlopsACycle{512, 256, 256} : FlopsACycle{1024, 512, 256};  // 8.6, 8.9, 12.x
}

// The rates of a GPU that is not in the table, from what it reports. A module whose memory is its host's may
// report any memory clock, so at least LPDDR5's 6.4 Gbit/s per line is assumed. If no bandwidth is reported,
// an A100's for the same FLOP/s is assumed.
inline KnownGpu computed_gpu(const GpuFacts& facts) {
    const auto [bf16, tf32, fp32] =
        flops_a_cycle(facts.major, facts.minor, facts.name.find("GeForce") != std::string::npos);
    const double cycles = facts.multiprocessors * facts.clock;
    const double transfers = std::max(2 * facts.memory_clock, facts.integrated ? 6.4e9 : 0.0);
    double bandwidth = transfers * facts.bus_bits / 8;
    if (bandwidth <= 0) bandwidth = kA100.bandwidth / kA100.flops * bf16 * cycles;
    KnownGpu gpu = {"", bf16 * cycles, tf32 * cycles, fp32 * cycles, bandwidth, kPcie4};
    if (facts.major >= 9) gpu.link = kPcie5;
    if (facts.name.find("Laptop") != std::string::npos) gpu.link /= 2;  // eight lanes
    if (facts.name.find("RTX") != std::string::npos) gpu.host = kDesktop;
    if (facts.integrated) gpu.link = bandwidth / 2, gpu.host = bandwidth;  // a copy reads and writes
    return gpu;
}
