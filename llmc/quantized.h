// quantized.h - matrices of weights in a quantized format: what a format is, and what can be done with such a
// matrix: make floats of it, all or some rows, and multiply a row with it.
//
// A format is a value, as a family of models is (family.h): one file has its decoder, the bytes of a matrix
// and its place in files; quantized_formats.h lists them. The decoder is what kernels have of a matrix:
//
//     template <int N> void decode(float (&w)[N], int64_t i) const;   // elements i to i + N - 1
//
// for N = 1, 4, 8, 16 or 32 and an i that is a multiple of it. Decoded values are the same bits everywhere.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#if defined(__AVX512F__)
#define SIMT_AVX512 1  // its masked forms, for of the others g++ 12 warns (GCC's bug 105593)
#endif
#endif

#include "llmc/packed.h"
#include "llmc/work.h"

struct QuantizedView;

struct WeightFormat {
    const char* name;       // as messages and options spell it
    const char* file_type;  // how files name it: GGUF's type, bitsandbytes' quant_type
    int ggml_type;          // its number in GGUF files; -1: not one of theirs
    int block;              // elements that share a scale
    int block_bytes;        // of them, where a matrix is nothing but blocks; else 0
    // Of a matrix of so many elements in memory.
    int64_t (*bytes)(int64_t elements);
    void (*to_fp32)(float* out, const QuantizedView&, int64_t first_row, int64_t count, Stream);
    void (*to_bf16)(bf16* out, const QuantizedView&, int64_t first_row, int64_t count, Stream);
    void (*rows_to_fp32)(float* out, const QuantizedView&, const int* rows, int64_t count, Stream);
    void (*rows_to_bf16)(bf16* out, const QuantizedView&, const int* rows, int64_t count, Stream);
    void (*matvec_fp32)(float* out, const float* x, const QuantizedView&, const float* bias, Stream);
    void (*matvec_bf16)(bf16* out, const bf16* x, const QuantizedView&, const bf16* bias, Stream);
    void (*matvec_widened)(float* out, const bf16* x, const QuantizedView&, const bf16* bias, Stream);
    int halves[2] = {-1, -1};  // where a block of bytes has its fp16 scales; -1: it has none
};

// A matrix in device memory, row-major; null data in a rehearsal.
struct QuantizedView {
    const WeightFormat* format = nullptr;
    const unsigned char* data = nullptr;  // aligned to 16 bytes, quantized_bytes() of them
    int64_t rows = 0, columns = 0;

    int64_t elements() const { return rows * columns; }
    // Of a format that is floats of that type, the first.
    template <class T>
    T* floats() const {
        return const_cast<T*>(reinterpret_cast<const T*>(data));
    }
};

// The bytes that a matrix of so many elements takes in memory, a multiple of 16. The file of the format says
// what lies where.
inline int64_t quantized_bytes(const WeightFormat& format, int64_t elements) {
    return format.bytes(elements);
}
inline int64_t quantized_bytes(const QuantizedView& w) { return quantized_bytes(*w.format, w.elements()); }

// Where the next part of a matrix may start.
constexpr int64_t kQuantizedAlignment = 16;
constexpr int64_t aligned_part(int64_t bytes) {
    return ceil_div(bytes, kQuantizedAlignment) * kQuantizedAlignment;
}

// out (count, columns) = rows of the matrix from first_row on, each element rounded once. `out` is aligned to
// 16 bytes, and the elements before those rows are a multiple of kDecodedRun.
template <class T>
void dequantize_slice(T* out, const QuantizedView& w, int64_t first_row, int64_t count, Stream stream) {
    if constexpr (std::is_same_v<T, float>)
        w.format->to_fp32(out, w, first_row, count, stream);
    else
        w.format->to_bf16(out, w, first_row, count, stream);
}

// out (rows, columns) = the matrix.
template <class T>
void dequantize(T* out, const QuantizedView& w, Stream stream) {
    dequantize_slice(out, w, 0, w.rows, stream);
}

// out (count, columns) = these rows of it, as an embedding looks them up. `rows`, on the device, are in
// range.
template <class T>
void dequantize_rows(T* out, const QuantizedView& w, const int* rows, int64_t count, Stream stream) {
    if constexpr (std::is_same_v<T, float>)
        w.format->rows_to_fp32(out, w, rows, count, stream);
    else
        w.format->rows_to_bf16(out, w, rows, count, stream);
}

// out (rows) = W x + bias for x (columns): a linear layer's product with one row, where W lies (out, in). The
// matrix is read as it is, once; sums are fp32. A null bias is none.
template <class T, class Out>
void quantized_matvec(Out* out, const T* x, const QuantizedView& w, const T* bias, Stream stream) {
    if constexpr (std::is_same_v<T, float>)
        w.format->matvec_fp32(out, x, w, bias, stream);
    else if constexpr (std::is_same_v<Out, float>)
        w.format->matvec_widened(out, x, w, bias, stream);
    else
        w.format->matvec_bf16(out, x, w, bias, stream);
}

// The longest run that decoders decode at a time; every block is whole runs.
constexpr int kDecodedRun = 32;

// Whether rows are whole runs: as they are where a row is whole blocks, so no decoder of single elements need
// be compiled.
template <class Decoder>
constexpr bool kWholeRuns = requires {
    requires Decoder::kElements % kDecodedRun == 0;
};

template <class T, class Decoder>
__global__ void __launch_bounds__(kBlockThreads)
    dequantize_kernel(T* out, Decoder weights, int64_t first, int64_t n) {
    for_each_vector<T>(n, [&]<int N>(int64_t i, std::integral_constant<int, N>) SIMT_INLINE {
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

// Calls f with the elements that a lane decodes at a time in rows of so many, as an integral constant.
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

// One warp a row.
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

// And whether they are whole runs of so many.
template <class Decoder, int kRun>
constexpr bool kWholeRunsOf = requires {
    requires Decoder::kElements % kRun == 0;
};

// One warp an output; two sums a lane, as a sum waits for the one before.
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

// A format with the kernels of its decoder, which has bytes() too.
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

// What decoders share.

// A number from 0 on, divided without the care that signs take.
SIMT_HOST_DEVICE int64_t divided(int64_t i, unsigned by) {
    return static_cast<int64_t>(static_cast<uint64_t>(i) / by);
}

// N bytes as numbers. For N > 1 their address is a multiple of 2.
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

// N numbers of some bits, from bit `shift` of N bytes on.
template <int N>
SIMT_DEVICE void load_numbers(float* q, const unsigned char* p, int shift, int mask) {
#if defined(SIMT_AVX512)
    if constexpr (N % 16 == 0) {  // g++ leaves the loop below scalar in the midst of others
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
// N bytes that are numbers from -128 to 127.
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
    // The exponent's bias is 15 in a half and 127 in a float; subnormals come out right by the product.
    const uint32_t magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
    const uint32_t finite = std::bit_cast<uint32_t>(scaled);
    return std::bit_cast<float>(sign | (magnitude < 0x0f800000u ? finite : 0x7f800000u | magnitude));
#endif
#endif
}

// a * b + c, both rounded: a compiler must not fuse them where files were made with two roundings. To it the
// asm could change the product.
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
