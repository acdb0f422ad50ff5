// ptx.h - reads PTX, the text that nvcc generates for kernels: the kernels, their parameters and variables,
// and their statements with operands. instructions.h says what these mean.
#pragma once

#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "test/gpu/fault.h"

namespace gpu {

// An operand as written. An address is [base + offset], and may have coordinates (TMA).
struct Arg {
    enum Kind { Name, Number, Vector, Address } kind = Name;
    std::string name;        // a register, symbol or label; the base of an address, empty if that is a number
    uint64_t number = 0;     // the bits of a number; the offset of an address
    bool negated = false;    // !p
    std::vector<Arg> parts;  // of a vector; the coordinates of an address
    std::string second;      // d|p
};

struct Statement {
    std::string opcode;  // "ld.global.v4.u32"
    std::string guard;   // a predicate's name, or empty
    bool guard_negated = false;
    std::vector<Arg> args;
    int line = 0;
};

struct Parameter {
    std::string name;
    size_t offset = 0, bytes = 0;
};

enum class RegisterClass { Predicate, Bits32, Bits64 };  // narrower ones take 32 bits

struct Variable {
    std::string name;
    size_t bytes = 0, alignment = 1;
    bool dynamic = false;  // the kernel's dynamic shared memory
};

// A kernel as written.
struct KernelText {
    std::string name;
    std::vector<Parameter> parameters;
    size_t parameter_bytes = 0;
    std::vector<Variable> shared;
    unsigned max_threads = 0;      // .maxntid's product, 0 if not given
    unsigned min_blocks = 1;       // .minnctapersm
    unsigned max_registers = 256;  // .maxnreg
    std::vector<Statement> statements;
    std::map<std::string, int> labels;  // the statement that follows each
    std::map<std::string, RegisterClass> registers;
};

struct PtxModule {
    std::string target;  // "sm_90a"
    std::vector<Variable> shared;
    std::map<std::string, KernelText> kernels;
};

class PtxReader {
  public:
    explicit PtxReader(std::string_view text) : text_(text) {}

    PtxModule read() {
        while (skip_space(), at_ < text_.size()) read_top();
        return std::move(module_);
    }

  private:
    [[noreturn]] void bad(const std::string& what) const {
        throw Fault("PTX line " + std::to_string(line_) + ": " + what);
    }
    void skip_space() {
        for (; at_ < text_.size(); at_++) {
            if (text_[at_] == '\n') line_++;
            if (isspace(static_cast<unsigned char>(text_[at_]))) continue;
            if (text_.substr(at_, 2) != "//") return;
            at_ = std::min(text_.find('\n', at_), text_.size()) - 1;
        }
    }
    char peek() {
        skip_space();
        return at_ < text_.size() ? text_[at_] : '\0';
    }
    bool take(char c) {
        if (peek() != c) return false;
        at_++;
        return true;
    }
    void expect(char c) {
        if (!take(c))
            bad(std::string("'") + c + "' is missing before \"" + std::string(text_.substr(at_, 20)) + '"');
    }
    static bool in_word(char c) {
        return isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
    }
    // A name, a directive or an opcode; it may contain "::".
    std::string word() {
        skip_space();
        const size_t start = at_;
        while (at_ < text_.size()) {
            if (in_word(text_[at_]))
                at_++;
            else if (text_.substr(at_, 2) == "::" && at_ > start)
                at_ += 2;
            else
                break;
        }
        if (at_ == start) bad("a name is missing before \"" + std::string(text_.substr(at_, 20)) + '"');
        return std::string(text_.substr(start, at_ - start));
    }
    uint64_t integer() { return number_of(word()).number; }
    Arg number_of(const std::string& w, bool minus = false) const {
        Arg a;
        a.kind = Arg::Number;
        if (w.size() == 10 && (w.starts_with("0f") || w.starts_with("0F"))) {
            a.number = strtoull(w.c_str() + 2, nullptr, 16);
        } else if (w.size() == 18 && (w.starts_with("0d") || w.starts_with("0D"))) {
            a.number = strtoull(w.c_str() + 2, nullptr, 16);
        } else {
            char* end = nullptr;
            a.number = strtoull(w.c_str(), &end, 0);
            if (*end && *end != 'U') bad("\"" + w + "\" is no number");
            if (minus) a.number = 0 - a.number;
        }
        return a;
    }
    void skip_line() {
        while (at_ < text_.size() && text_[at_] != '\n') at_++;
    }

