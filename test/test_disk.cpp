// test_disk.cpp - reads past the page cache while the program computes, and data that is kept on disk: pieces
// of any place and length, files that change, and requests that fail.

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/disk.h"
#include "llmc/offload_storage.h"
#include "test/file_helpers.h"

namespace {

// Staging memory, of whole sectors.
class Staging {
  public:
    Staging() : memory_(DiskQueue::kStagingBytes, "staging") {}
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

class DiskQueues : public testing::Test {
  protected:
    Staging staging_;
    DiskQueue queue_{staging_.data()};
    void read(const DiskReads& reads, char* to) {
        reads.start(queue_, to);
        queue_.wait();
    }
};

TEST_F(DiskQueues, ReadPiecesOfAnyPlaceAndLength) {
    const TempFolder folder;
    const std::string a = noise(5 * kRequestBytes + 4321, 1), b = noise(70001, 2);
    const FileReader file_a(folder.write("a", a)), file_b(folder.write("b", b));
    std::mt19937 random(3);
    for (int round = 0; round < 30; round++) {
        // Pieces in any order, next to each other or far apart, and ends of files.
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
        read(reads, got.data());
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

TEST_F(DiskQueues, AFileThatBecameShorterIsNoticed) {
    const TempFolder folder;
    const std::string path = folder.write("a", noise(100000, 1));
    const FileReader file(path);
    Opened opened;
    const DiskReads reads({{&file, 90000, 10000, 0}}, opened);
    std::filesystem::resize_file(path, 95000);
    std::string got(10000, ' ');
    expect_user_error([&] { read(reads, got.data()); }, {path, "was changed since it was opened"});
    expect_user_error([&] { reads.check(); }, {path, "was changed since it was opened"});
    queue_.wait();  // for nothing
}

// Sectors of one piece whose memory is aligned as in the file are read without staging memory, and what is
// beside them stays as it is.
TEST_F(DiskQueues, SectorsAreReadWhereTheyBelong) {
    const TempFolder folder;
    const std::string text = noise(3 * kRequestBytes + 10 * kSector, 1);
    const FileReader file(folder.write("a", text));
    Opened opened;
    const size_t first = 3 * kSector - 100, bytes = 2 * kRequestBytes + 5 * kSector;
    const DeviceBuffer memory(bytes + 2 * kSector, "the pieces");
    std::memset(memory.data(), '.', memory.bytes());
    char* const to = aligned_buffer(memory.data()) + kSector - 100;  // aligned to sectors as the file is
    const DiskReads alike({{&file, first, bytes, 0}}, opened), unlike({{&file, first, bytes, 1}}, opened);
    ASSERT_EQ(alike.count(), 3u);
    EXPECT_EQ(alike.straight_to(0, to), nullptr);  // begins within a sector
    EXPECT_EQ(alike.straight_to(1, to), to + 100 - kSector + kRequestBytes);
    EXPECT_EQ(alike.straight_to(2, to), nullptr);  // ends within one
    for (size_t i = 0; i < 3; i++) EXPECT_EQ(unlike.straight_to(i, to), nullptr);
    read(alike, to);
    EXPECT_EQ(std::string(to, bytes), text.substr(first, bytes));
    EXPECT_EQ(to[-1], '.');
    EXPECT_EQ(to[bytes], '.');
}

// Reads one sector at a time: some reads fail, each in its own way, and all others succeed.
struct SomeFail {
    const DirectFile& file;
    std::atomic<int> done = 0;
    void read(size_t i, char* staging) {
        const ssize_t got = read_at(i == 37 ? -1 : file.fd(), kSector * i, kSector, staging);
        if (got < 0) fail("number %zu: %s", i, std::strerror(errno));
        if (got < static_cast<ssize_t>(kSector)) fail("number %zu: too few", i);
        if (staging[0] != static_cast<char>(i)) fail("number %zu has another's", i);
        done++;
    }
};

TEST_F(DiskQueues, GoOnAfterAFailure) {
    const TempFolder folder;
    std::string text;
    for (int i = 0; i < 100; i++) text += std::string(i < 99 ? kSector : 100, static_cast<char>(i));
    const FileReader file(folder.write("a", text));
    const DirectFile direct(file);
    SomeFail reads{direct};
    const auto start = [&](size_t count) {
        return queue_.start(count, [&](size_t i, char* staging) { reads.read(i, staging); });
    };
    for (int round = 1; round <= 5; round++) {
        start(37);
        queue_.wait();
        const size_t number = start(99);
        start(10);
        expect_user_error([&] { queue_.wait(number); }, {"number 37: Bad file descriptor"});
        queue_.wait();
        EXPECT_EQ(reads.done, round * (37 + 98 + 10));
    }
    queue_.start(1, [&](size_t, char* staging) { reads.read(99, staging); });
    expect_user_error([&] { queue_.wait(); }, {"number 99: too few"});
    start(100);
    expect_user_error([&] { queue_.wait(); }, {"number"});
    start(0);
    queue_.wait();
    DiskQueue other(staging_.data());
    other.start(36, [&](size_t i, char* staging) { reads.read(i, staging); });  // still running at the end
}

TEST(DiskQueue, DoesTheOthersAfterAFailure) {
    const Staging staging;
    DiskQueue queue(staging.data());
    for (int round = 0; round < 20; round++) {
        std::vector<int> runs(100);
        queue.start(runs.size(), [&](size_t i, char*) {
            runs[i]++;
            if (i == 37) fail("number 37");
        });
        expect_user_error([&] { queue.wait(); }, {"number 37"});
        EXPECT_EQ(runs, std::vector<int>(100, 1));
    }
    queue.start(1 << 20, [](size_t, char*) {});  // still running at the end of the scope
}

TEST(DiskQueue, DoesWhatIsBegunInTurn) {
    DiskQueue queue(nullptr);
    std::atomic<int> done[50] = {};
    std::vector<size_t> numbers;
    for (int batch = 0; batch < 50; batch++)
        numbers.push_back(queue.start(batch % 7 + 1u, [&done, batch](size_t i, char* staging) {
            EXPECT_EQ(staging, nullptr);
            if (batch == 23 && i == 0) fail("number 23");
            done[batch]++;
        }));
    const auto expect_done = [&](int first, int end) {
        for (int batch = first; batch < end; batch++) EXPECT_EQ(done[batch], batch % 7 + 1) << batch;
    };
    queue.wait(numbers[20]);
    expect_done(0, 21);
    queue.wait(numbers[5]);  // again
    expect_user_error([&] { queue.wait(numbers[30]); }, {"number 23"});
    queue.wait();
    expect_done(24, 50);
}

TEST(DiskStorage, HasAnyBytesOfTheHosts) {
    const TempFolder folder;
    constexpr size_t kBytes = (3 << 20) + 777;
    DiskStorage place(folder.path(), kBytes, kBytes, "--state disk");
    std::string expected(kBytes, '\0');
    std::mt19937 random(7);
    for (int round = 0; round < 60; round++) {
        const size_t at = random() % kBytes, most = kBytes - at;
        const size_t bytes = 1 + random() % (round % 5 == 0 ? most : std::min<size_t>(most, 10000));
        const std::string text = noise(bytes, static_cast<unsigned>(round));
        place.write(at, bytes, text.data());
        expected.replace(at, bytes, text);
        std::string got(bytes, '.');
        const size_t from = random() % (kBytes - bytes + 1);
        place.read(from, bytes, got.data());
        ASSERT_EQ(got, expected.substr(from, bytes)) << round;
    }
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    expect_user_error([&] { DiskStorage(folder / "none", 1, 1, "--state disk"); },
                      {"--state disk", folder / "none", "TMPDIR"});
}

// Buffers are stored and fetched while others are. A buffer is filled again after its content was stored.
constexpr size_t kRoom = 2 * kRequestBytes + 3 * kSector, kRooms = 3, kChunks = 11;
void exchange_rooms(OffloadStorage& place) {
    for (size_t c = 0; c < kChunks; c++)
        place.write(c * kRoom, kRoom, noise(kRoom, static_cast<unsigned>(c)).data());
    const DeviceBuffer memory(kRooms * (kRoom + kStorageAlignment), "rooms");
    const auto buffer = [&](size_t c) {
        return aligned_buffer(memory.data() + c % kRooms * (kRoom + kStorageAlignment));
    };
    std::vector<size_t> numbers;
    for (size_t c = 0; c < kRooms; c++)
        numbers.push_back(place.start(buffer(c), {}, static_cast<int>(c), {}));
    for (size_t c = 0; c < kChunks; c++) {
        place.finish(numbers[c], {});
        ASSERT_EQ(std::string(buffer(c), kRoom), noise(kRoom, static_cast<unsigned>(c)));
        std::memcpy(buffer(c), noise(kRoom, static_cast<unsigned>(100 + c)).data(), kRoom);
        std::optional<int> next;
        if (c + kRooms < kChunks) next = static_cast<int>(c + kRooms);
        numbers.push_back(place.start(buffer(c), static_cast<int>(c), next, {}));
    }
    place.finish(numbers.back(), {});
    for (size_t c = 0; c < kChunks; c++) {
        std::string got(kRoom, '.');
        place.read(c * kRoom, kRoom, got.data());
        ASSERT_EQ(got, noise(kRoom, static_cast<unsigned>(100 + c))) << c;
    }
}

TEST_F(DiskQueues, ExchangeRooms) {
    const TempFolder folder;
    DiskStorage place(folder.path(), kChunks * kRoom, kRoom, "--state disk");
    exchange_rooms(place);
}

// Staged, as beside a GPU.
TEST_F(DiskQueues, ExchangeRoomsThroughOthers) {
    const TempFolder folder;
    auto file = std::make_unique<DiskStorage>(folder.path(), kChunks * kRoom, kRoom, "--state disk");
    StagedStorage place(std::move(file), kRoom, kRooms);
    exchange_rooms(place);
}

}  // namespace
