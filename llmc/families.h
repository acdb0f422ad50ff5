// families.h - the list of model families, and reading and writing a config.json by its family.
#pragma once

#include <array>
#include <string>

#include "llmc/family.h"

// Each has its table in a file of its own, which families.cpp includes.
extern const Family kGpt2, kLlama, kMistral, kQwen2, kQwen3, kSmolLm3, kPhi3, kMinistral3, kGranite, kGemma,
    kGemma2, kGemma3, kOlmo2, kOlmo3, kBloom;
inline constexpr std::array kFamilies = {&kGpt2,    &kLlama,  &kMistral,    &kQwen2,   &kQwen3,
                                         &kSmolLm3, &kPhi3,   &kMinistral3, &kGranite, &kGemma,
                                         &kGemma2,  &kGemma3, &kOlmo2,      &kOlmo3,   &kBloom};
std::string family_names();  // "gpt2, llama, ..."

// A model from scratch, by its name: "d12" is a GPT-2 with 12 layers, "llama:d12" a Llama.
struct NewModel {
    const Family* family = nullptr;  // null: no such name
    int layers = 0;
    explicit operator bool() const { return family; }
};
NewModel parse_new_model(const std::string& name);

// True for small new models, which are trained on the built-in text if no data are given. Models of 12 layers
// (GPT-2's own depth) and more are meant for data of the user's.
inline bool is_small(const NewModel& model) { return model && model.layers < 12; }

// The configuration of a new model with N layers and llm.c's widths: up to 12 layers 64 N channels in N
// heads; beyond, those of GPT-2. If its vocabulary has the size that is the family's default, it also gets
// the family's special tokens. Fails if N is not one of the known depths.
ModelConfig new_config(const NewModel& model, int vocabulary, int positions);

// Fails unless the trainer can run a model of these sizes. `where` begins the message.
void check_config(const ModelConfig& c, const std::string& where);

// Reads a model's configuration from a parsed config.json. Fails on what is missing, has the wrong type, or
// is not supported.
ModelConfig parse_config(const nlohmann::json& json, const std::string& file);

// One token as a number, several as a list, none as null.
nlohmann::json tokens_json(const std::vector<int>& tokens);

// Writes what parse_config() reads, and further keys that `transformers` wants.
nlohmann::json config_json(const ModelConfig& c, const char* dtype);
