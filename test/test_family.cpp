// The families' tables and config.json: parameter counts of published models, both spellings of
// `transformers`, the classes' defaults, what is refused, and that what is written reads back.
#include <gtest/gtest.h>

#include "llmc/arena.h"
#include "llmc/model.h"
#include "llmc/model_positions.h"

namespace {
using nlohmann::json;

ModelConfig parsed(const json& config) { return parse_config(config, "config.json"); }

std::string refusal(const json& config) {
    try {
        parsed(config);
    } catch (const UserError& e) {
        return e.what();
    }
    return "";
}

json with(json config, const char* key, const json& value) {
    config[key] = value;
    return config;
}

json llama(int channels, int layers, int heads, int kv_heads, int mlp_width, int vocabulary, bool tied) {
    return {
        {"model_type", "llama"},        {"hidden_size", channels},         {"num_hidden_layers", layers},
        {"num_attention_heads", heads}, {"num_key_value_heads", kv_heads}, {"intermediate_size", mlp_width},
        {"vocab_size", vocabulary},     {"max_position_embeddings", 4096}, {"rms_norm_eps", 1e-5},
        {"tie_word_embeddings", tied}};
}

json of_type(const char* type, json config) { return with(std::move(config), "model_type", type); }

json plain_llama() { return llama(64, 2, 4, 2, 96, 300, false); }

const json kScaled = {{"rope_type", "llama3"},
                      {"factor", 32.0},
                      {"low_freq_factor", 1.0},
                      {"high_freq_factor", 4.0},
                      {"original_max_position_embeddings", 8192}};

// The text model of Gemma 3 27B. What is not here is the class's default.
json gemma3_27b() {
    return {{"model_type", "gemma3_text"},  {"hidden_size", 5376},
            {"num_hidden_layers", 62},      {"num_attention_heads", 32},
            {"num_key_value_heads", 16},    {"head_dim", 128},
            {"intermediate_size", 21504},   {"sliding_window", 1024},
            {"query_pre_attn_scalar", 168}, {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}}};
}

TEST(Family, CountsOfPublishedModels) {
    const json qwen3 = with(of_type("qwen3", llama(1024, 28, 16, 8, 3072, 151936, true)), "head_dim", 128);
    const std::pair<json, int64_t> models[] = {
        {llama(4096, 32, 32, 32, 11008, 32000, false), 6738415616},                     // Llama 2 7B
        {llama(4096, 32, 32, 8, 14336, 128256, false), 8030261248},                     // Llama 3.1 8B
        {llama(2048, 16, 32, 8, 8192, 128256, true), 1235814400},                       // Llama 3.2 1B
        {llama(2048, 22, 32, 4, 5632, 32000, false), 1100048384},                       // TinyLlama
        {llama(576, 30, 9, 3, 1536, 49152, true), 134515008},                           // SmolLM2 135M
        {of_type("mistral", llama(4096, 32, 32, 8, 14336, 32000, false)), 7241732096},  // Mistral 7B
        {of_type("qwen2", llama(896, 24, 14, 2, 4864, 151936, true)), 494032768},       // Qwen2.5 0.5B
        {qwen3, 596049920},                                                             // Qwen3 0.6B
        {{{"model_type", "bloom"},
          {"hidden_size", 1024},
          {"n_layer", 24},
          {"n_head", 16},
          {"vocab_size", 250880}},
         559214592},  // BLOOM 560m
        {gemma3_27b(), 27009346304},
        {{{"model_type", "gemma2"}}, 2614341888},                                       // Gemma 2 2B
        {of_type("olmo2", llama(4096, 32, 32, 32, 11008, 100352, false)), 7298617344},  // OLMo 2 7B
    };
    for (const auto& [config, count] : models) EXPECT_EQ(Layout(parsed(config)).count(), count) << config;
}

// The scaling `longrope` with this many pairs.
json longrope(int pairs) {
    return {{"type", "longrope"},
            {"short_factor", std::vector<double>(static_cast<size_t>(pairs), 1.5)},
            {"long_factor", std::vector<double>(static_cast<size_t>(pairs), 4)},
            {"original_max_position_embeddings", 1024}};
}

