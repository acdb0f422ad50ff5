// assemble.h - turns a kernel's statements into instructions: what each opcode does for its types, and the
// place of each register and constant.
#pragma once

#include "test/gpu/hopper.h"
#include "test/gpu/instructions.h"
#include "test/gpu/ptx.h"

namespace gpu {

class Assembler {
  public:
    Assembler(const KernelText& kernel, const PtxModule& module)
        : kernel_(kernel), p_(std::make_unique<Program>()) {
        p_->name = kernel.name;
        p_->parameter_bytes = kernel.parameter_bytes;
        p_->max_threads = kernel.max_threads;
        p_->registers = starting_registers(kernel);
        for (const Parameter& a : kernel.parameters) {
            p_->parameters.emplace_back(a.offset, a.bytes);
            symbols_[a.name] = a.offset;
        }
        place_shared(module);
        p_->register_bytes = 64;  // no register is placed at 0, which stands for an absent operand
        for (const auto& [name, kind] : kernel.registers) place_register(name, kind);
        for (size_t i = 0; i < std::size(kSpecial); i++) {
            place_register(kSpecial[i], RegisterClass::Bits32);
            p_->special[i] = registers_.at(kSpecial[i]);
        }
    }
    std::unique_ptr<Program> assemble() {
        for (const Statement& s : kernel_.statements) {
            try {
                p_->code.push_back(instruction(s));
                p_->has_wgmma |= s.opcode.starts_with("wgmma");
            } catch (const std::exception& e) {
                throw Fault(kernel_.name + ", PTX line " + std::to_string(s.line) + ", " + s.opcode + ": " +
                            e.what());
            }
            p_->text.push_back(s.opcode);
        }
        // A label may be at the very end.
        Instruction end;
        end.flow = Flow::Return;
        p_->code.push_back(end);
        p_->text.push_back("ret");
        p_->executed.resize(p_->code.size());
        return std::move(p_);
    }

  private:
    using Words = std::vector<std::string>;

    // The registers of a thread that launch bounds leave of a multiprocessor's 65536, rounded down to a
    // multiple of eight. ptxas gives a kernel that contains setmaxnreg this many.
    static uint32_t starting_registers(const KernelText& kernel) {
        if (!kernel.max_threads) return 0;
        return std::min(kernel.max_registers, 65536 / (kernel.max_threads * kernel.min_blocks)) / 8 * 8;
    }

