// quant_matrix.h - weight matrices in quantized formats: what a format is, and the operations on such a
// matrix: dequantize it, wholly or some rows, and multiply it with one row or a few.
//
// A format is a value, as a family of models is (family.h). Each format has one file with its decoder, the
// layout of a matrix in memory and the place of its parts in files; quant_formats.h lists them all. A kernel
// reads a matrix through its decoder:
//
//     template <int N> void decode(float (&w)[N], int64_t i) const;   // elements i to i + N - 1
//
// for N = 1, 4, 8, 16 or 32, with i a multiple of N. Decoded values have the same bits everywhere. A CPU
// prefetches from
//
//     const unsigned char* place(int64_t i) const;                     // where the codes of element i are
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#if defined(__AVX512F__)
#define SIMT_AVX512 1  // use masked intrinsics: g++ 12 warns about the others (GCC's bug 105593)
#endif
#endif

#include "llmc/simt_vector.h"
#include "llmc/tensor.h"
#include "llmc/work.h"

struct QuantizedView;

// Rows x (rows, columns) to multiply with a matrix, and where the products go: out's rows are out_row
// elements apart.
struct FewRows {
    floatX* out;
    int64_t out_row;
    const floatX* x;
    int64_t rows;
};
constexpr int kRowsTogether = 8;  // rows that share what is decoded

struct WeightFormat {
    const char* name;       // its name in messages and options
    const char* file_type;  // its name in files: GGUF's type, bitsandbytes' quant_type
    int ggml_type;          // its number in GGUF files; -1: not a GGUF type
    int block;              // elements that share a scale
    int block_bytes;        // bytes of a block, if a matrix consists of blocks only; else 0
    // bytes: the size in memory of a matrix with `elements` elements. The others are described below.
    int64_t (*bytes)(int64_t elements);
    void (*dequantize_slice)(floatX* out, const QuantizedView&, int64_t first_row, int64_t count, Stream);
    void (*dequantize_rows)(floatX* out, const QuantizedView&, const int* rows, int64_t count, Stream);
    void (*multiply_few_rows)(const FewRows&, const QuantizedView&, const floatX* bias, Stream);
    int halves[2] = {-1, -1};  // offsets of a block's fp16 scales; -1: none
};

// A matrix in device memory, row-major; data is null in a rehearsal.
struct QuantizedView {
    const WeightFormat* format = nullptr;
    const unsigned char* data = nullptr;  // aligned to 16 bytes, quantized_bytes() of them
    int64_t rows = 0, columns = 0;

    int64_t elements() const { return rows * columns; }
    // The elements, if the format is floats of type T.
    template <class T>
    T* floats() const {
        return const_cast<T*>(reinterpret_cast<const T*>(data));
    }
};

// The bytes that a matrix with `elements` elements takes in memory, a multiple of 16. The format's file
// describes their layout.
inline int64_t quantized_bytes(const WeightFormat& format, int64_t elements) {
    return format.bytes(elements);
}
inline int64_t quantized_bytes(const QuantizedView& w) { return quantized_bytes(*w.format, w.elements()); }

// The next part of a matrix may start at multiples of this.
constexpr int64_t kQuantizedAlignment = 16;
constexpr int64_t aligned_part(int64_t bytes) {
    return ceil_div(bytes, kQuantizedAlignment) * kQuantizedAlignment;
}

// out (count, columns) = rows of the matrix, from first_row on, each element rounded once. The number of
// elements before first_row is a multiple of kDecodedRun. In formats of whole runs (kWholeRuns) `out` is
// aligned to 16 bytes.
inline void dequantize_slice(floatX* out, const QuantizedView& w, int64_t first_row, int64_t count,
                             Stream stream) {
    w.format->dequantize_slice(out, w, first_row, count, stream);
}

// out (rows, columns) = the whole matrix.
inline void dequantize(floatX* out, const QuantizedView& w, Stream stream) {
    dequantize_slice(out, w, 0, w.rows, stream);
}

// out (count, columns) = the rows of the matrix with these numbers, as in an embedding lookup. `rows` is on
// the device; its numbers must be in range.
inline void dequantize_rows(floatX* out, const QuantizedView& w, const int* rows, int64_t count,
                            Stream stream) {
    w.format->dequantize_rows(out, w, rows, count, stream);
}

// out (rows, outputs) = x (rows, columns) W^T + bias: a linear layer's product with one row or a few, where W
// is (outputs, columns). The quantized matrix is read once for kRowsTogether rows; sums are fp32. `bias` may
// be null. On a CPU a row has the same bits beside any others.
inline void multiply_few_rows(const FewRows& rows, const QuantizedView& w, const floatX* bias,
                              Stream stream) {
    w.format->multiply_few_rows(rows, w, bias, stream);
}