TEST(Family, BothSpellingsOfTransformersAreTheSame) {
    const json plain = llama(64, 2, 4, 2, 96, 300, false);
    json four = with(with(plain, "rope_theta", 5e5), "rope_scaling", kScaled), old = four;
    old["rope_scaling"].erase("rope_type");
    old["rope_scaling"]["type"] = "llama3";
    json five = with(plain, "rope_parameters", kScaled);
    five["rope_parameters"]["rope_theta"] = 5e5;
    const ModelConfig c = parsed(four);
    EXPECT_EQ(c, parsed(old));
    EXPECT_EQ(c, parsed(five));
    EXPECT_EQ(c.rope.type, RopeType::kLlama3);
    EXPECT_EQ(c.rope.theta, 5e5);
    EXPECT_EQ(c.rope.factor, 32);
    EXPECT_EQ(parsed(with(plain, "rope_scaling", nullptr)), parsed(plain));
    EXPECT_EQ(parsed(plain).rope, RopeScaling());
    json bloom = {
        {"model_type", "bloom"}, {"hidden_size", 64}, {"n_layer", 3}, {"n_head", 4}, {"vocab_size", 99}};
    const json original = {{"model_type", "bloom"},
                           {"n_embed", 64},
                           {"num_hidden_layers", 3},
                           {"num_attention_heads", 4},
                           {"vocab_size", 99}};
    EXPECT_EQ(parsed(bloom), parsed(original));
}

// Gemma 3's layers attend to all tokens, or to a window with a rotation of their own.
TEST(Family, Gemma3sLayers) {
    const ModelConfig c = parsed(gemma3_27b());
    for (int l = 0; l < c.layers; l++) {
        const bool slides = l % 6 != 5;
        EXPECT_EQ(c.layer(l).window, slides ? 1024 : 0) << l;
        EXPECT_EQ(c.layer(l).rope.theta, slides ? 1e4 : 1e6) << l;
        EXPECT_EQ(c.layer(l).rope.type, slides ? RopeType::kDefault : RopeType::kLinear) << l;
    }
    json five = with(gemma3_27b(), "rope_parameters",
                     {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 1e6}}},
                      {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}});
    five.erase("rope_scaling");
    EXPECT_EQ(parsed(five), c);
}

TEST(Family, CapsOfGemma2) {
    const json config = of_type("gemma2", plain_llama());
    EXPECT_EQ(parsed(config).scales.attention_cap, 50);
    EXPECT_EQ(parsed(config).scales.logit_cap, 30);
    EXPECT_EQ(parsed(with(config, "attn_logit_softcapping", nullptr)).scales.attention_cap, 0);
    EXPECT_EQ(parsed(with(gemma3_27b(), "final_logit_softcapping", 20)).scales.logit_cap, 20);
    EXPECT_EQ(parsed(gemma3_27b()).scales.logit_cap, 0);
    EXPECT_NE(refusal(with(config, "final_logit_softcapping", 0)).find("'final_logit_softcapping' is 0"),
              std::string::npos);
}

// The lengths from which yarn and dynamic scaling start, and the lengths that they reach.
TEST(Family, LengthsOfScalings) {
    const auto scaled = [](const json& rope) { return parsed(with(plain_llama(), "rope_scaling", rope)); };
    EXPECT_EQ(parsed(plain_llama()).longest(), 4096);
    const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
    EXPECT_EQ(scaled(yarn).rope.original_max_position_embeddings, 4096);
    EXPECT_EQ(scaled(yarn).longest(), 4 * 4096);
    EXPECT_EQ(scaled(with(yarn, "original_max_position_embeddings", 512)).longest(), 4096);
    EXPECT_EQ(scaled({{"rope_type", "yarn"}, {"factor", nullptr}, {"original_max_position_embeddings", 512}})
                  .rope.factor,
              8);
    EXPECT_EQ(
        parsed(with(with(plain_llama(), "original_max_position_embeddings", 2048), "rope_scaling", yarn))
            .rope.original_max_position_embeddings,
        2048);
    EXPECT_EQ(scaled({{"rope_type", "dynamic"}, {"factor", 2.5}}).longest(), 10240);
    EXPECT_EQ(scaled({{"rope_type", "dynamic"}, {"factor", 1e9}}).longest(), kMostPositions);
    EXPECT_EQ(scaled({{"rope_type", "linear"}, {"factor", 2.5}}).longest(), 4096);
    EXPECT_NEAR(attention_factor(scaled(yarn).rope), 0.1 * std::log(4) + 1, 1e-15);
    EXPECT_EQ(attention_factor(parsed(plain_llama()).rope), 1);
}

