// The host parts that have no file format of their own: schedule, sampling, options, sizes and layout of
// models.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "llmc/arena.h"
#include "llmc/bench.h"
#include "llmc/model.h"
#include "llmc/options.h"
#include "llmc/sampler.h"
#include "llmc/schedule.h"

namespace {

TEST(Schedule, WarmsUpLinearly) {
    for (const char* name : {"constant", "cosine", "linear", "wsd"})
        for (int step = 0; step < 10; step++)
            EXPECT_DOUBLE_EQ(learning_rate(name, step, 100, 10, 1.0, 0.1), (step + 1) / 10.0) << name;
}

TEST(Schedule, KnownPoints) {
    EXPECT_DOUBLE_EQ(learning_rate("constant", 99, 100, 0, 2.0, 0.0), 2.0);
    EXPECT_DOUBLE_EQ(learning_rate("cosine", 55, 100, 10, 1.0, 0.0), 0.5);
    EXPECT_DOUBLE_EQ(learning_rate("linear", 55, 100, 10, 1.0, 0.2), 0.6);
    EXPECT_DOUBLE_EQ(learning_rate("wsd", 79, 100, 10, 1.0, 0.0), 1.0);
    EXPECT_DOUBLE_EQ(learning_rate("wsd", 90, 100, 10, 1.0, 0.0), 0.5);
    EXPECT_DOUBLE_EQ(learning_rate("wsd", 92, 100, 90, 1.0, 0.0), 0.8);  // decay waits for a long warm-up
    EXPECT_DOUBLE_EQ(learning_rate("cosine", 0, 1, 0, 1.0, 0.0), 1.0);
}

// Rates are those of the steps that are replayed, where these are; phases stay those of plain steps.
TEST(Bench, ReplayedStepsAreTheSteps) {
    const MemoryReport memory;
    for (const bool forward_only : {false, true}) {
        const std::string whole = forward_only ? "forward" : "step", plain = "plain_" + whole + "_ms";
        BenchReport r{memory, forward_only, false, 1, 0, {}, 100, 1000, 1, 1};
        r.cold.ranges = {{"forward", 3.}, {"step", 9.}};
        r.steps.assign(3, {{{"forward", 1.}, {"update", 2.}, {"step", 4.}}, {}});
        nlohmann::ordered_json j = bench_json(r);
        EXPECT_FALSE(j.contains(plain));
        EXPECT_EQ(j.contains("update_ms"), !forward_only);
        EXPECT_EQ(j[whole + "_ms"]["median"], forward_only ? 1e3 : 4e3);
        EXPECT_EQ(j["tokens_per_second"], forward_only ? 100 : 25);
        r.replayed = {0.5, 0.25, 1};
        j = bench_json(r);
        EXPECT_EQ(j[plain]["median"], forward_only ? 1e3 : 4e3);
        EXPECT_EQ(j.contains("update_ms"), !forward_only);
        EXPECT_EQ(j[whole + "_ms"]["median"], 500);
        EXPECT_EQ(j[whole + "_ms"]["min"], 250);
        EXPECT_EQ(j["tokens_per_second"], 200);
        EXPECT_EQ(j["flops_per_second"], 2000);
    }
}

TEST(Sampler, ZeroTemperatureIsTheLikeliest) { EXPECT_EQ(sample_token({0.f, 3.f, 3.f, 1.f}, 0, 0, 0.99), 1); }

TEST(Sampler, DrawsWithSoftmaxProbabilities) {
    const std::vector<float> logits = {1.f, 0.f, -1.f, 2.f};
    std::vector<double> count(4);
    const int draws = 100000;
    for (int i = 0; i < draws; i++)
        count[static_cast<size_t>(sample_token(logits, 0.5, 0, (i + 0.5) / draws))]++;
    double total = 0;
    for (float x : logits) total += std::exp(x / 0.5);
    for (size_t v = 0; v < 4; v++) EXPECT_NEAR(count[v] / draws, std::exp(logits[v] / 0.5) / total, 1e-4);
}

TEST(Sampler, TopKDrawsNothingElse) {
    std::set<int> seen;
    for (int i = 0; i < 1000; i++) seen.insert(sample_token({1.f, 0.f, -1.f, 2.f}, 5.0, 2, i / 1000.0));
    EXPECT_EQ(seen, (std::set<int>{0, 3}));
}

Options parse(std::vector<std::string> words, const nlohmann::json& saved = {}) {
    words.insert(words.begin(), "train");
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    return parse_options(static_cast<int>(argv.size()), argv.data(),
                         [&](const std::string&) { return saved; });
}
std::string failure(const std::vector<std::string>& words) {
    try {
        parse(words);
    } catch (const UserError& e) {
        return e.what();
    }
    return "";
}

TEST(Options, AResumeTakesTheSavedOnesUnlessGiven) {
    const nlohmann::json saved = {{"--batch", {"3"}}, {"--lr", {"0.5"}}, {"--data", {"a.txt", "b.txt"}}};
    const Options o = parse({"--resume", "dir", "--lr", "0.25"}, saved);
    EXPECT_EQ(o.batch, 3);
    EXPECT_EQ(o.lr, 0.25);
    EXPECT_EQ(o.data, (std::vector<std::string>{"a.txt", "b.txt"}));
    EXPECT_TRUE(o.has("--batch") && o.has("--lr") && !o.has("--seed"));
    EXPECT_EQ(o.given.at("--lr"), std::vector<std::string>{"0.25"});
}

TEST(Options, GraphIsOnOrOff) {
    EXPECT_EQ(parse({}).graph, "on");
    EXPECT_EQ(parse({"--graph", "off"}).graph, "off");
    EXPECT_NE(failure({"--graph", "maybe"}).find("--graph"), std::string::npos);
}

TEST(Options, MistakesNameTheOption) {
    EXPECT_NE(failure({"--batch", "0"}).find("--batch"), std::string::npos);
    EXPECT_NE(failure({"--schedule", "sinus"}).find("--schedule"), std::string::npos);
    EXPECT_NE(failure({"--no-such"}).find("--no-such"), std::string::npos);
    EXPECT_NE(failure({"--min-lr", "1", "--lr", "0.1"}).find("--min-lr"), std::string::npos);
    EXPECT_NE(failure({"--json"}).find("--json"), std::string::npos);
    EXPECT_NE(failure({"--lr", "nan"}), "");
    EXPECT_EQ(failure({"--batch", "2", "--lr", "1e-3"}), "");
}

TEST(Model, CountsOfGpt2) {
    EXPECT_EQ(Layout(config_of_depth(12, 50257, 1024)).count(), 124439808);
    EXPECT_EQ(Layout(config_of_depth(24, 50257, 1024)).count(), 354823168);
    EXPECT_EQ(Layout(config_of_depth(36, 50257, 1024)).count(), 774030080);
    EXPECT_EQ(Layout(config_of_depth(48, 50257, 1024)).count(), 1557611200);
    EXPECT_THROW(config_of_depth(13, 50257, 1024), UserError);
}

TEST(Model, LayoutTilesTheBufferAndPutsDecayFirst) {
    const Layout layout({300, 50, 3, 5, 35});
    int64_t end = 0;
    for (const Parameter& p : layout.parameters()) {
        EXPECT_GE(p.offset, end) << p.name;
        EXPECT_LT(p.offset - end, kParameterAlignment) << p.name;
        EXPECT_EQ(p.offset % kParameterAlignment, 0) << p.name;
        end = p.offset + p.memory.size();
    }
    EXPECT_LE(end, layout.size());
    int64_t start = 0;
    for (const Unit& u : layout.units()) {
        EXPECT_EQ(u.offset, start);
        start += u.size;
        for (const Parameter& p : layout.parameters()) {
            const bool inside = p.offset >= u.offset && p.offset < u.offset + u.size;
            EXPECT_TRUE(!inside || p.decayed() == (p.offset < u.offset + u.decayed)) << p.name;
        }
    }
    EXPECT_EQ(start, layout.size());
    EXPECT_EQ(layout.parameters()[0].memory.dims[0], 384);
}

TEST(Model, FieldsPointWhereTheTableSays) {
    const Layout layout({256, 16, 2, 2, 8});
    std::vector<float> memory(static_cast<size_t>(layout.size()));
    const Block<float> block = layout.block(memory.data(), 1);
    for (const Parameter& p : layout.parameters())
        if (p.name == "h.1.mlp.c_fc.weight") {
            EXPECT_EQ(block.up_weight.data(), memory.data() + p.offset);
            EXPECT_EQ(block.up_weight.shape(), (Shape{8, 32}));
        }
    EXPECT_EQ(layout.last_layernorm(memory.data()).bias.size(), 8);
}

TEST(Model, InitialValuesHaveGpt2sDeviation) {
    const Parameter normal{"w", {100, 100}, {100, 100}, 0, Init::Normal};
    const Parameter residual{"w", {100, 100}, {100, 100}, 0, Init::ResidualNormal};
    double sum = 0, squares = 0, residual_squares = 0;
    for (int i = 0; i < 10000; i++) {
        const double x = initial_value(normal, 3, i, 8, 1), y = initial_value(residual, 4, i, 8, 1);
        sum += x, squares += x * x, residual_squares += y * y;
    }
    EXPECT_NEAR(sum / 10000, 0, 1e-3);
    EXPECT_NEAR(std::sqrt(squares / 10000), 0.02, 1e-3);
    EXPECT_NEAR(std::sqrt(residual_squares / 10000), 0.02 / 4, 3e-4);
}

TEST(Config, RefusesWhatItCannotCompute) {
    const nlohmann::json good = config_json({50257, 1024, 12, 12, 768}, "float32");
    EXPECT_EQ(parse_config(good, "f"), (GptConfig{50257, 1024, 12, 12, 768}));
    auto message = [&](const char* name, const nlohmann::json& value) -> std::string {
        nlohmann::json j = good;
        j[name] = value;
        try {
            parse_config(j, "f");
        } catch (const UserError& e) {
            return e.what();
        }
        return "";
    };
    for (auto [name, value] : std::initializer_list<std::pair<const char*, nlohmann::json>>{
             {"model_type", "llama"},
             {"activation_function", "relu"},
             {"layer_norm_epsilon", 1e-6},
             {"n_head", 7},
             {"n_layer", -1},
             {"n_embd", "many"},
             {"n_embd", 1e30},
             {"vocab_size", 18446744073709551615ull},
             {"n_inner", 5},
             {"n_head", 2},
             {"tie_word_embeddings", false}})
        EXPECT_NE(message(name, value), "") << name << " " << value;
    nlohmann::json missing = good;
    missing.erase("n_layer");
    EXPECT_THROW(parse_config(missing, "f"), UserError);
    EXPECT_THROW(parse_config(nlohmann::json::array(), "f"), UserError);
}
}  // namespace
