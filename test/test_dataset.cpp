// test_dataset.cpp - token files: what they are taken for, what is refused, and the order of sequences.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/dataset.h"
#include "test/file_helpers.h"

namespace {

std::string shard(const std::vector<uint16_t>& tokens, int32_t magic = 20240520, int32_t version = 1,
                  int extra = 0) {
    std::vector<int32_t> header(256);
    header[0] = magic;
    header[1] = version;
    header[2] = static_cast<int32_t>(tokens.size()) + extra;
    return std::string(reinterpret_cast<const char*>(header.data()), 1024) +
           std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
}

// n tokens that tell their stream and position.
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
    EXPECT_EQ(data.vocabulary(), 256);
    EXPECT_EQ(data.stream_count(), 1u);
    std::vector<int32_t> tokens(6);
    data.read(0, 21, 6, tokens.data());  // across all three files
    EXPECT_EQ(tokens, (std::vector<int32_t>{'y', 'z', 0xff, 0x80, 'q', 'a'}));
    // Tenths are rounded down for each file: 2, 0 and 1 bytes.
    EXPECT_EQ(text_of(Dataset({a, c}, "--data", Part::Train)), "0123456789ABCDEFGHIJxabcdefghi");
    EXPECT_EQ(text_of(Dataset({a, b, c}, "--data", Part::Validation)), "yzj");
    EXPECT_EQ(Dataset({b}, "--data", Part::Validation).token_count(), 0u);
}

TEST(Dataset, ShardsAreStreams) {
    const TempFolder folder;
    const std::string a = folder.write("a.bin", shard({1, 2, 50256})), b = folder.write("b", shard({4}));
    const Dataset data({a, b}, "--data");  // b is known by its content
    EXPECT_FALSE(data.is_text());
    EXPECT_EQ(data.vocabulary(), 50257);
    EXPECT_EQ(data.stream_count(), 2u);
    EXPECT_EQ(data.token_count(), 4u);
    std::vector<int32_t> tokens(2);
    data.read(0, 1, 2, tokens.data());
    EXPECT_EQ(tokens, (std::vector<int32_t>{2, 50256}));
    EXPECT_EQ(Dataset({a, b}, "--data", Part::Train).token_count(), 4u);
    expect_user_error([&] { Dataset({a}, "--data", Part::Validation); }, {"--data", a, "validation"});
}

TEST(Dataset, NamesDamagedShards) {
    const TempFolder folder;
    const std::string good = shard({1, 2, 3});
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"plain text", "10 bytes are too few"},
        {good.substr(0, 1023), "1023 bytes are too few"},
        {shard({1, 2, 3}, 20240801), "starts with 20240801 where 20240520"},
        {shard({1, 2, 3}, 20240520, 2), "version 2"},
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

    // A loader notices as well, without a check before.
    const Dataset unchecked({bad}, "--data");
    SequenceLoader loader(unchecked, 100, 0, false);
    std::vector<int32_t> in(100), out(100);
    EXPECT_NO_THROW(loader.fill(80, 1, in.data(), out.data()));
    expect_user_error([&] { loader.fill(81, 1, in.data(), out.data()); }, {bad, "50257 at position 8191"});

    const std::string text = folder.write("t", "0123456789012345678z");
    Dataset held_out({text}, "--data", Part::Validation);
    EXPECT_NO_THROW(held_out.check_tokens(256));
    expect_user_error([&] { held_out.check_tokens('z'); }, {text, "token 122 at position 19"});
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

// The order as its definition says it, epoch by epoch, with nothing kept: start tokens of all sequences.
struct Start {
    size_t stream;
    uint64_t token;
};
std::vector<Start> starts_of_epoch(const std::vector<uint64_t>& sizes, uint64_t T, uint64_t seed, uint64_t e,
                                   bool shuffle) {
    std::vector<size_t> streams(sizes.size());
    for (size_t f = 0; f < sizes.size(); f++) streams[f] = f;
    if (shuffle)
        std::stable_sort(streams.begin(), streams.end(), [&](size_t a, size_t b) {
            return random_bits(seed, e, 0, a) < random_bits(seed, e, 0, b);
        });
    std::vector<Start> starts;
    for (const size_t f : streams) {
        const uint64_t n = sizes[f];
        std::vector<uint64_t> windows;
        for (uint64_t w = 0; w < std::max<uint64_t>(1, (n - T) / T); w++) windows.push_back(w);
        if (shuffle)
            std::stable_sort(windows.begin(), windows.end(), [&](uint64_t a, uint64_t b) {
                return random_bits(seed, e, f + 1, a) < random_bits(seed, e, f + 1, b);
            });
        const uint64_t offset = shuffle && n >= 2 * T ? random_bits(seed, e, f + 1, 1ull << 63) % T : 0;
        for (const uint64_t w : windows) starts.push_back({f, offset + w * T});
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
                // Any part, in any order, from any loader, is the same.
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
              (std::vector<int32_t>{107, 115, 103, 111, 5, 1, 9, 13, 9, 5, 1, 13, 115, 111, 103, 107}));
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

}  // namespace
