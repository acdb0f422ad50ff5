// test_files.cpp - files, JSON, safetensors and files of matmul algorithms: round trips, exact conversions,
// and every kind of damage.

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "llmc/file.h"
#include "llmc/matmul_algorithms.h"
#include "llmc/safetensors.h"
#include "llmc/temporary_file.h"
#include "test/file_helpers.h"

namespace {

// A safetensors file of this header and this many bytes of data.
std::string file_of(const std::string& header, size_t data_bytes) {
    const uint64_t length = header.size();
    std::string text(reinterpret_cast<const char*>(&length), sizeof length);
    return text + header + std::string(data_bytes, '\1');
}

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

TEST(FileReader, ReadsAnyPart) {
    const TempFolder folder;
    const FileReader file(folder.write("a", "0123456789"));
    std::string text(4, ' ');
    file.read(3, 4, text.data());
    EXPECT_EQ(text, "3456");
    expect_user_error([&] { file.read(8, 4, text.data()); }, {folder / "a", "ends at byte 10"});
    EXPECT_EQ(FileReader(folder.write("b", "")).size(), 0u);
    EXPECT_EQ(file.stamp(), FileReader(folder / "a").stamp());
    EXPECT_NE(file.stamp(), FileReader(folder / "b").stamp());
}

// Bytes of a file that are in the page cache.
size_t cached_bytes(const std::string& path) {
    const OpenFile file(path, O_RDONLY);
    const size_t bytes = stamp_of(file.fd(), path).bytes, page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* const at = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.fd(), 0);
    std::vector<unsigned char> there((bytes + page - 1) / page);
    EXPECT_EQ(mincore(at, bytes, there.data()), 0);
    munmap(at, bytes);
    size_t pages = 0;
    for (const unsigned char p : there) pages += p & 1;
    return pages * page;
}
bool keeps_pages(const std::string& path) {
    const OpenFile file(path, O_RDWR);
    fsync(file.fd());
    posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
    return cached_bytes(path) > 0;
}

// Reads in pieces, in order and not, as a model's tensors are read.
TEST(FileReader, LeavesNoPagesOfWhatIsReadOnce) {
    const TempFolder folder;
    std::string text(9 * kPagesWindow + 12345, '\0');
    for (size_t i = 0; i < text.size(); i += 97) text[i] = static_cast<char>(i / 97);
    const std::string path = folder.write("large", text);
    if (keeps_pages(path)) GTEST_SKIP() << "a file system that keeps pages";
    {
        const FileReader kept(path);
        std::string got(2 * kPagesWindow, ' ');
        kept.read(kPagesWindow, got.size(), got.data());
    }
    EXPECT_GE(cached_bytes(path), 2 * kPagesWindow);
    ASSERT_FALSE(keeps_pages(path));
    {
        const FileReader once(path, Pages::Dropped);
        const auto read = [&](size_t first, size_t end, size_t piece) {
            for (std::string got; first < end; first += got.size()) {
                got.assign(std::min(piece, end - first), ' ');
                once.read(first, got.size(), got.data());
                ASSERT_EQ(text.compare(first, got.size(), got), 0) << first;
                ASSERT_LE(cached_bytes(path), 4 * kPagesWindow);  // with what is read ahead
            }
        };
        const size_t middle = 5 * kPagesWindow + 4567;
        read(middle, text.size(), 70001);
        read(0, middle, text.size());
    }
    EXPECT_EQ(cached_bytes(path), 0u);
}

TEST(FileReader, NamesWhatItCannotOpen) {
    const TempFolder folder;
    const std::string pipe = folder / "pipe";
    ASSERT_EQ(mkfifo(pipe.c_str(), 0666), 0);
    const auto expect_refusal = [](const std::string& path, const char* part) {
        expect_user_error([&] { FileReader{path}; }, {path, part});
        expect_user_error([&] { read_text(path); }, {path, part});
    };
    expect_refusal(folder / "absent", "No such file");
    expect_refusal(folder.path(), "directory");
    expect_refusal(pipe, "not a regular file");  // the pipe is not waited for
    expect_refusal("/dev/zero", "not a regular file");
}

TEST(FileReader, TextsHaveASensibleSize) {
    const TempFolder folder;
    const std::string large = folder.write("large", "{}");
    std::filesystem::resize_file(large, kLargestText);
    EXPECT_EQ(read_text(large).size(), kLargestText);
    std::filesystem::resize_file(large, uint64_t{1} << 40);
    expect_user_error([&] { read_json(large); }, {large, "1099511627776 bytes", "128 MiB"});
}

