// assemble.h - turns a kernel's statements into instructions, and gives each register and constant its place.
// What opcodes compute is in arithmetic.h and conversions.h; instructions that reach memory, other lanes or
// Hopper's units are in assemble_memory.h and assemble_hopper.h.
#pragma once

#include "test/gpu/arithmetic.h"
#include "test/gpu/conversions.h"
#include "test/gpu/opcode.h"
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
    bool memory(const Statement& s, const Words& words, Instruction& i);

    // Instructions by which lanes of a warp work together.
    bool together(const Statement& s, const Words& words, Instruction& i);

    // Hopper's own instructions: copies by TMA, mbarriers, products by a warpgroup.
    bool hopper(const Statement& s, const Words& words, Instruction& i);
    // wgmma.mma_async.sync.aligned.m64nNk16.f32.bf16.bf16 {d}, A, B, add, 1, 1[, A transposed], B transposed
    void product_of_warpgroup(const Statement& s, const Words& words, Instruction& i);

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

    Instruction set_predicate(const Statement& s, const Words& words, Instruction i) {
        if (words.size() != 3 || s.args.size() != 3 || !s.args[0].second.empty()) unknown();
        const std::string& type = words[2];
        i.execute = number(type, [&]<class T>() { return comparison<T>(words[1]); });
        i.d = destination(s.args[0]);
        for (size_t n = 0; n < 2; n++) i.s[n] = source(s.args[n + 1], type_bytes(type) == 8);
        return i;
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

#include "test/gpu/assemble_hopper.h"
#include "test/gpu/assemble_memory.h"
