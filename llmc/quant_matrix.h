// quant_matrix.h - weight matrices in quantized formats: what a format is, and the operations on such a
// matrix: dequantize it, wholly or some rows, and multiply it with one row.
//
// A format is a value, as a family of models is (family.h). Each format has one file with its decoder, the
// layout of a matrix in memory and the place of its parts in files; quant_formats.h lists them all. A kernel
// reads a matrix through its decoder:
//
//     template <int N> void decode(float (&w)[N], int64_t i) const;   // elements i to i + N - 1
//
// for N = 1, 4, 8, 16 or 32, with i a multiple of N. Decoded values have the same bits everywhere.
#pragma once

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
#include "llmc/work.h"

struct QuantizedView;

struct WeightFormat {
    const char* name;       // its name in messages and options
    const char* file_type;  // its name in files: GGUF's type, bitsandbytes' quant_type
    int ggml_type;          // its number in GGUF files; -1: not a GGUF type
    int block;              // elements that share a scale
    int block_bytes;        // bytes of a block, if a matrix consists of blocks only; else 0
    // bytes: the size in memory of a matrix with `elements` elements. The others are described below.
    int64_t (*bytes)(int64_t elements);
    void (*to_fp32)(float* out, const QuantizedView&, int64_t first_row, int64_t count, Stream);
    void (*to_bf16)(bf16* out, const QuantizedView&, int64_t first_row, int64_t count, Stream);
    void (*rows_to_fp32)(float* out, const QuantizedView&, const int* rows, int64_t count, Stream);
    void (*rows_to_bf16)(bf16* out, const QuantizedView&, const int* rows, int64_t count, Stream);
    void (*matvec_fp32)(float* out, const float* x, const QuantizedView&, const float* bias, Stream);
    void (*matvec_bf16)(bf16* out, const bf16* x, const QuantizedView&, const bf16* bias, Stream);
    void (*matvec_widened)(float* out, const bf16* x, const QuantizedView&, const bf16* bias, Stream);
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
template <class T>
void dequantize_slice(T* out, const QuantizedView& w, int64_t first_row, int64_t count, Stream stream) {
    if constexpr (std::is_same_v<T, float>)
        w.format->to_fp32(out, w, first_row, count, stream);
    else
        w.format->to_bf16(out, w, first_row, count, stream);
}

// out (rows, columns) = the whole matrix.
template <class T>
void dequantize(T* out, const QuantizedView& w, Stream stream) {
    dequantize_slice(out, w, 0, w.rows, stream);
}

// out (count, columns) = the rows of the matrix with these numbers, as in an embedding lookup. `rows` is on
// the device; its numbers must be in range.
template <class T>
void dequantize_rows(T* out, const QuantizedView& w, const int* rows, int64_t count, Stream stream) {
    if constexpr (std::is_same_v<T, float>)
        w.format->rows_to_fp32(out, w, rows, count, stream);
    else
        w.format->rows_to_bf16(out, w, rows, count, stream);
}

// out (rows) = W x + bias for x (columns): a linear layer's product with one row, where W is (out, in). The
// quantized matrix is read once; sums are fp32. `bias` may be null.
template <class T, class Out>
void quantized_matvec(Out* out, const T* x, const QuantizedView& w, const T* bias, Stream stream) {
    if constexpr (std::is_same_v<T, float>)
        w.format->matvec_fp32(out, x, w, bias, stream);
    else if constexpr (std::is_same_v<Out, float>)
        w.format->matvec_widened(out, x, w, bias, stream);
    else
        w.format->matvec_bf16(out, x, w, bias, stream);
}

// The most elements that a decoder decodes at a time. Every block consists of whole runs.
constexpr int kDecodedRun = 32;

// True if each row consists of whole runs. This is so if rows consist of whole blocks; then no decoder of
// single elements needs to be compiled.
template <class Decoder>
constexpr bool kWholeRuns = requires {
    requires Decoder::kElements % kDecodedRun == 0;
};

template <class T, class Decoder>
__global__ void __launch_bounds__(kBlockThreads)
    dequantize_kernel(T* out, Decoder weights, int64_t first, int64_t n) {
    // Rows of whole runs are aligned.
    const bool aligned = kWholeRuns<Decoder> || are_aligned(out);
    for_each_vector<T>(n, aligned, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
        if constexpr (N > 1 || !kWholeRuns<Decoder>) {
            float w[N];
            weights.decode(w, first + i);
            store(out + i, w);
        }
    });
}

template <class T, class Decoder>
void dequantize_with(T* out, const QuantizedView& w, int64_t first_row, int64_t count, Stream stream) {
    const int64_t n = count * w.columns, first = first_row * w.columns;
    const double read = static_cast<double>(quantized_bytes(w)) * count / w.rows;
    const Operation operation("dequantize", 0, read + static_cast<double>(n * sizeof(T)), {},
                              {.form = w.format->name});
    launch<dequantize_kernel<T, Decoder>>(elementwise_blocks<T>(n), kBlockThreads, 0, stream, out, Decoder(w),
                                          first, n);
}

