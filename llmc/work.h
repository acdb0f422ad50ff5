// work.h - what the operations of a step cost: the FLOPs and the bytes that each launcher counts while the
// step is rehearsed (arena.h).
#pragma once

#include <string>
#include <vector>

#include "llmc/device.h"

// A launch or library call, or several alike in a loop. Bytes are those read and written if every operand
// passes once.
struct Work {
    std::string range;  // where it stands: Range::path()
    const char* name;
    double flops, bytes;  // of all calls
    double calls = 1;
    int time = 0;  // takes and releases before it
};

// Where a rehearsal writes its operations down, and its clock; null otherwise.
inline std::vector<Work>* work_ledger = nullptr;
inline const int* work_clock = nullptr;

inline void count_work(const char* name, double flops, double bytes) {
    if (!work_ledger) return;
    work_ledger->push_back({Range::path(), name, flops, bytes, 1, work_clock ? *work_clock : 0});
}

// The same for an operation that passes once over these tensors.
template <class... Tensors>
void count_pass(const char* name, const Tensors&... tensors) {
    if (work_ledger) count_work(name, 0, (static_cast<double>(tensors.bytes()) + ...));
}
