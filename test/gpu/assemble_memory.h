// assemble_memory.h - assembles instructions that load and store, and those by which lanes of a warp work
// together.
#pragma once

#include "test/gpu/assemble.h"

namespace gpu {

inline bool Assembler::memory(const Statement& s, const Words& words, Instruction& i) {
    if (s.opcode.starts_with("cp.async.c")) {  // cp.async.cg.shared.global [to], [from], bytes[, count]
        i.execute = copy_async;
        set_address(s.args.at(0), i);
        Instruction from;
        set_address(s.args.at(1), from);
        i.s[1] = from.s[0];
        if (!i.s[1].wide) throw Fault("an address in global memory has 64 bits");
        i.option = static_cast<uint32_t>(from.offset);
        i.bytes = static_cast<uint8_t>(s.args.at(2).number);
        i.count = s.args.size() > 3;
        if (i.count) i.s[2] = source(s.args[3], false);
        if (has(words, "cg") ? i.bytes != 16 : i.bytes != 4 && i.bytes != 8 && i.bytes != 16)
            throw Fault("cp.async copies 4, 8 or 16 bytes, and with .cg only 16");
        return true;
    }
    if (s.opcode == "cp.async.commit_group") {
        i.execute = copy_async_commit;
        return true;
    }
    if (s.opcode == "cp.async.wait_all" || s.opcode == "cp.async.wait_group") {
        i.execute = copy_async_wait;
        i.offset = words[2] == "wait_all" ? -1 : static_cast<int64_t>(s.args.at(0).number);
        return true;
    }
    if (words[0] != "ld" && words[0] != "st") return false;
    const bool loads = words[0] == "ld";
    i.execute = loads ? load : store;
    if (has(words, "global"))
        i.option = kGlobal;
    else if (has(words, "shared"))
        i.option = kShared;
    else if (has(words, "param") && loads)
        i.execute = load_parameter;
    else
        unknown();
    i.count = has(words, "v4") ? 4 : has(words, "v2") ? 2 : 1;
    i.bytes = static_cast<uint8_t>(type_bytes(words.back()));
    i.is_signed = words.back()[0] == 's';
    set_address(s.args.at(loads ? 1 : 0), i);
    const Arg& values = s.args.at(loads ? 0 : 1);
    std::vector<Arg> parts = values.kind == Arg::Vector ? values.parts : std::vector<Arg>{values};
    if (parts.size() != i.count) throw Fault("not as many values as it moves");
    for (const Arg& a : parts) {
        if (loads)
            i.more.push_back(destination(a));
        else if (a.kind == Arg::Number)
            i.sources.push_back(constant(a.number, i.bytes == 8));
        else
            i.sources.push_back(any_width(a));
    }
    return true;
}

// Instructions by which lanes of a warp work together.
inline bool Assembler::together(const Statement& s, const Words& words, Instruction& i) {
    if (s.opcode == "bar.warp.sync") {
        i.flow = Flow::Together;
        i.execute = sync_warp;
        i.s[0] = source(s.args.at(0), false);
        return true;
    }
    if (words[0] == "shfl" && words[1] == "sync") {
        i.flow = Flow::Together;
        i.execute = words[2] == "up"     ? shuffle<kUp>
                    : words[2] == "down" ? shuffle<kDown>
                    : words[2] == "bfly" ? shuffle<kXor>
                                         : shuffle<kIndex>;
        i.d = destination(s.args.at(0).name);
        i.more.push_back(destination(s.args[0].second.empty() ? "_" : s.args[0].second));
        for (size_t n = 0; n < 3; n++) i.s[n] = source(s.args.at(n + 1), false);
        i.sources.push_back(source(s.args.at(4), false));
        return true;
    }
    if (s.opcode == "vote.sync.ballot.b32") {
        i.flow = Flow::Together;
        i.execute = vote_ballot;
        i.d = destination(s.args.at(0));
        i.s[0] = destination(s.args.at(1));
        i.sources.push_back(source(s.args.at(2), false));
        return true;
    }
    if (words[0] == "ldmatrix") {
        i.flow = Flow::Together;
        i.whole_warp = true;
        i.execute = load_matrix;
        i.option = kShared;
        i.is_signed = has(words, "trans");
        i.count = has(words, "x4") ? 4 : has(words, "x2") ? 2 : 1;
        for (const Arg& a : s.args.at(0).parts) i.more.push_back(destination(a));
        if (i.more.size() != i.count || words.back() != "b16" || !has(words, "m8n8")) unknown();
        set_address(s.args.at(1), i);
        return true;
    }
    if (s.opcode == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") {
        i.flow = Flow::Together;
        i.whole_warp = true;
        i.execute = mma_16_8_16;
        for (const Arg& a : s.args.at(0).parts) i.more.push_back(destination(a));
        for (size_t n = 1; n < 4; n++)
            for (const Arg& a : s.args.at(n).parts) i.sources.push_back(source(a, false));
        if (i.more.size() != 4 || i.sources.size() != 10) unknown();
        return true;
    }
    return false;
}

}  // namespace gpu