    void read_top() {
        const std::string w = word();
        if (w == ".version" || w == ".address_size" || w == ".file") {
            skip_line();
        } else if (w == ".section") {  // names for lines
            at_ = std::min(text_.find('}', at_), text_.size() - 1) + 1;
        } else if (w == ".target") {
            module_.target = word();
            skip_line();
        } else if (w == ".extern" || w == ".visible" || w == ".weak") {
            return;  // they qualify what follows
        } else if (w == ".shared") {
            module_.shared.push_back(variable());
        } else if (w == ".entry") {
            read_kernel();
        } else {
            bad("\"" + w + "\" is not known here");
        }
    }
    static size_t type_bytes(const std::string& type) {
        const size_t digits = type.find_first_of("0123456789");
        return digits == std::string::npos ? 0 : strtoul(type.c_str() + digits, nullptr, 10) / 8;
    }
    // After ".shared": [.align N] .type name[N];
    Variable variable() {
        Variable v;
        std::string w = word();
        if (w == ".align") {
            v.alignment = integer();
            w = word();
        }
        v.bytes = type_bytes(w);
        v.alignment = std::max(v.alignment, v.bytes);
        v.name = word();
        while (take('[')) {
            if (take(']')) {
                v.dynamic = true;
                v.bytes = 0;
            } else {
                v.bytes *= integer();
                expect(']');
            }
        }
        expect(';');
        return v;
    }
    void read_kernel() {
        KernelText k;
        k.name = word();
        expect('(');
        while (!take(')')) {
            if (word() != ".param") bad("a kernel's parameters begin with .param");
            size_t alignment = 1;
            std::string w = word();
            const size_t bytes =
                w == ".align" ? (alignment = integer(), w = word(), type_bytes(w)) : type_bytes(w);
            alignment = std::max(alignment, bytes);
            while ((w = word()).starts_with('.'))  // .ptr .global .align N
                if (w == ".align") integer();
            Parameter p{w, 0, bytes};
            if (take('[')) {
                p.bytes *= integer();
                expect(']');
            }
            p.offset = (k.parameter_bytes + alignment - 1) / alignment * alignment;
            k.parameter_bytes = p.offset + p.bytes;
            k.parameters.push_back(p);
            take(',');
        }
        while (peek() == '.') {
            const std::string w = word();
            if (w == ".maxntid") {
                k.max_threads = static_cast<unsigned>(integer());
                while (take(',')) k.max_threads *= static_cast<unsigned>(integer());
            } else if (w == ".minnctapersm") {
                k.min_blocks = static_cast<unsigned>(integer());
            } else if (w == ".maxnreg") {
                k.max_registers = static_cast<unsigned>(integer());
            } else {
                bad("\"" + w + "\" of a kernel is not known");
            }
        }
        expect('{');
        scopes_ = {{}};
        while (!scopes_.empty()) read_statement(k);
        module_.kernels[k.name] = std::move(k);
    }
    // Registers that an inner scope declares get names of their own.
    std::string renamed(const std::string& name) const {
        for (size_t i = scopes_.size(); i-- > 1;)
            if (const auto it = scopes_[i].find(name); it != scopes_[i].end()) return it->second;
        return name;
    }
    void read_statement(KernelText& k) {
        if (take('{')) {
            scopes_.emplace_back();
            return;
        }
        if (take('}')) {
            scopes_.pop_back();
            return;
        }
        Statement s;
        s.line = line_;
        if (take('@')) {
            s.guard_negated = take('!');
            s.guard = renamed(word());
        }
        const std::string w = word();
        s.line = line_;
        if (w == ".reg") return declare(k);
        if (w == ".shared") {
            k.shared.push_back(variable());
            return;
        }
        if (w == ".loc") return skip_line();  // the source's line of what follows
        if (w == ".pragma") {
            while (!take(';')) at_++;
            return;
        }
        if (w.starts_with('.')) bad("\"" + w + "\" in a kernel is not known");
        if (peek() == ':') {
            at_++;
            k.labels[w] = static_cast<int>(k.statements.size());
            return;
        }
        s.opcode = w;
        while (!take(';')) {
            s.args.push_back(argument());
            take(',');
        }
        k.statements.push_back(std::move(s));
    }
    void declare(KernelText& k) {
        const std::string type = word();
        const RegisterClass kind = type == ".pred"         ? RegisterClass::Predicate
                                   : type_bytes(type) == 8 ? RegisterClass::Bits64
                                                           : RegisterClass::Bits32;
        if (type != ".pred" && (type_bytes(type) > 8 || !type_bytes(type)))
            bad("registers of type " + type + " are not known");
        do {
            const std::string name = word();
            if (take('<')) {
                const uint64_t count = integer();
                expect('>');
                for (uint64_t i = 0; i < count; i++) k.registers[name + std::to_string(i)] = kind;
            } else if (scopes_.size() == 1) {
                k.registers[name] = kind;
            } else {
                const std::string own = name + "@" + std::to_string(line_);
                scopes_.back()[name] = own;
                k.registers[own] = kind;
            }
        } while (take(','));
        expect(';');
    }
    Arg argument() {
        Arg a;
        if (take('{')) {
            a.kind = Arg::Vector;
            while (!take('}')) {
                a.parts.push_back(argument());
                take(',');
            }
            return a;
        }
        if (take('[')) {
            a.kind = Arg::Address;
            const bool minus = take('-');
            const std::string w = word();
            if (isdigit(static_cast<unsigned char>(w[0])))
                a.number = number_of(w, minus).number;
            else
                a.name = renamed(w);
            if (take('+')) {
                const bool negative = take('-');
                a.number += number_of(word(), negative).number;
            }
            if (take(',')) a.parts = argument().parts;
            expect(']');
            return a;
        }
        const bool minus = take('-');
        a.negated = take('!');
        const std::string w = word();
        if (minus || isdigit(static_cast<unsigned char>(w[0]))) return number_of(w, minus);
        a.name = renamed(w);
        if (take('|')) a.second = renamed(word());
        return a;
    }

    std::string_view text_;
    size_t at_ = 0;
    int line_ = 1;
    PtxModule module_;
    std::vector<std::map<std::string, std::string>> scopes_;
};

inline PtxModule read_ptx(std::string_view text) { return PtxReader(text).read(); }

}  // namespace gpu
