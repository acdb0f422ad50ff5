// test_attention.cpp - warp products and causal attention, forward and backward, against sums in double
// precision.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/attention.cuh"
#include "test/kernel_test.h"

namespace {

struct Case {
    int batch, heads, head_size, queries, keys;
    // Columns of a packed qkv; a cache with spare rows; rows whose length is no multiple of a vector.
    enum Layout { kPacked, kCache, kUnaligned };
    Layout layout;
    double scale = 1;  // of q, so of the scores
    bool hopper = false;

    int channels() const { return heads * head_size; }
    int spare() const { return layout == kCache ? 3 : 0; }
    int64_t row() const { return layout == kPacked ? 3 * channels() : channels() + (layout == kUnaligned); }
    size_t q_size() const { return batch * queries * row(); }
    size_t kv_size() const { return batch * (keys + spare()) * row(); }
    std::string name() const {
        return "batch " + std::to_string(batch) + ", " + std::to_string(heads) + " heads of " +
               std::to_string(head_size) + ", " + std::to_string(queries) + " queries, " +
               std::to_string(keys) + " keys, layout " + std::to_string(layout);
    }
};

// The arrays q, k and v lie in, or their gradients: one if packed, else three. With the columns' places in
// them.
template <class T>
struct Arrays {
    std::vector<std::vector<T>> host;
    std::vector<std::unique_ptr<DeviceArray<T>>> device;
    T *q, *k, *v;