TEST(Json, ReadsAndNamesThePositionOfErrors) {
    const TempFolder folder;
    EXPECT_EQ(read_json(folder.write("good", R"({"a": [1, 2]})"))["a"][1], 2);
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"{\n \"a\": 1,\n \"b\" 2}", "line 3, column 6"},
        {"", "line 1, column 1"},
        {"{\"a\": 1}}", "column 9"},
        {"[1e999]", "number overflow"},
        {"{\"k\":1,\"k\":2}", "\"k\" appears twice"},
        {"\"\xff\"", "UTF-8"},
    };
    for (const auto& [text, part] : cases) {
        const std::string path = folder.write("bad.json", text);
        expect_user_error([&] { read_json(path); }, {path + ": broken JSON: ", part});
    }
    // The same key in different objects is no error.
    EXPECT_NO_THROW(read_json(folder.write("nested", R"({"a": {"a": 1}, "b": [{"a": 1}, {"a": 2}]})")));
}

TEST(FileWriter, WritesPiecesOfEverySize) {
    const TempFolder folder;
    std::string expected;
    FileWriter writer(folder / "out");
    for (const size_t size :
         {size_t{1}, size_t{0}, size_t{1} << 20, size_t{7}, (size_t{1} << 20) + 1, size_t{3}}) {
        const std::string piece(size, static_cast<char>('a' + size % 26));
        writer.write(piece);
        expected += piece;
    }
    writer.finish();
    EXPECT_EQ(read_text(folder / "out"), expected);
}

TEST(FileWriter, LeavesNoPages) {
    const TempFolder folder;
    const std::string path = folder / "out";
    if (keeps_pages(folder.write("probe", std::string(1 << 20, 'x'))))
        GTEST_SKIP() << "a file system that keeps pages";
    std::string all;
    FileWriter writer(path);
    for (int i = 0; i < 100; i++) {
        const std::string piece(static_cast<size_t>(7919 * i + (i == 70 ? 3 * kPagesWindow : 0)),
                                static_cast<char>('a' + i % 26));
        writer.write(piece);
        all += piece;
        if (all.size() > 2 << 20) {
            ASSERT_LE(cached_bytes(path), 2 * kPagesWindow);
        }
    }
    writer.finish();
    EXPECT_GT(all.size(), 5 * kPagesWindow);
    EXPECT_EQ(cached_bytes(path), 0u);
    EXPECT_EQ(read_text(path), all);
}

TEST(FileWriter, NamesTheFileWhenTheDiskIsFull) {
    const std::string part = "/dev/full: cannot write: No space left on device";
    expect_user_error([] { FileWriter("/dev/full").write(std::string(3 << 20, 'x')); }, {part});
    expect_user_error(
        [] {
            FileWriter writer("/dev/full");
            writer.write("x");  // stays in the buffer
            writer.finish();
        },
        {part});
    const TempFolder folder;
    expect_user_error([&] { FileWriter(folder / "absent/file"); }, {folder / "absent/file", "No such file"});
}

TEST(FileWriter, ReplacesAFileWhole) {
    const TempFolder folder;
    folder.write("model", "old");
    FileWriter writer(folder / "model.new");
    writer.write("new");
    writer.finish();
    EXPECT_EQ(read_text(folder / "model"), "old");
    replace_file(folder / "model.new", folder / "model");
    EXPECT_EQ(read_text(folder / "model"), "new");
    EXPECT_FALSE(std::filesystem::exists(folder / "model.new"));
    expect_user_error([&] { replace_file(folder / "absent", folder / "model"); },
                      {folder / "absent", "model"});
    expect_user_error([&] { sync_directory(folder / "absent"); }, {folder / "absent"});
}

TEST(TemporaryFile, HasNoNameAtAnyMoment) {
    const TempFolder folder;
    const int any = open(folder.path().c_str(), O_TMPFILE | O_RDWR, 0600);
    if (any < 0) GTEST_SKIP() << "this file system has no files without names";
    close(any);
    const int events = inotify_init1(IN_NONBLOCK);
    ASSERT_GE(inotify_add_watch(events, folder.path().c_str(), IN_CREATE), 0);
    const int fd = make_nameless_file(folder.path(), 0);
    ASSERT_GE(fd, 0);
    EXPECT_EQ(write(fd, "text", 4), 4);
    char event[512];
    EXPECT_EQ(read(events, event, sizeof event), -1) << "a name was there";
    close(fd);
    close(events);
    EXPECT_LT(make_nameless_file(folder / "absent", 0), 0);
    EXPECT_EQ(errno, ENOENT);
    EXPECT_LT(make_nameless_file("/proc", 0), 0);  // has no such files, and no others
}

