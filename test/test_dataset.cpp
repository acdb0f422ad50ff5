// test_dataset.cpp - token files: how they are recognized, what is refused, and the order of sequences.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <malloc.h>

#include "llmc/data_tokens.h"
#include "llmc/random.h"
#include "llmc/utf8.h"
#include "llmc/dataset.h"
#include "test/file_helpers.h"

namespace {

template <class Token = uint16_t>
std::string shard(const std::vector<Token>& tokens, int32_t magic = 20240520, int32_t version = 1,
                  int extra = 0) {
    std::vector<int32_t> header(256);
    header[0] = magic;
    header[1] = version;
    header[2] = static_cast<int32_t>(tokens.size()) + extra;
    return std::string(reinterpret_cast<const char*>(header.data()), 1024) +
           std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
}
std::string shard(std::initializer_list<uint16_t> tokens, int32_t magic = 20240520, int32_t version = 1,
                  int extra = 0) {
    return shard(std::vector<uint16_t>(tokens), magic, version, extra);
}
std::string wide_shard(const std::vector<uint32_t>& tokens, int32_t version = 7, int extra = 0) {
    return shard(tokens, 20240801, version, extra);
}

// n tokens that say which stream they are from and at which position.
std::vector<uint16_t> numbered(int n, int first) {
    std::vector<uint16_t> tokens;
    for (int i = 0; i < n; i++) tokens.push_back(static_cast<uint16_t>(first + i));
    return tokens;
}

std::string text_of(const Dataset& data) {
    std::vector<int32_t> tokens(data.token_count());
    data.read(0, 0, tokens.size(), tokens.data());
    return {tokens.begin(), tokens.end()};
}

TEST(ExpandFiles, SortsInsideEachPattern) {
    const TempFolder folder;
    for (const char* name : {"b.txt", "B.txt", "a.txt", "z.bin", "odd[1].txt"}) folder.write(name, "x");
    EXPECT_EQ(expand_files({folder / "z.bin", folder / "*.txt"}, "--data"),
              (std::vector<std::string>{folder / "z.bin", folder / "B.txt", folder / "a.txt",
                                        folder / "b.txt", folder / "odd[1].txt"}));
    EXPECT_EQ(expand_files({folder / "odd[1].txt"}, "--data"),
              std::vector<std::string>{folder / "odd[1].txt"});
}

TEST(ExpandFiles, NamesOptionAndPattern) {
    const TempFolder folder;
    const auto expand = [](const std::string& pattern) { expand_files({pattern}, "--train-data"); };
    expect_user_error([&] { expand(folder / "*.bin"); },
                      {"--train-data", folder / "*.bin", "no file matches"});
    expect_user_error([&] { expand(folder / "absent"); },
                      {"--train-data", folder / "absent", "no file matches"});
    expect_user_error([&] { expand(""); }, {"--train-data", "no file matches \"\""});
    expect_user_error([&] { expand(folder.path()); }, {"--train-data", folder.path(), "is a directory"});
    expect_user_error([&] { expand("/dev/null"); }, {"--train-data", "/dev/null", "not a regular file"});
    folder.write("empty.bin", "");
    expect_user_error([&] { expand(folder / "empty.bin"); },
                      {"--train-data", folder / "empty.bin", "is empty"});
    expect_user_error([&] { expand(folder / "*.bin"); },
                      {"--train-data", folder / "empty.bin", folder / "*.bin"});
}

TEST(Dataset, TextIsBytesInOneStream) {
    const TempFolder folder;
    const std::string a = folder.write("a", "0123456789ABCDEFGHIJxyz"), b = folder.write("b", "\xff\x80q"),
                      c = folder.write("c", "abcdefghij");
    const Dataset data({a, b, c}, "--data");
    EXPECT_TRUE(data.is_text());
    EXPECT_EQ(data.largest_token(), 255);
    EXPECT_EQ(data.stream_count(), 1u);
    std::vector<int32_t> tokens(6);
    data.read(0, 21, 6, tokens.data());  // across all three files
    EXPECT_EQ(tokens, (std::vector<int32_t>{'y', 'z', 0xff, 0x80, 'q', 'a'}));
}

TEST(Dataset, HoldsOutTheLastTenths) {
    const TempFolder folder;
    const std::string a = folder.write("a", "0123456789ABCDEFGHIJxyz"), b = folder.write("b", "\xff\x80q"),
                      c = folder.write("c", "abcdefghij");
    for (const uint64_t least : {0, 3}) {  // rounded down for each file: 2, 0 and 1 bytes
        Dataset data({a, b, c}, "--data");
        const auto tenths = data.hold_out(least);
        ASSERT_TRUE(tenths);
        EXPECT_EQ(text_of(*tenths), "yzj");
        EXPECT_EQ(text_of(data), "0123456789ABCDEFGHIJx\xff\x80qabcdefghi");
        EXPECT_EQ(tenths->stream_name(0), a + " and 1 more");
        expect_user_error([&] { tenths->check_tokens('z'); }, {a, "token 122 at position 22"});
        expect_user_error([&] { data.check_tokens('x'); }, {a, "token 120 at position 20"});
    }
    Dataset data({a, b, c}, "--data");
    EXPECT_FALSE(data.hold_out(4));  // too few: nothing is held out
    EXPECT_EQ(text_of(data), "0123456789ABCDEFGHIJxyz\xff\x80qabcdefghij");
}

// Encodes a file as 0 and then each character's number plus 1.
void encode_characters(const FileReader& file, const auto& put) {
    std::vector<int32_t> tokens = {0};
    read_utf8(file, [&](std::string_view part) {
        for (size_t at = 0; at < part.size(); at += first_character(part.substr(at)).length) {
            tokens.push_back(first_character(part.substr(at)).code + 1);
            if (tokens.size() == 1000) put(tokens), tokens.clear();
        }
    });
    put(tokens);
}

TEST(Dataset, KeepsTheTokensThatATextBecomes) {
    const TempFolder folder;
    const std::string a = folder.write("a", "012345678"), b = folder.write("b", "\xe2\x82\xac"),
                      c = folder.write("c", "abcdefghij");
    for (const uint32_t limit : {0x10000u, 0x110001u}) {
        Dataset data({a, b, c}, "--data");
        EXPECT_TRUE(data.is_bytes());
        EXPECT_EQ(data.file_bytes(), 22u);
        data.tokenize(limit, [](const auto& file, const auto& put) { encode_characters(file, put); });
        EXPECT_TRUE(data.is_text());
        EXPECT_FALSE(data.is_bytes());
        const std::vector<int32_t> whole = {0, '1', '2', '3', '4', '5', '6', '7', '8', '9', 0,  0x20ad,
                                            0, 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j', 'k'};
        ASSERT_EQ(data.token_count(), whole.size());
        std::vector<int32_t> tokens(whole.size());
        data.read(0, 0, whole.size(), tokens.data());
        EXPECT_EQ(tokens, whole);
        data.read(0, 9, 5, tokens.data());
        EXPECT_TRUE(std::equal(whole.begin() + 9, whole.begin() + 14, tokens.begin()));

        // The last tenths of 10, 2 and 11 tokens.
        const auto tenths = data.hold_out(2);
        ASSERT_TRUE(tenths);
        EXPECT_EQ(text_of(*tenths), "9k");
        EXPECT_EQ(data.token_count(), whole.size() - 2);
        data.read(0, 8, 4, tokens.data());
        EXPECT_TRUE(std::equal(tokens.begin(), tokens.begin() + 4,
                               std::array<int32_t, 4>{'8', 0, 0x20ad, 0}.begin()));
        EXPECT_TRUE(data.reads(b) && tenths->reads(c));
    }
}

TEST(Dataset, NoticesATextThatChangesOnItsWay) {
    const TempFolder folder;
    const std::string a = folder.write("a", "text"), b = folder.write("b", "more");
    const auto tokenize = [&](const auto& change) {
        Dataset data({a, b}, "--data");
        data.tokenize(256, [&](const FileReader& file, const auto&) {
            if (file.path() == b) change();
            std::string text(file.size(), ' ');
            file.read(0, text.size(), text.data());
        });
    };
    EXPECT_NO_THROW(tokenize([] {}));
    expect_user_error([&] { tokenize([&] { folder.write("b", "longer"); }); }, {b, "was written to"});
    expect_user_error([&] { tokenize([&] { folder.write("b", "x"); }); }, {b, "changed meanwhile"});
}

TEST(ReadUtf8, HandsOverWholeCharacters) {
    const TempFolder folder;
    const auto read = [&](const std::string& text) {
        const FileReader file(folder.write("t", text));
        std::string all;
        read_utf8(file, [&](std::string_view part) {
            EXPECT_EQ(valid_utf8(part), part.size());
            all += part;
        });
        return all;
    };
    for (const std::string character : {"a", "\u00e9", "\u20ac", "\U0001f642"})
        for (size_t shift = 0; shift < 4; shift++) {  // parts end everywhere in a character
            std::string text(shift, 'x');
            while (text.size() < (1 << 20) + 2) text += character;
            EXPECT_TRUE(read(text) == text) << character << shift;
            const std::string position = std::to_string(text.size());
            for (const char* bad :
                 {"\xff", "\x80", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82"}) {
                expect_user_error([&] { read(text + bad); },
                                  {folder / "t", "not UTF-8", "position " + position});
                expect_user_error([&] { read(text + bad + text); }, {"not UTF-8", "position " + position});
            }
        }
}

TEST(TemporaryFile, IsInTheFolderThatIsAskedFor) {
    const TempFolder folder;
    setenv("TMPDIR", folder.path().c_str(), 1);
    TemporaryFile file("numbers");
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    std::string bytes;
    for (int i = 0; i < 700000; i++) bytes += std::to_string(i) + ",";
    for (size_t at = 0, size = 1; at < bytes.size(); at += size, size = size * 5 / 2 % 2999999 + 1)
        file.append(bytes.data() + at, size = std::min(size, bytes.size() - at));
    file.finish();
    std::string read(bytes.size() - 5, ' ');
    file.read(5, read.size(), read.data());
    EXPECT_TRUE(read == bytes.substr(5));
    EXPECT_THROW(file.read(5, read.size() + 1, bytes.data()), std::logic_error);
    setenv("TMPDIR", (folder / "absent").c_str(), 1);
    expect_user_error([] { TemporaryFile("numbers"); },
                      {folder / "absent", "numbers", "No such file", "TMPDIR"});
    unsetenv("TMPDIR");
}

TEST(Dataset, ShardsAreStreams) {
    const TempFolder folder;
    const std::string a = folder.write("a.bin", shard({1, 2, 50256})), b = folder.write("b", shard({4}));
    const Dataset data({a, b}, "--data");  // b is recognized by its content
    EXPECT_FALSE(data.is_text());
    EXPECT_EQ(data.largest_token(), 50256);
    EXPECT_EQ(data.stream_count(), 2u);
    EXPECT_EQ(data.token_count(), 4u);
    std::vector<int32_t> tokens(2);
    data.read(0, 1, 2, tokens.data());
    EXPECT_EQ(tokens, (std::vector<int32_t>{2, 50256}));
}

TEST(Dataset, ReadsWideTokens) {
    const TempFolder folder;
    const std::vector<uint32_t> tokens = {128255, 0, 65536, 7, 1 << 20};
    const std::string a = folder.write("a.bin", wide_shard(tokens));
    Dataset data({a}, "--data");
    EXPECT_FALSE(data.is_text());
    EXPECT_EQ(data.largest_token(), 1 << 20);
    ASSERT_EQ(data.token_count(), 5u);
    std::vector<int32_t> read(4);
    data.read(0, 0, 4, read.data());
    EXPECT_EQ(read, (std::vector<int32_t>{128255, 0, 65536, 7}));
    expect_user_error([&] { data.check_tokens(128256); }, {a, "token 1048576 at position 4", "128256"});
    EXPECT_NO_THROW(data.check_tokens((1 << 20) + 1));
    Dataset damaged({folder.write("b.bin", wide_shard({1, 0xffffffff}))}, "--data");
    expect_user_error([&] { damaged.check_tokens(1 << 24); }, {"token 4294967295 at position 1"});
}

TEST(Dataset, NamesDamagedShards) {
    const TempFolder folder;
    const std::string good = shard({1, 2, 3});
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"plain text", "10 bytes are too few"},
        {good.substr(0, 1023), "1023 bytes are too few"},
        {shard({1, 2, 3}, 20240802), "starts with 20240802 where 20240520 or 20240801"},
        {shard({1, 2, 3}, 20240520, 7), "version 7 where 1"},
        {wide_shard({1, 2, 3}, 1), "version 1 where 7"},
        {wide_shard({1, 2, 3}, 7, 1), "promises 4 tokens of 4 bytes and 12 bytes follow"},
        {shard({1, 2, 3}, 20240520, 1, 1), "promises 4 tokens of 2 bytes and 6 bytes follow"},
        {good.substr(0, good.size() - 1), "promises 3 tokens of 2 bytes and 5 bytes follow"},
        {good + "xx", "promises 3 tokens of 2 bytes and 8 bytes follow"},
        {shard({}), "promises 0 tokens"},
        {shard({}, 20240520, 1, -1), "promises -1 tokens"},
    };
    for (const auto& [content, part] : cases) {
        const std::string path = folder.write("s.bin", content);
        expect_user_error([&] { Dataset({path}, "--data"); }, {path, part});
    }
}

TEST(Dataset, RefusesToMix) {
    const TempFolder folder;
    const std::string text = folder.write("t", "text"), bin = folder.write("s.bin", shard({1}));
    expect_user_error([&] { Dataset({text, bin}, "--val-data"); }, {"--val-data", text, bin});
    expect_user_error([&] { Dataset({bin, text}, "--val-data"); }, {"--val-data", text, bin});
    const std::string wide = folder.write("w", wide_shard({1}));
    expect_user_error([&] { Dataset({bin, wide}, "--data"); }, {bin, "16-bit", wide, "32-bit"});
}

TEST(Dataset, NamesFilesThatChange) {
    const TempFolder folder;
    const std::string a = folder.write("a", std::string(50, 'a')),
                      b = folder.write("b", std::string(50, 'b'));
    Dataset data({a, b}, "--data");
    std::vector<int32_t> tokens(100);
    const auto expect_failure = [&](const std::string& part) {
        expect_user_error([&] { data.read(0, 40, 20, tokens.data()); }, {b, part});
        EXPECT_NO_THROW(data.read(0, 0, 50, tokens.data()));
        EXPECT_THROW(data.read(0, 50, 1, tokens.data()), DataError);
        EXPECT_NO_THROW(data.read(0, 0, 50, tokens.data()));
    };
    data.read(0, 0, 100, tokens.data());
    std::filesystem::resize_file(b, 10);
    expect_failure("written to or replaced since the run began, and had 50 bytes");
    folder.write("b", std::string(50, 'c'));
    std::filesystem::last_write_time(b, std::filesystem::last_write_time(b) + std::chrono::seconds(1));
    expect_failure("written to or replaced");
    std::filesystem::remove(b);
    expect_failure("No such file");
    EXPECT_EQ(mkfifo(b.c_str(), 0666), 0);
    expect_failure("not a regular file");
}

// More files than a process may map or hold open at a time.
TEST(Dataset, TakesAnyNumberOfFiles) {
    const TempFolder folder;
    const std::string path = folder.write("a", "some text");
    std::vector<std::string> files = {folder.write("first", "0123456789")};
    files.resize(70000, path);
    files.push_back(folder.write("last", "xyz"));
    Dataset data(files, "--data");
    ASSERT_EQ(data.token_count(), 10 + 69999u * 9 + 3);
    const auto held_out = data.hold_out(1);
    ASSERT_TRUE(held_out);
    EXPECT_EQ(text_of(*held_out), "9");
    std::vector<int32_t> tokens(5);
    data.read(0, 9 + 69999 * 9 - 2, 5, tokens.data());
    EXPECT_EQ(std::string(tokens.begin(), tokens.end()), "xtxyz");
}

TEST(Dataset, NamesTokensOutsideTheVocabulary) {
    const TempFolder folder;
    std::vector<uint16_t> tokens(10000, 7);
    const std::string good = folder.write("a.bin", shard(tokens));
    tokens[8191] = 50257;
    const std::string bad = folder.write("b.bin", shard(tokens));
    Dataset data({good, bad}, "--data");
    EXPECT_NO_THROW(data.check_tokens(50258));
    expect_user_error([&] { data.check_tokens(50257); }, {bad, "token 50257 at position 8191", "50257"});
    expect_user_error([&] { data.check_tokens(7); }, {good, "token 7 at position 0"});

    // A loader notices it too, without a check before.
    std::vector<uint32_t> wide(10000, 7);
    wide[8191] = 1u << 31;
    const std::string worse = folder.write("c.bin", wide_shard(wide));
    const Dataset unchecked({worse}, "--data");
    SequenceLoader loader(unchecked, 100, 0, false);
    std::vector<int32_t> in(100), out(100);
    EXPECT_NO_THROW(loader.fill(80, 1, in.data(), out.data()));
    expect_user_error([&] { loader.fill(81, 1, in.data(), out.data()); },
                      {worse, "2147483648 at position 8191"});

    Dataset text({folder.write("t", "0123456789012345678z")}, "--data");
    EXPECT_NO_THROW(text.check_tokens(256));
    expect_user_error([&] { text.check_tokens('z'); }, {folder / "t", "token 122 at position 19"});
}

TEST(SequenceLoader, NamesStreamsThatAreTooShort) {
    const TempFolder folder;
    const std::string a = folder.write("a.bin", shard(numbered(9, 0))),
                      b = folder.write("b.bin", shard(numbered(8, 0)));
    const Dataset data({a, b}, "--data");
    EXPECT_NO_THROW(SequenceLoader(data, 7, 0, true));
    expect_user_error([&] { SequenceLoader(data, 8, 0, true); }, {"--data", b, "8 tokens", "need 9"});
    const Dataset text({folder.write("t", "ab"), folder.write("u", "c")}, "--data");
    EXPECT_EQ(SequenceLoader(text, 2, 0, true).sequences_per_epoch(), 1u);
    expect_user_error([&] { SequenceLoader(text, 3, 0, true); },
                      {folder / "t", "1 more", "3 tokens", "need 4"});
}

// The order by its definition, epoch by epoch, without any state: start tokens of all sequences.
struct Start {
    size_t stream;
    uint64_t token;
};
std::vector<Start> starts_of_epoch(const std::vector<uint64_t>& sizes, uint64_t T, uint64_t seed, uint64_t e,
                                   bool shuffle) {
    const auto in_order = [&](uint64_t i, uint64_t count, uint64_t group) {
        return shuffle ? Permutation(count, random_key(seed, e, group))(i) : i;
    };
    std::vector<Start> starts;
    for (uint64_t turn = 0; turn < sizes.size(); turn++) {
        const uint64_t f = in_order(turn, sizes.size(), 0);
        const uint64_t n = sizes[f], count = shuffle ? std::max<uint64_t>(1, (n - T) / T) : (n - 1) / T;
        const uint64_t offset = shuffle && n >= 2 * T ? random_bits(seed, e, f + 1, 1ull << 63) % T : 0;
        for (uint64_t i = 0; i < count; i++) starts.push_back({f, offset + in_order(i, count, f + 1) * T});
    }
    return starts;
}

TEST(SequenceLoader, FollowsTheDefinition) {
    const TempFolder folder;
    const std::vector<uint64_t> sizes = {100, 17, 6, 11, 10, 64};
    std::vector<std::string> files;
    for (size_t f = 0; f < sizes.size(); f++)
        files.push_back(folder.write("s" + std::to_string(f), shard(numbered(static_cast<int>(sizes[f]),
                                                                             static_cast<int>(1000 * f)))));
    const Dataset data(files, "--data");
    for (const int T : {1, 2, 5}) {
        for (const bool shuffle : {false, true}) {
            for (const uint64_t seed : {0ull, 1337ull}) {
                std::vector<Start> starts;
                for (uint64_t e = 0; e < 4; e++) {
                    const auto epoch = starts_of_epoch(sizes, static_cast<uint64_t>(T), seed, e, shuffle);
                    starts.insert(starts.end(), epoch.begin(), epoch.end());
                }
                SequenceLoader loader(data, T, seed, shuffle);
                ASSERT_EQ(loader.sequences_per_epoch() * 4, starts.size());
                const int rows = static_cast<int>(starts.size());
                std::vector<int32_t> in(starts.size() * static_cast<size_t>(T)), out(in.size());
                loader.fill(0, rows, in.data(), out.data());
                for (size_t i = 0; i < in.size(); i++) {
                    const Start& start = starts[i / static_cast<size_t>(T)];
                    const auto expected =
                        static_cast<int32_t>(1000 * start.stream + start.token + i % static_cast<size_t>(T));
                    ASSERT_EQ(in[i], expected) << "T " << T << ", element " << i;
                    ASSERT_EQ(out[i], expected + 1) << "T " << T << ", element " << i;
                }
                // Any part is the same, in any order, from any loader.
                SequenceLoader other(data, T, seed, shuffle);
                std::vector<int32_t> in3(static_cast<size_t>(3 * T)), out3(in3.size());
                for (int first = rows - 3; first >= 0; first -= 2) {
                    other.fill(static_cast<uint64_t>(first), 3, in3.data(), out3.data());
                    ASSERT_TRUE(std::equal(in3.begin(), in3.end(), in.begin() + first * T)) << first;
                    ASSERT_TRUE(std::equal(out3.begin(), out3.end(), out.begin() + first * T)) << first;
                }
            }
        }
    }
}

TEST(SequenceLoader, KnownOrder) {
    const TempFolder folder;
    const Dataset data(
        {folder.write("a.bin", shard(numbered(20, 0))), folder.write("b.bin", shard(numbered(20, 100)))},
        "--data");
    SequenceLoader loader(data, 4, 42, true);
    ASSERT_EQ(loader.sequences_per_epoch(), 8u);
    std::vector<int32_t> in(64), out(64), firsts;
    loader.fill(0, 16, in.data(), out.data());
    for (size_t row = 0; row < 16; row++) firsts.push_back(in[row * 4]);
    EXPECT_EQ(firsts,
              (std::vector<int32_t>{9, 13, 5, 1, 103, 115, 111, 107, 13, 9, 1, 5, 103, 115, 111, 107}));
}

// Ten million windows of four files, with the memory of four files.
TEST(SequenceLoader, KeepsNoOrder) {
    const TempFolder folder;
    std::vector<std::string> files;
    for (const char* name : {"a.bin", "b.bin", "c.bin", "d.bin"}) {
        files.push_back(folder.write(name, shard({}, 20240520, 1, 1 << 23)));
        std::filesystem::resize_file(files.back(), 1024 + (2 << 23));  // zeros that take no disk space
    }
    const Dataset data(files, "--data");
    const size_t before = mallinfo2().uordblks;
    SequenceLoader loader(data, 3, 42, true);
    std::vector<int32_t> in(3), out(3);
    for (uint64_t q = 0; q < 3; q++) loader.fill(q * 3'000'000, 1, in.data(), out.data());
    EXPECT_GT(loader.sequences_per_epoch(), 10'000'000u);
    EXPECT_LT(mallinfo2().uordblks, before + 4096);
}

TEST(SequenceLoader, AnEpochShowsNoTokenTwice) {
    const TempFolder folder;
    const Dataset data({folder.write("a.bin", shard(numbered(1000, 0)))}, "--data");
    SequenceLoader loader(data, 16, 5, true);
    const auto rows = static_cast<size_t>(loader.sequences_per_epoch());
    EXPECT_EQ(rows, 61u);
    for (uint64_t epoch = 0; epoch < 3; epoch++) {
        std::vector<int32_t> in(rows * 16), out(rows * 16);
        loader.fill(epoch * rows, static_cast<int>(rows), in.data(), out.data());
        std::sort(in.begin(), in.end());
        for (size_t i = 1; i < in.size(); i++) ASSERT_EQ(in[i], in[i - 1] + 1);
    }
}

std::vector<uint32_t> packed(const std::vector<uint32_t>& lengths, uint32_t space) {
    BestFit fit(space, *std::min_element(lengths.begin(), lengths.end()));
    std::vector<uint32_t> sequences;
    for (const uint32_t length : lengths) sequences.push_back(fit.place(length));
    return sequences;
}

TEST(Packing, FillsTheSequenceThatIsLeftWithLeast) {
    EXPECT_EQ(packed({6, 5, 2, 4, 10, 1, 5, 3}, 10), (std::vector<uint32_t>{0, 1, 0, 1, 2, 1, 3, 3}));
    EXPECT_EQ(packed({7, 7, 7, 3, 2, 3}, 10),
              (std::vector<uint32_t>{0, 1, 2, 0, 1, 2}));  // the first of equals
}

// By definition: the sequence with the least space left, and among equals the first.
TEST(Packing, IsBestFit) {
    for (const uint32_t space : {1u, 7u, 100u, 1024u}) {
        std::vector<uint32_t> lengths, left, want;
        uint64_t sum = 0;
        for (uint64_t i = 0; i < 5000; i++) {
            const uint32_t length = 1 + static_cast<uint32_t>(random_bits(3, i) % ((space + 2) / 3));
            size_t best = left.size();
            for (size_t s = 0; s < left.size(); s++)
                if (left[s] >= length && (best == left.size() || left[s] < left[best])) best = s;
            if (best == left.size()) left.push_back(space);
            left[best] -= length;
            lengths.push_back(length);
            want.push_back(static_cast<uint32_t>(best));
            sum += length;
        }
        EXPECT_TRUE(packed(lengths, space) == want);
        EXPECT_LT(static_cast<double>(left.size()) * space, 1.03 * static_cast<double>(sum) + space);
    }
}

TEST(RecordFile, SortsItsRecords) {
    for (const uint64_t count : {0, 5, 150001}) {
        RecordFile<uint64_t> file("numbers");
        std::vector<uint64_t> want, got;
        for (uint64_t i = 0; i < count; i++) {
            want.push_back(random_bits(5, i) % 100000);
            file.append(want.back());
        }
        file.finish_sorted();
        file.for_each(0, count, [&](uint64_t number) { got.push_back(number); });
        std::sort(want.begin(), want.end());
        EXPECT_TRUE(got == want) << count;
    }
}

using Examples = std::vector<std::vector<int32_t>>;

// Examples of random lengths with consecutive tokens; every third token has no loss. Every other example is a
// text, which continues in further examples if it is longer than a sequence. `files` gets what the two files
// then contain.
std::unique_ptr<Dataset> examples_of(const TempFolder& folder, int count, int seq_len, Examples (&files)[2]) {
    auto data = std::make_unique<Dataset>(
        std::vector<std::string>{folder.write("a.jsonl", std::string(10, 'x')), folder.write("b.jsonl", "x")},
        "--data");
    EXPECT_TRUE(data->is_examples());
    int32_t token = 3;  // no token is 0, as padding is
    int file = 0;
    data->tokenize_examples(seq_len, seq_len, [&](const FileReader&, const auto& put) {
        Examples& all = files[file++];
        for (int i = (file - 1) * count / 2; i < file * count / 2; i++) {
            std::vector<int32_t> tokens;
            const auto length = 2 + random_bits(9, static_cast<uint64_t>(i)) % 20;
            for (uint64_t n = 0; n < length; n++, token++)
                tokens.push_back(token % 3 == 1 ? without_loss(token) : token);
            const bool is_text = i % 2 == 0;
            put(tokens, is_text, true, 0);
            const auto T = static_cast<size_t>(seq_len);
            for (size_t at = 0; at + 1 < (is_text ? tokens.size() : 2); at += T)
                all.emplace_back(
                    tokens.begin() + static_cast<ptrdiff_t>(at),
                    tokens.begin() + static_cast<ptrdiff_t>(std::min(tokens.size(), at + T + 1)));
        }
    });
    return data;
}

// Every example occurs once in an epoch, whole and in its own place, whatever the order.
void expect_all(const Dataset& data, int seq_len, const Examples& all, bool shuffle) {
    SequenceLoader loader(data, seq_len, 7, shuffle);
    const uint64_t sequences = loader.sequences_per_epoch();
    const auto T = static_cast<size_t>(seq_len);
    for (const uint64_t epoch : {0, 3}) {
        std::vector<int32_t> inputs(sequences * T), targets(inputs), positions(inputs), ends(inputs);
        loader.fill_batch(epoch * sequences, sequences, inputs, targets, positions, ends);
        std::vector<std::vector<int32_t>> got;
        uint64_t learnt = 0, padding = 0;
        for (size_t row = 0; row < inputs.size(); row++) {
            const bool begins = positions[row] == 0;
            ASSERT_LT(row % T, static_cast<size_t>(ends[row]));
            if (inputs[row] == 0) {
                padding++;
                EXPECT_TRUE(begins && targets[row] == -1 && ends[row] == static_cast<int>(row % T) + 1);
                continue;
            }
            if (begins) got.push_back({inputs[row]});
            const bool last = row % T + 1 == static_cast<size_t>(ends[row]), has_loss = targets[row] != -1;
            const int32_t next = inputs[row] + 1;
            EXPECT_TRUE((last || inputs[row + 1] == next) && (!has_loss || targets[row] == next));
            learnt += has_loss;
            got.back().push_back(has_loss ? next : without_loss(next));
        }
        std::vector<std::vector<int32_t>> want = all;
        for (auto& example : want) example[0] = token_of(example[0]);
        std::sort(got.begin(), got.end());
        std::sort(want.begin(), want.end());
        EXPECT_TRUE(got == want);
        EXPECT_EQ(loader.tokens_with_loss(epoch * sequences, sequences), learnt);
        EXPECT_NEAR(loader.padding(), static_cast<double>(padding) / static_cast<double>(inputs.size()),
                    1e-9);
    }
    // Steps need not begin where epochs do.
    for (const uint64_t first : {uint64_t{1}, sequences - 1, sequences})
        for (const uint64_t count : {uint64_t{1}, sequences, sequences + 1, 3 * sequences - 1}) {
            uint64_t learnt = 0;
            for (uint64_t i = 0; i < count; i++) learnt += loader.tokens_with_loss(first + i, 1);
            EXPECT_EQ(loader.tokens_with_loss(first, count), learnt) << first << " " << count;
        }
}

TEST(SequenceLoader, PacksExamples) {
    for (const int seq_len : {1, 13, 40}) {
        const TempFolder folder;
        Examples files[2], all, rest, tenths;
        const std::unique_ptr<Dataset> made = examples_of(folder, 200, seq_len, files);
        Dataset& data = *made;
        for (const Examples& file : files) {
            const auto cut = file.end() - static_cast<ptrdiff_t>(file.size() / 10);
            all.insert(all.end(), file.begin(), file.end());
            rest.insert(rest.end(), file.begin(), cut);
            tenths.insert(tenths.end(), cut, file.end());
        }
        ASSERT_EQ(data.example_count(), all.size());
        EXPECT_EQ(all.size() > 200, seq_len < 21);
        EXPECT_EQ(data.examples_cut() > 0 && data.texts_parted() > 0, seq_len < 21);
        expect_all(data, seq_len, all, true);
        expect_all(data, seq_len, all, false);
        const auto held_out = data.hold_out(1);
        ASSERT_TRUE(held_out);
        expect_all(data, seq_len, rest, true);
        expect_all(*held_out, seq_len, tenths, false);
        EXPECT_EQ(held_out->example_count(), tenths.size());
    }
}

// Bytes that the allocator has handed out.
size_t allocated() {
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

// A list of the examples would take 9.6 MB.
TEST(SequenceLoader, HoldsNoListOfExamples) {
    const TempFolder folder;
    const size_t before = allocated();
    Dataset data({folder.write("a.jsonl", "x")}, "--data");
    constexpr int kCount = 300000;
    data.tokenize_examples(64, 64, [&](const FileReader&, const auto& put) {
        for (int i = 0; i < kCount; i++) {
            const auto count = 2 + random_bits(4, static_cast<uint64_t>(i)) % 30;
            put(std::vector<int32_t>(count, i), false, true, 0);
        }
    });
    const auto held_out = data.hold_out(1);
    for (const Dataset* d :
         {static_cast<const Dataset*>(&data), static_cast<const Dataset*>(held_out.get())}) {
        SequenceLoader loader(*d, 64, 1, true);
        std::vector<int32_t> numbers[4];
        for (std::vector<int32_t>& n : numbers) n.resize(4 * 64);
        auto& [inputs, targets, positions, ends] = numbers;
        std::vector<bool> seen(kCount);
        uint64_t count = 0;
        for (uint64_t first = 0; first + 4 <= loader.sequences_per_epoch() && first < 4000; first += 4) {
            loader.fill_batch(first, 4, inputs, targets, positions, ends);
            for (size_t row = 0; row < inputs.size(); row++) {
                if (targets[row] < 0 || positions[row] > 0) continue;
                EXPECT_FALSE(seen[static_cast<size_t>(inputs[row])]);
                seen[static_cast<size_t>(inputs[row])] = true;
                count++;
            }
        }
        EXPECT_GT(count, d == &data ? 12000u : 6000u);
    }
    EXPECT_EQ(data.example_count() + held_out->example_count(), uint64_t{kCount});
    EXPECT_LT(allocated() - before, 100000u);
    EXPECT_LT(data.packed().packing_bytes(), 1000000u);
}

// A text that is passed in parts gives the same examples as the whole.
TEST(Dataset, TakesATextInParts) {
    for (const size_t count : {2u, 8u, 9u, 10u, 16u, 17u, 18u, 100u}) {
        std::vector<int32_t> tokens(count);
        std::iota(tokens.begin(), tokens.end(), 1);
        std::vector<std::vector<int32_t>> got[3];
        for (const size_t part : {size_t{1}, size_t{7}, count}) {
            const TempFolder folder;
            Dataset data({folder.write("a.jsonl", "x")}, "--data");
            data.tokenize_examples(8, 8, [&](const FileReader&, const auto& put) {
                for (size_t at = 0; at < count; at += part)
                    put(std::span(tokens).subspan(at, std::min(part, count - at)), true, at + part >= count,
                        0);
            });
            EXPECT_EQ(data.texts_parted(), count > 9 ? 1u : 0u);
            auto& examples = got[part == 1 ? 0 : part == 7 ? 1 : 2];
            data.for_each_example([&](const Example& e) { data.read(e, examples.emplace_back()); });
        }
        EXPECT_TRUE(got[0] == got[1] && got[1] == got[2]) << count;
        EXPECT_EQ(got[2].size(), count <= 9 ? 1u : (count - 2) / 8 + 1);
        EXPECT_EQ(got[2].back().back(), static_cast<int32_t>(count));
    }
}

TEST(SequenceLoader, FillsDocumentsOfText) {
    const TempFolder folder;
    const Dataset data({folder.write("text", "0123456789abcdef")}, "--data");
    SequenceLoader loader(data, 4, 1, false);
    std::vector<int32_t> inputs(12), targets(12), positions(12), ends(12);
    loader.fill_batch(0, 2, inputs, targets, positions, ends);
    EXPECT_EQ(positions, (std::vector<int32_t>{0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0, 0}));
    EXPECT_EQ(ends, (std::vector<int32_t>{4, 4, 4, 4, 4, 4, 4, 4, 1, 2, 3, 4}));
    EXPECT_EQ(loader.tokens_with_loss(5, 2), 8u);
}

}  // namespace
