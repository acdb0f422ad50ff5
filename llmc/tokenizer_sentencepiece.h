// tokenizer_sentencepiece.h - reads and applies tokenizer.model files with SentencePiece's own library.
//
// The file is a ModelProto of SentencePiece's sentencepiece_model.proto. Supported is the kind that Llama 2
// and Mistral use: byte pair encoding without a normalizer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <malloc.h>

#include <nlohmann/json.hpp>
#include <sentencepiece_processor.h>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/tokenizer_bpe.h"
#include "llmc/tokenizer_encoder.h"
#include "llmc/tokenizer_settings.h"
#include "llmc/tokenizer_vocabulary.h"
#include "llmc/utf8.h"

// Reads the fields of a message in Protocol Buffers' wire format. Fails naming the file if it is damaged.
class ProtoFields {
  public:
    struct Field {
        uint64_t number, value = 0;  // the value of a variable-length integer
        std::string_view bytes;      // or the contents of a string or a message
    };

    ProtoFields(std::string_view message, const std::string& path) : rest_(message), path_(path) {}

    bool next(Field& field) {
        if (rest_.empty()) return false;
        const uint64_t key = integer();
        field = {key >> 3, 0, {}};
        switch (key & 7) {
            case 0:
                field.value = integer();
                break;
            case 1:
                take(8);
                break;
            case 2:
                field.bytes = take(integer());
                break;
            case 5:
                take(4);
                break;
            default:
                refuse();
        }
        return true;
    }

  private:
    [[noreturn]] void refuse() const { fail("%s is damaged, or no SentencePiece model", path_); }

    std::string_view take(uint64_t bytes) {
        if (bytes > rest_.size()) refuse();
        const std::string_view taken = rest_.substr(0, static_cast<size_t>(bytes));
        rest_.remove_prefix(taken.size());
        return taken;
    }

    uint64_t integer() {
        uint64_t value = 0;
        for (int shift = 0; shift < 64; shift += 7) {
            const auto byte = static_cast<unsigned char>(take(1)[0]);
            value |= uint64_t{byte & 0x7fu} << shift;
            if (byte < 0x80) return value;
        }
        refuse();
    }

    std::string_view rest_;
    const std::string& path_;
};

class SentencePieceModel final : public WordModel {
  public:
    // `file` has the bytes of the file at `path`. Fails naming it if it is damaged or of an unsupported kind.
    SentencePieceModel(std::string file, const std::string& path) {
        check(file, path);
        // Words are encoded one by one, and the space that is put before a text must not be put before each
        // word. A message that appears a second time is merged into the first: normalizer_spec {
        // add_dummy_prefix: 0 }.
        file += std::string("\x1a\x02\x18\x00", 4);
        const size_t before = allocated();
        if (const auto status = model_.LoadFromSerializedProto(file); !status.ok())
            fail("%s: SentencePiece cannot read it: %s", path, printable(status.ToString()));
        bytes_ = sizeof *this + allocated() - before;
    }

    void encode(std::string_view word, WordScratch& scratch, std::vector<int32_t>& tokens) const override {
        auto& ids = scratch.tokens;
        if (const auto status = model_.Encode(word, &ids); !status.ok())
            fail("the text cannot be tokenized: %s", printable(status.ToString()));
        tokens.insert(tokens.end(), ids.begin(), ids.end());
    }

    const sentencepiece::SentencePieceProcessor& library() const { return model_; }
    // True if a space is put before a text.
    bool adds_space() const { return adds_space_; }

    // The library takes about 130 bytes of memory per byte of a word.
    size_t longest_word() const override { return 32 << 10; }

    // What the library allocated.
    size_t bytes() const override { return bytes_; }

  private:
    static size_t allocated() {
        const struct mallinfo2 info = mallinfo2();
        return info.uordblks + info.hblkhd;
    }

    // Refuses models that would need text to be split differently.
    void check(std::string_view file, const std::string& path) {
        const auto refuse = [&](const char* what, const std::string& value) {
            fail("%s: %s %s is not supported", path, what, value);
        };
        uint64_t type = 0;
        bool removes_spaces = true, escapes = true, suffix = false;
        std::string rules, name;
        ProtoFields::Field part, field;
        for (ProtoFields model(file, path); model.next(part);) {
            ProtoFields fields(part.bytes, path);
            if (part.number == 2) {  // trainer_spec
                type = std::max<uint64_t>(type, 1);
                while (fields.next(field)) {
                    if (field.number == 3) type = field.value;
                    if (field.number == 24) suffix = field.value;
                }
            }
            if (part.number == 3)  // normalizer_spec
                while (fields.next(field)) {
                    if (field.number == 1) name = field.bytes;
                    if (field.number == 2) rules = field.bytes;
                    if (field.number == 3) adds_space_ = field.value;
                    if (field.number == 4) removes_spaces = field.value;
                    if (field.number == 5) escapes = field.value;
                }
        }
        if (type == 0) fail("%s is damaged, or no SentencePiece model", path);
        const char* types[] = {"?", "UNIGRAM", "BPE", "WORD", "CHAR"};
        if (type != 2) refuse("model_type", types[type <= 4 ? type : 0]);
        if (!rules.empty()) refuse("normalizer", printable(name));
        if (removes_spaces) refuse("remove_extra_whitespaces", "true");
        if (!escapes) refuse("escape_whitespaces", "false");
        if (suffix) refuse("treat_whitespace_as_suffix", "true");
    }