TEST(Family, MissingKeysAreTheClasses) {
    json config = llama(4096, 2, 32, 32, 96, 300, false);
    for (const char* key : {"rms_norm_eps", "tie_word_embeddings", "num_key_value_heads"}) config.erase(key);
    EXPECT_EQ(parsed(config).kv_heads, 32);
    EXPECT_EQ(parsed(config).norm_epsilon, 1e-6);
    EXPECT_FALSE(parsed(config).tied);
    EXPECT_EQ(parsed(config).head_size, 128);
    EXPECT_EQ(parsed(of_type("mistral", config)).kv_heads, 8);
    EXPECT_EQ(parsed(with(of_type("mistral", config), "num_key_value_heads", nullptr)).kv_heads, 32);
    EXPECT_EQ(parsed(of_type("mistral", config)).window, 4096);
    EXPECT_EQ(parsed(with(of_type("mistral", config), "sliding_window", nullptr)).window, 0);
    config["hidden_size"] = 1024;
    EXPECT_EQ(parsed(of_type("qwen3", config)).head_size, 128);
    EXPECT_EQ(parsed(of_type("qwen2", config)).head_size, 32);
    EXPECT_TRUE(parsed({{"model_type", "bloom"}}).tied);
}

// Qwen's window is used only if the file says so, and from some layer on.
TEST(Family, WindowsOfQwen) {
    json config = of_type("qwen2", llama(64, 4, 4, 2, 96, 300, false));
    config["sliding_window"] = 7;
    EXPECT_EQ(parsed(config).window, 0);
    config["use_sliding_window"] = true;
    EXPECT_EQ(parsed(config).window, 0);  // from layer 28 on, and there are only 4
    config["max_window_layers"] = 0;
    EXPECT_EQ(parsed(config).window, 7);
    config["max_window_layers"] = 2;
    const auto windows = [](const ModelConfig& c) {
        std::vector<int> all;
        for (int l = 0; l < c.layers; l++) all.push_back(c.layer(l).window);
        return all;
    };
    EXPECT_EQ(windows(parsed(config)), (std::vector{0, 0, 7, 7}));
    EXPECT_EQ(parsed(config).window, 0) << "the base has the longest reach";
    EXPECT_EQ(parsed(config_json(parsed(config), "float32")), parsed(config));
    config["layer_types"] = {"sliding_attention", "full_attention", "full_attention", "sliding_attention"};
    EXPECT_EQ(windows(parsed(config)), (std::vector{7, 0, 0, 7}));
    EXPECT_EQ(parsed(config_json(parsed(config), "float32")), parsed(config));
    config["layer_types"] = std::vector<std::string>(4, "sliding_attention");
    EXPECT_EQ(parsed(config).window, 7);
    config["layer_types"] = std::vector<std::string>(4, "full_attention");
    EXPECT_EQ(parsed(config).window, 0);
    config["layer_types"] = std::vector<std::string>(3, "full_attention");
    EXPECT_NE(refusal(config).find("layer_types"), std::string::npos);
}