// The most elements that a decoder decodes at a time. Every block consists of whole runs.
constexpr int kDecodedRun = 32;

// True if each row consists of whole runs. This is so if rows consist of whole blocks; then no decoder of
// single elements needs to be compiled.
template <class Decoder>
constexpr bool kWholeRuns = requires {
    requires Decoder::kElements % kDecodedRun == 0;
};

template <class Decoder>
__global__ void __launch_bounds__(kBlockThreads)
    dequantize_kernel(floatX* out, Decoder weights, int64_t first, int64_t n) {
    // Rows of whole runs are aligned.
    const bool aligned = kWholeRuns<Decoder> || are_aligned(out);
    for_each_vector<floatX>(n, aligned, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        if constexpr (N > 1 || !kWholeRuns<Decoder>) {
            float w[N];
            weights.decode(w, first + i);
            store(out + i, w);
        }
    });
}

template <class Decoder>
void dequantize_with(floatX* out, const QuantizedView& w, int64_t first_row, int64_t count, Stream stream) {
    const int64_t n = count * w.columns, first = first_row * w.columns;
    const double read = static_cast<double>(quantized_bytes(w)) * count / w.rows;
    const Operation operation("dequantize", 0, read + static_cast<double>(n * sizeof(floatX)), {},
                              {.form = w.format->name});
    launch<dequantize_kernel<Decoder>>(elementwise_blocks<floatX>(n), kBlockThreads, 0, stream, out,
                                       Decoder(w), first, n);
}

// Calls f with the number of elements that a lane decodes at a time in rows of `columns` elements, as an
// integral constant.
template <class Decoder, class F>
void with_decoded_run(int64_t columns, F&& f) {
    constexpr int N = kFastCpu ? kDecodedRun : kVectorSize<floatX>;
    if constexpr (kWholeRuns<Decoder>)
        f(std::integral_constant<int, N>());
    else if (columns % N == 0)
        f(std::integral_constant<int, N>());
    else
        f(std::integral_constant<int, 1>());
}

// One warp per row.
template <class Decoder, int N>
__global__ void __launch_bounds__(kBlockThreads)
    dequantize_rows_kernel(floatX* out, Decoder weights, const int* rows, int64_t count, int64_t columns) {
    const int64_t row = int64_t{blockIdx.x} * warps_per_block() + warp();
    if (row >= count) return;
    for (int64_t c = lane() * N; c < columns; c += kLanes * N) {
        float w[N];
        weights.decode(w, rows[row] * columns + c);
        store(out + row * columns + c, w);
    }
}

template <class Decoder>
void dequantize_rows_with(floatX* out, const QuantizedView& w, const int* rows, int64_t count,
                          Stream stream) {
    const double bytes = static_cast<double>(quantized_bytes(w)) / w.rows + w.columns * sizeof(floatX);
    const Operation operation("dequantize_rows", 0, bytes * count);
    with_decoded_run<Decoder>(w.columns, [&]<int N>(std::integral_constant<int, N>) {
        launch<dequantize_rows_kernel<Decoder, N>>(blocks_of_rows(count), kBlockThreads, 0, stream, out,
                                                   Decoder(w), rows, count, w.columns);
    });
}

// True if each row consists of whole runs of kRun elements.
template <class Decoder, int kRun>
constexpr bool kWholeRunsOf = requires {
    requires Decoder::kElements % kRun == 0;
};

