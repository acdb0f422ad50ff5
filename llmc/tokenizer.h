// tokenizer.h - text to tokens and back with GPT-2's byte-level BPE (Radford et al. 2019, section 2.2), or
// one token a byte for models that were trained on plain text.
//
// A regular expression cuts the text into pieces, roughly words with the space before them. A piece starts as
// one token per byte; then the pair of neighbours that comes first in the list of merges is joined, again and
// again. Tokens are spelt in files with one printable character per byte.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/file.h"

class Tokenizer {
  public:
    // Reads vocab.json and merges.txt, or else tokenizer.json, from a folder; nothing if it has none of them.
    // Fails naming the file when one is damaged or is not a GPT-2 kind of tokenizer.
    static std::optional<Tokenizer> open(const std::string& folder) {
        const std::string vocab = folder + "/vocab.json", merges = folder + "/merges.txt";
        const std::string whole = folder + "/tokenizer.json";
        const bool has_vocab = file_exists(vocab), has_merges = file_exists(merges);
        if (!(has_vocab && has_merges) && file_exists(whole)) return from_json(whole);
        if (!has_vocab && !has_merges) return std::nullopt;
        Tokenizer tokenizer;
        tokenizer.compile();
        const Ids ids = tokenizer.read_vocabulary(read_json(vocab), vocab);
        tokenizer.read_merges(read_text(merges), ids, merges);
        return tokenizer;
    }

    // Every byte is its own token, 0 to 255.
    static Tokenizer bytes() {
        Tokenizer tokenizer;
        for (int byte = 0; byte < 256; byte++) {
            tokenizer.spellings_.emplace_back(1, static_cast<char>(byte));
            tokenizer.byte_tokens_[static_cast<size_t>(byte)] = byte;
        }
        return tokenizer;
    }

    // The tokens of a text. Any bytes will do: those that are not UTF-8 become one token each.
    // "<|endoftext|>" in a text is text like any other.
    std::vector<int> encode(std::string_view text) const {
        std::vector<int> tokens;
        if (!pattern_) {
            for (const unsigned char byte : text) tokens.push_back(byte);
            return tokens;
        }
        const Match match(pcre2_match_data_create_from_pattern(pattern_.get(), nullptr));
        while (!text.empty()) {
            const size_t valid = valid_utf8(text, match.get());
            encode_utf8(text.substr(0, valid), match.get(), tokens);
            text.remove_prefix(valid);
            if (text.empty()) break;
            tokens.push_back(byte_tokens_[static_cast<unsigned char>(text[0])]);
            text.remove_prefix(1);
        }
        return tokens;
    }

    // The bytes a token stands for, which need not be whole characters; none if there is no such token, for
    // models may have more rows than the vocabulary.
    std::string decode(int token) const {
        return token >= 0 && token < size() ? spellings_[static_cast<size_t>(token)] : "";
    }

    // The token between documents, or -1.
    int end_of_text() const { return end_of_text_; }
    // One more than the largest token.
    int size() const { return static_cast<int>(spellings_.size()); }

  private:
    using Ids = std::unordered_map<std::string, int>;  // a token's spelling in files -> token

    template <auto free>
    struct Free {
        template <class T>
        void operator()(T* pointer) const {
            free(pointer);
        }
    };
    using Pattern = std::unique_ptr<pcre2_code, Free<pcre2_code_free>>;
    using Match = std::unique_ptr<pcre2_match_data, Free<pcre2_match_data_free>>;

    struct Merge {
        int rank, token;
    };

    static constexpr int kLargestToken = 1 << 24;  // more is a damaged file
    static constexpr const char* kEndOfText = "<|endoftext|>";

    static uint64_t pair_key(int left, int right) {
        return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
    }