TEST(Printable, EscapesAndCuts) {
    EXPECT_EQ(printable("h.0.attn"), "h.0.attn");
    EXPECT_EQ(printable(std::string_view("a\n\"\0z", 5)), "a\\x0a\\x22\\x00z");
    EXPECT_EQ(printable(std::string(100, 'x')), std::string(80, 'x') + "...");
    EXPECT_EQ(printable("a\xe2\x80\xae\tb"), "a\\xe2\\x80\\xae\\x09b");
    EXPECT_EQ(printable(std::string(79, 'x') + "\xc3\xbc"),
              std::string(79, 'x') + "...");  // no half a character
}

TEST(Safetensors, RoundTrip) {
    const TempFolder folder;
    const std::string path = folder / "model.safetensors";
    const std::vector<float> weights = {1.5f, -2.0f, 0.0f, 3e-40f, INFINITY, -0.0f};
    const std::vector<uint16_t> halves = {0x3c00, 0x0001, 0xfc00}, brains = {0x3f80, 0xc000, 0x0001};
    const int64_t step = -7;
    SafetensorsWriter writer(path);
    writer.declare("wte", FileType::F32, {2, 3});
    writer.declare("half", FileType::F16, {3});
    writer.declare("brain", FileType::BF16, {3, 1});
    writer.declare("none", FileType::F32, {4, 0});
    writer.declare("step", FileType::I64, {});
    writer.append(weights.data(), 5);  // pieces need not end where elements do
    writer.append(reinterpret_cast<const char*>(weights.data()) + 5, 19);
    writer.append(halves.data(), 6);
    writer.append(brains.data(), 6);
    writer.append(&step, 8);
    writer.finish();

    uint64_t length = 0;
    std::memcpy(&length, read_text(path).data(), 8);
    EXPECT_EQ(length % 8, 0u);
    const SafetensorsFile file(path);
    const nlohmann::json header = nlohmann::json::parse(read_text(path).substr(8, length));
    EXPECT_EQ(header["__metadata__"], (nlohmann::json{{"format", "pt"}}));
    ASSERT_EQ(file.entries().size(), 5u);
    EXPECT_EQ(file.entries()[0].name, "wte");
    std::vector<float> read(6);
    read_as_float(file.get("wte", {2, 3}), read.data(), 0, 6);
    EXPECT_EQ(std::memcmp(read.data(), weights.data(), 24), 0);
    read_as_float(file.get("wte", {2, 3}), read.data(), 4, 1);
    EXPECT_EQ(read[0], INFINITY);
    read_as_float(file.get("half", {3}), read.data(), 0, 3);
    EXPECT_EQ(std::vector<float>(read.begin(), read.begin() + 3),
              (std::vector<float>{1.0f, 0x1p-24f, -INFINITY}));
    read_as_float(file.get("brain", {3, 1}), read.data(), 1, 2);
    EXPECT_EQ(std::vector<float>(read.begin(), read.begin() + 2), (std::vector<float>{-2.0f, 0x1p-133f}));
    read_as_float(file.get("none", {4, 0}), read.data(), 0, 0);
    int64_t found = 0;
    file.get("step", {}).read(0, 8, &found);
    EXPECT_EQ(found, step);
    EXPECT_EQ(file.find("absent"), nullptr);
}