    Arrays(const Case& c, std::vector<std::vector<T>> values) : host(std::move(values)) {
        for (const std::vector<T>& h : host) device.push_back(std::make_unique<DeviceArray<T>>(h));
        const bool packed = c.layout == Case::kPacked;
        q = device[0]->data();
        k = packed ? q + c.channels() : device[1]->data();
        v = packed ? q + 2 * c.channels() : device[2]->data();
    }
    void download() {
        for (size_t i = 0; i < host.size(); i++) host[i] = device[i]->download();
    }
    // Element (b, row, column) of q, k or v (which = 0, 1, 2), once downloaded.
    double at(const Case& c, int which, int b, int64_t row, int column) const {
        const int64_t rows = which == 0 ? c.queries : c.keys + c.spare();
        const bool packed = c.layout == Case::kPacked;
        const int64_t i = (b * rows + row) * c.row() + column + (packed ? which * c.channels() : 0);
        return to_float(host[packed ? 0 : which][i]);
    }
    // All of q, k or v as (batch, rows, channels).
    std::vector<float> compact(const Case& c, int which) const {
        std::vector<float> values;
        for (int b = 0; b < c.batch; b++)
            for (int i = 0; i < (which == 0 ? c.queries : c.keys); i++)
                for (int j = 0; j < c.channels(); j++)
                    values.push_back(static_cast<float>(at(c, which, b, i, j)));
        return values;
    }
};

template <class T, class Fill>
Arrays<T> make_arrays(const Case& c, Fill fill) {
    if (c.layout == Case::kPacked) return Arrays<T>(c, {fill(c.q_size(), 0)});
    return Arrays<T>(c, {fill(c.q_size(), 0), fill(c.kv_size(), 1), fill(c.kv_size(), 2)});
}
template <class T>
Arrays<T> random_arrays(const Case& c) {
    return make_arrays<T>(
        c, [&](size_t n, int which) { return random_values<T>(n, which == 0 ? c.scale : 1, 7 + which); });
}
template <class T>
Arrays<T> poisoned_arrays(const Case& c) {
    return make_arrays<T>(c, [](size_t n, int) { return poisoned<T>(n); });
}

template <class T>
AttentionInput<T> input_of(const Case& c, const Arrays<T>& arrays) {
    return {c.batch,
            c.heads,
            c.head_size,
            c.queries,
            c.keys,
            arrays.q,
            arrays.k,
            arrays.v,
            c.row(),
            c.row(),
            c.queries * c.row(),
            (c.keys + c.spare()) * c.row(),
            c.hopper};
}

struct Reference {
    std::vector<double> out, lse, dq, dk, dv;
};

// By the definition, one row of scores at a time.
template <class T>
Reference reference(const Case& c, const Arrays<T>& x, const std::vector<double>& dout) {
    const int C = c.channels();
    const size_t rows = static_cast<size_t>(c.batch) * c.queries,
                 key_rows = static_cast<size_t>(c.batch) * c.keys;
    Reference r{std::vector<double>(rows * C), std::vector<double>(rows * c.heads),
                std::vector<double>(rows * C), std::vector<double>(key_rows * C),
                std::vector<double>(key_rows * C)};
    const double scale = 1 / std::sqrt(double(c.head_size));
    for (int b = 0; b < c.batch; b++)
        for (int h = 0; h < c.heads; h++)
            for (int i = 0; i < c.queries; i++) {
                const int seen = c.keys - c.queries + i + 1;
                const size_t query = (b * size_t(c.queries) + i) * C;
                std::vector<double> p(seen), dp(seen, 0.);
                double sum = 0, delta = 0;
                for (int j = 0; j < seen; j++) {
                    for (int e = h * c.head_size; e < (h + 1) * c.head_size; e++) {
                        p[j] += x.at(c, 0, b, i, e) * x.at(c, 1, b, j, e);
                        dp[j] += dout[query + e] * x.at(c, 2, b, j, e);
                    }
                    sum += p[j] = std::exp(p[j] * scale);
                }
                for (int j = 0; j < seen; j++) delta += (p[j] /= sum) * dp[j];
                r.lse[(size_t(b) * c.heads + h) * c.queries + i] = std::log(sum);
                for (int j = 0; j < seen; j++)
                    for (int e = h * c.head_size; e < (h + 1) * c.head_size; e++) {
                        const size_t key = (b * size_t(c.keys) + j) * C + e;
                        const double ds = p[j] * (dp[j] - delta) * scale;
                        r.out[query + e] += p[j] * x.at(c, 2, b, j, e);
                        r.dq[query + e] += ds * x.at(c, 1, b, j, e);
                        r.dk[key] += ds * x.at(c, 0, b, i, e);
                        r.dv[key] += p[j] * dout[query + e];
                    }
            }
    return r;
}

// Both passes once from poisoned outputs, checked; the bytes of all results.
template <class T>
std::vector<unsigned char> run_case(const Case& c, const Arrays<T>& x, const DeviceArray<T>& dout,
                                    const Reference& want) {
    const size_t rows = static_cast<size_t>(c.batch) * c.queries;
    const AttentionInput<T> in = input_of(c, x);
    DeviceArray<T> out(poisoned<T>(rows * c.channels()));
    DeviceArray<float> lse(poisoned<float>(rows * c.heads)), delta(poisoned<float>(rows * c.heads));
    attention_forward(out.data(), lse.data(), in, Stream{});
    EXPECT_LT(relative_error(out.download(), want.out), tolerance<T>());
    EXPECT_LT(relative_error(lse.download(), want.lse), tolerance<T>());
    DeviceArray<T> out_only(poisoned<T>(rows * c.channels()));
    attention_forward(out_only.data(), static_cast<float*>(nullptr), in, Stream{});
    EXPECT_TRUE(bytes_of(out_only.download()) == bytes_of(out.download())) << "other bits without lse";
    if (c.queries != c.keys) return bytes_of(out.download(), lse.download());

    Arrays<T> gradients = poisoned_arrays<T>(c);
    attention_backward(gradients.q, gradients.k, gradients.v, dout.data(), out.data(), lse.data(),
                       delta.data(), in, Stream{});
    gradients.download();
    const std::vector<float> dq = gradients.compact(c, 0), dk = gradients.compact(c, 1),
                             dv = gradients.compact(c, 2);
    EXPECT_LT(relative_error(dq, want.dq), tolerance<T>());
    EXPECT_LT(relative_error(dk, want.dk), tolerance<T>());
    EXPECT_LT(relative_error(dv, want.dv), tolerance<T>());
    return bytes_of(out.download(), lse.download(), dq, dk, dv);
}

// Where attention_hopper.cuh's kernels run: on such a GPU, and in the faithful build.
bool has_hopper_attention() {
    if constexpr (kHopperAttention<bf16>) return device_is_hopper();
    return false;
}

// Calls check(inputs, dout, reference) for the case.
template <class T, class Check>
void with_case(const Case& c, Check check) {
    SCOPED_TRACE(c.name());
    const Arrays<T> x = random_arrays<T>(c);
    const std::vector<T> dout =
        random_values<T>(static_cast<size_t>(c.batch) * c.queries * c.channels(), 1, 11);
    check(x, DeviceArray<T>(dout), reference(c, x, to_doubles(dout)));
}

std::vector<Case> cases() {
    using enum Case::Layout;
    if (kThreadSanitizer) return {{1, 1, 20, 70, 70, kPacked}, {1, 1, 64, 5, 130, kCache}};
    return {
        {1, 1, 8, 1, 1, kPacked},       {2, 3, 8, 63, 63, kPacked},      {1, 2, 20, 64, 64, kPacked},
        {1, 2, 21, 65, 65, kPacked},    {3, 1, 64, 65, 65, kPacked},     {1, 1, 64, 200, 200, kPacked, 3},
        {1, 1, 80, 130, 130, kPacked},  {1, 2, 128, 65, 65, kPacked},    {1, 2, 64, 70, 70, kUnaligned},
        {2, 2, 16, 100, 100, kCache},   {1, 1, 1, 17, 17, kPacked},      {1, 1, 128, 129, 129, kUnaligned},
        {2, 2, 64, 1, 77, kCache},      {2, 1, 32, 5, 130, kCache},      {1, 2, 48, 66, 67, kUnaligned},
        {1, 2, 33, 1, 300, kUnaligned}, {1, 1, 64, 100, 260, kCache, 3}, {1, 1, 32, 5, 67, kCache},
    };
}

template <class T>
class Attention : public testing::Test {};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Attention, Types);

