// work.h - what the operations of a step cost: the FLOPs and the bytes that each launcher counts while the
// step is rehearsed (arena.h), and the moments between which it runs, for whoever measures (bench.h).
#pragma once

#include <compare>
#include <string>
#include <vector>

#include "llmc/device.h"

// What tells one matrix product from another: its shape and its form. All zero for other operations.
struct Product {
    int64_t m = 0, n = 0, k = 0;
    int64_t a_row = 0, b_row = 0, out_row = 0;  // as in MatmulOptions
    bool transpose_a = false, transpose_b = false, accumulate = false, bias = false, gelu = false,
         gelu_backward = false;
    bool bias_gradient = false;  // b's columns are summed too, into zeros: a library may fuse that
    bool widened = false;        // out is fp32, the operands are not
    auto operator<=>(const Product&) const = default;

    // "512 x 768 x 3072 NT accumulate": m x n x k, whether a and b are transposed, and what else is asked
    // for.
    std::string text() const {
        std::string t = std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k);
        t += transpose_a ? " T" : " N";
        t += transpose_b ? "T" : "N";
        if (bias) t += " bias";
        if (accumulate) t += " accumulate";
        if (gelu) t += " gelu";
        if (gelu_backward) t += " gelu_backward";
        if (bias_gradient) t += " bias_gradient";
        if (widened) t += " to fp32";
        if (a_row) t += format(" rows of %lld", static_cast<long long>(a_row));
        if (b_row) t += format(" b's rows of %lld", static_cast<long long>(b_row));
        if (out_row) t += format(" out's rows of %lld", static_cast<long long>(out_row));
        return t;
    }
};

// A launch or library call, or several alike in a loop. Bytes are those read and written if every operand
// passes once.
struct Work {
    std::string range;  // where it stands: Range::path()
    const char* name;
    double flops, bytes;  // of all calls
    double calls = 1;
    int time = 0;  // takes and releases before it
    Product product = {};
};

// Where a rehearsal writes its operations down, and its clock; null otherwise.
inline std::vector<Work>* work_ledger = nullptr;
inline const int* work_clock = nullptr;

// Hears of the operations of a step as they run: the bench. Operations may nest.
struct OperationListener {
    virtual void operation_begins(const char* name, const Product& product) = 0;
    virtual void operation_ends() = 0;
};
inline OperationListener* operation_listener = nullptr;  // null unless somebody measures

// An operation of the step, from here to the end of the scope: at the top of its launcher. In a rehearsal it
// is written down, in a measured run it is timed, else nothing happens.
class [[nodiscard]] Operation {
  public:
    Operation(const char* name, double flops, double bytes, const Product& product = {})
        : listener_(work_ledger ? nullptr : operation_listener) {
        if (work_ledger)
            work_ledger->push_back(
                {Range::path(), name, flops, bytes, 1, work_clock ? *work_clock : 0, product});
        if (listener_) listener_->operation_begins(name, product);
    }
    ~Operation() {
        if (listener_) listener_->operation_ends();
    }
    Operation(const Operation&) = delete;

  private:
    OperationListener* listener_;
};

// The bytes of an operation that passes once over these tensors.
template <class... Tensors>
double pass_bytes(const Tensors&... tensors) {
    return (static_cast<double>(tensors.bytes()) + ...);
}