// One warp per output computes it for kRows rows, from row blockIdx.y * kRows on. For a single row each lane
// has two sums, because every addition waits for the one before it.
template <class Decoder, int N, int kRows>
__global__ void __launch_bounds__(kBlockThreads)
    few_rows_kernel(FewRows p, Decoder weights, const floatX* bias, int64_t outputs, int64_t columns) {
    const int64_t j = int64_t{blockIdx.x} * warps_per_block() + warp();
    if (j >= outputs) return;
    const int64_t first = int64_t{blockIdx.y} * kRows;
    const auto count = static_cast<int>(p.rows - first < kRows ? p.rows - first : kRows);
    const floatX* const x = p.x + first * columns;
    Accumulator<N> even[kRows], odd[kRows];
    const auto add = [&](Accumulator<N>(&sums)[kRows], int64_t c) SIMT_INLINE {
        float w[N];
        weights.decode(w, j * columns + c);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            // A missing row repeats the first one. Offsets of 32 bits take fewer registers.
            const int row = r < count ? r : 0;
            const Packed<floatX, N> factors = load<N>(x + c + row * static_cast<int>(columns));
            for (int k = 0; k < N; k++) sums[r][k] += factors[k] * w[k];
        }
    };
    constexpr int kStep = kLanes * N;
    int64_t c = lane() * N;
    if constexpr (kRows == 1)
        for (; c + kStep < columns; c += 2 * kStep) add(even, c), add(odd, c + kStep);
    if constexpr (kRows > 1 || !kWholeRunsOf<Decoder, 2 * kStep>)
        for (; c < columns; c += kStep) add(even, c);
    if constexpr (kRows == 1)
        for (int k = 0; k < N; k++) even[0][k] += odd[0][k];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
        const float sum = warp_sum(sum_of(even[r].v));
        if (lane() == 0 && r < count)
            p.out[(first + r) * p.out_row + j] = from_float<floatX>(bias ? sum + to_float(bias[j]) : sum);
    }
}

#if !defined(SIMT_GPU) && !defined(LLMC_PLANNER)
// ---- for the fast CPU build
//
// A block computes some outputs of all rows. What it decodes is multiplied with several rows. A block widens
// their elements once for its outputs, a piece of the columns at a time, so that the piece stays in a core's
// first cache.

// Rows whose sums of an output fit the registers.
#if defined(SIMT_AVX512)
constexpr int kCpuRows = 8;
#else
constexpr int kCpuRows = 4;
#endif
constexpr int64_t kDecodedOutputs = 32, kDecodedColumns = 768;

// sums[r] += the product of n elements of the matrix, from element `at` on, with those of row r. In `packed`,
// N elements of each row follow each other.
template <int N, int kRows, class Decoder>
void add_decoded_products(float* sums, const float* packed, const Decoder& weights, int64_t at, int64_t n) {
    if constexpr (N == 1) {
        float all[kRows] = {};
        for (int64_t c = 0; c < n; c++, packed += kRows) {
            float w[1];
            weights.decode(w, at + c);
            for (int r = 0; r < kRows; r++) all[r] = __builtin_fmaf(packed[r], w[0], all[r]);
        }
        for (int r = 0; r < kRows; r++) sums[r] += all[r];
    } else {
        static_assert(N == 32);
        Vector16 low[kRows] = {}, high[kRows] = {};  // sums of products with the halves of runs
        for (int64_t c = 0; c < n; c += N, packed += kRows * N) {
            float w[N];
            weights.decode(w, at + c);
            Vector16 w_low, w_high, x_low, x_high;
            load_floats(w_low, w), load_floats(w_high, w + 16);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) {
                load_floats(x_low, packed + r * N), load_floats(x_high, packed + r * N + 16);
                low[r] += x_low * w_low, high[r] += x_high * w_high;
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) low[r] += high[r];
        float products[kRows];
        sums_of_vectors(products, low);
        for (int r = 0; r < kRows; r++) sums[r] += products[r];
    }
}

// Copies columns [begin, end) of x as floats, in the order in which add_decoded_products() reads them. x has
// `count` rows; if that is less than kRows, copies of the first row stand for the others.
template <int N, int kRows>
void pack_few_rows(float* packed, const floatX* x, int64_t count, int64_t columns, int64_t begin,
                   int64_t end) {
    for (int64_t c = begin; c < end; c += N)
        for (int64_t r = 0; r < kRows; r++, packed += N) {
            const Packed<floatX, N> run = load<N>(x + (r < count ? r : 0) * columns + c);
            for (int k = 0; k < N; k++) packed[k] = run[k];
        }
}