    void place_shared(const PtxModule& module) {
        // Places those of the module's variables that the kernel uses; the dynamic part comes last.
        std::map<std::string, const Variable*> variables;
        for (const Variable& v : module.shared) variables[v.name] = &v;
        for (const Variable& v : kernel_.shared) variables[v.name] = &v;
        std::map<std::string, const Variable*> used;
        const std::function<void(const Arg&)> look = [&](const Arg& a) {
            if (const auto it = variables.find(a.name); it != variables.end()) used.insert(*it);
            for (const Arg& part : a.parts) look(part);
        };
        for (const Statement& s : kernel_.statements)
            for (const Arg& a : s.args) look(a);
        for (const bool dynamic : {false, true})
            for (const auto& [name, v] : used) {
                if (v->dynamic != dynamic) continue;
                p_->static_shared = (p_->static_shared + v->alignment - 1) / v->alignment * v->alignment;
                symbols_[name] = p_->static_shared;
                p_->static_shared += v->bytes;
            }
    }
    void place_register(const std::string& name, RegisterClass kind) {
        const size_t bytes = kind == RegisterClass::Predicate ? 64
                             : kind == RegisterClass::Bits64  ? 256
                                                              : 128;
        Slot s;
        s.offset = static_cast<uint32_t>(p_->register_bytes);
        s.wide = kind == RegisterClass::Bits64;
        p_->register_bytes += bytes;
        registers_[name] = s;
    }
    // A constant for 32 lanes, with 8 bytes each if `wide`.
    Slot constant(uint64_t value, bool wide) {
        const auto [it, is_new] = constants_.try_emplace({value, wide});
        if (is_new) {
            Slot& s = it->second;
            s.constant = true;
            s.wide = wide;
            s.offset = static_cast<uint32_t>(p_->constants.size());
            const uint32_t narrow = static_cast<uint32_t>(value);
            for (int lane = 0; lane < 32; lane++)
                if (wide)
                    p_->constants.insert(p_->constants.end(), reinterpret_cast<const char*>(&value),
                                         reinterpret_cast<const char*>(&value) + 8);
                else
                    p_->constants.insert(p_->constants.end(), reinterpret_cast<const char*>(&narrow),
                                         reinterpret_cast<const char*>(&narrow) + 4);
        }
        return it->second;
    }
    // An operand that is read. The instruction says how wide it is.
    Slot source(const Arg& a, bool wide) {
        if (a.kind == Arg::Number) return constant(a.number, wide);
        if (a.kind != Arg::Name) throw Fault("an operand is not a register or a number");
        if (a.negated) throw Fault("a negated operand");
        if (const auto it = registers_.find(a.name); it != registers_.end()) {
            if (it->second.wide != wide) throw Fault(a.name + " is of another width");
            return it->second;
        }
        if (const auto it = symbols_.find(a.name); it != symbols_.end()) return constant(it->second, wide);
        throw Fault("\"" + a.name + "\" is not known");
    }
    Slot destination(const std::string& name) const {
        if (name == "_") {
            Slot s;
            s.sink = true;
            return s;
        }
        const auto it = registers_.find(name);
        if (it == registers_.end()) throw Fault("\"" + name + "\" is no register");
        return it->second;
    }
    Slot destination(const Arg& a) const {
        if (a.kind != Arg::Name) throw Fault("the destination is no register");
        return destination(a.name);
    }
    Slot any_width(const Arg& a) {
        if (a.kind == Arg::Name)
            if (const auto it = registers_.find(a.name); it != registers_.end()) return it->second;
        return source(a, false);
    }

    static Words split(const std::string& opcode) {
        Words words;
        size_t start = 0;
        for (size_t i = 0; i <= opcode.size(); i++)
            if (i == opcode.size() || opcode[i] == '.') {
                words.push_back(opcode.substr(start, i - start));
                start = i + 1;
            }
        return words;
    }
    static size_t type_bytes(const std::string& t) {
        const size_t digits = t.find_first_of("0123456789");
        const int bits = digits == std::string::npos ? 0 : atoi(t.c_str() + digits);
        if (bits % 8 || bits < 8 || bits > 64) throw Fault("type " + t + " is not known");
        return static_cast<size_t>(bits) / 8;
    }
    static bool has(const Words& words, const char* w) {
        return std::find(words.begin(), words.end(), w) != words.end();
    }
    [[noreturn]] static void unknown() { throw Fault("this instruction is not known"); }

    // Calls `make` for an integer type (integer), or for an integer or float type (number).
    template <class F>
    static Execute integer(const std::string& t, F make) {
        if (t == "s32") return make.template operator()<int32_t>();
        if (t == "u32" || t == "b32") return make.template operator()<uint32_t>();
        if (t == "s64") return make.template operator()<int64_t>();
        if (t == "u64" || t == "b64") return make.template operator()<uint64_t>();
        if (t == "s16") return make.template operator()<int16_t>();
        if (t == "u16" || t == "b16") return make.template operator()<uint16_t>();
        unknown();
    }
    template <class F>
    static Execute number(const std::string& t, F make) {
        if (t == "f32") return make.template operator()<float>();
        if (t == "f64") return make.template operator()<double>();
        return integer(t, make);
    }