TYPED_TEST(Attention, MatchesTheDefinition) {
    for (const Case& c : cases())
        with_case<TypeParam>(c, [&](const auto& x, const auto& dout, const Reference& want) {
            for_each_order([&] { return run_case(c, x, dout, want); });
        });
}

// Large enough for several tiles of the fast CPU build both ways.
TYPED_TEST(Attention, MatchesTheDefinitionInManyTiles) {
    if (kSmallShapes) GTEST_SKIP() << "slow";
    for (const Case& c : {Case{1, 2, 64, 700, 700, Case::kPacked}, Case{1, 1, 40, 300, 900, Case::kCache}})
        with_case<TypeParam>(
            c, [&](const auto& x, const auto& dout, const Reference& want) { run_case(c, x, dout, want); });
}

TEST(HopperAttention, MatchesTheDefinition) {
    if (!has_hopper_attention())
        GTEST_SKIP() << "needs a GPU of compute capability 9.0, or the faithful build";
    using enum Case::Layout;
    // One tile and less, tiles that are just full and just begun, several rounds of the ring, a cache.
    std::vector<Case> cases{
        {1, 1, 64, 1, 1, kPacked},      {2, 2, 64, 63, 63, kPacked},      {1, 1, 64, 192, 192, kPacked},
        {1, 2, 64, 193, 193, kPacked},  {1, 1, 64, 641, 641, kPacked, 3}, {1, 3, 64, 100, 260, kCache, 3},
        {2, 1, 64, 1, 700, kCache},     {1, 2, 128, 65, 65, kPacked},     {2, 1, 128, 128, 128, kPacked},
        {1, 1, 128, 129, 129, kPacked}, {1, 1, 128, 515, 515, kPacked},   {2, 1, 128, 37, 300, kCache}};
    if (kThreadSanitizer) cases = {{1, 1, 64, 130, 130, kPacked}, {1, 1, 128, 5, 300, kCache}};
    for (Case c : cases) {
        c.hopper = true;
        with_case<bf16>(c, [&](const auto& x, const auto& dout, const Reference& want) {
            for_each_order([&] { return run_case(c, x, dout, want); });
        });
    }
}

// Output, lse and gradients of packed inputs, by one of the two versions of the kernels.
std::vector<double> results_of(Case c, const Arrays<bf16>& x, const DeviceArray<bf16>& dout, bool hopper) {
    c.hopper = hopper;
    const AttentionInput<bf16> in = input_of(c, x);
    const size_t rows = static_cast<size_t>(c.batch) * c.queries;
    DeviceArray<bf16> out(poisoned<bf16>(rows * c.channels()));
    DeviceArray<float> lse(poisoned<float>(rows * c.heads)), delta(poisoned<float>(rows * c.heads));
    const Arrays<bf16> gradients = poisoned_arrays<bf16>(c);
    attention_forward(out.data(), lse.data(), in, Stream{});
    attention_backward(gradients.q, gradients.k, gradients.v, dout.data(), out.data(), lse.data(),
                       delta.data(), in, Stream{});
    std::vector<double> results = to_doubles(out.download());
    for (const std::vector<double>& more :
         {to_doubles(lse.download()), to_doubles(gradients.device[0]->download())})
        results.insert(results.end(), more.begin(), more.end());
    return results;
}

// On a GPU in more blocks than it has multiprocessors.
TEST(HopperAttention, AgreesWithTheCommonKernels) {
    if (!has_hopper_attention())
        GTEST_SKIP() << "needs a GPU of compute capability 9.0, or the faithful build";
    const int length = kSmallShapes ? 130 : kFaithful ? 300 : 3001, heads = kFaithful ? 2 : 16;
    for (const int head_size : {64, 128}) {
        const Case c{2, heads, head_size, length, length, Case::kPacked};
        SCOPED_TRACE(c.name());
        const Arrays<bf16> x = random_arrays<bf16>(c);
        const DeviceArray<bf16> dout(random_values<bf16>(c.q_size() / 3, 1, 11));
        const std::vector<double> common = results_of(c, x, dout, false),
                                  hopper = results_of(c, x, dout, true);
        EXPECT_LT(relative_error(std::vector<float>(hopper.begin(), hopper.end()), common),
                  tolerance<bf16>());
        EXPECT_FALSE(hopper == common) << "the same kernels ran";
        EXPECT_TRUE(results_of(c, x, dout, true) == hopper) << "other bits at the second time";
    }
}

