// model_from_scratch.h - chooses the vocabulary of a model from scratch to fit the data that it will be
// trained on.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>

#include "llmc/dataset.h"
#include "llmc/families.h"
#include "llmc/tokenizer.h"

// The folder of the shards, where their tokenizer is expected.
inline std::string tokenizer_folder(const Dataset& shards) {
    const auto parent = std::filesystem::path(shards.stream_name(0)).parent_path();
    return parent.empty() ? "." : parent.string();
}

// The vocabulary size for shards without a tokenizer: the family's default, or more if larger tokens occur.
inline int vocabulary_of_shards(const Dataset& shards, const Family& family) {
    constexpr int kMost = 1 << 24;
    const int32_t largest = shards.largest_token();
    if (largest >= kMost)
        fail("%s: token %d is beyond the largest vocabulary, %d", shards.stream_name(0).c_str(), largest,
             kMost);
    return std::max(family.tokens.vocabulary, largest + 1);
}

// The configuration of a new model for the data. Text is read as bytes; shards have the vocabulary of the
// tokenizer in their folder. Without data, the vocabulary is the family's default, or bytes if `bytes`.
inline ModelConfig new_config_for(const NewModel& model, const Dataset* data, bool bytes, int seq_len) {
    if (data) bytes = data->is_text();
    if (bytes) return new_config(model, 256, seq_len);
    const int positions = std::max(1024, seq_len);
    if (!data) return new_config(model, model.family->tokens.vocabulary, positions);
    const auto tokenizer = Tokenizer::open(tokenizer_folder(*data));
    if (!tokenizer) return new_config(model, vocabulary_of_shards(*data, *model.family), positions);
    ModelConfig c = new_config(model, tokenizer->size(), positions);
    if (const int token = tokenizer->begin_of_text(); token >= 0) c.begin_of_text = {token};
    if (const int token = tokenizer->end_of_text(); token >= 0) c.stops = c.end_of_text = {token};
    return c;
}
