// program.h - a kernel that is ready to run: its instructions with the places of their operands, its
// constants, its shared memory.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace gpu {

struct Warp;
struct Instruction;

// Executes an instruction for the lanes of a warp.
using Execute = void (*)(Warp&, const Instruction&, uint32_t lanes);

// The place of a register or a constant, with one value per lane: 32 of 4 bytes, or of 8 if it is wide; a
// predicate is one word of 32 bits.
struct Slot {
    uint32_t offset = 0;
    bool constant = false, wide = false, sink = false;
};

// Together: needs lanes at one place. TakeRegisters: setmaxnreg.inc, which needs them too, and waits for
// registers.
enum class Flow : uint8_t { Next, Branch, Return, Barrier, Together, TakeRegisters };

struct Instruction {
    Execute execute = nullptr;
    Flow flow = Flow::Next;
    bool guarded = false, guard_negated = false;
    bool whole_warp = false;  // Together: all live lanes, not those of a mask
    Slot guard;
    Slot d, s[4];
    std::vector<Slot> more;     // of vectors
    std::vector<Slot> sources;  // of tensor cores' products and stores
    int64_t offset = 0;         // of an address; otherwise a number of the instruction's own
    int target = -1;            // of a branch
    uint8_t bytes = 0, count = 1;
    bool is_signed = false;
    uint32_t option = 0;
    int line = 0;
};

// The names of special registers, in the order in which a block sets them.
inline constexpr const char* kSpecial[] = {"%tid.x",    "%tid.y",    "%tid.z",   "%ntid.x",  "%ntid.y",
                                           "%ntid.z",   "%ctaid.x",  "%ctaid.y", "%ctaid.z", "%nctaid.x",
                                           "%nctaid.y", "%nctaid.z", "%laneid"};

struct Program {
    std::string name;
    std::vector<Instruction> code;
    std::vector<char> constants;
    std::array<Slot, std::size(kSpecial)> special;
    size_t register_bytes = 0;
    size_t static_shared = 0;  // dynamic shared memory follows
    size_t parameter_bytes = 0;
    std::vector<std::pair<size_t, size_t>> parameters;  // offset, bytes
    unsigned max_threads = 0;
    uint32_t registers = 0;  // of a thread when it starts, as setmaxnreg counts them; 0 if unknown
    bool has_wgmma = false;
    std::vector<std::string> text;  // of each instruction, for messages
    mutable std::vector<bool> executed;
};

}  // namespace gpu