TEST(Family, RefusesWhatItCannotCompute) {
    const json plain = llama(64, 2, 4, 2, 96, 300, false);
    EXPECT_EQ(refusal(plain), "");
    const auto scaling = [&](const char* key, const json& value) {
        return with(plain, "rope_scaling", with(kScaled, key, value));
    };
    const std::pair<json, const char*> cases[] = {
        {with(plain, "model_type", "jamba"), "jamba"},
        {with(plain, "num_attention_heads", 5), "num_attention_heads 5"},
        {with(plain, "num_attention_heads", 0), "'num_attention_heads' is 0, but must be"},
        {with(plain, "num_key_value_heads", 3), "4 heads are not a multiple of 3"},
        {with(plain, "num_key_value_heads", 8), "8 key/value heads"},
        {with(plain, "head_dim", 7), "7 channels"},
        {with(plain, "head_dim", 0), "'head_dim' is 0"},
        {with(plain, "head_dim", 514), "'head_dim' is 514, but must be an integer from 1 to 512"},
        {with(with(with(plain, "hidden_size", 1 << 20), "num_attention_heads", 1 << 18), "head_dim", 128),
         "channels in all heads"},
        {with(plain, "hidden_act", "gelu"), "hidden_act"},
        {with(of_type("mistral", plain), "attention_bias", true), "attention_bias"},
        {with(plain, "attention_bias", 1), "'attention_bias' is 1"},
        {with(plain, "mlp_bias", true), "mlp_bias"},
        {with(plain, "rms_norm_eps", "small"), "rms_norm_eps"},
        {with(plain, "tie_word_embeddings", 1), "tie_word_embeddings"},
        {with(plain, "quantization_config", {{"quant_method", "bitsandbytes"}}), "\"fp4\""},
        {with(plain, "quantization_config", {{"quant_method", "gptq"}}), "\"gptq\""},
        {with(plain, "quantization_config", 4), "'quantization_config' is 4"},
        {with(plain, "rope_scaling", 3), "rope_scaling"},
        {scaling("rope_type", "longrope"), "'short_factor' is missing"},
        {with(plain, "rope_scaling", longrope(7)), "'short_factor' is [1.5,"},
        {with(plain, "rope_scaling", with(longrope(8), "long_factor", 2)),
         "'long_factor' is 2, but must be a list of 8"},
        {with(of_type("phi3", plain), "rope_scaling", kScaled), "\"llama3\" is not that of a phi3"},
        {with(of_type("phi3", plain), "resid_pdrop", 0.1), "'resid_pdrop' is 0.1"},
        {with(of_type("phi3", plain), "partial_rotary_factor", 1.5), "'partial_rotary_factor' is 1.5"},
        {with(of_type("phi3", plain), "partial_rotary_factor", 0.05), "'partial_rotary_factor'"},
        {of_type("ministral3", plain), "llama_4_scaling_beta"},
        {with(of_type("ministral3", plain), "rope_scaling", {{"type", "yarn"}, {"factor", 2}}),
         "llama_4_scaling_beta"},
        {with(of_type("smollm3", plain), "no_rope_layers", {1}), "a list of 2 zeros and ones"},
        {with(of_type("smollm3", plain), "no_rope_layers", {1, 2}), "a list of 2 zeros and ones"},
        {with(of_type("smollm3", plain), "no_rope_layers", {0, 0}), "1 for some layer"},
        {with(of_type("smollm3", plain), "use_sliding_window", true), "'use_sliding_window' is true"},
        {with(of_type("granite", plain), "logits_scaling", 0), "'logits_scaling' is 0"},
        {with(of_type("granite", plain), "mlp_bias", true), "mlp_bias"},
        {scaling("factor", 0.0), "'factor' is 0"},
        {scaling("factor", -8.0), "rope_scaling: 'factor' is -8"},
        {scaling("factor", "8"), "'factor' is \"8\", but must be a number"},
        {scaling("factor", nullptr), "'factor' is missing"},
        {scaling("factor", 1e300), "'factor' is 1e+300"},
        {scaling("low_freq_factor", json::array({1})), "low_freq_factor"},
        {scaling("high_freq_factor", 1.0), "'high_freq_factor' 1"},
        {scaling("high_freq_factor", -1), "'high_freq_factor' is -1"},
        {scaling("original_max_position_embeddings", 0), "'original_max_position_embeddings' is 0"},
        {scaling("original_max_position_embeddings", 8192.5), "'original_max_position_embeddings' is 8192.5"},
        {with(scaling("factor", 8), "original_max_position_embeddings", 4096),
         "'original_max_position_embeddings' is 4096"},
        {scaling("rope_type", 3), "'rope_type' is 3"},
        {scaling("rope_type", "proportional"), "\"proportional\""},
        {scaling("partial_rotary_factor", 0.5), "'partial_rotary_factor' is 0.5"},
        {with(plain, "partial_rotary_factor", 0.5), "'partial_rotary_factor' is 0.5"},
        {with(plain, "rope_parameters", {{"full_attention", {{"rope_theta", 1e4}}}}), "'full_attention' is"},
        {with(plain, "rope_parameters", json::array({1e4})), "'rope_parameters' is [10000.0]"},
        {with(plain, "rope_parameters", {{"rope_theta", 0}}), "rope_parameters: 'rope_theta' is 0"},
        {with(plain, "rope_theta", "many"), "'rope_theta' is \"many\""},
        {with(plain, "rope_theta", 0), "'rope_theta' is 0"},
        {with(plain, "num_local_experts", 8), "'num_local_experts' is 8"},
        {with(plain, "num_experts", 60), "'num_experts' is 60"},
        {with(plain, "n_routed_experts", 64), "'n_routed_experts' is 64"},
        {with(plain, "eos_token_id", "</s>"), "'eos_token_id' is \"</s>\""},
        {with(plain, "eos_token_id", {1, 2.5}), "'eos_token_id' is [1,2.5]"},
        {with(plain, "bos_token_id", true), "'bos_token_id' is true"},
        {with(of_type("mistral", plain), "sliding_window", -1), "'sliding_window' is -1"},
        {with(of_type("mistral", plain), "sliding_window", 0), "'sliding_window' is 0"},
        {with(of_type("mistral", plain), "sliding_window", 7.5), "'sliding_window' is 7.5"},
        {with(of_type("mistral", plain), "sliding_window", "7"), "'sliding_window' is \"7\""},
        {with(of_type("mistral", plain), "layer_types", {"full_attention", "full_attention"}), "4096"},
        {with(with(of_type("mistral", plain), "layer_types", {"sliding_attention", "sliding_attention"}),
              "sliding_window", nullptr),
         "no 'sliding_window'"},
        {with(with(of_type("qwen3", plain), "use_sliding_window", true), "sliding_window", 0),
         "'sliding_window' is 0"},
        {with(of_type("qwen2", plain), "use_sliding_window", "yes"), "'use_sliding_window' is \"yes\""},
        {with(of_type("qwen2", plain), "max_window_layers", -1), "'max_window_layers' is -1"},
        {with(of_type("qwen2", plain), "layer_types", {"full_attention", "chunked"}), "chunked"},
        {with(of_type("qwen2", plain), "layer_types", 2), "'layer_types' is 2"},
        {with(of_type("qwen2", plain), "layer_types", {"sliding_attention", "sliding_attention"}),
         "no 'sliding_window'"},
        {with(of_type("gemma", plain), "hidden_act", "silu"), "'hidden_act' is \"silu\""},
        {with(of_type("gemma", plain), "attention_bias", true), "'attention_bias' is true"},
        {with(gemma3_27b(), "use_bidirectional_attention", true), "'use_bidirectional_attention' is true"},
        {with(gemma3_27b(), "hidden_activation", "gelu"), "'hidden_activation' is \"gelu\""},
        {with(gemma3_27b(), "attn_logit_softcapping", 50.0), "'attn_logit_softcapping' is 50"},
        {with(gemma3_27b(), "query_pre_attn_scalar", 0), "'query_pre_attn_scalar' is 0"},
        {with(gemma3_27b(), "rope_local_base_freq", 0), "'rope_local_base_freq' is 0"},
        {{{"model_type", "bloom"}, {"apply_residual_connection_post_layernorm", true}},
         "apply_residual_connection_post_layernorm"},
    };
    for (const auto& [config, message] : cases)
        EXPECT_NE(refusal(config).find(message), std::string::npos) << message << ": " << refusal(config);
}