    Instruction instruction(const Statement& s) {
        Instruction i;
        i.line = s.line;
        if (!s.guard.empty()) {
            i.guarded = true;
            i.guard_negated = s.guard_negated;
            i.guard = destination(s.guard);
        }
        const Words words = split(s.opcode);
        if (flow(s, words, i) || memory(s, words, i) || together(s, words, i) || hopper(s, words, i))
            return i;
        if (words[0] == "mov") return move(s, words, i);
        if (words[0] == "cvt") return convert(s, words, i);
        if (words[0] == "setp") return set_predicate(s, words, i);
        if (words[0] == "selp") return select(s, words, i);
        if (words.back() == "pred") return of_predicates(s, words, i);
        i.execute = arithmetic(words);
        i.d = destination(s.args.at(0));
        const std::string& type = words.back();
        const bool shifts = words[0] == "shl" || words[0] == "shr";
        // "mul.wide.s32" takes 32 bits and gives 64.
        for (size_t n = 1; n < s.args.size(); n++) {
            const bool third_of_wide = has(words, "wide") && n == 3;
            const bool of_32 =
                (shifts && n == 2) || ((words[0] == "bfi") && n >= 3) || ((words[0] == "bfe") && n >= 2);
            i.s[n - 1] = source(s.args[n], of_32 ? false : third_of_wide ? true : type_bytes(type) == 8);
        }
        if (i.d.wide !=
            (has(words, "wide") || (type_bytes(type) == 8 && words[0] != "popc" && words[0] != "clz")))
            throw Fault("the destination is of another width");
        return i;
    }

    bool flow(const Statement& s, const Words& words, Instruction& i) {
        if (words[0] == "bra") {
            i.flow = Flow::Branch;
            const auto it = kernel_.labels.find(s.args.at(0).name);
            if (it == kernel_.labels.end()) throw Fault("there is no such label");
            i.target = it->second;
            return true;
        }
        if (words[0] == "ret" || words[0] == "exit") {
            i.flow = Flow::Return;
            return true;
        }
        if (s.opcode == "bar.sync" || s.opcode == "barrier.sync.aligned") {
            i.flow = Flow::Barrier;
            i.whole_warp = true;
            i.s[0] = source(s.args.at(0), false);
            i.s[1] = s.args.size() > 1 ? source(s.args[1], false) : constant(0, false);
            return true;
        }
        return false;
    }