// They are read in pieces; the ends of pieces must not show.
TEST(Safetensors, ReadsLongTensorsFromAnywhere) {
    const TempFolder folder;
    const size_t size = 100003;
    std::vector<uint16_t> bits(size);
    std::vector<float> expected(size), read(size);
    for (size_t i = 0; i < size; i++) {
        bits[i] = static_cast<uint16_t>(i * 40503 >> 3);
        expected[i] = std::bit_cast<float>(uint32_t{bits[i]} << 16);
    }
    SafetensorsWriter writer(folder / "f");
    writer.declare("whole", FileType::F32, {static_cast<int64_t>(size)});
    writer.declare("brain", FileType::BF16, {static_cast<int64_t>(size)});
    writer.append(expected.data(), size * sizeof(float));
    writer.append(bits.data(), size * sizeof(uint16_t));
    writer.finish();
    const SafetensorsFile file(folder / "f");
    for (const char* name : {"whole", "brain"}) {
        for (const size_t first : {0, 1, 32767, 99999}) {
            std::fill(read.begin(), read.end(), -1.f);
            read_as_float(*file.find(name), read.data(), first, size - first);
            EXPECT_EQ(std::memcmp(read.data(), expected.data() + first, (size - first) * sizeof(float)), 0)
                << name << first;
            EXPECT_TRUE(first == 0 || read[size - first] == -1.f) << name << first;
        }
    }
    // The file is cut short meanwhile.
    std::filesystem::resize_file(folder / "f", std::filesystem::file_size(folder / "f") - 2);
    expect_user_error([&] { read_as_float(*file.find("brain"), read.data(), 0, size); },
                      {folder / "f", "changed meanwhile"});
}

TEST(Safetensors, LooksUpByNameShapeAndType) {
    const TempFolder folder;
    const std::string path =
        folder.write("f", file_of(R"({"ids":)" + tensor("I64", "[2]", "[0,16]") + "}", 16));
    const SafetensorsFile file(path);
    expect_user_error([&] { file.get("wpe", {2}); }, {path, "\"wpe\"", "missing"});
    expect_user_error([&] { file.get("ids", {2, 1}); }, {path, "\"ids\"", "[2]", "[2, 1]"});
    float out;
    expect_user_error([&] { read_as_float(file.get("ids", {2}), &out, 0, 1); }, {"\"ids\"", "I64"});
}

TEST(Safetensors, ReadsDataAtAnyAddress) {
    const TempFolder folder;
    const std::string header = R"({"w":)" + tensor("F32", "[1]", "[0,4]") + "}";
    for (size_t pad = 0; pad < 4; pad++) {
        const SafetensorsFile file(folder.write("f", file_of(header + std::string(pad, ' '), 4)));
        float value = 0;
        read_as_float(file.get("w", {1}), &value, 0, 1);
        EXPECT_EQ(std::bit_cast<uint32_t>(value), 0x01010101u);
    }
}