// Every number of every family: out of range, of another type, or in a container.
TEST(Family, RefusesAbsurdNumbers) {
    const json none_of_both = {-1, -1e300, 1e300, "7", true, json::array({1}), json::object()};
    int refused = 0;
    for (const Family* family : kFamilies) {
        ModelConfig c = new_config({family, 6}, 300, 128);
        if (family == &kMistral || family == &kQwen2 || family == &kQwen3) c.window = 16;
        const json good = config_json(c, "float32");
        EXPECT_EQ(refusal(good), "");
        for (const auto& [key, value] : good.items()) {
            const bool unread = key == "n_ctx" || key == "initializer_range" || key.ends_with("drop") ||
                                key.ends_with("dropout") || key.ends_with("token_id");
            if (!value.is_number() || unread) continue;
            json bad = none_of_both;
            if (value.is_number_integer()) bad.insert(bad.end(), {0.5, int64_t{1} << 40, UINT64_MAX});
            if (key != "max_window_layers") bad.push_back(0);
            for (const json& wrong : bad) {
                const std::string message = refusal(with(good, key.c_str(), wrong));
                EXPECT_NE(message.find("'" + key + "' is " + wrong.dump() + ", but must be"),
                          std::string::npos)
                    << family->name << " " << key << " " << wrong << ": " << message;
                refused++;
            }
        }
    }
    EXPECT_GT(refused, 300);
}

