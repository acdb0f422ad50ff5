// test_gguf.cpp - GGUF files: what is read of a good one, and that every false value in a bad one is refused
// in one line; the same for the JSON of bitsandbytes' NF4.

#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/arena.h"  // defines arena_give_back()
#include "llmc/gguf_export.h"
#include "llmc/gguf_model.h"
#include "llmc/quant_nf4_files.h"
#include "llmc/tokenizer.h"
#include "test/file_helpers.h"
#include "test/gguf_writer.h"

namespace {
using Change = std::function<void(GgufBytes&)>;

// A Llama of one layer: 8 channels in 2 heads, 1 head of keys and values, 6 tokens.
void add_keys(GgufBytes& w, const std::string& arch = "llama", float theta = 500000) {
    w.text("general.architecture", arch);
    w.u32(arch + ".block_count", 1);
    w.u32(arch + ".context_length", 64);
    w.u32(arch + ".embedding_length", 8);
    w.u32(arch + ".feed_forward_length", arch == "bloom" ? 32 : 16);
    w.u32(arch + ".attention.head_count", 2);
    if (arch == "bloom") return;
    w.u32(arch + ".attention.head_count_kv", 1);
    w.f32(arch + ".attention.layer_norm_rms_epsilon", 1e-5f);
    w.f32(arch + ".rope.freq_base", theta);
}
void add_tensors(GgufBytes& w, const std::string& without = "") {
    const std::vector<std::pair<std::string, std::vector<uint64_t>>> tensors = {
        {"token_embd.weight", {8, 6}},      {"output_norm.weight", {8}},
        {"blk.0.attn_norm.weight", {8}},    {"blk.0.ffn_norm.weight", {8}},
        {"blk.0.attn_q.weight", {8, 8}},    {"blk.0.attn_k.weight", {8, 4}},
        {"blk.0.attn_v.weight", {8, 4}},    {"blk.0.attn_output.weight", {8, 8}},
        {"blk.0.ffn_gate.weight", {8, 16}}, {"blk.0.ffn_up.weight", {8, 16}},
        {"blk.0.ffn_down.weight", {16, 8}}};
    for (const auto& [name, dims] : tensors)
        if (name != without) w.floats(name, dims);
}
void add_tokenizer(GgufBytes& w, const std::string& pre) {
    w.text("tokenizer.ggml.model", "gpt2");
    w.text("tokenizer.ggml.pre", pre);
    w.texts("tokenizer.ggml.tokens", {"a", "b", "ab", "\xc4\xa0", "1", "<s>"});
    w.i32s("tokenizer.ggml.token_type", {1, 1, 1, 1, 1, 3});
    w.texts("tokenizer.ggml.merges", {"a b"});
    w.u32("tokenizer.ggml.bos_token_id", 5);
    w.u32("tokenizer.ggml.eos_token_id", 5);
}

class Gguf : public testing::Test {
  protected:
    TempFolder folder_;
    std::string write(const GgufBytes& w) { return folder_.write("model.gguf", w.bytes()); }
    std::string write(const Change& change) {
        GgufBytes w;
        change(w);
        return write(w);
    }
    // Expects that a file with these keys and tensors is refused, with its name in the message.
    void expect_refused(const Change& change, std::initializer_list<std::string> parts) {
        const std::string path = write(change);
        expect_user_error([&] { GgufFile file(path); }, {path});
        expect_user_error([&] { GgufFile file(path); }, parts);
    }
    void expect_no_model(const Change& change, std::initializer_list<std::string> parts) {
        const std::string path = write(change);
        expect_user_error([&] { GgufModel model(path); }, {path});
        expect_user_error([&] { GgufModel model(path); }, parts);
    }
};

TEST_F(Gguf, KeysAndTensorsAreRead) {
    GgufBytes w;
    w.u32("general.alignment", w.alignment = 64);
    w.key("small", 1, std::string(1, '\xff'));
    w.f32("float", 1e-5f);
    w.key("true", 7, std::string(1, '\1'));
    w.texts("list", {"x", "\xe2\x96\x81"});
    w.floats("first", {3, 2});
    w.tensor("second", {32}, 8, std::string(34, 'x'));
    const GgufFile file(write(w));
    EXPECT_EQ(file.metadata()["small"], -1);
    EXPECT_EQ(file.metadata()["float"].get<double>(), 1e-5);
    EXPECT_EQ(file.metadata()["true"], true);
    EXPECT_EQ(file.metadata()["list"], (nlohmann::json{"x", "\xe2\x96\x81"}));
    ASSERT_EQ(file.tensors().size(), 2u);
    const GgufTensor& first = *file.find("first");
    EXPECT_EQ(first.shape, (std::vector<int64_t>{2, 3}));
    float numbers[6];
    first.file->read(first.offset, first.bytes, numbers);
    EXPECT_EQ(numbers[5], 5);
    EXPECT_EQ(file.find("second")->bytes, 34u);
    EXPECT_EQ(file.find("third"), nullptr);
}

TEST_F(Gguf, BrokenFilesAreRefused) {
    expect_refused([](auto& w) { w.version = 1; }, {"version is 1", "2 and 3"});
    expect_refused([](auto& w) { w.version = 3 << 24; }, {"big endian"});
    expect_refused([](auto& w) { w.claimed_tensors = 1000; }, {"1000 tensors"});
    expect_refused([](auto& w) { w.claimed_keys = 1; }, {"1 keys"});
    expect_refused([](auto& w) { w.u32("a", 1), w.u32("a", 2); }, {"\"a\" appears twice"});
    expect_refused([](auto& w) { w.u32("", 1); }, {"is empty"});
    expect_refused([](auto& w) { w.u32("\xff", 1); }, {"UTF-8"});
    expect_refused([](auto& w) { w.key("a", 13, "    "); }, {"\"a\"", "type 13"});
    expect_refused([](auto& w) { w.key("a", 7, "\2"); }, {"true or false"});
    expect_refused([](auto& w) { w.key("a", 8, w.number(uint64_t{1} << 40)); }, {"string", "1099511627776"});
    const auto list = [](uint32_t type, uint64_t count) {
        return [=](GgufBytes& w) { w.key("a", 9, w.number(type) + w.number(count)); };
    };
    expect_refused(list(4, 1 << 20), {"1048576 elements"});
    expect_refused(list(4, 1ull << 63), {"elements"});
    expect_refused(list(9, 0), {"list of lists"});
    expect_refused(list(77, 1), {"type 77"});
    expect_refused([](auto& w) { w.u32("general.alignment", 12); }, {"general.alignment", "power of two"});
    expect_refused([](auto& w) { w.text("general.alignment", "32"); }, {"general.alignment"});
    const std::string small = folder_.write("small.gguf", "GGUF"),
                      other = folder_.write("other", std::string(64, 'x'));
    expect_user_error([&] { GgufFile file(small); }, {"too few"});
    expect_user_error([&] { GgufFile file(other); }, {"no GGUF file"});
}

TEST_F(Gguf, BrokenTensorsAreRefused) {
    const auto tensor = [](std::vector<uint64_t> dims, uint32_t type, size_t bytes, int64_t offset = -1) {
        return [=](GgufBytes& w) { w.tensor("t", dims, type, std::string(bytes, '\0'), offset); };
    };
    expect_refused(tensor({}, 0, 4), {"\"t\"", "0 dimensions"});
    expect_refused(tensor({1, 1, 1, 1, 1}, 0, 4), {"5 dimensions"});
    expect_refused(tensor({0}, 0, 4), {"dimension 0"});
    expect_refused(tensor({1ull << 40, 1ull << 40}, 0, 4), {"too large"});
    expect_refused(tensor({1ull << 62}, 0, 4), {"overflow"});
    expect_refused(tensor({256}, 23, 136), {"\"t\"", "type IQ4_XS is not supported", "Q4_K", "IQ4_NL"});
    expect_refused(tensor({256}, 99, 176), {"unknown type 99"});
    expect_refused(tensor({48}, 8, 51), {"48 elements", "Q8_0, 32"});
    expect_refused(tensor({4}, 0, 15), {"cut short"});
    expect_refused(tensor({4}, 0, 16, 32), {"cut short"});
    expect_refused(tensor({4}, 0, 64, 16), {"offset 16 is not a multiple of 32"});
    expect_refused([](auto& w) { w.floats("t", {4}), w.floats("t", {4}); }, {"\"t\"", "twice"});
    expect_refused([](auto& w) { w.floats("t", {4}), w.tensor("u", {4}, 0, std::string(16, 0), 0); },
                   {"overlap"});
    expect_refused([](auto& w) { w.floats(std::string(65, 'n'), {4}); }, {"name", "65"});
}

TEST_F(Gguf, ALlamaIsRead) {
    const GgufModel model(write([](auto& w) { add_keys(w), add_tensors(w); }));
    const ModelConfig& c = model.config();
    EXPECT_EQ(c.family, &kLlama);
    EXPECT_EQ(c.vocabulary, 6);
    EXPECT_EQ(c.kv_heads, 1);
    EXPECT_EQ(c.head_size, 4);
    EXPECT_EQ(c.norm_epsilon, 1e-5);
    EXPECT_EQ(c.rope.theta, 500000);
    EXPECT_TRUE(c.tied);
    std::vector<float> q(64), v(32);
    model.get("model.layers.0.self_attn.q_proj.weight", {8, 8}).read_floats(0, 8, q.data());
    model.get("model.layers.0.self_attn.v_proj.weight", {4, 8}).read_floats(0, 4, v.data());
    const int rows[] = {0, 2, 1, 3, 4, 6, 5, 7};  // in each head the even rows, then the odd ones
    for (size_t i = 0; i < q.size(); i++) EXPECT_EQ(q[i], 8 * rows[i / 8] + i % 8);
    EXPECT_EQ(v[31], 31);
    expect_user_error([&] { model.get("model.norm.weight", {9}); }, {"output_norm.weight", "[8]", "[9]"});
    expect_user_error([&] { model.get("lm_head.weight", {6, 8}); }, {"output.weight", "missing"});
}

TEST_F(Gguf, RotaryScalingIsReadFromItsDivisors) {
    RopeScaling rope;
    rope.type = RopeType::kLlama3, rope.factor = 32, rope.theta = 1e12;
    const std::vector<float> divisors = gguf::llama3_divisors(4, rope);
    const auto file = [&](float times) {
        return [=](GgufBytes& w) {
            add_keys(w, "llama", 1e12f), add_tensors(w);
            std::string data;
            for (const float d : divisors) data += w.number(d * (data.empty() ? times : 1));
            w.tensor("rope_freqs.weight", {2}, 0, data);
        };
    };
    EXPECT_EQ(GgufModel(write(file(1))).config().rope, rope);
    expect_no_model(file(1.1f), {"rope_freqs.weight", "Llama 3.1"});
}

TEST_F(Gguf, YarnIsReadFromItsKeys) {
    const auto file = [&](bool whole) {
        return write([=](GgufBytes& w) {
            add_keys(w), add_tensors(w);
            w.text("llama.rope.scaling.type", "yarn");
            w.f32("llama.rope.scaling.factor", 4), w.f32("llama.rope.scaling.yarn_beta_fast", 16);
            if (whole) w.u32("llama.rope.scaling.original_context_length", 4);
        });
    };
    const RopeScaling rope = GgufModel(file(true)).config().rope;
    EXPECT_EQ(rope.type, RopeType::kYarn);
    EXPECT_EQ(rope.factor, 4);
    EXPECT_EQ(rope.original_max_position_embeddings, 4);
    EXPECT_EQ(rope.beta_fast, 16);
    EXPECT_EQ(rope.beta_slow, 1);
    expect_user_error([&] { GgufModel model(file(false)); }, {"rope.scaling.original_context_length"});
}

TEST_F(Gguf, OtherModelsAreRefused) {
    const auto with = [](const Change& change) {
        return [=](GgufBytes& w) { add_keys(w), change(w), add_tensors(w); };
    };
    expect_no_model([](auto& w) { w.text("general.architecture", "gemma9"); }, {"gemma9", "qwen3"});
    expect_no_model([](auto& w) { w.u32("a", 1); }, {"general.architecture"});
    expect_no_model(with([](auto& w) { w.u32("llama.expert_count", 8); }), {"llama.expert_count"});
    expect_no_model(with([](auto& w) { w.u32("llama.rope.dimension_count", 2); }),
                    {"partial_rotary_factor", "0.5"});
    expect_no_model(with([](auto& w) { w.text("llama.rope.scaling.type", "longrope"); }), {"longrope"});
    expect_no_model(with([](auto& w) { w.u32("llama.vocab_size", 7); }), {"vocab_size", "7"});
    expect_no_model(with([](auto& w) { w.floats("blk.0.attn_q.bias", {8}); }), {"attn_q.bias"});
    expect_no_model(with([](auto& w) { w.floats("blk.1.attn_q.weight", {8, 8}); }), {"blk.1.attn_q"});
    expect_no_model([](auto& w) { add_keys(w), add_tensors(w, "blk.0.ffn_up.weight"); },
                    {"ffn_up", "up_proj"});
    expect_no_model([](auto& w) { add_keys(w); }, {"token_embd.weight"});
    expect_no_model(
        [](auto& w) {
            add_keys(w, "bloom"), w.floats("token_embd.weight", {8, 6});
        },
        {"token_embd_norm.weight"});
}

TEST_F(Gguf, TokenizersAreRead) {
    const GgufFile file(write([](auto& w) { add_tokenizer(w, "gpt-2"); }));
    const Tokenizer tokenizer = read_gguf_tokenizer(file.metadata(), file.path());
    EXPECT_EQ(tokenizer.encode("abba<s>"), (std::vector<int>{2, 1, 0, 5}));
    EXPECT_EQ(tokenizer.decode(std::vector<int>{3, 2}), " ab");
    EXPECT_EQ(tokenizer.begin_of_text(), 5);
}

TEST_F(Gguf, BrokenTokenizersAreRefused) {
    const auto expect = [&](const Change& change, std::initializer_list<std::string> parts) {
        const GgufFile file(write(change));
        expect_user_error([&] { read_gguf_tokenizer(file.metadata(), file.path()); }, parts);
    };
    expect([](auto& w) { w.u32("a", 1); }, {"tokenizer.ggml.model"});
    expect([](auto& w) { w.text("tokenizer.ggml.model", "t5"); }, {"t5", "gpt2 and llama"});
    expect([](auto& w) { add_tokenizer(w, "tekken"); }, {"tekken", "llama-bpe"});
    const auto with = [](const std::string& model, const std::vector<int32_t>& types, const Change& change) {
        return [=](GgufBytes& w) {
            w.text("tokenizer.ggml.model", model);
            w.text("tokenizer.ggml.pre", "gpt-2");
            w.texts("tokenizer.ggml.tokens", {"a", "b"});
            w.i32s("tokenizer.ggml.token_type", types);
            change(w);
        };
    };
    const auto nothing = [](auto&) {};
    expect(with("gpt2", {1}, nothing), {"token_type", "1 elements for 2"});
    expect(with("gpt2", {1, 9}, nothing), {"token 1"});
    expect(with("gpt2", {1, 1}, nothing), {"merges", "missing"});
    expect(with("llama", {1, 1}, nothing), {"scores", "missing"});
    expect(with("gpt2", {1, 1}, [](auto& w) { w.texts("tokenizer.ggml.merges", {"a c"}); }), {"merge 0"});
    expect(with("gpt2", {1, 1}, [](auto& w) { w.u32("tokenizer.ggml.merges", 1); }), {"a list"});
}

// As in llama.cpp's src/llama-quant.cpp. test_export.py compares models of few layers.
TEST(ExportTypes, SomeMatricesOfDeepModelsGetMoreBits) {
    ModelConfig c;
    c.layers = 32, c.heads = 32, c.kv_heads = 8;
    const auto type = [&](const char* kind, const char* matrix, int layer, int64_t columns = 512) {
        return std::string(export_type_of(*find_export_type(kind), c, matrix, layer, columns).name);
    };
    EXPECT_EQ(type("q4_k_s", "attn_v.weight", 3) + type("q4_k_s", "attn_v.weight", 4), "Q5_KQ4_K");
    EXPECT_EQ(type("q4_k_s", "ffn_down.weight", 3) + type("q4_k_s", "ffn_down.weight", 4), "Q5_KQ4_K");
    EXPECT_EQ(type("q5_k_m", "ffn_down.weight", 3) + type("q5_k_m", "ffn_down.weight", 4), "Q6_KQ5_K");
    EXPECT_EQ(type("q5_k_m", "attn_v.weight", 6) + type("q5_k_m", "attn_v.weight", 28), "Q6_KQ6_K");
    EXPECT_EQ(type("q5_k_s", "attn_v.weight", 0) + type("q5_k_s", "output.weight", -1), "Q5_KQ6_K");
    EXPECT_EQ(type("iq4_nl", "ffn_down.weight", 3) + type("iq4_nl", "ffn_down.weight", 4), "Q5_KIQ4_NL");
    EXPECT_EQ(type("iq4_nl", "attn_v.weight", 20) + type("iq4_nl", "attn_v.weight", 20, 288), "Q5_KQ5_1");
    c.kv_heads = 16;
    EXPECT_EQ(type("iq4_nl", "attn_v.weight", 20), "IQ4_NL");
}

TEST(Nf4State, IsReadAndWritten) {
    const Nf4State state{true, "bfloat16", 64, 128, 0.03125f};
    const std::string json = nf4_state_json(state);
    const Nf4State again = parse_nf4_state(json, "file");
    EXPECT_EQ(nf4_state_json(again), json);
    EXPECT_EQ(again.nested_offset, state.nested_offset);
    EXPECT_FALSE(parse_nf4_state(nf4_state_json({false, "float32", 1, 1, 0}), "file").is_double);
}

TEST(Nf4State, OthersAreRefused) {
    const nlohmann::json good = nlohmann::json::parse(nf4_state_json({true, "bfloat16", 64, 128, 1}));
    const auto expect = [&](const char* key, const nlohmann::json& value,
                            std::initializer_list<std::string> parts) {
        nlohmann::json json = good;
        json[key] = value;
        if (value.is_discarded()) json.erase(key);
        expect_user_error([&] { parse_nf4_state(json.dump(), "file"); }, {"file", std::string(key)});
        expect_user_error([&] { parse_nf4_state(json.dump(), "file"); }, parts);
    };
    const nlohmann::json none(nlohmann::json::value_t::discarded);
    expect("quant_type", "fp4", {"\"nf4\""});
    expect("quant_type", none, {"missing"});
    expect("blocksize", 128, {"128", "64"});
    expect("dtype", "int8", {"bfloat16"});
    expect("dtype", 3, {"bfloat16"});
    expect("shape", {64}, {"[64]"});
    expect("shape", {64, -1}, {"two sizes"});
    expect("shape", {64, 1.5}, {"two sizes"});
    expect("shape", {1ull << 40, 64}, {"two sizes"});
    expect("nested_blocksize", 128, {"256"});
    expect("nested_dtype", "float16", {"float32"});
    expect("nested_offset", "0", {"a number"});
    expect("nested_offset", none, {"missing"});
    expect("nested_offset", 1e300, {"a number"});
    expect("blocks", 1, {"not supported"});
    expect_user_error([] { parse_nf4_state("[1]", "file"); }, {"object"});
    expect_user_error([] { parse_nf4_state("{\"a\"", "file"); }, {"broken JSON"});
}
}  // namespace