#if !defined(SIMT_GPU)
TYPED_TEST(Attention, DoesNotDependOnTheNumberOfThreads) {
    if (kThreadSanitizer) GTEST_SKIP() << "slow";
    const int before = omp_get_max_threads();
    // One head of few rows is a single block, in which the fast build's products could use all threads.
    for (const Case& c : {Case{2, 3, 64, 150, 150, Case::kPacked}, Case{1, 1, 64, 100, 100, Case::kPacked}})
        with_case<TypeParam>(c, [&](const auto& x, const auto& dout, const Reference& want) {
            omp_set_num_threads(1);
            const std::vector<unsigned char> one = run_case(c, x, dout, want);
            for (const int threads : {2, 3, 5}) {
                omp_set_num_threads(threads);
                EXPECT_TRUE(run_case(c, x, dout, want) == one) << "other bits with " << threads << " threads";
            }
        });
    omp_set_num_threads(before);
}
#endif

#if defined(SIMT_GPU) || SIMT_LANES == 32
constexpr int kRows = 32, kInner = 16, kColumns = 16, kTileStride = 24;

// d = a b, and e = d b with d rounded to T; a (32, 16), b (16, 16), of which `b_by_column` is the transpose.
template <class T>
__global__ void product_kernel(float* d, float* e, const T* a, const T* b, const T* b_by_column) {
    DYNAMIC_SHARED(T, shared);
    T* const tiles[3] = {shared, shared + kRows * kTileStride, shared + (kRows + kInner) * kTileStride};
    for (int i = threadIdx.x; i < kRows * kInner; i += 32)
        tiles[0][i / kInner * kTileStride + i % kInner] = a[i];
    for (int i = threadIdx.x; i < kInner * kColumns; i += 32) {
        tiles[1][i / kColumns * kTileStride + i % kColumns] = b[i];
        tiles[2][i / kInner * kTileStride + i % kInner] = b_by_column[i];
    }
    __syncwarp();
    const FragmentA<T> fragments[2] = {load_a(tiles[0], kTileStride),
                                       load_a(tiles[0] + 16 * kTileStride, kTileStride)};
    FragmentB<T> right[2];
    load_b(right, tiles[2], kTileStride);
    float first[2][2][4] = {}, second[2][2][4] = {};
    mma_tiles(first, fragments, right);
    load_b_transposed(right, tiles[1], kTileStride);
    const FragmentA<T> again[2] = {accumulators_as_a<T>(first[0][0], first[0][1]),
                                   accumulators_as_a<T>(first[1][0], first[1][1])};
    mma_tiles(second, again, right);
    for (int i = 0; i < 16; i++) {
        const int row = 16 * (i / 8) + lane() / 4 + 8 * (i % 4 / 2),
                  column = i / 4 % 2 * 8 + lane() % 4 * 2 + i % 2;
        d[row * kColumns + column] = first[i / 8][i / 4 % 2][i % 4];
        e[row * kColumns + column] = second[i / 8][i / 4 % 2][i % 4];
    }
}

std::vector<double> product(const std::vector<double>& a, const std::vector<double>& b) {
    std::vector<double> d(kRows * kColumns);
    for (int i = 0; i < kRows; i++)
        for (int j = 0; j < kColumns; j++)
            for (int k = 0; k < kInner; k++) d[i * kColumns + j] += a[i * kInner + k] * b[k * kColumns + j];
    return d;
}

TYPED_TEST(Attention, WarpMultipliesTiles) {
    using T = TypeParam;
    const std::vector<T> a = random_values<T>(kRows * kInner, 1, 1),
                         b = random_values<T>(kInner * kColumns, 1, 2);
    std::vector<T> b_by_column(b.size());
    for (int i = 0; i < kInner; i++)
        for (int j = 0; j < kColumns; j++) b_by_column[j * kInner + i] = b[i * kColumns + j];
    const DeviceArray<T> a_device(a), b_device(b), b_by_column_device(b_by_column);
    for_each_order([&] {
        DeviceArray<float> d(poisoned<float>(kRows * kColumns)), e(poisoned<float>(kRows * kColumns));
        launch<product_kernel<T>>(1, 32, (kRows + kInner + kColumns) * kTileStride * sizeof(T), Stream{},
                                  d.data(), e.data(), a_device.data(), b_device.data(),
                                  b_by_column_device.data());
        const std::vector<float> once = d.download();
        EXPECT_LT(relative_error(once, product(to_doubles(a), to_doubles(b))), 1e-6);
        std::vector<T> rounded;
        for (const float x : once) rounded.push_back(from_float<T>(x));
        EXPECT_LT(relative_error(e.download(), product(to_doubles(rounded), to_doubles(b))), 1e-6);
        return bytes_of(once, e.download());
    });
}
#endif

}  // namespace