TEST(Safetensors, NamesWhatIsDamaged) {
    const auto one = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
        return file_of(R"({"h.0":)" + tensor(dtype, shape, offsets) + "}", 8);
    };
    const auto two = [](const std::string& first, const std::string& second) {
        return file_of(
            R"({"a":)" + tensor("U8", "[4]", first) + R"(,"b":)" + tensor("U8", "[4]", second) + "}", 8);
    };
    const std::string huge_header("\x01\xe1\xf5\x05\0\0\0\0", 8), all_ones(8, '\xff');
    const struct {
        std::string content;
        std::vector<std::string> parts;
    } cases[] = {
        {"", {"0 bytes are too few"}},
        {"1234567", {"7 bytes are too few"}},
        {huge_header + "{}", {"100000001", "limit"}},
        {all_ones, {"18446744073709551615", "limit"}},
        {std::string("\x03\0\0\0\0\0\0\0{}", 10), {"header of 3 bytes", "2 after"}},
        {file_of("", 0), {"broken JSON"}},
        {file_of("{\"a\"", 0), {"broken JSON", "line 1"}},
        {file_of("[]", 0), {"not a JSON object"}},
        {file_of(R"({"__metadata__":[]})", 0), {"__metadata__"}},
        {file_of(R"({"__metadata__":{"step":1}})", 0), {"__metadata__", "\"step\""}},
        {file_of(R"({"h.0":5})", 0), {"\"h.0\"", "\"dtype\" is missing"}},
        {file_of(R"({"h.0":{"dtype":"F32","shape":[]}})", 0), {"\"h.0\"", "\"data_offsets\" is missing"}},
        {file_of(
             R"({"h.0":)" + tensor("U8", "[8]", "[0,8]") + R"(,"h.0":)" + tensor("U8", "[8]", "[0,8]") + "}",
             8),
         {"\"h.0\" appears twice"}},
        {one("F33", "[2]", "[0,8]"), {"\"h.0\"", "unknown dtype", "F33"}},
        {file_of(R"({"h.0":{"dtype":4,"shape":[],"data_offsets":[0,4]}})", 4),
         {"\"h.0\"", "unknown dtype 4"}},
        {one("F32", "2", "[0,8]"), {"\"h.0\"", "shape 2 is not a list"}},
        {one("F32", "[-2]", "[0,8]"), {"\"h.0\"", "dimension -2"}},
        {one("F32", "[2.0]", "[0,8]"), {"\"h.0\"", "dimension 2.0"}},
        {one("F32", "[\"2\"]", "[0,8]"), {"\"h.0\"", "dimension"}},
        {one("F32", "[[2]]", "[0,8]"), {"\"h.0\"", "dimension [2]"}},
        {one("F32", "[9223372036854775808]", "[0,8]"), {"\"h.0\"", "dimension 9223372036854775808"}},
        {one("F32", "[4611686018427387904,4]", "[0,0]"), {"\"h.0\"", "overflows"}},
        {one("F32", "[4294967296,4294967296]", "[0,0]"), {"\"h.0\"", "overflows"}},
        {one("F32", "[2]", "[0]"), {"\"h.0\"", "data_offsets [0]"}},
        {one("F32", "[2]", "[0,8,8]"), {"\"h.0\"", "data_offsets [0,8,8]"}},
        {one("F32", "[2]", "[-8,0]"), {"\"h.0\"", "data_offsets [-8,0]"}},
        {one("F32", "[2]", "[0,8.0]"), {"\"h.0\"", "data_offsets [0,8.0]"}},
        {one("F32", "[2]", "8"), {"\"h.0\"", "data_offsets 8"}},
        {one("F32", "[2]", "[8,0]"), {"\"h.0\"", "[8,0] end before they begin"}},
        {one("F32", "[3]", "[0,12]"), {"\"h.0\"", "[0,12] end after the file's 8 bytes"}},
        {one("F32", "[2]", "[8,18446744073709551615]"), {"\"h.0\"", "end after"}},
        {one("F32", "[3]", "[0,8]"), {"\"h.0\"", "8 bytes", "F32 of shape [3] takes 12"}},
        {two("[0,4]", "[2,6]"), {"\"b\"", "overlaps that of \"a\""}},
        {two("[0,4]", "[0,4]"), {"overlaps"}},
        {two("[1,5]", "[4,8]"), {"\"a\"", "1 bytes before"}},
        {one("U8", "[4]", "[0,4]"), {"last 4 bytes"}},
        {one("U8", "[4]", "[4,8]"), {"\"h.0\"", "4 bytes before"}},
        {file_of("{\"a\\n\\u0000b\":0}", 0), {"\"a\\x0a\\x00b\""}},
    };
    const TempFolder folder;
    for (const auto& damaged : cases) {
        const std::string path = folder.write("f.safetensors", damaged.content);
        for (const std::string& part : damaged.parts)
            expect_user_error([&] { SafetensorsFile file(path); }, {path, part});
    }
    expect_user_error([&] { SafetensorsFile file(folder / "absent"); }, {folder / "absent", "No such file"});
}

TEST(Safetensors, EveryCutIsNoticed) {
    const TempFolder folder;
    const std::string whole = file_of(R"({"a":)" + tensor("F32", "[2]", "[0,8]") + "}", 8);
    for (size_t size = 0; size < whole.size(); size++) {
        const std::string path = folder.write("cut", whole.substr(0, size));
        expect_user_error([&] { SafetensorsFile file(path); }, {path});
    }
    EXPECT_NO_THROW(SafetensorsFile(folder.write("cut", whole)));
}

TEST(Safetensors, NamesTheFileWhenTheDiskIsFull) {
    SafetensorsWriter writer("/dev/full");
    writer.declare("w", FileType::U8, {10});
    writer.append("0123456789", 10);
    expect_user_error([&] { writer.finish(); }, {"/dev/full", "No space left on device"});
}

TEST(HalfToFloat, All65536) {
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const int exponent = bits >> 10 & 31, fraction = bits & 1023;
        const double sign = bits & 0x8000 ? -1.0 : 1.0;
        const float value = half_to_float(static_cast<uint16_t>(bits));
        EXPECT_EQ(std::signbit(value), std::signbit(sign)) << bits;
        if (exponent == 31 && fraction) {
            EXPECT_TRUE(std::isnan(value)) << bits;
            continue;
        }
        double expected = std::numeric_limits<double>::infinity();
        if (exponent < 31)
            expected =
                exponent ? std::ldexp(1.0 + fraction / 1024.0, exponent - 15) : std::ldexp(fraction, -24);
        EXPECT_EQ(static_cast<double>(value), sign * expected) << bits;
    }
}