    void set_address(const Arg& a, Instruction& i) {
        if (a.kind != Arg::Address) throw Fault("an address is missing");
        if (a.name.empty()) {
            i.s[0] = constant(a.number, true);
            return;
        }
        i.offset = static_cast<int64_t>(a.number);
        const auto it = registers_.find(a.name);
        if (it != registers_.end())
            i.s[0] = it->second;
        else if (const auto symbol = symbols_.find(a.name); symbol != symbols_.end())
            i.s[0] = constant(symbol->second, true);
        else
            throw Fault("\"" + a.name + "\" is not known");
    }
    bool memory(const Statement& s, const Words& words, Instruction& i) {
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
                throw Fault("cannot copy so many bytes");
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
    bool together(const Statement& s, const Words& words, Instruction& i) {
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

    // Hopper's own instructions: copies by TMA, mbarriers, products by a warpgroup.
    bool hopper(const Statement& s, const Words& words, Instruction& i) {
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
    void product_of_warpgroup(const Statement& s, const Words& words, Instruction& i) {
        i.execute = wgmma;
        int n = 0;
        if (sscanf(words.at(4).c_str(), "m64n%dk16", &n) != 1 || words.at(5) != "f32" ||
            words.at(6) != "bf16")
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
        if (s.args.at(4).number != 1 || s.args.at(5).number != 1)
            throw Fault("operands are not negated here");
        const size_t transposes = 6;
        if (!a_in_registers && s.args.at(transposes).number) throw Fault("a transposed A is not known");
        i.is_signed = s.args.at(transposes + !a_in_registers).number;  // B is MN-major
    }

    Instruction move(const Statement& s, const Words& words, Instruction i) {
        const Arg &to = s.args.at(0), &from = s.args.at(1);
        const std::string& type = words.back();
        if (type == "pred") {
            i.d = destination(to);
            i.s[0] = i.s[1] =
                from.kind == Arg::Number ? constant(from.number ? ~0ull : 0, false) : destination(from);
            i.execute = predicates([](uint32_t a, uint32_t) { return a; });
        } else if (to.kind == Arg::Vector) {
            if (to.parts.size() != 2) unknown();
            for (const Arg& a : to.parts) i.more.push_back(destination(a));
            i.s[0] = source(from, type_bytes(type) == 8);
            i.bytes = static_cast<uint8_t>(type_bytes(type) / 2);
            i.execute = [](Warp& w, const Instruction& x, uint32_t lanes) {
                for_lanes(lanes, [&](int lane) {
                    const uint64_t bits =
                        x.s[0].wide ? w.at<uint64_t>(x.s[0])[lane] : w.at<uint32_t>(x.s[0])[lane];
                    const uint64_t mask = (1ull << 8 * x.bytes) - 1;
                    if (!x.more[0].sink) w.at<uint32_t>(x.more[0])[lane] = static_cast<uint32_t>(bits & mask);
                    if (!x.more[1].sink)
                        w.at<uint32_t>(x.more[1])[lane] = static_cast<uint32_t>(bits >> 8 * x.bytes);
                });
            };
        } else if (from.kind == Arg::Vector) {
            if (from.parts.size() != 2) unknown();
            i.d = destination(to);
            i.s[0] = source(from.parts[0], false);
            i.s[1] = source(from.parts[1], false);
            if (type_bytes(type) == 8)
                i.execute = elementwise<uint64_t, uint32_t, uint32_t>(
                    [](uint32_t a, uint32_t b) { return a | uint64_t{b} << 32; });
            else
                i.execute = elementwise<uint32_t, uint16_t, uint16_t>(
                    [](uint16_t a, uint16_t b) { return a | static_cast<uint32_t>(b) << 16; });
        } else {
            const bool wide = type_bytes(type) == 8;
            i.d = destination(to);
            i.s[0] = source(from, wide);
            i.execute = wide ? elementwise<uint64_t, uint64_t>([](uint64_t a) { return a; })
                             : elementwise<uint32_t, uint32_t>([](uint32_t a) { return a; });
            if (i.d.wide != wide) throw Fault("the destination is of another width");
        }
        return i;
    }

    template <class From, class To>
    static Execute from_integer() {
        return elementwise<To, From>([](From x) { return static_cast<To>(x); });
    }
    template <class From>
    static Execute to_integer(const std::string& to) {
        // In a wider register the sign of the narrower type is extended.
        if (to == "s64" || to == "u64") return from_integer<From, int64_t>();
        if (to == "s32" || to == "u32") return from_integer<From, int32_t>();
        if (to == "s16") return from_integer<From, int16_t>();
        if (to == "u16") return from_integer<From, uint16_t>();
        if (to == "u8")
            return elementwise<uint32_t, From>(
                [](From x) { return static_cast<uint32_t>(static_cast<uint8_t>(x)); });
        if (to == "s8")
            return elementwise<int32_t, From>(
                [](From x) { return static_cast<int32_t>(static_cast<int8_t>(x)); });
        if (to == "f32") return from_integer<From, float>();
        if (to == "f64") return from_integer<From, double>();
        unknown();
    }
    Instruction convert(const Statement& s, const Words& words, Instruction i) {
        const std::string &to = words[words.size() - 2], &from = words.back();
        i.d = destination(s.args.at(0));
        if (s.opcode == "cvt.s64.s32" &&
            any_width(s.args.at(1)).wide) {  // the lower half of a wider register
            i.s[0] = any_width(s.args[1]);
            i.execute = elementwise<int64_t, uint64_t>(
                [](uint64_t x) { return static_cast<int64_t>(static_cast<int32_t>(x)); });
            return i;
        }
        for (size_t n = 1; n < s.args.size(); n++) i.s[n - 1] = source(s.args[n], type_bytes(from) == 8);
        const std::string mode = words.size() > 3 ? words[1] : "";
        if (to == "bf16x2" && from == "f32" && mode == "rn") {  // the first goes to the upper half
            i.execute = elementwise<uint32_t, float, float>(
                [](float a, float b) { return static_cast<uint32_t>(to_bf16(a)) << 16 | to_bf16(b); });
        } else if (to == "bf16" && from == "f32" && mode == "rn") {
            i.execute = elementwise<uint16_t, float>([](float x) { return to_bf16(x); });
        } else if (to == "f32" && from == "bf16") {
            i.execute = elementwise<float, uint16_t>([](uint16_t x) { return from_bf16(x); });
        } else if (to == "f32" && from == "f16") {
            i.execute = elementwise<float, uint16_t>(
                [](uint16_t x) { return static_cast<float>(std::bit_cast<_Float16>(x)); });
        } else if (to == "f64" && from == "f32") {
            i.execute = elementwise<double, float>([](float x) { return static_cast<double>(x); });
        } else if (to == "f32" && from == "f64" && mode == "rn") {
            i.execute = elementwise<float, double>([](double x) { return static_cast<float>(x); });
        } else if (to == "f32" && from == "f32" && mode == "rmi") {
            i.execute = elementwise<float, float>([](float x) { return std::floor(x); });
        } else if (to == "f32" && from == "f32" && mode == "rni") {
            i.execute = elementwise<float, float>([](float x) { return std::nearbyint(x); });
        } else if (to == "s32" && from == "f32" && (mode == "rzi" || mode == "rni")) {
            i.execute =
                mode == "rzi"
                    ? elementwise<int32_t, float>([](float x) { return saturated(std::trunc(x)); })
                    : elementwise<int32_t, float>([](float x) { return saturated(std::nearbyint(x)); });
        } else if (from == "s32") {
            i.execute = to_integer<int32_t>(to);
        } else if (from == "u32") {
            i.execute = to_integer<uint32_t>(to);
        } else if (from == "s64") {
            i.execute = to_integer<int64_t>(to);
        } else if (from == "u64") {
            i.execute = to_integer<uint64_t>(to);
        } else if (from == "s16") {
            i.execute = to_integer<int16_t>(to);
        } else if (from == "u16") {
            i.execute = to_integer<uint16_t>(to);
        } else if (from == "s8") {
            i.execute = to_integer<int8_t>(to);
        } else if (from == "u8") {
            i.execute = to_integer<uint8_t>(to);
        } else {
            unknown();
        }
        if (i.d.wide != (type_bytes(to == "bf16x2" ? "b32" : to == "bf16" ? "b16" : to) == 8))
            throw Fault("the destination is of another width");
        return i;
    }
    static int32_t saturated(float x) {
        if (x != x) return 0;
        if (x >= 2147483648.f) return std::numeric_limits<int32_t>::max();
        if (x < -2147483648.f) return std::numeric_limits<int32_t>::min();
        return static_cast<int32_t>(x);
    }

    template <class T>
    static Execute comparison(const std::string& how) {
        if (how == "eq") return compare<T>([](T a, T b) { return a == b; });
        if (how == "ne") return compare<T>([](T a, T b) { return a < b || a > b; });  // false for NaN
        if (how == "lt" || how == "lo") return compare<T>([](T a, T b) { return a < b; });
        if (how == "le" || how == "ls") return compare<T>([](T a, T b) { return a <= b; });
        if (how == "gt" || how == "hi") return compare<T>([](T a, T b) { return a > b; });
        if (how == "ge" || how == "hs") return compare<T>([](T a, T b) { return a >= b; });
        if (how == "equ") return compare<T>([](T a, T b) { return !(a < b || a > b); });
        if (how == "neu") return compare<T>([](T a, T b) { return !(a == b); });
        if (how == "ltu") return compare<T>([](T a, T b) { return !(a >= b); });
        if (how == "leu") return compare<T>([](T a, T b) { return !(a > b); });
        if (how == "gtu") return compare<T>([](T a, T b) { return !(a <= b); });
        if (how == "geu") return compare<T>([](T a, T b) { return !(a < b); });
        if (how == "num") return compare<T>([](T a, T b) { return a == a && b == b; });
        if (how == "nan") return compare<T>([](T a, T b) { return a != a || b != b; });
        unknown();
    }
    Instruction set_predicate(const Statement& s, const Words& words, Instruction i) {
        if (words.size() != 3 || s.args.size() != 3 || !s.args[0].second.empty()) unknown();
        const std::string& type = words[2];
        i.execute = number(type, [&]<class T>() { return comparison<T>(words[1]); });
        i.d = destination(s.args[0]);
        for (size_t n = 0; n < 2; n++) i.s[n] = source(s.args[n + 1], type_bytes(type) == 8);
        return i;
    }
    template <class T>
    static Execute choose() {
        return [](Warp& w, const Instruction& i, uint32_t lanes) {
            const uint32_t p = *w.at<uint32_t>(i.s[2]);
            const auto *a = w.at<T>(i.s[0]), *b = w.at<T>(i.s[1]);
            T* d = w.at<T>(i.d);
#pragma GCC ivdep
            for (int lane = 0; lane < 32; lane++) {
                const T r = p >> lane & 1 ? a[lane] : b[lane];
                d[lane] = lanes >> lane & 1 ? r : d[lane];
            }
        };
    }
    Instruction select(const Statement& s, const Words& words, Instruction i) {
        const bool wide = type_bytes(words.back()) == 8;
        i.execute = wide ? choose<uint64_t>() : choose<uint32_t>();
        i.d = destination(s.args.at(0));
        i.s[0] = source(s.args.at(1), wide);
        i.s[1] = source(s.args.at(2), wide);
        i.s[2] = destination(s.args.at(3));
        if (i.d.wide != wide) throw Fault("the destination is of another width");
        return i;
    }
    Instruction of_predicates(const Statement& s, const Words& words, Instruction i) {
        if (words[0] == "and")
            i.execute = predicates([](uint32_t a, uint32_t b) { return a & b; });
        else if (words[0] == "or")
            i.execute = predicates([](uint32_t a, uint32_t b) { return a | b; });
        else if (words[0] == "xor")
            i.execute = predicates([](uint32_t a, uint32_t b) { return a ^ b; });
        else if (words[0] == "not")
            i.execute = predicates([](uint32_t a, uint32_t) { return ~a; });
        else
            unknown();
        i.d = destination(s.args.at(0));
        i.s[0] = destination(s.args.at(1));
        i.s[1] = s.args.size() > 2 ? destination(s.args[2]) : i.s[0];
        return i;
    }

    template <class T>
    using Unsigned = std::make_unsigned_t<T>;
    template <class T>
    static T divided(T a, T b) {
        if (b == 0) return static_cast<T>(~T{0});
        if constexpr (std::is_signed_v<T>)
            if (b == -1) return static_cast<T>(0 - static_cast<Unsigned<T>>(a));
        return static_cast<T>(a / b);
    }
    template <class T>
    static T remainder(T a, T b) {
        if (b == 0) return a;
        if constexpr (std::is_signed_v<T>)
            if (b == -1) return 0;
        return static_cast<T>(a % b);
    }
    // A type that holds the product of two integers.
    template <class T>
    using Wider = std::conditional_t<
        sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
        std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                           std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>>;

    static Execute arithmetic(const Words& words) {
        const std::string &op = words[0], &type = words.back();
        if (type == "f32") return floats(words);
        if (op == "add")
            return integer(type, []<class T>() {
                return elementwise<T, T, T>([](T a, T b) {
                    return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
                });
            });
        if (op == "sub")
            return integer(type, []<class T>() {
                return elementwise<T, T, T>([](T a, T b) {
                    return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
                });
            });
        if (op == "mul" && words[1] == "lo")
            return integer(type, []<class T>() {
                return elementwise<T, T, T>(
                    [](T a, T b) { return static_cast<T>(uint64_t(a) * uint64_t(b)); });
            });
        if (op == "mul" && words[1] == "hi")
            return integer(type, []<class T>() {
                return elementwise<T, T, T>(
                    [](T a, T b) { return static_cast<T>(Wider<T>(a) * Wider<T>(b) >> (8 * sizeof(T))); });
            });
        if (op == "mad" && words[1] == "lo")
            return integer(type, []<class T>() {
                return elementwise<T, T, T, T>(
                    [](T a, T b, T c) { return static_cast<T>(uint64_t(a) * uint64_t(b) + uint64_t(c)); });
            });
        if (op == "mul" && words[1] == "wide") {
            if (type == "s32")
                return elementwise<int64_t, int32_t, int32_t>(
                    [](int32_t a, int32_t b) { return int64_t{a} * b; });
            if (type == "u32")
                return elementwise<uint64_t, uint32_t, uint32_t>(
                    [](uint32_t a, uint32_t b) { return uint64_t{a} * b; });
        }
        if (op == "mad" && words[1] == "wide") {
            if (type == "s32")
                return elementwise<int64_t, int32_t, int32_t, int64_t>([](int32_t a, int32_t b, int64_t c) {
                    return static_cast<int64_t>(static_cast<uint64_t>(int64_t{a} * b) +
                                                static_cast<uint64_t>(c));
                });
            if (type == "u32")
                return elementwise<uint64_t, uint32_t, uint32_t, uint64_t>(
                    [](uint32_t a, uint32_t b, uint64_t c) { return uint64_t{a} * b + c; });
        }
        if (op == "div")
            return integer(
                type, []<class T>() { return elementwise<T, T, T>([](T a, T b) { return divided(a, b); }); });
        if (op == "rem")
            return integer(type, []<class T>() {
                return elementwise<T, T, T>([](T a, T b) { return remainder(a, b); });
            });
        if (op == "min")
            return integer(
                type, []<class T>() { return elementwise<T, T, T>([](T a, T b) { return a < b ? a : b; }); });
        if (op == "max")
            return integer(
                type, []<class T>() { return elementwise<T, T, T>([](T a, T b) { return a > b ? a : b; }); });
        if (op == "and")
            return integer(type, []<class T>() {
                return elementwise<T, T, T>([](T a, T b) { return static_cast<T>(a & b); });
            });
        if (op == "or")
            return integer(type, []<class T>() {
                return elementwise<T, T, T>([](T a, T b) { return static_cast<T>(a | b); });
            });
        if (op == "xor")
            return integer(type, []<class T>() {
                return elementwise<T, T, T>([](T a, T b) { return static_cast<T>(a ^ b); });
            });
        if (op == "not")
            return integer(
                type, []<class T>() { return elementwise<T, T>([](T a) { return static_cast<T>(~a); }); });
        if (op == "neg")
            return integer(type, []<class T>() {
                return elementwise<T, T>([](T a) { return static_cast<T>(0 - static_cast<Unsigned<T>>(a)); });
            });
        if (op == "abs")
            return integer(type, []<class T>() {
                return elementwise<T, T>([](T a) {
                    return static_cast<T>(a < 0 ? 0 - static_cast<Unsigned<T>>(a)
                                                : static_cast<Unsigned<T>>(a));
                });
            });
        // Shifts by the number of bits, or by more, leave nothing, or the sign.
        if (op == "shl")
            return integer(type, []<class T>() {
                return elementwise<T, T, uint32_t>([](T a, uint32_t n) {
                    return n < 8 * sizeof(T) ? static_cast<T>(static_cast<Unsigned<T>>(a) << n) : T{0};
                });
            });
        if (op == "shr")
            return integer(type, []<class T>() {
                return elementwise<T, T, uint32_t>([](T a, uint32_t n) {
                    return static_cast<T>(n < 8 * sizeof(T) ? a >> n : a < 0 ? ~T{0} : T{0});
                });
            });
        if (op == "bfi" && type == "b32") return bit_field_insert<uint32_t>();
        if (op == "bfi" && type == "b64") return bit_field_insert<uint64_t>();
        if (op == "bfe" && type == "u32")
            return elementwise<uint32_t, uint32_t, uint32_t, uint32_t>(
                [](uint32_t a, uint32_t at, uint32_t n) {
                    at &= 255, n &= 255;
                    return at > 31 || !n ? 0 : n > 31 ? a >> at : a >> at & ((1u << n) - 1);
                });
        if (op == "prmt" && words.size() == 2)
            return elementwise<uint32_t, uint32_t, uint32_t, uint32_t>(
                [](uint32_t a, uint32_t b, uint32_t how) {
                    const uint64_t bytes = a | uint64_t{b} << 32;
                    uint32_t r = 0;
                    for (int k = 0; k < 4; k++) {
                        const uint32_t pick = how >> 4 * k & 15;
                        uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (pick & 7)) & 255;
                        if (pick & 8) byte = byte & 128 ? 255 : 0;
                        r |= byte << 8 * k;
                    }
                    return r;
                });
        if (op == "popc" && type == "b32")
            return elementwise<uint32_t, uint32_t>(
                [](uint32_t a) { return static_cast<uint32_t>(std::popcount(a)); });
        if (op == "clz" && type == "b32")
            return elementwise<uint32_t, uint32_t>(
                [](uint32_t a) { return static_cast<uint32_t>(std::countl_zero(a)); });
        if (op == "brev" && type == "b32")
            return elementwise<uint32_t, uint32_t>([](uint32_t a) {
                uint32_t r = 0;
                for (int k = 0; k < 32; k++) r |= (a >> k & 1) << (31 - k);
                return r;
            });
        if (op == "cvta" && has(words, "global"))
            return elementwise<uint64_t, uint64_t>([](uint64_t a) { return a; });
        if (op == "cvta" && words[1] == "param")
            return [](Warp& w, const Instruction& i, uint32_t lanes) {
                const uint64_t base = reinterpret_cast<uint64_t>(w.block->launch().parameters.data());
                for_lanes(lanes,
                          [&](int lane) { w.at<uint64_t>(i.d)[lane] = base + w.at<uint64_t>(i.s[0])[lane]; });
            };
        unknown();
    }
    template <class T>
    static Execute bit_field_insert() {
        return elementwise<T, T, T, uint32_t, uint32_t>([](T a, T b, uint32_t at, uint32_t n) {
            at &= 255, n &= 255;
            if (at >= 8 * sizeof(T) || !n) return b;
            const T ones = n >= 8 * sizeof(T) ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << n) - 1);
            return static_cast<T>((b & ~(ones << at)) | (a & ones) << at);
        });
    }
    static Execute floats(const Words& words) {
        const std::string op = words[0];
        const std::string mode = words.size() > 2 ? words[1] : "rn";
        const bool ftz = has(words, "ftz");
        if (ftz && op != "ex2") unknown();
        if (op == "ex2" && mode == "approx")
            return ftz ? elementwise<float, float>([](float x) { return flushed(std::exp2(flushed(x))); })
                       : elementwise<float, float>([](float x) { return std::exp2(x); });
        if (op == "lg2" && mode == "approx")
            return elementwise<float, float>([](float x) { return std::log2(x); });
        if (op == "rsqrt" && mode == "approx")
            return elementwise<float, float>(
                [](float x) { return static_cast<float>(1 / std::sqrt(static_cast<double>(x))); });
        if (op == "sin" && mode == "approx")
            return elementwise<float, float>([](float x) { return std::sin(x); });
        if (op == "cos" && mode == "approx")
            return elementwise<float, float>([](float x) { return std::cos(x); });
        if (op == "min")
            return elementwise<float, float, float>([](float a, float b) {
                return a != a ? b : b != b ? a : b < a || (a == b && std::signbit(b)) ? b : a;
            });
        if (op == "max")
            return elementwise<float, float, float>([](float a, float b) {
                return a != a ? b : b != b ? a : b > a || (a == b && !std::signbit(b)) ? b : a;
            });
        if (op == "neg") return elementwise<float, float>([](float x) { return -x; });
        if (op == "abs") return elementwise<float, float>([](float x) { return std::fabs(x); });
        if (mode != "rn") unknown();
        if (op == "add") return elementwise<float, float, float>([](float a, float b) { return a + b; });
        if (op == "sub") return elementwise<float, float, float>([](float a, float b) { return a - b; });
        if (op == "mul") return elementwise<float, float, float>([](float a, float b) { return a * b; });
        if (op == "fma")
            return elementwise<float, float, float, float>(
                [](float a, float b, float c) { return std::fma(a, b, c); });
        if (op == "div") return elementwise<float, float, float>([](float a, float b) { return a / b; });
        if (op == "rcp") return elementwise<float, float>([](float x) { return 1 / x; });
        if (op == "sqrt") return elementwise<float, float>([](float x) { return std::sqrt(x); });
        unknown();
    }

    const KernelText& kernel_;
    std::unique_ptr<Program> p_;
    std::map<std::string, Slot> registers_;
    std::map<std::string, uint64_t> symbols_;
    std::map<std::pair<uint64_t, bool>, Slot> constants_;
};

inline std::unique_ptr<Program> assemble(const KernelText& kernel, const PtxModule& module) {
    return Assembler(kernel, module).assemble();
}

}  // namespace gpu