// Computes outputs [first, end) of the rows from `row` on: of kRows, or of those that there are. One row is
// widened whole, and reads the matrix from its first byte to its last. Several are multiplied some columns at
// a time; each time the columns of the next output are prefetched, as they are far from those of this one.
template <int N, int kRows, class Decoder>
void multiply_rows(const FewRows& p, int64_t row, const Decoder& weights, const floatX* bias, int64_t first,
                   int64_t end, int64_t columns, float* packed) {
    const int64_t count = p.rows - row < kRows ? p.rows - row : kRows;
    const floatX* const x = p.x + row * columns;
    float sums[kDecodedOutputs * kRows] = {};
    const auto end_of = [&](int64_t c) {
        return c + kDecodedColumns < columns ? c + kDecodedColumns : columns;
    };
    const auto multiply = [&](int64_t j, int64_t c, const float* factors) SIMT_INLINE {
        add_decoded_products<N, kRows>(sums + (j - first) * kRows, factors, weights, j * columns + c,
                                       end_of(c) - c);
    };
    if constexpr (kRows == 1) {
        pack_few_rows<N, 1>(packed, x, 1, columns, 0, columns);
        for (int64_t j = first; j < end; j++)
            for (int64_t c = 0; c < columns; c += kDecodedColumns) multiply(j, c, packed + c);
    } else {
        for (int64_t c = 0; c < columns; c += kDecodedColumns) {
            pack_few_rows<N, kRows>(packed, x, count, columns, c, end_of(c));
            for (int64_t j = first; j < end; j++) {
                if (j + 1 < end) {
                    const unsigned char* const next = weights.place((j + 1) * columns + c);
                    const unsigned char* const next_end = weights.place((j + 1) * columns + end_of(c) - 1);
                    for (const unsigned char* at = next; at <= next_end; at += 64) __builtin_prefetch(at);
                }
                multiply(j, c, packed);
            }
        }
    }
    for (int64_t j = first; j < end; j++)
        for (int64_t r = 0; r < count; r++) {
            const float sum = sums[(j - first) * kRows + r] + (bias ? to_float(bias[j]) : 0.f);
            p.out[(row + r) * p.out_row + j] = from_float<floatX>(sum);
        }
}

template <class Decoder, int N>
__global__ void few_rows_on_cpu_kernel(FewRows p, Decoder weights, const floatX* bias, int64_t outputs,
                                       int64_t columns) {
    const int64_t first = blockIdx.x * kDecodedOutputs;
    const int64_t end = first + kDecodedOutputs < outputs ? first + kDecodedOutputs : outputs;
    DYNAMIC_SHARED(float, packed);
    for (int64_t row = 0; row < p.rows; row += kCpuRows)
        if (p.rows - row == 1)
            multiply_rows<N, 1>(p, row, weights, bias, first, end, columns, packed);
        else
            multiply_rows<N, kCpuRows>(p, row, weights, bias, first, end, columns, packed);
}

template <class Decoder, int N>
void multiply_few_rows_on_cpu(const FewRows& p, const QuantizedView& w, const floatX* bias, Stream stream) {
    const auto blocks = static_cast<unsigned>(ceil_div(w.rows, kDecodedOutputs));
    const int64_t floats = std::max(w.columns, kCpuRows * kDecodedColumns);
    launch<few_rows_on_cpu_kernel<Decoder, N>>(blocks, 1, static_cast<size_t>(floats) * sizeof(float), stream,
                                               p, Decoder(w), bias, w.rows, w.columns);
}
#else
template <class Decoder, int N>
void multiply_few_rows_on_cpu(const FewRows&, const QuantizedView&, const floatX*, Stream);
#endif

template <class Decoder, int N, int kRows>
void multiply_few_rows_on_gpu(const FewRows& p, const QuantizedView& w, const floatX* bias, Stream stream) {
    const dim3 blocks(blocks_of_rows(w.rows), static_cast<unsigned>(ceil_div(p.rows, int64_t{kRows})));
    launch<few_rows_kernel<Decoder, N, kRows>>(blocks, kBlockThreads, 0, stream, p, Decoder(w), bias, w.rows,
                                               w.columns);
}

template <class Decoder>
void multiply_few_rows_with(const FewRows& p, const QuantizedView& w, const floatX* bias, Stream stream) {
    const auto rows = static_cast<double>(p.rows),
               passes = static_cast<double>(ceil_div(p.rows, int64_t{kRowsTogether})),
               in = static_cast<double>(w.columns * sizeof(floatX)),
               out = static_cast<double>(w.rows * sizeof(floatX));
    const Operation operation("quantized_few_rows", 2 * rows * static_cast<double>(w.elements()),
                              passes * static_cast<double>(quantized_bytes(w)) + rows * (in + out));
    with_decoded_run<Decoder>(w.columns, [&]<int N>(std::integral_constant<int, N>) {
        if constexpr (kFastCpu)
            multiply_few_rows_on_cpu<Decoder, N>(p, w, bias, stream);
        else if (p.rows == 1)
            multiply_few_rows_on_gpu<Decoder, N, 1>(p, w, bias, stream);
        else
            multiply_few_rows_on_gpu<Decoder, N, kRowsTogether>(p, w, bias, stream);
    });
}

