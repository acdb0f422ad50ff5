// tokenizer_pretokenizer.h - prepares text for its encoding into tokens: normalizes it, and splits it into
// pieces, roughly words.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <utf8proc.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/utf8.h"

// Composes characters (NFC), replaces characters, and adds a prefix.
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
        for (const auto& [replaced, first] : replacements) {
            std::string text = replaced;
            for (const auto& [from, to] : replacements) {
                text = with_replaced(text, from, to);
                longest = std::max(longest, text.size());
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
        for (const auto& [from, to] : replacements) normal = with_replaced(normal, from, to);
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
        return std::ranges::any_of(text, [](char c) { return static_cast<unsigned char>(c) >= 0xcc; });
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

// ---- splitting
//
// Splits text into pieces, roughly words with the space before them. No token crosses the border of a piece.
// The splits are the regular expressions in Hugging Face's files, which are written for Oniguruma in Ruby's
// syntax. Here PCRE2 runs them, after a translation of what PCRE2 reads differently. A character that is
// newer than PCRE2's version of Unicode (14 in Debian 12) counts as neither letter nor digit.

// GPT-2's expression (Radford et al. 2019).
inline constexpr const char* kGpt2Split =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Translates an expression to PCRE2's syntax. It knows what usual tokenizers contain: alternatives, groups,
// (?i:...), lookahead, classes and classes inside classes, \s, \S, \d, \p{general category}, and repetitions.
// Fails on everything else and names the part that it does not know, because PCRE2 would read some of it
// differently: verbs, repeated lookahead, which Oniguruma refuses, and (?i:...) where Oniguruma matches one
// character with several.
class RegexTranslation {
  public:
    // `where` begins error messages: it names the file and the component.
    RegexTranslation(std::string_view regex, std::string where) : rest_(regex), where_(std::move(where)) {
        if (regex.size() > kLongest)
            fail("%s: a regex of %zu bytes where %zu are the most", where_, regex.size(), kLongest);
        while (!rest_.empty()) translate_one();
    }
    const std::string& result() const { return out_; }

  private:
    static constexpr size_t kLongest = 10000;
    // White_Space, spelled out: PCRE2's own \s includes U+180E in some versions.
    static constexpr const char* kSpace = R"(\t-\r\x{85}\p{Z})";

    [[noreturn]] void refuse(std::string_view what) const {
        fail("%s: \"%s\" in a regex is not supported", where_, printable(what.substr(0, 20)));
    }

    std::string_view take(size_t bytes) {
        const std::string_view taken = rest_.substr(0, bytes);
        rest_.remove_prefix(taken.size());
        return taken;
    }

    void translate_one() {
        switch (rest_[0]) {
            case '\\':
                return translate_escape(false);
            case '[':
                return translate_class();
            case '(':
                return translate_group();
            case ')':
                return close_group();
            case '{':
                return translate_repetition();
            case '^':
            case '$':
                refuse(rest_);  // line ends in Ruby's syntax, the ends of the text in PCRE2's
            default:
                check_folding(rest_);
                out_ += take(1);
        }
    }

    // Ignoring case, Oniguruma matches "\u00df" with "ss": five pairs of ASCII letters can match one
    // character, and a character that is not ASCII can match several. PCRE2 matches single characters only.
    void check_folding(std::string_view literal) const {
        if (!ignores_case()) return;
        if (static_cast<unsigned char>(literal[0]) >= 0x80) refuse_folding();
        if (literal.size() < 2) return;
        const auto lower = [](char c) { return std::tolower(static_cast<unsigned char>(c)); };
        const int first = lower(literal[0]), second = lower(literal[1]);
        const bool joins = (first == 's' && (second == 's' || second == 't')) ||
                           (first == 'f' && (second == 'f' || second == 'i' || second == 'l'));
        if (joins || ((first == 's' || first == 'f') &&
                      std::string_view("{(").find(literal[1]) != std::string_view::npos))
            refuse_folding();
    }
    [[noreturn]] void refuse_folding() const { refuse(groups_.back().text); }
    bool ignores_case() const { return !groups_.empty() && groups_.back().ignores_case; }

    void translate_group() {
        if (rest_.starts_with("(*")) refuse(rest_);  // a verb in PCRE2, a callout in Oniguruma
        for (const char* known : {"(?:", "(?i:", "(?!", "(?=", "("}) {
            if (!rest_.starts_with(known)) continue;
            const std::string_view opens = known;
            if (opens == "(" && rest_.starts_with("(?")) refuse(rest_);
            const bool ignores = ignores_case();
            groups_.push_back({ignores ? groups_.back().text : rest_,
                               opens == "(?!" || opens == "(?=", ignores || opens == "(?i:"});
            out_ += take(opens.size());
            return;
        }
    }

    void close_group() {
        if (groups_.empty()) refuse(rest_);
        const Group group = groups_.back();
        groups_.pop_back();
        const std::string_view whole = rest_;
        out_ += take(1);
        const bool repeats =
            !rest_.empty() && std::string_view("*+?{").find(rest_[0]) != std::string_view::npos;
        if (group.is_lookahead && repeats) refuse(whole);
    }

    // {n}, {n,} or {n,m}. A + or ? after it repeats it again in Ruby's syntax, but not in PCRE2's.
    void translate_repetition() {
        const size_t end = rest_.find('}');
        const std::string_view counts = rest_.substr(1, end == rest_.npos ? 0 : end - 1);
        const bool numbers =
            counts.find_first_not_of("0123456789,") == counts.npos && std::ranges::count(counts, ',') <= 1;
        if (end == rest_.npos || counts.empty() || counts[0] == ',' || !numbers ||
            rest_.substr(end + 1).starts_with('+') || rest_.substr(end + 1).starts_with('?'))
            refuse(rest_);
        out_ += take(end + 1);
    }

    void translate_escape(bool in_class) {
        const std::string_view whole = rest_;
        if (whole.size() < 2) refuse(whole);
        const char kind = whole[1];
        if (ignores_case() && std::string_view("SDpP").find(kind) != std::string_view::npos) refuse_folding();
        const bool word =
            (kind >= '0' && kind <= '9') || (kind >= 'a' && kind <= 'z') || (kind >= 'A' && kind <= 'Z');
        take(2);
        if (kind == 's')
            out_ += in_class ? kSpace : "[" + std::string(kSpace) + "]";
        else if (kind == 'S' && !in_class)
            out_ += "[^" + std::string(kSpace) + "]";
        else if (kind == 'd' || kind == 'D')
            out_ += kind == 'd' ? R"(\p{Nd})" : R"(\P{Nd})";
        else if (kind == 'p' || kind == 'P')
            translate_property(whole);
        else if (!word || kind == 'r' || kind == 'n' || kind == 't' || kind == 'f')
            out_ += whole.substr(0, 2);
        else
            refuse(whole.substr(0, 2));
    }

    // A general category: one letter or two.
    void translate_property(std::string_view whole) {
        const size_t end = rest_.find('}');
        const size_t start = rest_.starts_with("{^") ? 2 : 1;
        const size_t letters = end == rest_.npos || !rest_.starts_with('{') ? 0 : end - start;
        if (letters < 1 || letters > 2 || std::string_view("LMNPSZC").find(rest_[start]) == rest_.npos ||
            (letters == 2 && !(rest_[start + 1] >= 'a' && rest_[start + 1] <= 'z')))
            refuse(whole);
        out_ += whole.substr(0, 2);
        out_ += take(end + 1);
    }

    // PCRE2 has no classes inside classes: the members of the inner class are added to the outer one.
    void translate_class() {
        const std::string_view whole = rest_;
        if (ignores_case() && rest_.starts_with("[^")) refuse_folding();
        out_ += take(rest_.starts_with("[^") ? 2 : 1);
        if (rest_.starts_with(']')) refuse(whole);
        for (int depth = 1; depth > 0;) {
            if (rest_.empty() || rest_.starts_with("&&") || rest_.starts_with("-[") ||
                rest_.starts_with("]-"))
                refuse(whole);
            if (rest_[0] == '[') {
                if (rest_.starts_with("[^") || rest_.starts_with("[:") || rest_.starts_with("[]"))
                    refuse(whole);
                take(1);
                depth++;
            } else if (rest_[0] == ']') {
                take(1);
                depth--;
            } else if (rest_[0] == '\\') {
                translate_escape(true);
            } else {
                check_folding(rest_.substr(0, 1));
                out_ += take(1);
            }
        }
        out_ += ']';
    }

    // An open group, and the expression from its start on; inside a (?i:...) from the start of the outermost
    // one.
    struct Group {
        std::string_view text;
        bool is_lookahead, ignores_case;
    };

    std::string_view rest_;
    std::string where_, out_;
    std::vector<Group> groups_;
};

// A compiled regular expression.
class Pattern {
  public:
    struct Found {
        enum { kMatch, kNone, kUndecided } kind;
        size_t begin, end;  // of the match; if kUndecided: no match starts before `begin`
    };
    // PCRE2's buffer for a match; each thread needs its own.
    using Match = std::shared_ptr<pcre2_match_data>;
    static Match make_match() { return {pcre2_match_data_create(1, nullptr), pcre2_match_data_free}; }

    // Compiles an expression in Oniguruma's syntax. Fails with a message that begins with `where`.
    Pattern(std::string_view regex, const std::string& where) {
        int error = 0;
        PCRE2_SIZE at = 0;
        // A dot matches any character but a line feed, as in Ruby's syntax.
        const std::string translated = "(*LF)" + RegexTranslation(regex, where).result();
        code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                  PCRE2_UTF | PCRE2_UCP, &error, &at, nullptr));
        uint32_t may_be_empty = 0;
        if (code_) pcre2_pattern_info(code_.get(), PCRE2_INFO_MATCHEMPTY, &may_be_empty);
        if (!code_ || may_be_empty) {
            PCRE2_UCHAR message[200] = "it matches no text at all";
            if (!code_) pcre2_get_error_message(error, message, sizeof message);
            fail("%s: the regex \"%s\" cannot be used: %s", where, printable(regex),
                 reinterpret_cast<const char*>(message));
        }
        // If this fails, matching is slower but still correct.
        pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD);
    }

    // Finds the first match in valid UTF-8 from `from` on. With `more`, further text will follow; a match
    // that it could change is kUndecided.
    Found find(std::string_view text, size_t from, bool more, pcre2_match_data* match) const {
        const uint32_t options = PCRE2_NO_UTF_CHECK | (more ? PCRE2_PARTIAL_HARD : 0);
        int result = run(text, from, options, match);
        if (result == PCRE2_ERROR_JIT_STACKLIMIT) result = run(text, from, options | PCRE2_NO_JIT, match);
        if (result == PCRE2_ERROR_NOMATCH) return {Found::kNone, text.size(), text.size()};
        const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match);
        if (result == PCRE2_ERROR_PARTIAL) return {Found::kUndecided, range[0], text.size()};
        if (result < 0) {
            PCRE2_UCHAR message[200];
            pcre2_get_error_message(result, message, sizeof message);
            fail("the tokenizer's regex cannot split the text: %s", reinterpret_cast<const char*>(message));
        }
        return {Found::kMatch, range[0], range[1]};
    }

    size_t bytes() const {
        size_t code = 0, jit = 0;
        pcre2_pattern_info(code_.get(), PCRE2_INFO_SIZE, &code);
        pcre2_pattern_info(code_.get(), PCRE2_INFO_JITSIZE, &jit);
        return code + jit;
    }

  private:
    struct FreeCode {
        void operator()(pcre2_code* code) const { pcre2_code_free(code); }
    };

    int run(std::string_view text, size_t from, uint32_t options, pcre2_match_data* match) const {
        return pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from, options,
                           match, nullptr);
    }

    std::unique_ptr<pcre2_code, FreeCode> code_;
};

// One way to split a text: each match is a piece, and so is the text between two matches.
struct TextSplit {
    Pattern pattern;
    bool keeps_matches = true, keeps_rest = true;
};
