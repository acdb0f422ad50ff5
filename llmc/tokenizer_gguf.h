// tokenizer_gguf.h - reads the tokenizer of a GGUF file from its keys "tokenizer.ggml.*".
//
// The tokenizer model "gpt2" is byte-level BPE with merges and a pre-tokenizer that is given by name; it is
// converted to the equivalent tokenizer.json and read as such. "llama" is SentencePiece's BPE with scores; it
// is converted to the equivalent tokenizer.model.
#pragma once

#include <bit>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/model_config.h"
#include "llmc/tokenizer_encoder.h"
#include "llmc/tokenizer_json.h"
#include "llmc/tokenizer_sentencepiece.h"
#include "llmc/tokenizer_settings.h"

namespace gguf {
using nlohmann::json;

enum TokenType { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };

// The keys of a tokenizer. Reading one checks its type.
class TokenizerKeys {
  public:
    TokenizerKeys(const json& metadata, const std::string& file) : reader_(metadata, file) {
        tokens_ = &list("tokens");
        const json& types = list("token_type");
        if (types.size() != tokens_->size())
            fail("%s: 'tokenizer.ggml.token_type' has %zu elements for %zu tokens", path(), types.size(),
                 tokens_->size());
        for (size_t i = 0; i < types.size(); i++)
            if (!(*tokens_)[i].is_string() || !types[i].is_number_integer() || types[i] < 1 || types[i] > 6)
                fail("%s: token %zu of 'tokenizer.ggml.tokens' is no string, or of no known type", path(), i);
    }

    const char* path() const { return reader_.file().c_str(); }
    const ConfigReader& reader() const { return reader_; }
    static std::string key(const char* name) { return std::string("tokenizer.ggml.") + name; }

    size_t size() const { return tokens_->size(); }
    const std::string& token(size_t i) const { return (*tokens_)[i].get_ref<const std::string&>(); }
    int type(size_t i) const { return list("token_type")[i].get<int>(); }
    bool is_special(size_t i) const { return type(i) == kControl || type(i) == kUnknown; }

    const json& list(const char* name) const {
        const std::string full = key(name);
        if (!reader_.has(full.c_str())) fail("%s: '%s' is missing", path(), full);
        const json& value = reader_.json()[full];
        if (!value.is_array()) reader_.refuse(full, "a list");
        return value;
    }
    bool truth(const char* name, bool otherwise) const { return reader_.truth(key(name).c_str(), otherwise); }
    std::string text(const char* name) const { return reader_.text(key(name).c_str(), ""); }
    // The number of a special token, such as "bos_token_id", or -1.
    int mark(const char* name) const {
        const std::string full = key(name);
        return reader_.has(full.c_str()) ? reader_.integer(full.c_str(), 0, static_cast<int>(size()) - 1)
                                         : -1;
    }