// If a file has both spellings, `transformers` uses the older one.
TEST(Family, TheOlderSpellingCounts) {
    json both = with(llama(64, 2, 4, 2, 96, 300, false), "rope_scaling", kScaled);
    both["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 3.0}, {"rope_theta", 7.0}};
    EXPECT_EQ(parsed(both).rope.type, RopeType::kLlama3);
    EXPECT_EQ(parsed(both).rope.theta, 10000);
    both["rope_scaling"] = json::object();
    EXPECT_EQ(parsed(both).rope.type, RopeType::kLinear);
    EXPECT_EQ(parsed(both).rope.theta, 7);
}

TEST(Family, WhatIsWrittenReadsBack) {
    json scaled = with(llama(64, 2, 4, 2, 96, 300, true), "rope_scaling", kScaled);
    scaled["eos_token_id"] = {7, 8, 9};
    const json linear =
        with(llama(64, 2, 4, 2, 96, 300, false), "rope_scaling", {{"type", "linear"}, {"factor", 2.0}});
    const json window = with(of_type("mistral", linear), "sliding_window", 9);
    json qwen = with(of_type("qwen3", linear), "sliding_window", 5);
    qwen["use_sliding_window"] = true;
    qwen["max_window_layers"] = 0;
    const json bloom = {{"model_type", "bloom"}, {"layer_norm_epsilon", 1e-6}, {"vocab_size", 31}};
    const json yarn = with(plain_llama(), "rope_scaling",
                           {{"type", "yarn"},
                            {"factor", 3.5},
                            {"mscale", 0.7},
                            {"mscale_all_dim", 1.0},
                            {"truncate", false},
                            {"beta_fast", 20},
                            {"attention_factor", 1.25}});
    const json dynamic = with(plain_llama(), "rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2}});
    const json smollm3 = with(of_type("smollm3", plain_llama()), "no_rope_layers", {0, 1});
    const json phi3 =
        with(with(of_type("phi3", llama(64, 2, 4, 2, 96, 300, true)), "partial_rotary_factor", 0.75),
             "rope_scaling", longrope(6));
    const json ministral3 = with(of_type("ministral3", yarn), "rope_scaling",
                                 with(yarn["rope_scaling"], "llama_4_scaling_beta", 0.1));
    const json granite = with(of_type("granite", plain_llama()), "logits_scaling", 10.0);
    const json biases = with(plain_llama(), "attention_bias", true);
    const json gemma = with(of_type("gemma", plain_llama()), "head_dim", 24);
    const json gemma2 = with(of_type("gemma2", plain_llama()), "attn_logit_softcapping", nullptr);
    const json olmo2 = of_type("olmo2", plain_llama()), olmo3 = of_type("olmo3", yarn);
    for (const json& config :
         {smollm3, phi3, ministral3, granite, biases, gemma, gemma2, gemma3_27b(), olmo2, olmo3}) {
        EXPECT_EQ(parsed(config_json(parsed(config), "float32")), parsed(config)) << config;
        EXPECT_NE(parsed(config), parsed(plain_llama()));
    }
    for (const json& config :
         {scaled, linear, window, of_type("qwen2", window), qwen, bloom, yarn, of_type("qwen3", dynamic)}) {
        const ModelConfig c = parsed(config);
        const json written = config_json(c, "float32");
        EXPECT_EQ(parsed(written), c) << written;
        EXPECT_EQ(parsed(written).end_of_text, c.end_of_text);
        EXPECT_EQ(written["model_type"], config["model_type"]);
    }
    EXPECT_EQ(config_json(parsed(scaled), "float32")["eos_token_id"], (json{7, 8, 9}));
}

TEST(Family, NewModels) {
    EXPECT_EQ(parse_new_model("d12").family, &kGpt2);
    EXPECT_EQ(parse_new_model("qwen3:d3").family, &kQwen3);
    EXPECT_EQ(parse_new_model("qwen3:d3").layers, 3);
    for (const char* name : {"", "d", "dd", "12", "gemma9:d3", "llama:", "llama:3", "d123456", "llama/d3"})
        EXPECT_FALSE(parse_new_model(name)) << name;
    for (const Family* family : kFamilies) {
        const ModelConfig c = new_config({family, 6}, 300, 128);
        check_config(c, family->name);
        EXPECT_EQ(parsed(config_json(c, "float32")), c) << family->name;
        const double parameters = static_cast<double>(Layout(c).count());
        EXPECT_NEAR(parameters, 12.0 * 6 * 384 * 384 + 300 * 384, 0.2 * parameters) << family->name;
    }
    EXPECT_THROW(new_config({&kLlama, 13}, 300, 128), UserError);
}

// The parts of a fused row are adjacent, and every tensor of a unit can be found by its field.
TEST(Family, FusedRowsAreTheFilesTensors) {
    const Layout layout(parsed(of_type("qwen2", llama(64, 2, 4, 2, 96, 300, false))));
    std::vector<float> memory(static_cast<size_t>(layout.size()));
    const Block<float> block = layout.block(memory.data() + layout.units()[2].offset, 1);
    EXPECT_EQ(block.qkv.weight.shape(), (Shape{128, 64}));
    EXPECT_EQ(block.qkv.bias.shape(), (Shape{128}));
    EXPECT_EQ(block.up.weight.shape(), (Shape{192, 64}));
    EXPECT_FALSE(block.up.bias);
    EXPECT_FALSE(block.norm_1.bias);
    EXPECT_TRUE(block.qkv.by_outputs);
    for (const Parameter& p : layout.parameters()) {
        int64_t end = 0;
        for (const Parameter::Part& part : p.parts) {
            EXPECT_EQ(part.offset, end);
            end += part.shape.size();
        }
        EXPECT_EQ(end, p.shape.size());
        if (p.name != "layers.1.self_attn.qkv_proj.weight") continue;
        EXPECT_EQ(memory.data() + p.offset, block.qkv.weight.data());
        EXPECT_EQ(p.parts[1].name, "model.layers.1.self_attn.k_proj.weight");
        EXPECT_EQ(p.parts[1].offset, 64 * 64);
    }
    const Head<float> head = layout.head(memory.data() + layout.units()[3].offset);
    EXPECT_EQ(head.logits.weight.shape(), (Shape{384, 64}));
    EXPECT_EQ(layout.parameters_of(layout.head_unit())[0].parts[0].name, "lm_head.weight");
    EXPECT_EQ(layout.embeddings(memory.data()).token.shape(), (Shape{300, 64}));
}
}  // namespace
