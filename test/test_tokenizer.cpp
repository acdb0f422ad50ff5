// test_tokenizer.cpp - tokenizers of small vocabularies, their steps, and what is refused; and GPT-2's
// tokenizer if GPT2_TOKENIZER names its folder. test_tokenizers.py compares real ones with other programs.

#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <sys/resource.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "llmc/tokenizer.h"
#include "llmc/tokenizer_encoder.h"
#include "llmc/tokenizer_pretokenizer.h"
#include "test/file_helpers.h"

namespace {

using nlohmann::json;

// How files spell a byte, by the definition: the printable bytes of Latin-1 stand for themselves, the others
// are U+0100, U+0101, ... in order.
std::string spelling(int byte) {
    const auto prints = [](int b) {
        return (33 <= b && b <= 126) || (161 <= b && b <= 172) || (174 <= b && b <= 255);
    };
    int character = byte;
    if (!prints(byte)) {
        character = 256;
        for (int b = 0; b < byte; b++) character += !prints(b);
    }
    if (character < 128) return std::string(1, static_cast<char>(character));
    return {static_cast<char>(0xc0 | character >> 6), static_cast<char>(0x80 | (character & 63))};
}

// 256 bytes in order, then the tokens of these merges, then <|endoftext|>. "Ġ" spells a space.
const std::vector<std::pair<std::string, std::string>> kMerges = {
    {"h", "e"}, {"l", "l"}, {"he", "ll"}, {"hell", "o"}, {"Ġ", "w"},  {"'", "s"},  {"a", "a"},
    {"Ġ", "Ġ"}, {"Ã", "©"}, {"n", "p"},   {"m", "n"},    {"np", "q"}, {"m", "np"},
};
enum { kHe = 256, kLl, kHell, kHello, kSpaceW, kQuoteS, kAa, kSpaces, kEAcute, kNp, kMn, kNpq, kMnp, kEnd };

json small_vocabulary() {
    json vocab;
    int next = 0;
    for (int byte = 0; byte < 256; byte++) vocab[spelling(byte)] = next++;
    for (const auto& [left, right] : kMerges) vocab[left + right] = next++;
    vocab["<|endoftext|>"] = next;
    return vocab;
}

std::string merges_text(const std::string& line_end = "\n") {
    std::string text = "#version: 0.2" + line_end;
    for (const auto& [left, right] : kMerges) text += left + " " + right + line_end;
    return text;
}

void write_small(const TempFolder& folder) {
    folder.write("vocab.json", small_vocabulary().dump());
    folder.write("merges.txt", merges_text());
}

std::string decode_all(const Tokenizer& tokenizer, const std::vector<int>& tokens) {
    std::string text;
    for (const int token : tokens) text += tokenizer.decode(token);
    return text;
}

// vocab.json is read as GPT2Tokenizer reads it, whose end of a text is a special token; a tokenizer.json has
// only those that it lists.
void expect_small(const Tokenizer& tokenizer, bool knows_end) {
    const std::vector<std::pair<std::string, std::vector<int>>> cases = {
        {"", {}},
        {"hello", {kHello}},
        {"hell he l", {kHell, ' ', kHe, ' ', 'l'}},
        {"aaaaa", {kAa, kAa, 'a'}},
        {"o world", {'o', kSpaceW, 'o', 'r', 'l', 'd'}},
        {"mn mnp mnpq", {kMn, ' ', kMnp, ' ', 'm', kNpq}},  // "np" is gone before "m np" is merged
        {"x's", {'x', kQuoteS}},
        {"x 's", {'x', ' ', '\'', 's'}},                   // the space takes the quote along
        {"a   w", {'a', kSpaces, kSpaceW}},                // the last space goes with the word
        {"a   ", {'a', kSpaces, ' '}},                     // at the end all stay together
        {"w\xe3\x80\x80w", {'w', 0xe3, 0x80, 0x80, 'w'}},  // U+3000 is white space: no merge crosses it
        {"h3e", {'h', '3', 'e'}},
        {"\xc3\xa9", {kEAcute}},
        {"\xc3he\xa9\xff", {0xc3, kHe, 0xa9, 0xff}},  // broken UTF-8: bad bytes alone, the rest as usual
        {"\xed\xa0\x80\xc0\x80", {0xed, 0xa0, 0x80, 0xc0, 0x80}},
        {std::string("he\0he", 5), {kHe, 0, kHe}},
        {"hello<|endoftext|>", knows_end ? std::vector<int>{kHello, kEnd}
                                         : std::vector<int>{kHello, '<', '|', 'e', 'n', 'd', 'o', 'f', 't',
                                                            'e', 'x', 't', '|', '>'}},
    };
    for (const auto& [text, tokens] : cases) {
        EXPECT_EQ(tokenizer.encode(text), tokens) << text;
        EXPECT_EQ(decode_all(tokenizer, tokens), text);
    }
    EXPECT_EQ(tokenizer.size(), kEnd + 1);
    EXPECT_EQ(tokenizer.end_of_text(), kEnd);
    EXPECT_EQ(tokenizer.decode(kSpaceW), " w");
    EXPECT_EQ(tokenizer.decode(kEnd), "<|endoftext|>");
    EXPECT_EQ(tokenizer.decode(kEnd + 1), "");
    EXPECT_EQ(tokenizer.decode(-1), "");
}

TEST(Tokenizer, VocabAndMerges) {
    const TempFolder folder;
    EXPECT_FALSE(Tokenizer::open(folder.path()));
    write_small(folder);
    expect_small(*Tokenizer::open(folder.path()), true);
    folder.write("merges.txt", merges_text("\r\n"));
    expect_small(*Tokenizer::open(folder.path()), true);
}

json byte_level() { return {{"type", "ByteLevel"}, {"add_prefix_space", false}}; }

json merge_strings() {
    json merges = json::array();
    for (const auto& [left, right] : kMerges) merges.push_back(left + " " + right);
    return merges;
}

// A tokenizer.json of the small vocabulary.
json small_json() {
    return {{"version", "1.0"},
            {"added_tokens", json::array()},
            {"pre_tokenizer", byte_level()},
            {"decoder", {{"type", "ByteLevel"}}},
            {"model", {{"type", "BPE"}, {"vocab", small_vocabulary()}, {"merges", merge_strings()}}}};
}

// A tokenizer like SentencePiece's, whose tokens are characters, and also bytes if asked for.
json small_characters(bool bytes) {
    json vocab, merges = json::array();
    const auto add = [&](const std::string& token) { vocab[token] = vocab.size(); };
    for (const char* token : {"<unk>", "▁", "a", "b", "ä"}) add(token);
    if (bytes)
        for (int byte = 0; byte < 256; byte++) add(format("<0x%02X>", byte));
    for (const std::pair<std::string, std::string> merge :
         {std::pair{"▁", "a"}, std::pair{"a", "b"}, std::pair{"▁a", "b"}, std::pair{"▁", "▁"}}) {
        add(merge.first + merge.second);
        merges.push_back({merge.first, merge.second});
    }
    const json space = {{"String", "▁"}};
    return {{"pre_tokenizer",
             {{"type", "Metaspace"}, {"replacement", "▁"}, {"prepend_scheme", "always"}, {"split", false}}},
            {"decoder",
             {{"type", "Sequence"},
              {"decoders",
               {{{"type", "Replace"}, {"pattern", space}, {"content", " "}},
                {{"type", "ByteFallback"}},
                {{"type", "Fuse"}},
                {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
            {"model",
             {{"type", "BPE"},
              {"unk_token", "<unk>"},
              {"byte_fallback", bytes},
              {"vocab", vocab},
              {"merges", merges}}}};
}

Tokenizer open_json(const json& content) {
    const TempFolder folder;
    folder.write("tokenizer.json", content.dump());
    return *Tokenizer::open(folder.path());
}

TEST(Tokenizer, TokenizerJson) {
    expect_small(open_json(small_json()), false);
    json pairs = small_json();
    pairs["model"]["merges"] = json::array();
    for (const auto& [left, right] : kMerges) pairs["model"]["merges"].push_back({left, right});
    expect_small(open_json(pairs), false);
}

// JSON objects have no order.
TEST(Tokenizer, MergesMayComeBeforeTheVocabulary) {
    const TempFolder folder;
    folder.write("tokenizer.json", R"({"pre_tokenizer": )" + byte_level().dump() +
                                       R"(, "model": {"merges": )" + merge_strings().dump() +
                                       R"(, "vocab": )" + small_vocabulary().dump() + "}}");
    expect_small(*Tokenizer::open(folder.path()), false);
}

// If a merge is given twice, the last one counts, as in Hugging Face's tokenizers.
TEST(Tokenizer, LastOfEqualMerges) {
    json content = small_json();
    content["model"]["vocab"]["el"] = 999;
    content["model"]["merges"] = {"h e", "e l"};
    EXPECT_EQ(open_json(content).encode("hel"), (std::vector<int>{kHe, 'l'}));
    content["model"]["merges"] = {"h e", "e l", "h e"};
    EXPECT_EQ(open_json(content).encode("hel"), (std::vector<int>{'h', 999}));
}

TEST(Tokenizer, IgnoreMerges) {
    json content = small_json();
    content["model"]["vocab"]["now"] = 999;
    EXPECT_EQ(open_json(content).encode("now").size(), 3);
    content["model"]["ignore_merges"] = true;
    EXPECT_EQ(open_json(content).encode("now"), std::vector<int>{999});
    EXPECT_EQ(open_json(content).size(), 1000);
}

TEST(Tokenizer, BytesWithoutTokens) {
    json content = small_json();
    content["model"]["vocab"].erase("x");
    EXPECT_EQ(open_json(content).encode("axxlxl"), (std::vector<int>{'a', kLl}));
    content["model"]["unk_token"] = "<|endoftext|>";
    EXPECT_EQ(open_json(content).encode("axxlxl"), (std::vector<int>{'a', kEnd, kEnd, 'l', kEnd, 'l'}));
    content["model"]["fuse_unk"] = true;
    EXPECT_EQ(open_json(content).encode("axxlxl"), (std::vector<int>{'a', kEnd, 'l', kEnd, 'l'}));
}

TEST(Tokenizer, Characters) {
    const Tokenizer bytes = open_json(small_characters(true));
    const int b = 3, umlaut = 4, byte = 5, space_a = byte + 256, ab = space_a + 1, space_ab = ab + 1,
              spaces = ab + 2;
    EXPECT_EQ(bytes.encode("a b\nä€"),
              (std::vector<int>{space_a, 1, b, byte + '\n', umlaut, byte + 0xe2, byte + 0x82, byte + 0xac}));
    EXPECT_EQ(bytes.encode("b   ab"), (std::vector<int>{1, b, spaces, space_ab}));  // "▁" "▁" is merged last
    EXPECT_EQ(bytes.encode("\xffz"), (std::vector<int>{byte + 0xff, byte + 'z'}));
    EXPECT_EQ(bytes.encode("a\xff"
                           "ab"),
              (std::vector<int>{space_a, byte + 0xff, ab}));  // text goes on
    for (const std::string text : {"a b\nä€", "b   ab", "ab", ""})
        EXPECT_EQ(bytes.decode(bytes.encode(text)), text);
    const Tokenizer none = open_json(small_characters(false));
    EXPECT_EQ(none.encode("a€€b\xff"), (std::vector<int>{5, 0, 0, b, 0}));
    EXPECT_EQ(none.encode("abab"), (std::vector<int>{7, 6}));
}

// Without a pre-tokenizer a whole text is one word. It is cut where no merge crosses.
TEST(Tokenizer, LongWordsOfCharacters) {
    const Tokenizer tokenizer = open_json(small_characters(true));
    std::string text;
    std::vector<int> expected;
    for (int i = 0; i < 300000; i++) {
        text += i % 3 == 0 ? " a" : "ab";
        expected.push_back(i % 3 == 0 ? 261 : 262);
    }
    text.erase(0, 1);
    EXPECT_EQ(tokenizer.encode(text), expected);
    expected.assign(500000, 264);
    EXPECT_EQ(tokenizer.encode(std::string(1000000, ' ')), expected);
}

TEST(Tokenizer, DecodesTokenByToken) {
    const Tokenizer tokenizer = open_json(small_characters(true));
    const auto text_of = [&](std::vector<int> tokens, bool begins) {
        Tokenizer::Decoder decoder(tokenizer, begins);
        std::vector<std::string> parts;
        for (const int token : tokens) parts.push_back(decoder.next(token));
        return parts;
    };
    using Parts = std::vector<std::string>;
    EXPECT_EQ(text_of({261, 261}, true), (Parts{"a", " a"}));
    EXPECT_EQ(text_of({261, 261}, false), (Parts{" a", " a"}));
    EXPECT_EQ(text_of({264, 2}, true), (Parts{" ", "a"}));
    EXPECT_EQ(text_of({1, 261}, true), (Parts{"", " a"}));
    EXPECT_EQ(text_of({5 + 0xe2, 5 + 0x82, 5 + 0xac}, true), (Parts{"\xe2", "\x82", "\xac"}));
    EXPECT_EQ(tokenizer.decode(261), " a");
}

TEST(Tokenizer, OneEndOfText) {
    const TempFolder folder;
    folder.write("tokenizer.json", small_json().dump());
    folder.write("generation_config.json", R"({"eos_token_id": [7, 9, 100000, -1]})");
    EXPECT_EQ(Tokenizer::open(folder.path())->end_of_text(), kEnd);
    for (const char* file : {"tokenizer_config.json", "special_tokens_map.json", "generation_config.json"}) {
        const std::string path = folder.write(file, "[]");
        expect_user_error([&] { Tokenizer::open(folder.path()); }, {path, "not a JSON object"});
        std::filesystem::remove(path);
    }
}

TEST(Tokenizer, RefusesWhatItDoesNotKnow) {
    const TempFolder folder;
    const std::string path = folder / "tokenizer.json";
    const auto refuses = [&](const json& content, std::initializer_list<std::string> parts) {
        folder.write("tokenizer.json", content.dump());
        expect_user_error([&] { Tokenizer::open(folder.path()); }, {path + ": "});
        expect_user_error([&] { Tokenizer::open(folder.path()); }, parts);
    };
    const auto with = [](const char* where, const json& value) {
        json content = small_json();
        content[json::json_pointer(where)] = value;
        return content;
    };
    const auto split = [](const json& pattern, const char* behavior = "Isolated") {
        return json{{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}, {"invert", false}};
    };
    for (const char* type : {"WordPiece", "Unigram", "WordLevel", "New"})
        refuses(with("/model/type", type), {"model type \"" + std::string(type) + "\" is not supported"});
    refuses(with("/version", "2.0"), {"\"version\" \"2.0\""});
    refuses(with("/model/dropout", 0.1), {"\"dropout\" 0.1"});
    refuses(with("/model/end_of_word_suffix", "</w>"), {"\"end_of_word_suffix\" \"</w>\"", "not supported"});
    refuses(with("/model/continuing_subword_prefix", "##"), {"\"continuing_subword_prefix\""});
    refuses(with("/model/new", 1), {"\"new\" is not supported"});
    refuses(with("/new", 1), {"\"new\" is not supported"});
    json unknown = with("/model/unk_token", "none");
    unknown["model"]["vocab"].erase("x");
    refuses(unknown, {"\"unk_token\" \"none\"", "not in the vocabulary"});
    for (const char* part : {"normalizer", "pre_tokenizer", "decoder", "post_processor"}) {
        const std::string where = "/" + std::string(part);
        refuses(with(where.c_str(), {{"type", "New"}}),
                {std::string(part) + " type \"New\" is not supported"});
        refuses(with(where.c_str(), {{"no", "type"}}), {std::string(part), "not supported"});
        refuses(with(where.c_str(), 7), {std::string(part) + " is not a JSON object"});
    }
    refuses(with("/pre_tokenizer/new", 1), {"pre_tokenizer ByteLevel: \"new\" is not supported"});
    refuses(with("/pre_tokenizer/use_regex", "yes"), {"pre_tokenizer ByteLevel: \"use_regex\" \"yes\""});
    refuses(with("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {byte_level(), byte_level()}}}),
            {"after ByteLevel"});
    refuses(with("/pre_tokenizer", split({{"Regex", "a"}}, "MergedWithNext")),
            {"\"behavior\" \"MergedWithNext\""});
    refuses(with("/pre_tokenizer", split({{"Glob", "a"}})), {"pre_tokenizer Split", "\"pattern\""});
    refuses(with("/pre_tokenizer", split({{"Regex", "(a"}})), {"pre_tokenizer Split", "the regex \"(a\""});
    refuses(with("/pre_tokenizer", split({{"Regex", "a*"}})), {"the regex \"a*\"", "no text"});
    refuses(with("/pre_tokenizer", split({{"Regex", std::string(20000, 'a')}})), {"20000 bytes"});
    refuses(with("/pre_tokenizer", split({{"Regex", "(?:(?:a{60000}){60000}){60000}"}})), {"cannot be used"});
    refuses(with("/pre_tokenizer", split({{"Regex", std::string(1000, '(') + "a" + std::string(1000, ')')}})),
            {"cannot be used"});
    refuses(with("/normalizer", {{"type", "Replace"}, {"pattern", {{"Regex", "a"}}}, {"content", "b"}}),
            {"\"pattern\""});
    refuses(with("/normalizer", {{"type", "Replace"}, {"pattern", {{"String", "ab"}}}, {"content", "b"}}),
            {"\"pattern\""});
    refuses(with("/decoder", {{"type", "Metaspace"}, {"replacement", "▁"}}),
            {"decoder Metaspace", "ByteLevel"});
    refuses(with("/post_processor", {{"type", "TemplateProcessing"}, {"single", json::array()}}),
            {"\"single\""});
    refuses(with("/post_processor", {{"type", "TemplateProcessing"},
                                     {"single", {{{"SpecialToken", {{"id", "<s>"}}}}}},
                                     {"special_tokens", {{"<s>", {{"ids", {100000}}}}}}}),
            {"special token \"<s>\" is no token"});
    json characters = small_characters(true);
    characters.erase("decoder");
    refuses(characters, {"has no \"decoder\""});

    const auto added = [](int id, const char* content) { return json{{"id", id}, {"content", content}}; };
    refuses(with("/added_tokens", 1), {"\"added_tokens\" is not a list"});
    refuses(with("/added_tokens", json::array({1})), {"added token is not a JSON object"});
    refuses(with("/added_tokens", json::array({added(-1, "<s>")})), {"\"id\" -1"});
    refuses(with("/added_tokens", json::array({added(1 << 30, "<s>")})), {"\"id\" 1073741824"});
    refuses(with("/added_tokens", json::array({added(3, "<s>")})),
            {"added token 3 \"<s>\"", "another token"});
    refuses(with("/added_tokens", json::array({added(300, "he")})),
            {"added token 300 \"he\"", "another number"});
    refuses(with("/added_tokens", json::array({added(300, "<s>"), added(300, "<t>")})),
            {"added token 300 \"<t>\"", "twice"});
    refuses(with("/added_tokens", json::array({added(300, "<s>"), added(301, "<s>")})),
            {"added token 301 \"<s>\""});
}

TEST(Tokenizer, NamesWhatIsWrong) {
    const TempFolder folder;
    const auto open = [&] { Tokenizer::open(folder.path()); };
    const std::string vocab_path = folder / "vocab.json", merges_path = folder / "merges.txt";
    write_small(folder);
    std::filesystem::remove(merges_path);
    expect_user_error(open, {merges_path, "No such file"});
    for (const std::string merges : {"h e\nh e l\n", "h e\nhe\n"}) {
        folder.write("merges.txt", merges);
        expect_user_error(open, {merges_path + ": line 2", "not a pair"});
    }
    folder.write("merges.txt", "h e\nh zz\n");
    expect_user_error(open, {merges_path + ": line 2", "\"zz\"", "not in the vocabulary"});
    folder.write("merges.txt", "z z\n");
    expect_user_error(open, {merges_path + ": line 1", "\"zz\"", "not in the vocabulary"});

    folder.write("merges.txt", "");
    folder.write("vocab.json", "[]");
    expect_user_error(open, {vocab_path, "not a JSON object"});
    for (const json& bad : {json(-1), json(1.5), json("7"), json(1 << 30)}) {
        json vocab = small_vocabulary();
        vocab["bad"] = bad;
        folder.write("vocab.json", vocab.dump());
        expect_user_error(open, {vocab_path, "\"bad\""});
    }
    json vocab = small_vocabulary();
    vocab["zzz"] = 65;
    folder.write("vocab.json", vocab.dump());
    expect_user_error(open, {vocab_path, "token 65 is given twice"});
    vocab = small_vocabulary();
    vocab.erase(spelling(0x20));
    folder.write("vocab.json", vocab.dump());
    expect_user_error(open, {vocab_path, "no token for the byte 0x20"});

    folder.write("tokenizer_config.json", R"({"tokenizer_class": "CLIPTokenizer"})");
    expect_user_error(open, {"tokenizer_config.json", "CLIPTokenizer", "tokenizer.json is needed"});

    const TempFolder other;
    const std::string path = other / "tokenizer.json";
    const auto refuses = [&](const std::string& content, const char* part) {
        other.write("tokenizer.json", content);
        expect_user_error([&] { Tokenizer::open(other.path()); }, {path, part});
    };
    refuses("[]", "not a JSON object");
    for (const char* text :
         {"{}", R"({"model": 1})", R"({"model": {"vocab": {}}})", R"({"model": {"type": "BPE"}})"})
        refuses(text, "no BPE model");
    refuses(R"({"model": {"vocab": [], "merges": []}})", "the vocabulary is not a JSON object");
    refuses(R"({"model": {"vocab": {}, "merges": {}}})", "\"merges\" is not a list");
    for (const char* vocab : {R"({"a": 1, "a": 2})", R"({"a": 1, "b": 1})", R"({"a": -1})", R"({"a": 1.5})",
                              R"({"a": [1]})", R"({"a": {"b": 1}})", R"({"a": 99999999})"})
        refuses(R"({"model": {"merges": [], "vocab": )" + std::string(vocab) + "}}", "token");
    for (const char* merges :
         {R"(["h e", "he"])", "[\"h e\", 1]", R"(["h e", ["h"]])", R"(["h e", ["h", 1]])",
          R"(["h e", ["h", "e", "l"]])", R"(["h e", {"h": "e"}])", R"(["h e", ["h", ["e"]]])",
          R"(["h e", ["", "e"]])", R"(["h e", " e"])", R"(["h e", ["h", "zz"]])", R"(["h e", ["e", "h"]])"})
        refuses(R"({"model": {"merges": )" + std::string(merges) + R"(, "vocab": )" +
                    small_vocabulary().dump() + "}}",
                "merge 1: ");
    refuses(R"({"model": {"vocab": {)", "broken JSON");
    refuses(std::string(100000, '[') + std::string(100000, ']'), "nests more than 200 deep");
    refuses(R"({"a": )" + std::string(100000, '[') + std::string(100000, ']') + "}", "");

    const TempFolder third;
    third.write("tokenizer.model", "text");
    expect_user_error([&] { Tokenizer::open(third.path()); }, {third / "tokenizer.model", "damaged"});
    third.write("tokenizer.model", "");
    expect_user_error([&] { Tokenizer::open(third.path()); }, {third / "tokenizer.model", "damaged"});
}

TEST(Tokenizer, Bytes) {
    const Tokenizer tokenizer = Tokenizer::bytes();
    EXPECT_EQ(tokenizer.size(), 256);
    EXPECT_EQ(tokenizer.end_of_text(), -1);
    std::string all;
    std::vector<int> tokens;
    for (int byte = 0; byte < 256; byte++) {
        all += static_cast<char>(byte);
        tokens.push_back(byte);
    }
    EXPECT_EQ(tokenizer.encode(all), tokens);
    EXPECT_EQ(decode_all(tokenizer, tokens), all);
    EXPECT_EQ(tokenizer.decode(256), "");
}

TEST(Tokenizer, AnyBytesSurvive) {
    const TempFolder folder;
    write_small(folder);
    const Tokenizer tokenizer = *Tokenizer::open(folder.path());
    std::mt19937 random(1);
    const std::string alphabet = " \n'shelow3\xc3\xa9\xe3\x80\xf0\x9f\x98\x80\xff";
    for (int trial = 0; trial < 2000; trial++) {
        std::string text;
        for (size_t i = random() % 40; i > 0; i--) text += alphabet[random() % alphabet.size()];
        EXPECT_EQ(decode_all(tokenizer, tokenizer.encode(text)), text);
    }
}

// A single piece of a million letters, and as many bad bytes: quadratic time would take minutes.
TEST(Tokenizer, LongPieces) {
    const TempFolder folder;
    write_small(folder);
    const Tokenizer tokenizer = *Tokenizer::open(folder.path());
    EXPECT_EQ(tokenizer.encode(std::string(1000000, 'a')), std::vector<int>(500000, kAa));
    EXPECT_EQ(tokenizer.encode(std::string(1000000, '\xff')), std::vector<int>(1000000, 0xff));
    EXPECT_EQ(tokenizer.encode(std::string(1000000, ' ')), std::vector<int>(500000, kSpaces));
}

std::vector<int> encode_bytewise(const Tokenizer& tokenizer, std::string_view text) {
    std::vector<int> tokens;
    const std::shared_ptr<TextEncoder> encoder = tokenizer.encoder();
    for (const char& byte : text) encoder->feed({&byte, 1}, tokens);
    encoder->finish(tokens);
    return tokens;
}

// "xa" in "wxab" is no word of its own, and the "a" in it is not searched for, wherever the text's parts end.
TEST(Tokenizer, PartsOfAddedTokens) {
    json content = small_characters(true);
    content.erase("pre_tokenizer");
    content["added_tokens"] = {{{"id", 300}, {"content", "xa"}, {"single_word", true}},
                               {{"id", 2}, {"content", "a"}}};
    for (const bool normalized : {false, true}) {
        for (json& token : content["added_tokens"]) token["normalized"] = normalized;
        const Tokenizer tokenizer = open_json(content);
        const auto byte = [](char c) { return 5 + c; };
        const std::vector<int> expected = {byte('w'), byte('x'), 262,       byte('-'),
                                           byte('w'), 2,         byte('-'), 300};
        EXPECT_EQ(tokenizer.encode("wxab-wa-xa"), expected);
        EXPECT_EQ(encode_bytewise(tokenizer, "wxab-wa-xa"), expected);
    }
}

// A text of any size takes bounded memory, whatever steps are between the text and its words.
TEST(Tokenizer, PartsTakeBoundedMemory) {
    json composed = small_json();
    composed["normalizer"] = {{"type", "NFC"}};
    const auto added = [](int id, const char* content) {
        return json{{"id", id},
                    {"content", content},
                    {"normalized", id % 2 == 0},
                    {"lstrip", true},
                    {"rstrip", true}};
    };
    composed["added_tokens"] = {added(500, "<left>"), added(501, "<right>")};
    for (const json& content : {composed, small_characters(true)}) {
        const Tokenizer tokenizer = open_json(content);
        const std::shared_ptr<TextEncoder> encoder = tokenizer.encoder();
        std::vector<int> tokens;
        const auto peak = [] {
            rusage usage;
            getrusage(RUSAGE_SELF, &usage);
            return usage.ru_maxrss;  // KiB
        };
        std::string part;
        while (part.size() < 100000) part += "a hello é日本語 hell  \n he < l<";
        const auto before = peak();
        size_t count = 0;
        for (int i = 0; i < 300; i++) {
            encoder->feed(part, tokens);
            count += tokens.size();
            tokens.clear();
        }
        encoder->finish(tokens);
        EXPECT_GT(count, 300u * 40000);
        EXPECT_LT(peak() - before, 4096);  // of 30 MB
    }
}

// More different words than the cache holds.
TEST(Tokenizer, ManyWords) {
    const TempFolder folder;
    write_small(folder);
    const Tokenizer tokenizer = *Tokenizer::open(folder.path());
    std::string text;
    std::vector<int> expected;
    for (int i = 0; i < 150000; i++) {
        const std::string word = "hello " + std::to_string(i % 99991);
        text += word;
        expected.push_back(kHello);
        for (const char c : word.substr(5)) expected.push_back(c);
    }
    EXPECT_EQ(tokenizer.encode(text), expected);
}

std::string translated(const std::string& regex) { return RegexTranslation(regex, "here").result(); }

TEST(Pretokenizer, TranslatesOniguruma) {
    const std::string space = R"(\t-\r\x{85}\p{Z})";
    EXPECT_EQ(translated(R"(\s+(?!\S)|\d)"), "[" + space + "]+(?![^" + space + R"(])|\p{Nd})");
    EXPECT_EQ(translated(R"(?[^(\s|[.,!?]\])]+)"), "?[^(" + space + R"(|.,!?\])]+)");
    EXPECT_EQ(translated(R"((?i:'s)|[^\r\n\p{L}\p{^N}]?\P{Lu}{1,3}.\.)"),
              R"((?i:'s)|[^\r\n\p{L}\p{^N}]?\P{Lu}{1,3}.\.)");
    for (const char* same : {R"(\(*a)", "[(*]", "(?i:'s|'ll|[sdmt]|s'f)(?=a)b+", "(a)*b"})
        EXPECT_EQ(translated(same), same);
    for (const char* regex : {"^a",
                              "a$",
                              R"(\ba)",
                              R"(\Aa)",
                              R"(\h)",
                              R"(\w)",
                              R"(\p{Han})",
                              R"(\p{)",
                              R"(\pL)",
                              R"(\p)",
                              "\\",
                              "(?<=a)",
                              "(?<n>a)",
                              "(?m:a)",
                              "a{,2}",
                              "a{2}+",
                              "a{2}?",
                              "a{x}",
                              "a{",
                              "[]a]",
                              "[[:alpha:]]",
                              "[a[^b]]",
                              "[a&&b]",
                              "[a-[b]]",
                              "[[a]-b]",
                              R"([\S])",
                              "[a",
                              R"(\u0041)",
                              "(*LIMIT_MATCH=1)a",
                              "(*UTF)a",
                              "a(*COMMIT)b",
                              "a(*ACCEPT)",
                              "(*CR)a",
                              "((*F)|a)",
                              "(?=a)+b",
                              "(?!a)?b",
                              "(?=a){2}b",
                              "a)",
                              "(?i:ss)",
                              "(?i:a(?:'ST))",
                              "(?i:s{2})",
                              "(?i:fl)",
                              "(?i:é)",
                              "(?i:[é])",
                              "(?i:[^a])",
                              R"((?i:\p{L}))",
                              R"((?i:\S))"})
        expect_user_error([&] { translated(regex); }, {"here: \"", "in a regex is not supported"});
}

TEST(Pretokenizer, DecidesNothingThatFollowingTextCouldChange) {
    const Pattern pattern(kGpt2Split, "here");
    const auto match = Pattern::make_match();
    const auto find = [&](std::string_view text, bool more) {
        const auto found = pattern.find(text, 0, more, match.get());
        return std::tuple(static_cast<int>(found.kind), found.begin, found.end);
    };
    const int is_match = Pattern::Found::kMatch, undecided = Pattern::Found::kUndecided;
    EXPECT_EQ(find("ab", false), std::tuple(is_match, 0, 2));
    EXPECT_EQ(find("ab", true), std::tuple(undecided, 0, 2));
    EXPECT_EQ(find("ab c", true), std::tuple(is_match, 0, 2));
    EXPECT_EQ(find("'", true), std::tuple(undecided, 0, 1));
    EXPECT_EQ(find("   ", true), std::tuple(undecided, 0, 3));
    EXPECT_EQ(find("   a", true), std::tuple(is_match, 0, 2));
}

// Wherever a text is cut, its parts are composed as in the whole.
TEST(Normalizer, Cuts) {
    Normalizer normalizer;
    normalizer.nfc = true;
    const std::vector<std::string> characters = {
        "a", "e",      "\u0301", "\u0323", "\u1100", "\u1161", "\u11a8", "\uac00", " ", "é",
        "ậ", "\u09c7", "\u09be", "日",     "\u0f71", "\u0f72", "\u3042", "\u3099", "x", "\u212b"};
    std::mt19937 random(2);
    for (int trial = 0; trial < 3000; trial++) {
        std::string text;
        for (size_t i = 0; i < 12; i++) text += characters[random() % characters.size()];
        std::string parts;
        for (std::string_view rest = text; !rest.empty();) {
            const size_t cut = normalizer.cut(rest, 1 + random() % 4, false);
            ASSERT_GT(cut, 0u);
            normalizer.append(rest.substr(0, cut), false, false, parts);
            rest.remove_prefix(cut);
        }
        ASSERT_EQ(parts, normalizer(text)) << text;
        const size_t cut = normalizer.cut(text, text.size(), true);
        for (const std::string& next : characters) {
            std::string halves;
            if (cut > 0) normalizer.append(std::string_view(text).substr(0, cut), false, false, halves);
            normalizer.append(text.substr(cut) + next, false, false, halves);
            ASSERT_EQ(halves, normalizer(text + next)) << text << "|" << next;
        }
    }
}

// Expected tokens are from Hugging Face's tokenizers 0.23.
TEST(Tokenizer, Gpt2) {
    const char* folder = std::getenv("GPT2_TOKENIZER");
    if (!folder) GTEST_SKIP() << "GPT2_TOKENIZER=<folder with vocab.json and merges.txt> is not set";
    const Tokenizer tokenizer = *Tokenizer::open(folder);
    EXPECT_EQ(tokenizer.size(), 50257);
    EXPECT_EQ(tokenizer.end_of_text(), 50256);
    const std::vector<std::pair<std::string, std::vector<int>>> cases = {
        {"Hello world, it's 2024!", {15496, 995, 11, 340, 338, 48609, 0}},
        {"I'll they've we'd DON'T can't", {40, 1183, 484, 1053, 356, 1549, 23917, 6, 51, 460, 470}},
        {"a  b   \012\012\011c \012", {64, 220, 275, 220, 220, 220, 628, 197, 66, 220, 198}},
        {"na\303\257ve caf\303\251 \316\225\316\273\316\273\316\254\316\264\316\261 "
         "\346\227\245\346\234\254\350\252\236 \357\274\221\357\274\222\357\274\223",
         {2616, 38776, 40304, 7377,  243, 39377, 39377, 138, 105, 138, 112, 17394, 10545, 245,
          98,   17312, 105,   45739, 252, 27332, 120,   239, 171, 120, 240, 171,   120,   241}},
        {"\360\237\221\251\342\200\215\360\237\221\251\342\200\215\360\237\221\247 "
         "\360\237\216\211\360\237\216\211",
         {41840, 102, 447, 235, 41840, 102, 447, 235, 41840, 100, 12520, 236, 231, 8582, 236, 231}},
        {"\343\200\200x\302\240y\341\240\216z\342\200\250w\302\205v",
         {5099, 222, 87, 1849, 88, 157, 254, 236, 89, 447, 101, 86, 126, 227, 85}},
        {"'''s 'S", {7061, 6, 82, 705, 50}},
    };
    for (const auto& [text, tokens] : cases) {
        EXPECT_EQ(tokenizer.encode(text), tokens) << text;
        EXPECT_EQ(decode_all(tokenizer, tokens), text);
    }
}

}  // namespace