void write_weights(const std::string& path, const std::string& name, float value) {
    SafetensorsWriter writer(path);
    writer.declare(name, FileType::F32, {1});
    writer.append(&value, sizeof value);
    writer.finish();
}

float value_of(const SafetensorsFolder& folder, const std::string& name) {
    float value;
    read_as_float(folder.get(name, {1}), &value, 0, 1);
    return value;
}

TEST(SafetensorsFolder, FindsNamesWithAndWithoutPrefix) {
    for (const std::string written : {"wte.weight", "transformer.wte.weight"}) {
        const TempFolder folder;
        write_weights(folder / "model.safetensors", written, 3.0f);
        const SafetensorsFolder weights(folder.path(), "transformer.");
        EXPECT_EQ(value_of(weights, "transformer.wte.weight"), 3.0f);
        EXPECT_EQ(weights.find("lm_head.weight"), nullptr);
        expect_user_error([&] { weights.get("transformer.wpe.weight", {1}); },
                          {folder.path(), "\"transformer.wpe.weight\"", "missing"});
        expect_user_error(
            [&] {
                weights.get("transformer.wte.weight", {1, 1});
            },
            {folder.path(), "wte.weight", "[1, 1]"});
    }
}

TEST(SafetensorsFolder, OpensShards) {
    const TempFolder folder;
    write_weights(folder / "model-1.safetensors", "a", 1.0f);
    write_weights(folder / "model-2.safetensors", "transformer.b", 2.0f);
    folder.write("model.safetensors.index.json",
                 R"({"weight_map": {"a": "model-1.safetensors", "transformer.b": "model-2.safetensors"}})");
    const SafetensorsFolder weights(folder.path(), "transformer.");
    EXPECT_EQ(value_of(weights, "transformer.a"), 1.0f);
    EXPECT_EQ(value_of(weights, "transformer.b"), 2.0f);
    EXPECT_EQ(weights.find("b"), nullptr);
}

TEST(SafetensorsFolder, NamesWhatIsWrong) {
    const TempFolder folder;
    const auto open = [&] { SafetensorsFolder weights(folder.path()); };
    expect_user_error(open, {folder.path(), "neither model.safetensors nor"});
    write_weights(folder / "s", "a", 1.0f);
    const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
        {"{", {"broken JSON"}},
        {"[]", {"weight_map"}},
        {R"({"weight_map": []})", {"weight_map"}},
        {R"({"weight_map": {"a": 1}})", {"\"a\"", "not the name of a file"}},
        {R"({"weight_map": {"a": "../s"}})", {"\"a\"", "not the name of a file"}},
        {R"({"weight_map": {"a": "absent"}})", {folder / "absent", "No such file"}},
        {R"({"weight_map": {"a": "s", "b": "s"}})", {folder / "s", "\"b\"", "missing"}},
    };
    for (const auto& [index, parts] : cases) {
        folder.write("model.safetensors.index.json", index);
        for (const std::string& part : parts) expect_user_error(open, {folder.path(), part});
    }
}

// ---- matmul_algorithms.h

MatmulAlgorithm algorithm(uint64_t first, double microseconds, bool bias_gradient) {
    return {{first, 1, 2, 3, 4, 5, 6, ~uint64_t{0}}, microseconds, bias_gradient};
}

void expect_equal(const MatmulAlgorithm* got, const MatmulAlgorithm& want) {
    ASSERT_NE(got, nullptr);
    EXPECT_EQ(got->data, want.data);
    EXPECT_EQ(got->microseconds, want.microseconds);
    EXPECT_EQ(got->bias_gradient, want.bias_gradient);
}

TEST(MatmulAlgorithms, TheFirstOfTheFastestWins) {
    const std::vector<MatmulAlgorithm> measured = {algorithm(1, 3, false), algorithm(2, 2, false),
                                                   algorithm(3, 2, true)};
    EXPECT_EQ(fastest(measured).data[0], 2u);
}