// The format with the kernels of this decoder, which also defines bytes().
template <class Decoder>
constexpr WeightFormat quantized_format(const char* name, const char* file_type, int ggml_type, int block,
                                        int block_bytes) {
    return {.name = name,
            .file_type = file_type,
            .ggml_type = ggml_type,
            .block = block,
            .block_bytes = block_bytes,
            .bytes = Decoder::bytes,
            .dequantize_slice = dequantize_with<Decoder>,
            .dequantize_rows = dequantize_rows_with<Decoder>,
            .multiply_few_rows = multiply_few_rows_with<Decoder>};
}

// Shared by the decoders.

// The quotient and the remainder of a number that is not negative, faster than signed ones.
SIMT_HOST_DEVICE int64_t divided(int64_t i, unsigned by) {
    return static_cast<int64_t>(static_cast<uint64_t>(i) / by);
}
SIMT_HOST_DEVICE unsigned remainder_of(int64_t i, unsigned by) {
    return static_cast<unsigned>(static_cast<uint64_t>(i) % by);
}

// Loads N bytes as integers. If N > 1, their address must be a multiple of 2.
template <int N>
SIMT_DEVICE void load_bytes(int (&q)[N], const unsigned char* p) {
#if defined(SIMT_GPU)
    if constexpr (N == 1) {
        q[0] = *p;
    } else {
#pragma unroll
        for (int k = 0; k < N; k += 2) {
            const int two = *reinterpret_cast<const uint16_t*>(p + k);
            q[k] = two & 255;
            q[k + 1] = two >> 8;
        }
    }
#else
    unsigned char bytes[N];
    memcpy(bytes, p, N);
    for (int k = 0; k < N; k++) q[k] = bytes[k];
#endif
}

// Loads N small integers, masked, from bit `shift` on of each of N bytes.
template <int N>
SIMT_DEVICE void load_numbers(float* q, const unsigned char* p, int shift, int mask) {
#if defined(SIMT_AVX512)
    if constexpr (N % 16 == 0) {  // g++ does not vectorize the loop below when it is inlined next to others
        for (int k = 0; k < N; k += 16) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + k));
            const __m512i shifted = _mm512_maskz_srl_epi32(0xffff, _mm512_maskz_cvtepu8_epi32(0xffff, bytes),
                                                           _mm_cvtsi32_si128(shift));
            const __m512i numbers = _mm512_and_si512(shifted, _mm512_set1_epi32(mask));
            _mm512_storeu_ps(q + k, _mm512_maskz_cvtepi32_ps(0xffff, numbers));
        }
        return;
    }
#endif
    int bytes[N];
    load_bytes(bytes, p);
    for (int k = 0; k < N; k++) q[k] = static_cast<float>(bytes[k] >> shift & mask);
}
// Loads N bytes as integers from -128 to 127.
template <int N>
SIMT_DEVICE void load_signed(float* q, const unsigned char* p) {
#if defined(SIMT_AVX512)
    if constexpr (N % 16 == 0) {
        for (int k = 0; k < N; k += 16) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + k));
            const __m512i numbers = _mm512_maskz_cvtepi8_epi32(0xffff, bytes);
            _mm512_storeu_ps(q + k, _mm512_maskz_cvtepi32_ps(0xffff, numbers));
        }
        return;
    }
#endif
    int bytes[N];
    load_bytes(bytes, p);
    for (int k = 0; k < N; k++) q[k] = static_cast<float>(static_cast<signed char>(bytes[k]));
}

// The value of the IEEE 754 half at an address that is a multiple of 2; every half has one.
SIMT_DEVICE float half_at(const unsigned char* p) {
    uint16_t bits;
#if defined(SIMT_GPU)
    bits = *reinterpret_cast<const uint16_t*>(p);
    return __half2float(__ushort_as_half(bits));
#else
    memcpy(&bits, p, 2);
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    // The exponent's bias is 15 in a half and 127 in a float. The product also converts subnormals correctly.
    const uint32_t magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
    const uint32_t finite = std::bit_cast<uint32_t>(scaled);
    return std::bit_cast<float>(sign | (magnitude < 0x0f800000u ? finite : 0x7f800000u | magnitude));
#endif
#endif
}

// a * b + c, with both results rounded. The compiler must not fuse them, because the files were made with two
// roundings; the asm makes it believe that the product could change.
SIMT_DEVICE float product_then_sum(float a, float b, float c) {
#if defined(SIMT_GPU)
    return __fadd_rn(__fmul_rn(a, b), c);
#else
    float product = a * b;
#if defined(__x86_64__)
    asm("" : "+x"(product));
#else
    asm("" : "+m"(product));
#endif
    return product + c;
#endif
}
