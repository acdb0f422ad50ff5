// tokenizer_parts.h - what a tokenizer consists of: the steps from text to tokens, and the rules back.
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

// What text_encoder.h's steps do.
struct TextSteps {
    AddedTokens added[2];              // found in text as it is, and in normalized text
    Normalizer normalizers[2];         // of what is left by each
    std::vector<TextSplit> splits;     // each splits the pieces of the one before
    std::unique_ptr<WordModel> words;  // makes tokens of the last pieces
    // Where pieces may be cut into words; without it nowhere. Unless all characters are known to have tokens,
    // not beside one that has none.
    std::optional<Joints> joints;
    bool knows_all = false;
    std::array<int32_t, 256> byte_tokens;  // of bytes that are not UTF-8; -1: none
    int unknown = -1;                      // for those; -1: they are left out
    std::shared_ptr<Vocabulary> vocabulary;

    TextSteps() { byte_tokens.fill(-1); }

    // The most bytes that one byte of text is normalized to.
    size_t longest_replacement() const {
        return normalizers[0].longest_replacement() * normalizers[1].longest_replacement();
    }

    // The memory that all of it holds.
    size_t bytes() const {
        size_t sum = sizeof *this + added[0].bytes() + added[1].bytes() + vocabulary->bytes();
        for (const TextSplit& split : splits) sum += sizeof split + split.pattern.bytes();
        return sum + (joints ? joints->bytes() : 0) + (words ? words->bytes() : 0);
    }
};

// How tokens become text again.
struct DecodingRules {
    bool space_symbol = false;         // U+2581 in a token is a space
    bool byte_tokens = false;          // a token "<0x0A>" is that byte
    size_t strips_spaces = 0;          // so many spaces at the start of a text are left out,
    bool strips_symbols = false;       // or every U+2581 in its first token
    std::map<int, std::string> texts;  // of tokens that do not stand for their spelling
};

// A tokenizer as its files describe it.
struct TokenizerParts {
    TextSteps steps;
    DecodingRules decoding;
    std::vector<bool> special;           // by token: no text, but a mark in it
    std::vector<int32_t> before, after;  // special tokens that are put around a text when asked for
};