TEST(MatmulAlgorithms, RoundTripAndMerge) {
    const TempFolder folder;
    const std::string path = folder / "algorithms.json";
    const MatmulAlgorithm one = algorithm(0x0123456789abcdef, 12.5, false), two = algorithm(7, 1e-3, true);
    {
        MatmulAlgorithms empty(path, "GPU, cuBLASLt 1");
        EXPECT_EQ(empty.size(), 0u);
        EXPECT_EQ(empty.find("1 x 2 x 3 NN"), nullptr);
        empty.add("1 x 2 x 3 NN", one);
        EXPECT_FALSE(std::filesystem::exists(path));
        empty.save();
    }
    MatmulAlgorithms known(path, "GPU, cuBLASLt 1");
    expect_equal(known.find("1 x 2 x 3 NN"), one);
    EXPECT_EQ(known.find("1 x 2 x 3 NT"), nullptr);
    known.add("1 x 2 x 3 TN bias_gradient", two);
    expect_equal(known.find("1 x 2 x 3 TN bias_gradient"), two);
    known.save();
    const std::string before = read_text(path);
    MatmulAlgorithms(path, "GPU, cuBLASLt 1").save();
    EXPECT_EQ(read_text(path), before);

    // Another GPU, or another version of the library, does not use these entries but keeps them.
    for (const char* machine : {"other GPU, cuBLASLt 1", "GPU, cuBLASLt 2"}) {
        MatmulAlgorithms other(path, machine);
        EXPECT_EQ(other.size(), 0u);
        EXPECT_EQ(other.find("1 x 2 x 3 NN"), nullptr);
        other.add("1 x 2 x 3 NN", two);
        other.save();
    }
    const MatmulAlgorithms again(path, "GPU, cuBLASLt 1");
    EXPECT_EQ(again.size(), 2u);
    expect_equal(again.find("1 x 2 x 3 NN"), one);
    expect_equal(again.find("1 x 2 x 3 TN bias_gradient"), two);
    expect_equal(MatmulAlgorithms(path, "GPU, cuBLASLt 2").find("1 x 2 x 3 NN"), two);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);  // nothing beside it
}

TEST(MatmulAlgorithms, NamesWhatIsWrong) {
    const TempFolder folder;
    const std::string digits = '"' + std::string(128, 'a') + '"';
    const auto product = [](const std::string& entry) {
        return R"({"matmul_algorithms": 1, "machines": {"GPU": {"1 x 1": )" + entry + "}}}";
    };
    const auto entry = [](const std::string& algorithm, const std::string& time, const std::string& fused) {
        return R"({"algorithm": )" + algorithm + R"(, "microseconds": )" + time + R"(, "bias_gradient": )" +
               fused + "}";
    };
    const auto open = [&](const std::string& text) {
        return MatmulAlgorithms(folder.write("a.json", text), "GPU");
    };
    const std::string good = product(entry(digits, "1.5", "true"));
    EXPECT_EQ(open(good).size(), 1u);
    const std::vector<std::pair<std::string, std::string>> cases = {
        {good.substr(0, good.size() / 2), "broken JSON"},
        {"", "broken JSON"},
        {"[]", "is no file of matmul algorithms"},
        {R"({"n_layer": 12})", "is no file of matmul algorithms"},
        {R"({"matmul_algorithms": 2, "machines": {}})", "format"},
        {R"({"matmul_algorithms": 1})", "machines"},
        {R"({"matmul_algorithms": 1, "machines": []})", "machines"},
        {R"({"matmul_algorithms": 1, "machines": {"GPU": 3}})", "GPU"},
        {product("3"), "\"1 x 1\""},
        {product("{}"), "no \"algorithm\" of \"1 x 1\""},
        {product(entry("3", "1", "true")), "hexadecimal"},
        {product(entry("\"abc\"", "1", "true")), "hexadecimal"},
        {product(entry('"' + std::string(128, 'x') + '"', "1", "true")), "hexadecimal"},
        {product(entry(digits, "\"1\"", "true")), "microseconds"},
        {product(entry(digits, "1", "1")), "bias_gradient"},
    };
    for (const auto& [text, part] : cases)
        expect_user_error([&, &text = text] { open(text); }, {folder / "a.json", part});
    // Entries of other machines are not read.
    EXPECT_EQ(MatmulAlgorithms(folder.write("a.json", product("3")), "other").size(), 0u);
    expect_user_error([&] { MatmulAlgorithms(folder.path(), "GPU"); }, {folder.path(), "directory"});
    expect_user_error([&] { MatmulAlgorithms(folder / "absent/a.json", "GPU").save(); },
                      {folder / "absent/a.json", "No such file"});
}

}  // namespace
