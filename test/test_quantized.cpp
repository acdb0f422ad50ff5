// test_quantized.cpp - every quantized format, compared with plain loops over its definition, in every order
// of threads: all elements, some rows, the product with a row; and the result of NF4's quantization. In bf16,
// test_quantized_bf16.cpp runs it.

#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <omp.h>

#include "llmc/quant_formats.h"
#include "llmc/safetensors.h"
#include "test/kernel_test.h"

namespace {

template <class T>
void quantize_nf4(unsigned char* out, const T* w, int64_t n, const WeightFormat& format) {
    Nf4Quantizer quantizer(out, n, format);
    quantizer.add(0, w, n);
    quantizer.finish();
}
using Bytes = std::vector<unsigned char>;
const Stream kStream{};

// Quantization runs on several threads, and ThreadSanitizer does not see that libgomp joins them.
[[maybe_unused]] const bool kThreadsSet = [] {
    if (kThreadSanitizer) omp_set_num_threads(1);
    return true;
}();

float half_of(const unsigned char* p) { return half_to_float(static_cast<uint16_t>(p[0] | p[1] << 8)); }

// Element i of a block of one of ggml's formats, by its definition. Blocks of the float types have one
// element.
double ggml_element(const std::string& format, const unsigned char* b, int i) {
    if (format == "f16") return half_of(b);
    if (format == "bf16" || format == "f32") {
        float x;
        const Bytes bits = format == "f32" ? Bytes(b, b + 4) : Bytes{0, 0, b[0], b[1]};
        memcpy(&x, bits.data(), 4);
        return x;
    }
    if (format == "q8_0") return double{half_of(b)} * static_cast<signed char>(b[2 + i]);
    const auto nibble = [&](const unsigned char* p) { return i < 16 ? p[i] & 15 : p[i - 16] >> 4; };
    if (format == "q4_0") return double{half_of(b)} * (nibble(b + 2) - 8);
    if (format == "q4_1") return double{half_of(b)} * nibble(b + 4) + double{half_of(b + 2)};
    if (format == "q5_0" || format == "q5_1") {
        const unsigned char* const fifths = b + (format == "q5_0" ? 2 : 4);
        const int q = nibble(fifths + 4) | (fifths[i / 8] >> (i % 8) & 1) << 4;
        return format == "q5_0" ? double{half_of(b)} * (q - 16)
                                : double{half_of(b)} * q + double{half_of(b + 2)};
    }
    if (format == "iq4_nl") {
        constexpr int kValues[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        return double{half_of(b)} * kValues[nibble(b + 2)];
    }
    const auto two_bits = [&](const unsigned char* p) {
        return p[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    };
    if (format == "q2_k") {
        const int scale = b[i / 16] & 15, least = b[i / 16] >> 4;
        return double{half_of(b + 80)} * scale * two_bits(b + 16) - double{half_of(b + 82)} * least;
    }
    if (format == "q3_k") {
        const unsigned char* const s = b + 96;
        const int part = i / 16, low = part < 8 ? s[part] & 15 : s[part - 8] >> 4;
        const int scale = (low | (s[8 + part % 4] >> (part / 4 * 2) & 3) << 4) - 32;
        return double{half_of(b + 108)} * scale * (two_bits(b + 32) - (b[i % 32] >> (i / 32) & 1 ? 0 : 4));
    }
    if (format == "q4_k" || format == "q5_k") {
        const int part = i / 32;
        const unsigned char* s = b + 4;
        const int scale = part < 4 ? s[part] & 63 : (s[part + 4] & 15) | s[part - 4] >> 6 << 4;
        const int least = part < 4 ? s[part + 4] & 63 : s[part + 4] >> 4 | s[part] >> 6 << 4;
        const bool fifth = format == "q5_k";
        const int low = b[(fifth ? 48 : 16) + i / 64 * 32 + i % 32] >> (part % 2 ? 4 : 0) & 15;
        const int q = low | (fifth ? (b[16 + i % 32] >> part & 1) << 4 : 0);
        return double{half_of(b)} * scale * q - double{half_of(b + 2)} * least;
    }
    if (format != "q6_k") bug("the test does not define %s", format.c_str());
    const int half = i / 128, quarter = i / 32 % 4;
    const int low = b[half * 64 + quarter % 2 * 32 + i % 32] >> (quarter < 2 ? 0 : 4) & 15;
    const int high = b[128 + half * 32 + i % 32] >> (2 * quarter) & 3;
    return double{half_of(b + 208)} * static_cast<signed char>(b[192 + i / 16]) * ((low | high << 4) - 32);
}

// Element i of an NF4 matrix of n elements. Scales are rounded twice, as in bitsandbytes.
float nf4_element(const Bytes& bytes, int64_t i, int64_t n, bool is_double) {
    const Nf4Parts parts(n, is_double);
    const auto floats = [&](int64_t at) { return reinterpret_cast<const float*>(bytes.data() + at); };
    const int64_t block = i / 64;
    float scale;
    if (is_double) {
        const volatile float product =
            floats(parts.nested_map)[bytes[parts.absmax + block]] * floats(parts.nested_absmax)[block / 256];
        scale = product + *floats(parts.nested_offset);
    } else {
        scale = floats(parts.absmax)[block];
    }
    const int two = bytes[i / 2];
    return kNf4Values[i % 2 ? two & 15 : two >> 4] * scale;
}

// A matrix in a format, and the values of its elements.
struct Matrix {
    const WeightFormat* format;
    int64_t rows, columns;
    Bytes bytes;
    std::vector<float> elements;

    Matrix(const WeightFormat& f, int64_t r, int64_t c) : format(&f), rows(r), columns(c) {
        const int64_t n = r * c;
        bytes.resize(quantized_bytes(f, n));
        if (f.block_bytes == 0) {
            quantize_nf4(bytes.data(), random_values<float>(n, 0.02, 5).data(), n, f);
            for (int64_t i = 0; i < n; i++) elements.push_back(nf4_element(bytes, i, n, &f == &kNf4Double));
            return;
        }
        for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<unsigned char>(random_bits(7, i));
        for (int64_t b = 0; b < n / f.block; b++) {
            unsigned char* const block = bytes.data() + b * f.block_bytes;
            if (f.block == 1) block[1] &= 0xbb, block[f.block_bytes - 1] &= 0xbb;  // no infinity
            for (const int at : f.halves)
                if (at >= 0) block[at + 1] &= 0xbb;
            if (f.block == 1) block[f.block_bytes - 1] |= 1;  // AVX-512 takes subnormals as zeros
            for (int i = 0; i < f.block; i++)
                elements.push_back(static_cast<float>(ggml_element(f.name, block, i)));
        }
    }
    QuantizedView view(const DeviceArray<unsigned char>& data) const {
        return {format, data.data(), rows, columns};
    }
};

std::vector<Matrix> matrices() {
    std::vector<Matrix> all;
    for (const WeightFormat* f : kWeightFormats) {
        const bool blocks = f->block_bytes > 0;
        for (const int64_t rows : {1, 3, 21}) {
            all.emplace_back(*f, rows, blocks ? f->block : 65);
            all.emplace_back(*f, rows, blocks ? 3 * f->block : 1008);
            if (f->block == 1)
                all.emplace_back(*f, rows, 403), all.emplace_back(*f, rows, 2056);  // whole vectors
        }
        if (!kSmallShapes) all.emplace_back(*f, 9, blocks ? 9 * f->block : 2049);  // two scales of scales
        for (const int n : kTailSizes)
            if (!kSmallShapes && (f->block == 1 || !blocks)) all.emplace_back(*f, 1, n);
        if (!kSmallShapes && f->block == 32) all.emplace_back(*f, 4, 2080);  // many vectors per lane
    }
    return all;
}

std::string text(const Matrix& m) {
    return std::string(m.format->name) + " " + std::to_string(m.rows) + " x " + std::to_string(m.columns);
}

using T = floatX;

TEST(Quantized, ElementsAreThoseOfTheDefinition) {
    for (const Matrix& m : matrices()) {
        SCOPED_TRACE(text(m));
        std::vector<T> want, out, gathered;
        for (const float x : m.elements) want.push_back(from_float<T>(x));
        int64_t first = 1;  // of the last rows, which can be decoded alone
        while (first < m.rows && first * m.columns % kDecodedRun != 0) first++;
        const std::vector<T> want_slice(want.begin() + first * m.columns, want.end());
        std::vector<T> slice;
        const std::vector<int> rows = {0, static_cast<int>(m.rows - 1), static_cast<int>(m.rows / 2)};
        for_each_order([&] {
            const DeviceArray<unsigned char> d_bytes(m.bytes);
            const DeviceArray<T> d_out(poisoned<T>(want.size()));
            const DeviceArray<T> d_rows(poisoned<T>(rows.size() * m.columns));
            const DeviceArray<T> d_slice(poisoned<T>(want_slice.size()));
            const DeviceArray<int> d_numbers(rows);
            dequantize(d_out.data(), m.view(d_bytes), kStream);
            dequantize_rows(d_rows.data(), m.view(d_bytes), d_numbers.data(), 3, kStream);
            if (first < m.rows)
                dequantize_slice(d_slice.data(), m.view(d_bytes), first, m.rows - first, kStream);
            out = d_out.download(), gathered = d_rows.download(), slice = d_slice.download();
            return bytes_of(out, gathered, slice);
        });
        EXPECT_TRUE(bytes_of(slice) == bytes_of(want_slice));
        EXPECT_TRUE(bytes_of(out) == bytes_of(want));
        // Only formats of whole runs need an aligned array.
        if (m.format->block_bytes == 0 || m.format->block % kDecodedRun != 0) {
            const DeviceArray<unsigned char> d_bytes(m.bytes);
            const DeviceArray<T> d_out(poisoned<T>(want.size() + 3));
            dequantize(d_out.data() + 3, m.view(d_bytes), kStream);
            const std::vector<T> later = d_out.download();
            EXPECT_TRUE(bytes_of(std::vector<T>(later.begin() + 3, later.end())) == bytes_of(want));
        }
        std::vector<T> want_rows;
        for (const int row : rows)
            want_rows.insert(want_rows.end(), want.begin() + row * m.columns,
                             want.begin() + (row + 1) * m.columns);
        EXPECT_TRUE(bytes_of(gathered) == bytes_of(want_rows));
    }
}

// Checks the product with `count` rows. Each has the bits that it has alone, on a CPU.
void check_few_rows(const Matrix& m, int64_t count) {
    const std::vector<T> x = random_values<T>(count * m.columns, 1, 3), bias = random_values<T>(m.rows, 1, 4);
    const int64_t out_row = m.rows + 5;
    const DeviceArray<unsigned char> d_bytes(m.bytes);
    const DeviceArray<T> d_x(x), d_bias(bias);
    for (const bool with_bias : {false, true}) {
        const T* const d_b = with_bias ? d_bias.data() : nullptr;
        std::vector<T> out;
        for_each_order([&] {
            const DeviceArray<T> d_out(poisoned<T>(count * out_row));
            multiply_few_rows({d_out.data(), out_row, d_x.data(), count}, m.view(d_bytes), d_b, kStream);
            return bytes_of(out = d_out.download());
        });
        std::vector<T> got;
        std::vector<double> want;
        for (int64_t i = 0; i < count; i++) {
            for (int64_t r = 0; r < m.rows; r++) {
                double sum = with_bias ? double{to_float(bias[r])} : 0;
                for (int64_t c = 0; c < m.columns; c++)
                    sum += double{to_float(x[i * m.columns + c])} * double{m.elements[r * m.columns + c]};
                want.push_back(sum), got.push_back(out[i * out_row + r]);
            }
            const std::vector<T> between(out.begin() + i * out_row + m.rows, out.begin() + (i + 1) * out_row);
            EXPECT_TRUE(bytes_of(between) == bytes_of(poisoned<T>(5)));
        }
        EXPECT_LT(relative_error(got, want), tolerance<T>());
        for (int64_t i = 0; i < (kFastCpu ? count : 0); i++) {
            const DeviceArray<T> d_out(poisoned<T>(m.rows));
            multiply_few_rows({d_out.data(), m.rows, d_x.data() + i * m.columns, 1}, m.view(d_bytes), d_b,
                              kStream);
            EXPECT_TRUE(bytes_of(d_out.download()) ==
                        bytes_of(std::vector<T>(got.begin() + i * m.rows, got.begin() + (i + 1) * m.rows)));
        }
    }
}

TEST(Quantized, FewRowsTimesTheElements) {
    for (const Matrix& m : matrices())
        for (const int64_t rows : {1, 2, 8, 11}) {
            SCOPED_TRACE(text(m) + ", rows " + std::to_string(rows));
            check_few_rows(m, rows);
        }
}

TEST(Nf4, QuantizedToTheNearestValue) {
    const int64_t n = 64 * 300 + 17;
    const std::vector<float> w = random_values<float>(n, 0.02, 8);
    for (const WeightFormat* format : {&kNf4, &kNf4Double}) {
        Bytes bytes(quantized_bytes(*format, n));
        quantize_nf4(bytes.data(), w.data(), n, *format);
        double error = 0, size = 0;
        for (int64_t i = 0; i < n; i++) {
            const double d = nf4_element(bytes, i, n, format == &kNf4Double) - w[i];
            error += d * d, size += w[i] * w[i];
        }
        EXPECT_LT(std::sqrt(error / size), 0.1) << format->name;
    }
}

TEST(Nf4, InPiecesAsWhole) {
    const int64_t n = 64 * 300 + 17;
    const std::vector<bf16> w = random_values<bf16>(n, 0.02, 9);
    for (const WeightFormat* format : {&kNf4, &kNf4Double}) {
        Bytes whole(quantized_bytes(*format, n)), pieces(whole.size(), 0x5a);
        quantize_nf4(whole.data(), w.data(), n, *format);
        Nf4Quantizer quantizer(pieces.data(), n, *format);
        for (int64_t first = 0; first < n; first += 64 * 7)
            quantizer.add(first, w.data() + first, std::min<int64_t>(64 * 7, n - first));
        quantizer.finish();
        EXPECT_TRUE(pieces == whole) << format->name;
    }
}

TEST(Q8_0, QuantizedToTheNearestNumber) {
    const int64_t n = 32 * 77;
    const std::vector<float> w = random_values<float>(n, 0.02, 8);
    Bytes bytes(quantized_bytes(kQ8_0, n));
    quantize_q8_0(bytes.data(), w.data(), n);
    for (int64_t b = 0; b < n / 32; b++) {
        const unsigned char* const block = bytes.data() + 34 * b;
        for (int i = 0; i < 32; i++) {  // half a number, and the rounding of the scale, 2^-11 of 127 numbers
            const double off = ggml_element("q8_0", block, i) - w[b * 32 + i];
            EXPECT_LE(std::fabs(off), 0.563 * half_of(block));
        }
    }
}

// Their scale is subnormal, and its inverse an infinity.
TEST(Q8_0, BlocksOfTheSmallestNumbersAreZeros) {
    for (const float x : {1e-45f, 1e-40f, 3e-37f}) {
        std::vector<float> w(32, x);
        w[5] = 0;
        Bytes block(34);
        quantize_q8_0(block.data(), w.data(), 32);
        for (int i = 0; i < 32; i++) EXPECT_EQ(ggml_element("q8_0", block.data(), i), 0) << x;
        EXPECT_EQ(block[2 + 5], 0) << x;
    }
}

TEST(Q8_0, ScalesAreTheNearestHalves) {
    for (unsigned bits = 0; bits < 0x7c00; bits++) {
        const float half = half_to_float(static_cast<uint16_t>(bits));
        const float next = bits == 0x7bff ? 65536.f : half_to_float(static_cast<uint16_t>(bits + 1));
        const float middle = (half + next) / 2;  // exact
        EXPECT_EQ(half_bits(half), bits);
        EXPECT_EQ(half_bits(middle), bits % 2 ? bits + 1 : bits);
        EXPECT_EQ(half_bits(std::nextafter(middle, 0.f)), bits);
        EXPECT_EQ(half_bits(std::nextafter(middle, 1e9f)), bits + 1);
    }
    EXPECT_EQ(half_bits(1e30f), 0x7c00);
}

// In bitsandbytes a block of zeros has the code of -1 and a scale of zero.
TEST(Nf4, BlocksOfZerosAreZeros) {
    const std::vector<float> w(130, 0.f);
    for (const WeightFormat* format : {&kNf4, &kNf4Double}) {
        Bytes bytes(quantized_bytes(*format, 130));
        quantize_nf4(bytes.data(), w.data(), 130, *format);
        for (int64_t i = 0; i < 130; i++)
            EXPECT_EQ(nf4_element(bytes, i, 130, format == &kNf4Double), 0.f) << format->name << " " << i;
    }
}

// A block has a value that is not finite exactly where first_not_finite() finds it.
TEST(WeightFormats, NumbersThatAreNotFiniteAreFound) {
    for (const WeightFormat* format : kWeightFormats) {
        if (format->block_bytes == 0) continue;  // NF4
        const auto width = static_cast<size_t>(format->block_bytes);
        for (size_t at = 0; at + 2 <= width; at += 2) {
            Bytes blocks(3 * width);
            for (size_t i = 0; i < blocks.size();
                 i++)  // bytes of 0x38 to 0x3b: all halves and floats are finite
                blocks[i] = static_cast<unsigned char>(0x38 + random_bits(7, at, width, i) % 4);
            EXPECT_EQ(first_not_finite(*format, blocks.data(), blocks.size()), -1) << format->name;
            blocks[2 * width + at] = 0xc0,
                               blocks[2 * width + at + 1] = 0x7f;  // a NaN of a half, a bf16, a float
            bool finite = true;
            for (int i = 0; i < format->block; i++)
                finite = finite && std::isfinite(ggml_element(format->name, blocks.data() + 2 * width, i));
            EXPECT_EQ(first_not_finite(*format, blocks.data(), blocks.size()), finite ? -1 : 2)
                << format->name << " " << at;
        }
    }
}

TEST(WeightFormats, HaveNamesOfTheirOwn) {
    for (const WeightFormat* format : kWeightFormats)
        for (const WeightFormat* other : kWeightFormats)
            EXPECT_EQ(std::string_view(format->name) == other->name, format == other);
    EXPECT_EQ(quantized_bytes(kNf4, 4096), 2048 + 256 + 64);
    EXPECT_EQ(quantized_bytes(kNf4Double, 4096), 2048 + 64 + 64 + 16 + 1024 + 16);
    EXPECT_EQ(quantized_bytes(kQ4_K, 512), 288);
}
}  // namespace
