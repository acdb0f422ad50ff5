// products.cpp - the matrix products of a step alone, as oneDNN does them: what the step's own rates are to
// be held against, and what a layout of oneDNN's own would bring.
//
// Reads what ./train --profile-ops --json printed, and prints a table: of each product the rate inside the
// step; alone, with operands as they lie in the step; and alone, with the weights in the layout that oneDNN
// asks for, which somebody would have to put them into. A product's operands change from call to call, as
// they do in a step, so that they come from memory and not from the cache.

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "llmc/device.h"
#include "llmc/matmul_onednn.h"
#include "llmc/rates_device.h"
#include "llmc/threads.h"

namespace {
using dnnl::memory;

constexpr int64_t kOperandBytes = 64 << 20;  // of all copies of an operand: more than caches hold
constexpr int kRounds = 7;

struct Line {
    std::string name;
    OnednnProduct product;
    bool widened;             // to fp32
    double calls, flops, ms;  // of a step
};

// A line of the profile: "matmul 256 x 768 x 3072 NT accumulate".
Line parse(const nlohmann::json& operation) {
    Line line{operation.at("name"), {}, false, operation.at("calls"), operation.at("flops"),
              operation.at("ms")};
    OnednnProduct& p = line.product;
    std::istringstream text(line.name);
    std::string word, form;
    text >> word >> p.m >> word >> p.n >> word >> p.k >> form;
    if (!text || form.size() != 2) fail("\"%s\" is no product", line.name.c_str());
    p.a_row = form[0] == 'T' ? 1 : p.k, p.a_column = form[0] == 'T' ? p.m : 1;
    p.b_row = form[1] == 'T' ? 1 : p.n, p.b_column = form[1] == 'T' ? p.k : 1;
    p.c_row = p.n;
    char operand = 'a';
    while (text >> word) {
        if (word == "accumulate") p.accumulate = true;
        if (word == "bias") p.bias = true;
        if (word == "gelu") p.gelu = true;
        if (word == "to") line.widened = true;
        if (word == "b's" || word == "out's") operand = word[0];
        if (word != "of") continue;
        if (operand == 'a') text >> (form[0] == 'T' ? p.a_column : p.a_row);
        if (operand == 'b') text >> (form[1] == 'T' ? p.b_column : p.b_row);
        if (operand == 'o') text >> p.c_row;
    }
    return line;
}

// Copies of an operand, with small numbers in them.
struct Operand {
    std::vector<memory> copies;
    explicit Operand(const memory::desc& shape) {
        const int64_t bytes = std::max<int64_t>(1, static_cast<int64_t>(shape.get_size()));
        for (int64_t i = 0; i < std::clamp<int64_t>(kOperandBytes / bytes, 1, 64); i++) {
            copies.emplace_back(shape, onednn::cpu());
            uint16_t* const to = static_cast<uint16_t*>(copies.back().get_data_handle());
            for (int64_t k = 0; k < bytes / 2; k++) to[k] = static_cast<uint16_t>(0x3c00 + k % 64);
        }
    }
    const memory& of(int call) const { return copies[static_cast<size_t>(call) % copies.size()]; }
};

// Seconds of one call: the median of rounds, each of as many calls as take some 20 ms.
double seconds_of(const dnnl::matmul::primitive_desc& description) {
    const dnnl::matmul product(description);
    const Operand a(description.src_desc()), b(description.weights_desc()), c(description.dst_desc());
    const Operand bias(description.bias_desc()), scratch(description.scratchpad_desc());
    dnnl::stream stream(onednn::cpu());
    int next = 0;
    const bool has_bias = description.bias_desc().get_size() > 0;
    auto run = [&](int calls) {
        const WallClock clock;
        for (int i = 0; i < calls; i++, next++) {
            std::unordered_map<int, memory> arguments = {{DNNL_ARG_SRC, a.of(next)},
                                                         {DNNL_ARG_WEIGHTS, b.of(next)},
                                                         {DNNL_ARG_DST, c.of(next)},
                                                         {DNNL_ARG_SCRATCHPAD, scratch.of(0)}};
            if (has_bias) arguments[DNNL_ARG_BIAS] = bias.of(0);
            product.execute(stream, arguments);
        }
        stream.wait();
        return clock.seconds() / calls;
    };
    run(1);
    const int calls = static_cast<int>(std::clamp(0.02 / run(2), 2.0, 200.0));
    std::vector<double> rounds;
    for (int i = 0; i < kRounds; i++) rounds.push_back(run(calls));
    std::sort(rounds.begin(), rounds.end());
    return rounds[kRounds / 2];
}

void measure(const nlohmann::json& profile) {
    const auto type = profile.at("precision") == "bf16" ? memory::data_type::bf16 : memory::data_type::f32;
    start_threads(profile.at("threads"));
    printf("%-48s %10s %10s %10s %10s\n", "GFLOP/s", "in step", "alone", "in/alone", "own layout");
    double flops = 0, in_step = 0, alone = 0, own = 0;  // of the step: sums of seconds
    for (const nlohmann::json& operation : profile.at("operations")) {
        if (!operation.at("name").get<std::string>().starts_with("matmul ")) continue;
        const Line line = parse(operation);
        const OnednnProduct& p = line.product;
        const memory::desc a({p.m, p.k}, type, memory::dims{p.a_row, p.a_column});
        const memory::desc b({p.k, p.n}, type, memory::format_tag::any);
        const auto out = line.widened ? memory::data_type::f32 : type;
        const memory::desc c({p.m, p.n}, out, memory::dims{p.c_row, 1});
        const double plain = seconds_of(onednn::describe(p, type, out));
        const double asked_for = seconds_of(onednn::describe(p, type, a, b, c));
        const double rate = line.flops / line.calls / 1e9;
        printf("%-48s %10.1f %10.1f %10.2f %10.1f\n", line.name.c_str(), line.flops / line.ms / 1e6,
               rate / plain, line.calls * plain * 1e3 / line.ms, rate / asked_for);
        fflush(stdout);
        flops += line.flops / 1e9;
        in_step += line.ms / 1e3, alone += line.calls * plain, own += line.calls * asked_for;
    }
    printf("%-48s %10.1f %10.1f %10.2f %10.1f\n", "all", flops / in_step, flops / alone, alone / in_step,
           flops / own);
    printf("%-48s %10.1f %10.1f %10s %10.1f\n", "ms a step", 1e3 * in_step, 1e3 * alone, "", 1e3 * own);
}
}  // namespace

int main() {
    try {
        const nlohmann::json profile = nlohmann::json::parse(std::cin, nullptr, false);
        if (!profile.is_object() || !profile.contains("operations"))
            fail("standard input is not what ./train --profile-ops --json prints");
        measure(profile);
    } catch (const UserError& e) {
        fprintf(stderr, "products: %s\n", e.what());
        return 2;
    } catch (const dnnl::error& e) {
        fprintf(stderr, "products: oneDNN has no such product for this CPU (%s)\n", e.what());
        return 2;
    } catch (const nlohmann::json::exception& e) {
        fprintf(stderr, "products: %s\n", e.what());
        return 2;
    }
}
