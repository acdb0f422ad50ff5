// tokenizer_parts.h - the parts of a tokenizer: the steps that turn text into tokens, and the rules for
// decoding.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/added_tokens.h"
#include "llmc/bpe.h"
#include "llmc/normalizer.h"
#include "llmc/pretokenizer.h"
#include "llmc/vocabulary.h"

// The steps that text_encoder.h applies.
struct TextSteps {
    AddedTokens added[2];              // looked for in the original text, and in normalized text
    Normalizer normalizers[2];         // applied to the text between them
    std::vector<TextSplit> splits;     // each splits the pieces that the one before it made
    std::unique_ptr<WordModel> words;  // turns the last pieces into tokens
    // Tells where pieces may be cut into words; without it they may not be cut. Unless knows_all (all
    // characters have tokens), no cut is made next to a character without a token.
    std::optional<Joints> joints;
    bool knows_all = false;
    std::array<int32_t, 256> byte_tokens;  // for bytes that are not UTF-8; -1: none
    int unknown = -1;                      // for those without a token; -1: leave them out
    std::shared_ptr<Vocabulary> vocabulary;

    TextSteps() { byte_tokens.fill(-1); }

    // The most bytes that normalizing makes of one byte of text.
    size_t longest_replacement() const {
        return normalizers[0].longest_replacement() * normalizers[1].longest_replacement();
    }

    // The memory that all of this takes.
    size_t bytes() const {
        size_t sum = sizeof *this + added[0].bytes() + added[1].bytes() + vocabulary->bytes();
        for (const TextSplit& split : splits) sum += sizeof split + split.pattern.bytes();
        return sum + (joints ? joints->bytes() : 0) + (words ? words->bytes() : 0);
    }
};

// How tokens are turned back into text.
struct DecodingRules {
    bool space_symbol = false;         // U+2581 in a token means a space
    bool byte_tokens = false;          // a token "<0x0A>" means that byte
    size_t strips_spaces = 0;          // remove this many spaces at the start of a text,
    bool strips_symbols = false;       // or every U+2581 in its first token
    std::map<int, std::string> texts;  // of tokens whose text differs from their spelling
};

// A tokenizer, as its files describe it.
struct TokenizerParts {
    TextSteps steps;
    DecodingRules decoding;
    std::vector<bool> special;           // by token: true if it is a special token, not text
    std::vector<int32_t> before, after;  // special tokens added around a text on request
};
