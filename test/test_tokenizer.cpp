// test_tokenizer.cpp - byte-level BPE on a small vocabulary, and on GPT-2's when GPT2_TOKENIZER names its
// folder.

#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "llmc/tokenizer.h"
#include "test/file_helpers.h"

namespace {

using nlohmann::json;

// How files spell a byte, written down by its definition: the printable bytes of Latin-1 are themselves, the
// other ones are U+0100, U+0101, ... in order.
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

// 256 bytes in order, then the tokens that these merges make, then <|endoftext|>. "Ġ" spells a space.
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

void expect_small(const Tokenizer& tokenizer) {
    const std::vector<std::pair<std::string, std::vector<int>>> cases = {
        {"", {}},
        {"hello", {kHello}},
        {"hell he l", {kHell, ' ', kHe, ' ', 'l'}},
        {"aaaaa", {kAa, kAa, 'a'}},
        {"o world", {'o', kSpaceW, 'o', 'r', 'l', 'd'}},
        {"mn mnp mnpq", {kMn, ' ', kMnp, ' ', 'm', kNpq}},  // "np" is gone before "m np" has its turn
        {"x's", {'x', kQuoteS}},
        {"x 's", {'x', ' ', '\'', 's'}},                   // the space takes the quote along
        {"a   w", {'a', kSpaces, kSpaceW}},                // the last space goes with the word
        {"a   ", {'a', kSpaces, ' '}},                     // at the end all stay together
        {"w\xe3\x80\x80w", {'w', 0xe3, 0x80, 0x80, 'w'}},  // U+3000 is white space: no merge reaches over it
        {"h3e", {'h', '3', 'e'}},
        {"\xc3\xa9", {kEAcute}},
        {"\xc3he\xa9\xff", {0xc3, kHe, 0xa9, 0xff}},  // broken UTF-8: bad bytes alone, the rest as ever
        {"\xed\xa0\x80\xc0\x80", {0xed, 0xa0, 0x80, 0xc0, 0x80}},
        {std::string("he\0he", 5), {kHe, 0, kHe}},
        {"hello<|endoftext|>", {kHello, '<', '|', 'e', 'n', 'd', 'o', 'f', 't', 'e', 'x', 't', '|', '>'}},
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
    expect_small(*Tokenizer::open(folder.path()));
    folder.write("merges.txt", merges_text("\r\n"));
    expect_small(*Tokenizer::open(folder.path()));
}

TEST(Tokenizer, TokenizerJson) {
    json strings = json::array(), pairs = json::array();
    for (const auto& [left, right] : kMerges) {
        strings.push_back(left + " " + right);
        pairs.push_back({left, right});
    }
    for (const json& merges : {strings, pairs}) {
        const TempFolder folder;
        json whole = {{"model", {{"type", "BPE"}, {"vocab", small_vocabulary()}, {"merges", merges}}},
                      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}}};
        folder.write("tokenizer.json", whole.dump());
        expect_small(*Tokenizer::open(folder.path()));
        whole["pre_tokenizer"]["add_prefix_space"] = true;
        const std::string path = folder.write("tokenizer.json", whole.dump());
        expect_user_error([&] { Tokenizer::open(folder.path()); }, {path, "add_prefix_space"});
        whole["pre_tokenizer"] = {{"type", "Metaspace"}};
        folder.write("tokenizer.json", whole.dump());
        expect_user_error([&] { Tokenizer::open(folder.path()); }, {path, "ByteLevel"});
    }
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

    const TempFolder other;
    const std::string path = other / "tokenizer.json";
    for (const std::string text : {"[]", R"({"model": 1})", R"({"model": {"vocab": {}}})"}) {
        other.write("tokenizer.json", text);
        expect_user_error([&] { Tokenizer::open(other.path()); }, {path, "no BPE model"});
    }
    for (const char* merges : {R"("h e")", "[1]", R"([["h"]])", R"([["h", 1]])", R"(["he"])"}) {
        const std::string model =
            R"({"merges": )" + std::string(merges) + R"(, "vocab": )" + small_vocabulary().dump();
        other.write("tokenizer.json", R"({"model": )" + model + "}}");
        expect_user_error([&] { Tokenizer::open(other.path()); }, {path, "merge"});
    }
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

// A single piece of a million letters, and as many bad bytes: anything quadratic would take minutes.
TEST(Tokenizer, LongPieces) {
    const TempFolder folder;
    write_small(folder);
    const Tokenizer tokenizer = *Tokenizer::open(folder.path());
    EXPECT_EQ(tokenizer.encode(std::string(1000000, 'a')), std::vector<int>(500000, kAa));
    EXPECT_EQ(tokenizer.encode(std::string(1000000, '\xff')), std::vector<int>(1000000, 0xff));
    EXPECT_EQ(tokenizer.encode(std::string(1000000, ' ')), std::vector<int>(500000, kSpaces));
}

// Expected tokens are those of Hugging Face's tokenizers 0.23.
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