    sentencepiece::SentencePieceProcessor model_;
    bool adds_space_ = true;
    size_t bytes_ = 0;
};

// Adds the pairs of neighbouring characters in a piece. A piece has U+2581 where a text has a space.
inline void add_neighbours(std::string_view piece, Joints::Pairs& pairs) {
    const int32_t symbol = first_character(kSpaceSymbol).code;
    const auto ways = [&](int32_t code) {
        return code == symbol ? std::vector{code, int32_t{' '}} : std::vector{code};
    };
    for (Character left = first_character(piece); left.length < piece.size();) {
        piece.remove_prefix(left.length);
        const Character right = first_character(piece);
        for (const int32_t a : ways(left.code))
            for (const int32_t b : ways(right.code)) pairs.emplace_back(a, b);
        left = right;
    }
}

// Reads the bytes of a tokenizer.model in `folder`, with the settings of tokenizer_settings(). A space is put
// before a text and, with "legacy" true, before what follows a special token. TokenizersBackend, where that
// is usual, then puts it before a text that begins with a space too.
inline TokenizerParts read_sentencepiece(const std::string& file, const std::string& path,
                                         const nlohmann::json& settings, const std::string& folder) {
    auto model = std::make_unique<SentencePieceModel>(file, path);
    const auto& library = model->library();
    const bool llama = settings.value("tokenizer_class", "") == "LlamaTokenizer";
    const bool legacy = truth_of(settings, "legacy", !llama);
    TokenizerParts parts;
    TextSteps& steps = parts.steps;
    steps.vocabulary = std::make_shared<Vocabulary>();
    Joints::Pairs pairs;
    nlohmann::json added = nlohmann::json::array();
    for (int token = 0; token < library.GetPieceSize(); token++) {
        const std::string& piece = library.IdToPiece(token);
        // The library splits such a piece again, depending on what it merged elsewhere in the text.
        if (library.IsUnused(token)) fail("%s: its pieces of type UNUSED are not supported", path);
        if (token > Vocabulary::kLargestToken || steps.vocabulary->find(piece) >= 0)
            fail("%s: \"%s\" is a piece too many", path, printable(piece));
        steps.vocabulary->add(token, piece);
        if (library.IsControl(token) || library.IsUnknown(token)) {
            added.push_back({{"id", static_cast<uint64_t>(token)}, {"content", piece}, {"special", true}});
        } else if (library.IsByte(token)) {
            if (const int byte = read_byte_spelling(piece); byte >= 0)
                steps.byte_tokens[static_cast<size_t>(byte)] = token;
        } else {
            add_neighbours(piece, pairs);
        }
    }
    complete_added_tokens(
        added, settings, [&](const std::string& text) { return steps.vocabulary->find(text); },
        static_cast<uint64_t>(steps.vocabulary->size()), folder);
    for (const nlohmann::json& each : added) {
        const std::string content = content_of(each);
        const auto is = [&](const char* flag) { return truth_of(each, flag, false); };
        const auto id = each["id"].get<size_t>();
        const int token = static_cast<int>(id);
        if (!steps.vocabulary->has(token)) steps.vocabulary->add(token, content, false);
        parts.special.resize(std::max(parts.special.size(), id + 1));
        parts.special[id] = is("special");
        if (content.empty()) continue;
        steps.added[0].add(content, {token, is("single_word"), is("lstrip"), is("rstrip"), is("special")});
    }
    steps.vocabulary->shrink();
    steps.joints = Joints(std::move(pairs));
    steps.knows_all = std::ranges::count(steps.byte_tokens, -1) == 0;
    steps.unknown = library.unk_id();
    const bool adds_space = llama ? truth_of(settings, "add_prefix_space", true) : model->adds_space();
    if (adds_space) {
        Normalizer& normalizer = steps.normalizers[0];
        normalizer.prefix_at_origin = !legacy;
        normalizer.prefix_unless_there = llama || !legacy;
        normalizer.prefix = normalizer.prefix_unless_there ? kSpaceSymbol : " ";
        if (normalizer.prefix_unless_there) normalizer.replacements.emplace_back(" ", kSpaceSymbol);
    }
    parts.decoding = {.space_symbol = true,
                      .byte_tokens = true,
                      .strips_spaces = adds_space,
                      .strips_symbols = false,
                      .texts = {}};
    if (truth_of(settings, "add_bos_token", true) && library.bos_id() >= 0)
        parts.before.push_back(library.bos_id());
    if (truth_of(settings, "add_eos_token", false) && library.eos_id() >= 0)
        parts.after.push_back(library.eos_id());
    steps.words = std::move(model);
    return parts;
}