// Calls f with the number of elements that a lane decodes at a time in rows of `columns` elements, as an
// integral constant.
template <class T, class Decoder, class F>
void with_decoded_run(int64_t columns, F&& f) {
    constexpr int N = kFastCpu ? kDecodedRun : kVectorSize<T>;
    if constexpr (kWholeRuns<Decoder>)
        f(std::integral_constant<int, N>());
    else if (columns % N == 0)
        f(std::integral_constant<int, N>());
    else
        f(std::integral_constant<int, 1>());
}

// One warp per row.
template <class T, class Decoder, int N>
__global__ void __launch_bounds__(kBlockThreads)
    dequantize_rows_kernel(T* out, Decoder weights, const int* rows, int64_t count, int64_t columns) {
    const int64_t row = int64_t{blockIdx.x} * warps_per_block() + warp();
    if (row >= count) return;
    for (int64_t c = lane() * N; c < columns; c += kLanes * N) {
        float w[N];
        weights.decode(w, rows[row] * columns + c);
        store(out + row * columns + c, w);
    }
}

template <class T, class Decoder>
void dequantize_rows_with(T* out, const QuantizedView& w, const int* rows, int64_t count, Stream stream) {
    const double bytes = static_cast<double>(quantized_bytes(w)) / w.rows + w.columns * sizeof(T);
    const Operation operation("dequantize_rows", 0, bytes * count);
    with_decoded_run<T, Decoder>(w.columns, [&]<int N>(std::integral_constant<int, N>) {
        launch<dequantize_rows_kernel<T, Decoder, N>>(blocks_of_rows(count), kBlockThreads, 0, stream, out,
                                                      Decoder(w), rows, count, w.columns);
    });
}

// True if each row consists of whole runs of kRun elements.
template <class Decoder, int kRun>
constexpr bool kWholeRunsOf = requires {
    requires Decoder::kElements % kRun == 0;
};

// One warp per output. Each lane has two sums, because every addition waits for the one before it.
template <class T, class Out, class Decoder, int N>
__global__ void __launch_bounds__(kBlockThreads)
    quantized_matvec_kernel(Out* out, const T* x, Decoder weights, const T* bias, int64_t rows,
                            int64_t columns) {
    const int64_t row = int64_t{blockIdx.x} * warps_per_block() + warp();
    if (row >= rows) return;
    Accumulator<N> even, odd;
    const auto add = [&](Accumulator<N>& sums, int64_t c) SIMT_INLINE {
        float w[N];
        weights.decode(w, row * columns + c);
        const Packed<T, N> factors = load<N>(x + c);
        for (int k = 0; k < N; k++) sums[k] += factors[k] * w[k];
    };
    constexpr int kStep = kLanes * N;
    int64_t c = lane() * N;
    for (; c + kStep < columns; c += 2 * kStep) add(even, c), add(odd, c + kStep);
    if constexpr (!kWholeRunsOf<Decoder, 2 * kStep>)
        if (c < columns) add(even, c);
    for (int k = 0; k < N; k++) even[k] += odd[k];
    const float sum = warp_sum(sum_of(even.v));
    if (lane() == 0) out[row] = from_float<Out>(bias ? sum + to_float(bias[row]) : sum);
}

template <class T, class Out, class Decoder>
void quantized_matvec_with(Out* out, const T* x, const QuantizedView& w, const T* bias, Stream stream) {
    const double passed = static_cast<double>(quantized_bytes(w) + w.columns * sizeof(T));
    const Operation operation("quantized_matvec", 2.0 * w.elements(), passed + w.rows * sizeof(Out));
    with_decoded_run<T, Decoder>(w.columns, [&]<int N>(std::integral_constant<int, N>) {
        launch<quantized_matvec_kernel<T, Out, Decoder, N>>(blocks_of_rows(w.rows), kBlockThreads, 0, stream,
                                                            out, x, Decoder(w), bias, w.rows, w.columns);
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
            .to_fp32 = dequantize_with<float, Decoder>,
            .to_bf16 = dequantize_with<bf16, Decoder>,
            .rows_to_fp32 = dequantize_rows_with<float, Decoder>,
            .rows_to_bf16 = dequantize_rows_with<bf16, Decoder>,
            .matvec_fp32 = quantized_matvec_with<float, float, Decoder>,
            .matvec_bf16 = quantized_matvec_with<bf16, bf16, Decoder>,
            .matvec_widened = quantized_matvec_with<bf16, float, Decoder>};
}

// Shared by the decoders.

// Divides a number that is not negative, faster than a signed division.
SIMT_HOST_DEVICE int64_t divided(int64_t i, unsigned by) {
    return static_cast<int64_t>(static_cast<uint64_t>(i) / by);
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
