// assemble_hopper.h - assembles Hopper's own instructions.
#pragma once

#include "test/gpu/assemble.h"
#include "test/gpu/hopper.h"

namespace gpu {

// Hopper's own instructions: copies by TMA, mbarriers, products by a warpgroup.
inline bool Assembler::hopper(const Statement& s, const Words& words, Instruction& i) {
    const auto barrier = [&](Execute execute) {
        i.execute = execute;
        set_address(s.args.at(0), i);
    };
    if (s.opcode == "mbarrier.init.shared::cta.b64") {
        barrier(make_mbarrier);
        i.s[1] = source(s.args.at(1), false);
    } else if (s.opcode == "mbarrier.arrive.shared::cta.b64") {
        i.execute = arrive_at_mbarrier;
        set_address(s.args.at(1), i);
    } else if (s.opcode == "mbarrier.arrive.expect_tx.shared::cta.b64") {
        i.execute = arrive_expecting;
        set_address(s.args.at(1), i);
        i.s[1] = source(s.args.at(2), false);
    } else if (s.opcode == "mbarrier.try_wait.parity.shared::cta.b64") {
        i.execute = try_wait_parity;
        i.d = destination(s.args.at(0));
        set_address(s.args.at(1), i);
        i.s[1] = source(s.args.at(2), false);
    } else if (s.opcode == "fence.mbarrier_init.release.cluster") {
        i.execute = fence_mbarrier_init;
    } else if (s.opcode == "fence.proxy.async.shared::cta") {
        i.execute = fence_proxy;
    } else if (words[0] == "setmaxnreg") {
        const bool more = words.at(1) == "inc";
        if (!more && words[1] != "dec") unknown();
        i.flow = more ? Flow::TakeRegisters : Flow::Together;
        i.execute = more ? nullptr : give_registers;
        i.whole_warp = true;
        i.option = static_cast<uint32_t>(s.args.at(0).number);
        if (i.option % 8 || i.option < 24 || i.option > 256) throw Fault("registers are 24 to 256, by 8");
    } else if (s.opcode ==
               "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes") {
        // [to], [map, {column, row, batch}], [barrier]
        barrier(copy_tensor);
        Instruction map, arrived;
        set_address(s.args.at(1), map);
        set_address(s.args.at(2), arrived);
        if (map.offset || arrived.offset || i.offset) throw Fault("an address with an offset");
        i.s[1] = map.s[0];
        i.s[2] = arrived.s[0];
        for (const Arg& a : s.args[1].parts) i.sources.push_back(source(a, false));
        if (i.sources.size() != 3) throw Fault("a tensor of three dimensions has three coordinates");
    } else if (words[0] == "wgmma") {
        i.flow = Flow::Together;
        i.whole_warp = true;
        if (words[1] == "fence") {
            i.execute = wgmma_fence;
        } else if (words[1] == "commit_group") {
            i.execute = wgmma_commit;
        } else if (words[1] == "wait_group") {
            i.execute = wgmma_wait;
            i.offset = static_cast<int64_t>(s.args.at(0).number);
        } else {
            product_of_warpgroup(s, words, i);
        }
    } else {
        return false;
    }
    return true;
}

// wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16 {d}, A, B, add, 1, 1[, A transposed], B transposed
inline void Assembler::product_of_warpgroup(const Statement& s, const Words& words, Instruction& i) {
    i.execute = wgmma;
    int n = 0;
    if (sscanf(words.at(4).c_str(), "m64n%dk16", &n) != 1 || words.at(5) != "f32" || words.at(6) != "bf16")
        unknown();
    i.option = static_cast<uint32_t>(n);
    for (const Arg& a : s.args.at(0).parts) i.more.push_back(destination(a));
    if (i.more.size() != static_cast<size_t>(n) / 2)
        throw Fault("not the registers of " + std::to_string(n) + " columns");
    const Arg& a = s.args.at(1);
    const bool a_in_registers = a.kind == Arg::Vector;
    if (a_in_registers)
        for (const Arg& part : a.parts) i.sources.push_back(source(part, false));
    else
        i.s[0] = source(a, true);
    i.s[1] = source(s.args.at(2), true);
    i.s[2] = destination(s.args.at(3));
    if (s.args.at(4).number != 1 || s.args.at(5).number != 1) throw Fault("operands are not negated here");
    const size_t transposes = 6;
    if (!a_in_registers && s.args.at(transposes).number) throw Fault("a transposed A is not known");
    i.is_signed = s.args.at(transposes + !a_in_registers).number;  // B is MN-major
}

}  // namespace gpu
