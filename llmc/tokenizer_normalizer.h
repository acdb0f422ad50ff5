// tokenizer_normalizer.h - normalizes text before it is split into words: composes characters (NFC), replaces
// characters, and adds a prefix.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <utf8proc.h>

#include "llmc/error.h"
#include "llmc/utf8.h"

class Normalizer {
  public:
    bool nfc = false;                                               // applied first
    std::vector<std::pair<std::string, std::string>> replacements;  // then: a character and its replacement
    std::string prefix;                                             // then: put in front of a text,
    bool prefix_at_origin = false;                                  // only at the start of the whole text,
    bool prefix_unless_there = false;                               // only if the text does not begin with it

    // The most bytes that one character becomes by the replacements.
    size_t longest_replacement() const {
        size_t longest = 1;
        for (const auto& [from, to] : replacements) {
            std::map<std::string_view, size_t> counts{{from, 1}};  // of the characters that it has become so
                                                                   // far
            for (const auto& [character, text] : replacements) {
                const auto found = counts.find(character);
                if (found == counts.end()) continue;
                const size_t times = found->second;
                counts.erase(found);
                for (std::string_view rest = text; !rest.empty();) {
                    const std::string_view part = rest.substr(0, first_character(rest).length);
                    size_t& count = counts[part];
                    count = std::min<size_t>(count + times, UINT32_MAX);
                    rest.remove_prefix(part.size());
                }
                size_t bytes = 0;
                for (const auto& [part, count] : counts) bytes += count * part.size();
                longest = std::max(longest, bytes);
            }
        }
        return longest;
    }

    bool empty() const { return !nfc && replacements.empty() && prefix.empty(); }

    // Finds a place where the text can be cut so that both parts are normalized as in the whole: the first at
    // or after `wanted` bytes or, if there is none and `more` text will follow, the last before that. 0 if
    // there is none.
    size_t cut(std::string_view text, size_t wanted, bool more) const {
        const size_t first = std::min(wanted, text.size());
        for (size_t at = first; at < text.size(); at++)
            if (begins_anew(text.substr(at))) return at;
        if (!more || !nfc) return text.size();
        for (size_t at = first; at-- > 0;)
            if (begins_anew(text.substr(at))) return at;
        return 0;
    }

    // Appends one part of a text, normalized. The part lies between two cuts, is valid UTF-8 and not empty.
    void append(std::string_view part, bool begins, bool at_origin, std::string& out) const {
        std::string normal = nfc && needs_nfc(part) ? composed(part) : std::string(part);
        for (const auto& [from, to] : replacements) normal = replaced(normal, from, to);
        const bool there = prefix_unless_there && normal.starts_with(prefix);
        if (begins && (at_origin || !prefix_at_origin) && !there) out += prefix;
        out += normal;
    }

    // Normalizes a whole text.
    std::string operator()(std::string_view text) const {
        std::string out;
        if (!text.empty()) append(text, true, true, out);
        return out;
    }

  private:
    // NFC changes no character below U+0300.
    static bool needs_nfc(std::string_view text) {
        return std::any_of(text.begin(), text.end(),
                           [](char c) { return static_cast<unsigned char>(c) >= 0xcc; });
    }

    // The combining marks after one character are sorted in a time that is quadratic in their number.
    static constexpr size_t kLongestMarks = 4 << 10;

    void check_marks(std::string_view text) const {
        for (size_t at = 0, begin = 0; at < text.size(); at += first_character(text.substr(at)).length) {
            if (begins_anew(text.substr(at))) begin = at;
            if (at - begin > kLongestMarks)
                fail("a text has more than %zu KiB of marks that follow one character", kLongestMarks >> 10);
        }
    }

    std::string composed(std::string_view text) const {
        check_marks(text);
        utf8proc_uint8_t* result = nullptr;
        const auto length = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                         static_cast<utf8proc_ssize_t>(text.size()), &result,
                                         static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
        const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(result, std::free);
        if (length < 0) fail("a text cannot be normalized: %s", utf8proc_errmsg(length));
        return {reinterpret_cast<const char*>(result), static_cast<size_t>(length)};
    }

    static std::string replaced(std::string_view text, const std::string& from, const std::string& to) {
        std::string result;
        for (size_t at; (at = text.find(from)) != text.npos; text.remove_prefix(at + from.size()))
            result.append(text.substr(0, at)).append(to);
        return result.append(text);
    }

    // True if a character starts here that is never composed with one before it. Those that are composed are
    // marks, and the vowels and finals of Hangul (U+1160 to U+11FF).
    bool begins_anew(std::string_view text) const {
        if (continues_character(text[0])) return false;
        if (!nfc || static_cast<unsigned char>(text[0]) < 0xcc) return true;
        const int32_t code = first_character(text).code;
        const auto category = utf8proc_category(code);
        return utf8proc_get_property(code)->combining_class == 0 && category != UTF8PROC_CATEGORY_MN &&
               category != UTF8PROC_CATEGORY_MC && category != UTF8PROC_CATEGORY_ME &&
               !(code >= 0x1160 && code <= 0x11ff);
    }
};
