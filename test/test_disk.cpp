// test_disk.cpp - what is read past the page cache while the program computes, and what is parked there:
// pieces of any place and length, files that change, and requests that fail.

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/disk_reader.h"
#include "llmc/parking_disk.h"
#include "test/file_helpers.h"

namespace {

// Memory of whole sectors.
class Staging {
  public:
    Staging() : memory_(DiskThreads::kStagingBytes, "staging") {}
    char* data() const { return memory_.data(); }

  private:
    DeviceBuffer memory_;
};

std::string noise(size_t bytes, unsigned seed) {
    std::mt19937 random(seed);
    std::string text(bytes, '\0');
    for (char& c : text) c = static_cast<char>(random());
    return text;
}

struct Opened {
    std::vector<std::unique_ptr<DirectFile>> files;
    const DirectFile* operator()(const FileReader& file) {
        return files.emplace_back(std::make_unique<DirectFile>(file)).get();
    }
};

TEST(DiskReads, ReadPiecesOfAnyPlaceAndLength) {
    const TempFolder folder;
    const std::string a = noise(5 * kRequestBytes + 4321, 1), b = noise(70001, 2);
    const FileReader file_a(folder.write("a", a)), file_b(folder.write("b", b));
    const Staging staging;
    DiskThreads threads(staging.data());
    std::mt19937 random(3);
    for (int round = 0; round < 30; round++) {
        // Pieces in any order, next to each other or far apart, and what a file ends with.
        std::vector<FilePiece> pieces;
        std::string expected;
        for (int i = 0; i < 40; i++) {
            const bool first = random() % 3 != 0;
            const std::string& text = first ? a : b;
            const size_t most = random() % 4 == 0 ? text.size() : 9000;
            const size_t at = i % 7 == 3 && first ? text.size() - 1 - random() % 100 : random() % text.size();
            const size_t bytes = 1 + random() % std::min(most, text.size() - at);
            const size_t together = i > 0 && random() % 2 ? pieces.back().offset + pieces.back().bytes : at;
            const bool follows = together != at && pieces.back().file == (first ? &file_a : &file_b) &&
                                 together + bytes <= text.size();
            const size_t from = follows ? together : at;
            pieces.push_back({first ? &file_a : &file_b, from, bytes, expected.size() + 1});
            expected += "." + text.substr(from, bytes);
        }
        std::shuffle(pieces.begin(), pieces.end(), random);
        Opened opened;
        const DiskReads reads(pieces, opened);
        std::string got(expected.size(), '.');
        threads.start(reads.count(), [&](size_t i, char* room) { reads.run(i, room, got.data()); });
        threads.wait();
        EXPECT_EQ(got, expected);
        reads.check();
    }
}

TEST(DiskReads, NeighboursAreReadTogether) {
    const TempFolder folder;
    const FileReader file(folder.write("a", noise(kRequestBytes, 1)));
    std::vector<FilePiece> rows;
    for (size_t i = 0; i < 1000; i++) rows.push_back({&file, 64 * (999 - i), 64, 64 * i});
    Opened opened;
    EXPECT_EQ(DiskReads(rows, opened).count(), 1u);
    EXPECT_EQ(DiskReads({{&file, 5, kRequestBytes - 5, 0}}, opened).count(), 1u);
    EXPECT_EQ(DiskReads({}, opened).count(), 0u);
}

TEST(DiskReads, AFileThatBecameShorterIsNoticed) {
    const TempFolder folder;
    const std::string path = folder.write("a", noise(100000, 1));
    const FileReader file(path);
    Opened opened;
    const DiskReads reads({{&file, 90000, 10000, 0}}, opened);
    std::filesystem::resize_file(path, 95000);
    std::string got(10000, ' ');
    const Staging staging;
    DiskThreads threads(staging.data());
    threads.start(1, [&](size_t i, char* room) { reads.run(i, room, got.data()); });
    expect_user_error([&] { threads.wait(); }, {path, "was changed since it was opened"});
    expect_user_error([&] { reads.check(); }, {path, "was changed since it was opened"});
    threads.wait();  // of nothing
}

TEST(DiskThreads, GoOnAfterAFailure) {
    const Staging staging;
    DiskThreads threads(staging.data());
    for (int round = 0; round < 20; round++) {
        std::vector<int> runs(100);
        threads.start(runs.size(), [&](size_t i, char*) {
            runs[i]++;
            if (i == 37) fail("number 37");
        });
        expect_user_error([&] { threads.wait(); }, {"number 37"});
        EXPECT_EQ(runs, std::vector<int>(100, 1));
    }
    threads.start(1 << 20, [](size_t, char*) {});  // is left where it ends
}

TEST(DiskParking, LoadsWhatWasStored) {
    const TempFolder folder;
    for (const size_t bytes : {size_t{1}, kSector - 1, kSector, kRequestBytes + 7, 3 * kRequestBytes}) {
        DiskParking parking(folder.path(), 3, bytes);
        std::vector<std::string> inputs;
        for (unsigned l = 0; l < 3; l++) inputs.push_back(noise(bytes, l));
        for (const int l : {0, 1, 2, 1}) {
            parking.store(l, inputs[static_cast<size_t>(l)].data(), {});
            parking.join({});
        }
        for (const int l : {2, 0, 1}) {
            std::string got(bytes + 1, '.');
            parking.load(l, got.data(), {});
            parking.join({});
            EXPECT_EQ(got, inputs[static_cast<size_t>(l)] + ".");
        }
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));  // the file has no name
    expect_user_error([&] { DiskParking(folder / "none", 1, 1); }, {"--park", folder / "none", "TMPDIR"});
}

}  // namespace