  private:
    ConfigReader reader_;
    const json* tokens_;
};

// Adds the tokens that are put around a text, and around each text of a pair.
inline void add_post_processor(json& file, const TokenizerKeys& keys, bool adds_bos) {
    const int bos = keys.truth("add_bos_token", adds_bos) ? keys.mark("bos_token_id") : -1;
    const int eos = keys.truth("add_eos_token", false) ? keys.mark("eos_token_id") : -1;
    if (bos < 0 && eos < 0) return;
    json specials = json::object();
    const auto add = [&](json& to, int token, int type) {
        if (token < 0) return;
        const std::string& name = keys.token(static_cast<size_t>(token));
        to.push_back({{"SpecialToken", {{"id", name}, {"type_id", type}}}});
        specials[name] = {{"id", name},
                          {"ids", json::array({static_cast<unsigned>(token)})},
                          {"tokens", json::array({name})}};
    };
    const auto add_text = [&](json& to, const char* text, int type) {
        add(to, bos, type);
        to.push_back({{"Sequence", {{"id", text}, {"type_id", type}}}});
        add(to, eos, type);
    };
    json single = json::array();
    add_text(single, "A", 0);
    json pair = single;
    add_text(pair, "B", 1);
    file["post_processor"] = {
        {"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", specials}};
}

// The tokenizer.json of a byte-level model, without its vocabulary and merges.
inline json byte_level_json(const TokenizerKeys& keys) {
    json file = empty_byte_level_json();
    for (size_t i = 0; i < keys.size(); i++)
        if (keys.is_special(i) || keys.type(i) == kUserDefined)
            file["added_tokens"].push_back({{"id", i},
                                            {"content", keys.token(i)},
                                            {"single_word", false},
                                            {"lstrip", false},
                                            {"rstrip", false},
                                            {"normalized", false},
                                            {"special", keys.is_special(i)}});
    const std::string pre = keys.text("pre");
    add_pre_tokenizer(file, pre, keys.path());
    add_post_processor(file, keys, pre == "llama-bpe");
    return file;
}

inline TokenizerParts read_byte_level(const TokenizerKeys& keys) {
    SpeltModel spelt(keys.path(), keys.path(), "merge");
    for (size_t i = 0; i < keys.size(); i++) spelt.add_token(keys.token(i), i);
    const json& merges = keys.list("merges");
    for (size_t i = 0; i < merges.size(); i++) {
        if (!merges[i].is_string()) spelt.refuse_merge(i, "is not a pair of tokens");
        spelt.add_merge(merges[i].get_ref<const std::string&>(), i);
    }
    return TokenizerJsonReader(byte_level_json(keys), std::move(spelt), keys.path()).take();
}

// Writes a byte-level model's tokenizer.json. The merges and the vocabulary, which are long, are written to
// the file directly, where the JSON without them has an empty list and an empty object.
inline void write_tokenizer_json(const TokenizerKeys& keys, const std::string& path) {
    const std::string text = byte_level_json(keys).dump();
    const json& merges = keys.list("merges");
    FileWriter out(path);
    size_t written = 0;
    const auto write_inside = [&](std::string_view opening, size_t count, auto&& text_of) {
        const size_t begin = text.find(opening, written) + opening.size();
        out.write(std::string_view(text).substr(written, begin - written));
        for (size_t i = 0; i < count; i++) out.write((i > 0 ? "," : "") + text_of(i));
        written = begin;
    };
    write_inside(R"("merges":[)", merges.size(), [&](size_t i) { return merges[i].dump(); });
    write_inside(R"("vocab":{)", keys.size(),
                 [&](size_t i) { return json(keys.token(i)).dump() + ":" + std::to_string(i); });
    out.write(std::string_view(text).substr(written));
    out.finish();
}

// Builds a message in Protocol Buffers' wire format, which ProtoFields reads.
class ProtoMessage {
  public:
    void add(unsigned field, uint64_t value) {
        integer(field << 3);
        integer(value);
    }
    void add(unsigned field, std::string_view bytes) {
        integer(field << 3 | 2);
        integer(bytes.size());
        bytes_ += bytes;
    }
    void add(unsigned field, float value) {
        integer(field << 3 | 5);
        bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    const std::string& bytes() const { return bytes_; }

  private:
    void integer(uint64_t value) {
        for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
        bytes_ += static_cast<char>(value);
    }
    std::string bytes_;
};

// Builds a tokenizer.model. Field numbers are those of SentencePiece's sentencepiece_model.proto.
inline std::string sentencepiece_model(const TokenizerKeys& keys) {
    const json& scores = keys.list("scores");
    if (scores.size() != keys.size())
        fail("%s: 'tokenizer.ggml.scores' has %zu elements for %zu tokens", keys.path(), scores.size(),
             keys.size());
    ProtoMessage model, trainer, normalizer;
    bool bytes = false;
    // Tokens at the end that nothing uses: a model may have more rows than its tokenizer has tokens.
    size_t used = keys.size();
    while (used > 0 && keys.type(used - 1) == kUnused) used--;
    // The library needs an unknown token. llama.cpp's converter calls it a control token if the model's files
    // list it among the special ones.
    size_t unknown = used;
    for (size_t i = 0; i < used; i++)
        if (keys.type(i) == kUnknown) unknown = i;
    if (const int named = keys.mark("unknown_token_id"); unknown == used && named >= 0)
        unknown = static_cast<size_t>(named);
    for (size_t i = 0; i < used && unknown == used; i++)
        if (keys.token(i) == "<unk>") unknown = i;
    for (size_t i = 0; i < used; i++) {
        if (!scores[i].is_number()) fail("%s: score %zu is not a number", keys.path(), i);
        ProtoMessage piece;
        // A GGUF has spaces in Gemma's tokens of spaces; the library looks for them after it has replaced
        // those of the text.
        piece.add(
            1, std::string_view(keys.type(i) == kUserDefined ? with_replaced(keys.token(i), " ", kSpaceSymbol)
                                                             : keys.token(i)));
        piece.add(2, scores[i].get<float>());
        piece.add(3, static_cast<uint64_t>(i == unknown ? kUnknown : keys.type(i)));
        model.add(1, std::string_view(piece.bytes()));
        bytes |= keys.type(i) == kByte;
    }
    trainer.add(3, uint64_t{2});  // BPE
    trainer.add(35, uint64_t{bytes});
    const std::pair<unsigned, const char*> marks[] = {
        {45, "unknown_token_id"}, {46, "bos_token_id"}, {47, "eos_token_id"}};
    for (const auto& [field, name] : marks)
        if (const int token = keys.mark(name); token >= 0)
            trainer.add(field, std::string_view(keys.token(static_cast<size_t>(token))));
    normalizer.add(1, std::string_view("identity"));
    normalizer.add(3, uint64_t{keys.truth("add_space_prefix", true)});
    normalizer.add(4, uint64_t{keys.truth("remove_extra_whitespaces", false)});
    model.add(2, std::string_view(trainer.bytes()));
    model.add(3, std::string_view(normalizer.bytes()));
    return model.bytes();
}

// The tokenizer_config.json, which says whether tokens are put around a text.
inline json sentencepiece_config(const TokenizerKeys& keys) {
    return {{"add_bos_token", keys.truth("add_bos_token", true)},
            {"add_eos_token", keys.truth("add_eos_token", false)}};
}

inline TokenizerParts read_sentencepiece_keys(const TokenizerKeys& keys) {
    return read_sentencepiece(sentencepiece_model(keys), keys.path(), sentencepiece_config(keys), "");
}
}  // namespace gguf