    // The character (below U+0144) that spells each byte in files: itself if it is printable, else the next
    // one from U+0100 on.
    static std::array<int, 256> byte_characters() {
        std::array<int, 256> characters;
        int next = 256;
        for (int byte = 0; byte < 256; byte++) {
            const bool prints = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad);
            characters[static_cast<size_t>(byte)] = prints ? byte : next++;
        }
        return characters;
    }

    static std::string utf8(int character) {
        if (character < 0x80) return {static_cast<char>(character)};
        return {static_cast<char>(0xc0 | character >> 6), static_cast<char>(0x80 | (character & 0x3f))};
    }

    static Tokenizer from_json(const std::string& path) {
        const nlohmann::json json = read_json(path);
        if (!json.is_object() || !json.contains("model") || !json["model"].is_object() ||
            !json["model"].contains("vocab") || !json["model"].contains("merges"))
            fail("%s: has no BPE model with \"vocab\" and \"merges\"", path.c_str());
        const auto pre = json.find("pre_tokenizer");
        if (pre != json.end() && (!pre->is_object() || pre->value("type", nlohmann::json()) != "ByteLevel" ||
                                  pre->value("add_prefix_space", nlohmann::json()) == true))
            fail("%s: its pre_tokenizer is not GPT-2's: ByteLevel without add_prefix_space", path.c_str());
        Tokenizer tokenizer;
        tokenizer.compile();
        const Ids ids = tokenizer.read_vocabulary(json["model"]["vocab"], path);
        tokenizer.read_merges(json["model"]["merges"], ids, path);
        return tokenizer;
    }

    void compile() {
        // \s spelt out: PCRE2's own differs from Unicode's White_Space by U+180E.
        static constexpr char kPattern[] =
            "'(?:s|t|re|ve|m|ll|d)| ?\\p{L}+| ?\\p{N}+| ?[^\\t-\\r\\x{85}\\p{Z}\\p{L}\\p{N}]+"
            "|[\\t-\\r\\x{85}\\p{Z}]+(?![^\\t-\\r\\x{85}\\p{Z}])|[\\t-\\r\\x{85}\\p{Z}]+";
        int error = 0;
        PCRE2_SIZE where = 0;
        pattern_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(kPattern), PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_UCP, &error, &where, nullptr));
        if (!pattern_)
            fail("the installed PCRE2 cannot compile GPT-2's pattern: error %d at %zu", error, where);
        pcre2_jit_compile(pattern_.get(), PCRE2_JIT_COMPLETE);  // without it matching is slower and as right
    }

    Ids read_vocabulary(const nlohmann::json& vocab, const std::string& path) {
        if (!vocab.is_object()) fail("%s: the vocabulary is not a JSON object", path.c_str());
        const auto characters = byte_characters();
        std::unordered_map<std::string, char> bytes;
        for (size_t byte = 0; byte < 256; byte++) bytes[utf8(characters[byte])] = static_cast<char>(byte);
        Ids ids;
        std::vector<bool> taken;
        for (const auto& [spelling, token] : vocab.items()) {
            if (!token.is_number_unsigned() || token.get<uint64_t>() > kLargestToken)
                fail("%s: \"%s\" has a token that is not a number from 0 to %d", path.c_str(),
                     printable(spelling).c_str(), kLargestToken);
            const auto id = token.get<size_t>();
            if (id >= spellings_.size()) spellings_.resize(id + 1), taken.resize(id + 1);
            if (taken[id])
                fail("%s: token %zu is given twice, here to \"%s\"", path.c_str(), id,
                     printable(spelling).c_str());
            taken[id] = true;
            spellings_[id] = to_bytes(spelling, bytes);
            ids[spelling] = static_cast<int>(id);
        }
        for (size_t byte = 0; byte < 256; byte++) {
            const auto found = ids.find(utf8(characters[byte]));
            if (found == ids.end()) fail("%s: has no token for the byte 0x%02zx", path.c_str(), byte);
            byte_tokens_[byte] = found->second;
        }
        if (const auto end = ids.find(kEndOfText); end != ids.end()) end_of_text_ = end->second;
        return ids;
    }

    // The bytes a spelling stands for. A token with other characters than those is one that was added to the
    // vocabulary, and stands for itself.
    static std::string to_bytes(const std::string& spelling,
                                const std::unordered_map<std::string, char>& bytes) {
        std::string result;
        for (size_t i = 0; i < spelling.size();) {
            const size_t length = static_cast<unsigned char>(spelling[i]) < 0x80 ? 1 : 2;
            const auto byte = bytes.find(spelling.substr(i, length));
            if (byte == bytes.end()) return spelling;
            result += byte->second;
            i += length;
        }
        return result;
    }

    // merges.txt: "left right" a line, after a line "#version: ...".
    void read_merges(const std::string& text, const Ids& ids, const std::string& path) {
        std::string_view rest = text;
        for (int number = 1; !rest.empty(); number++) {
            std::string_view line = rest.substr(0, rest.find('\n'));
            rest.remove_prefix(std::min(rest.size(), line.size() + 1));
            if (line.ends_with('\r')) line.remove_suffix(1);
            if (line.empty() || (number == 1 && line.starts_with("#version"))) continue;
            add_merge(line, ids, format("%s: line %d", path.c_str(), number));
        }
    }

    // tokenizer.json: a list of "left right", or of ["left", "right"] in newer files.
    void read_merges(const nlohmann::json& merges, const Ids& ids, const std::string& path) {
        if (!merges.is_array()) fail("%s: \"merges\" is not a list", path.c_str());
        for (size_t i = 0; i < merges.size(); i++) {
            const nlohmann::json& merge = merges[i];
            const std::string where = format("%s: merge %zu", path.c_str(), i);
            if (merge.is_string())
                add_merge(merge.get<std::string>(), ids, where);
            else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string())
                add_merge(merge[0].get<std::string>() + " " + merge[1].get<std::string>(), ids, where);
            else
                fail("%s is not a pair of tokens", where.c_str());
        }
    }

    void add_merge(std::string_view line, const Ids& ids, const std::string& where) {
        const size_t space = line.find(' ');
        if (space == line.npos || line.find(' ', space + 1) != line.npos)
            fail("%s: \"%s\" is not a pair of tokens", where.c_str(), printable(line).c_str());
        const std::string left(line.substr(0, space)), right(line.substr(space + 1));
        const auto id = [&](const std::string& spelling) {
            const auto found = ids.find(spelling);
            if (found == ids.end())
                fail("%s: \"%s\" is not in the vocabulary", where.c_str(), printable(spelling).c_str());
            return found->second;
        };
        const int first = id(left), second = id(right), rank = static_cast<int>(merges_.size());
        merges_.try_emplace(pair_key(first, second), Merge{rank, id(left + right)});
    }

    int match_at(std::string_view text, size_t start, uint32_t options, pcre2_match_data* match) const {
        const int result = pcre2_match(pattern_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                       start, options, match, nullptr);
        const bool not_utf8 = result <= PCRE2_ERROR_UTF8_ERR1 && result >= PCRE2_ERROR_UTF8_ERR21;
        if (result < 0 && !not_utf8) fail("the tokenizer's pattern does not match: PCRE2 error %d", result);
        return result;
    }

    // How many of the first bytes are valid UTF-8: PCRE2 looks through its whole subject before it matches.
    size_t valid_utf8(std::string_view text, pcre2_match_data* match) const {
        return match_at(text, 0, 0, match) < 0 ? pcre2_get_startchar(match) : text.size();
    }

    // Appends the tokens of valid UTF-8. The pattern matches at any character, so pieces follow each other
    // closely.
    void encode_utf8(std::string_view text, pcre2_match_data* match, std::vector<int>& tokens) const {
        for (size_t start = 0; start < text.size();) {
            match_at(text, start, PCRE2_NO_UTF_CHECK, match);
            const size_t end = pcre2_get_ovector_pointer(match)[1];
            encode_piece(text.substr(start, end - start), tokens);
            start = end;
        }
    }

    // Joins the pair of lowest rank, leftmost first, until no pair has a merge. The queue holds (rank, left
    // symbol) of pairs that were neighbours once; one that is no more, or of another rank by now, is passed
    // over.
    void encode_piece(std::string_view piece, std::vector<int>& tokens) const {
        struct Symbol {
            int token, previous, next;  // token -1: joined to the one before
        };
        std::vector<Symbol> symbols;
        const int count = static_cast<int>(piece.size());
        for (int i = 0; i < count; i++) {
            const auto byte = static_cast<unsigned char>(piece[static_cast<size_t>(i)]);
            symbols.push_back({byte_tokens_[byte], i - 1, i + 1 < count ? i + 1 : -1});
        }
        const auto at = [&](int i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };
        const auto merge_of = [&](int left) -> const Merge* {
            if (left < 0 || at(left).token < 0 || at(left).next < 0) return nullptr;
            const auto found = merges_.find(pair_key(at(left).token, at(at(left).next).token));
            return found == merges_.end() ? nullptr : &found->second;
        };
        using Candidate = std::pair<int, int>;
        std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
        const auto consider = [&](int left) {
            if (const Merge* merge = merge_of(left)) queue.emplace(merge->rank, left);
        };
        for (int i = 0; i < count; i++) consider(i);
        while (!queue.empty()) {
            const auto [rank, left] = queue.top();
            queue.pop();
            const Merge* merge = merge_of(left);
            if (!merge || merge->rank != rank) continue;
            Symbol& joined = at(left);
            Symbol& gone = at(joined.next);
            joined.token = merge->token;
            gone.token = -1;
            joined.next = gone.next;
            if (gone.next >= 0) at(gone.next).previous = left;
            consider(joined.previous);
            consider(left);
        }
        for (const Symbol& symbol : symbols)
            if (symbol.token >= 0) tokens.push_back(symbol.token);
    }

    Pattern pattern_;                     // none for bytes()
    std::vector<std::string> spellings_;  // the bytes of each token
    std::array<int, 256> byte_tokens_{};
    std::unordered_map<uint64_t, Merge> merges_;
    int end_of_text_ = -1;
};
