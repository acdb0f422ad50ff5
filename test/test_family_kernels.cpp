// test_family_kernels.cpp - the kernels of Llama's relatives, of adapters and of dropout, compared with plain
// loops in double precision, in every order of threads.
//
// Outputs start as NaN; gradients that are added to start as random numbers.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/dropout.cuh"
#include "llmc/elementwise.cuh"
#include "llmc/embedding.cuh"
#include "llmc/lora.cuh"
#include "llmc/model_positions.h"
#include "llmc/rmsnorm.cuh"
#include "llmc/rope.cuh"
#include "test/kernel_test.h"

namespace {

using Doubles = std::vector<double>;
const Stream kStream{};

template <class T>
class FamilyKernels : public testing::Test {};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(FamilyKernels, Types);

// Rows of different magnitudes, some so small that epsilon matters.
template <class T>
std::vector<T> rows_of_sizes(const MatrixSize& s, uint64_t seed) {
    const float scale[] = {1, 1e-3f, 100};
    std::vector<T> x = random_values<T>(static_cast<size_t>(s.rows) * s.C, 1, seed);
    for (size_t i = 0; i < x.size(); i++) x[i] = from_float<T>(to_float(x[i]) * scale[i / s.C % 3]);
    return x;
}

// Llama's, OLMo's and Gemma's.
constexpr RmsProduct kProducts[] = {{}, {.rounds_row = false}, {.rounds_row = false, .added = 1}};

std::string text(const RmsProduct& product) {
    return product.rounds_row ? " row rounded" : product.added ? " 1 + weight" : " weight";
}
// What a normalized row is multiplied with.
template <class T>
Doubles gains(const std::vector<T>& weight, const RmsProduct& product) {
    Doubles g = to_doubles(weight);
    for (double& x : g) x += product.added;
    return g;
}

// `weight` includes what is added to it.
struct RmsnormReference {
    Doubles out, rstd;
    RmsnormReference(const Doubles& x, const Doubles& weight, double epsilon) : out(x.size()) {
        const size_t C = weight.size();
        for (size_t start = 0; start < x.size(); start += C) {
            double square = 0;
            for (size_t c = 0; c < C; c++) square += x[start + c] * x[start + c] / C;
            rstd.push_back(1 / std::sqrt(square + epsilon));
            for (size_t c = 0; c < C; c++) out[start + c] = x[start + c] * rstd.back() * weight[c];
        }
    }
};

// Adds to dx and dweight their gradients through a row of rmsnorm, from dout.
void add_rmsnorm_gradients(double* dx, double* dweight, const double* dout, const double* x, double rstd,
                           const double* weight, size_t C) {
    double mean = 0;
    for (size_t c = 0; c < C; c++) mean += dout[c] * weight[c] * x[c] * rstd / C;
    for (size_t c = 0; c < C; c++) {
        dx[c] += rstd * (dout[c] * weight[c] - x[c] * rstd * mean);
        dweight[c] += dout[c] * x[c] * rstd;
    }
}

constexpr float kEpsilon = 1e-5f;

TYPED_TEST(FamilyKernels, RmsnormForward) {
    using T = TypeParam;
    for (const RmsProduct& product : kProducts)
        for (const MatrixSize& s : matrix_sizes()) {
            SCOPED_TRACE(text(s) + text(product));
            const Shape matrix{s.rows, s.C}, row{s.C}, column{s.rows};
            const size_t n = static_cast<size_t>(s.rows) * s.C;
            const std::vector<T> x = rows_of_sizes<T>(s, 1), w = random_values<T>(s.C, 1, 2);
            std::vector<T> out, again;
            std::vector<float> rstd;
            for_each_order([&] {
                const DeviceArray<T> d_x(x), d_w(w), d_out(poisoned<T>(n)), d_again(poisoned<T>(n));
                const DeviceArray<float> d_rstd(poisoned<float>(s.rows));
                Tensor<T> t_out = d_out.tensor(matrix), t_again = d_again.tensor(matrix);
                Tensor<float> t_rstd = d_rstd.tensor(column);
                rmsnorm_forward(t_out, t_rstd, d_x.tensor(matrix), d_w.tensor(row), kStream, kEpsilon,
                                product);
                rmsnorm_normalize(t_again, d_x.tensor(matrix), t_rstd, d_w.tensor(row), kStream, product);
                out = d_out.download(), again = d_again.download(), rstd = d_rstd.download();
                return bytes_of(out, rstd);
            });
            const RmsnormReference want(to_doubles(x), gains(w, product), double{kEpsilon});
            EXPECT_LT(relative_error(out, want.out), tolerance<T>());
            EXPECT_LT(relative_error(rstd, want.rstd), tolerance<float>());
            EXPECT_TRUE(bytes_of(again) == bytes_of(out)) << "rmsnorm_normalize makes other bits";
            bool as_rounded = true;
            for (size_t i = 0; i < n; i++) {
                const float exact = to_float(x[i]) * rstd[i / s.C];
                const float row = product.rounds_row ? to_float(from_float<T>(exact)) : exact;
                as_rounded &=
                    to_float(out[i]) == to_float(from_float<T>(row * (to_float(w[i % s.C]) + product.added)));
            }
            EXPECT_TRUE(as_rounded) << "rounded elsewhere";
        }
}

TYPED_TEST(FamilyKernels, ResidualRmsnormForwardIsAdditionThenRmsnorm) {
    using T = TypeParam;
    for (const RmsProduct& product : kProducts)
        for (const MatrixSize& s : matrix_sizes()) {
            SCOPED_TRACE(text(s) + text(product));
            const Shape matrix{s.rows, s.C}, row{s.C}, column{s.rows};
            const size_t n = static_cast<size_t>(s.rows) * s.C;
            const std::vector<T> a = rows_of_sizes<T>(s, 4), b = rows_of_sizes<T>(s, 5);
            const DeviceArray<T> weight(random_values<T>(s.C, 1, 6));
            std::vector<T> added(n);
            for (size_t i = 0; i < n; i++) added[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));

            // What the fused kernel and the separate ones write: sum, out, rstd.
            auto run = [&](bool fused) {
                const DeviceArray<T> d_a(a), d_b(b), d_sum(fused ? poisoned<T>(n) : added),
                    d_out(poisoned<T>(n));
                const DeviceArray<float> d_rstd(poisoned<float>(s.rows));
                Tensor<T> sum = d_sum.tensor(matrix), out = d_out.tensor(matrix);
                Tensor<float> rstd = d_rstd.tensor(column);
                if (fused)
                    residual_rmsnorm_forward(sum, out, rstd, d_a.tensor(matrix), d_b.tensor(matrix),
                                             weight.tensor(row), kStream, kEpsilon, product);
                else
                    rmsnorm_forward(out, rstd, sum, weight.tensor(row), kStream, kEpsilon, product);
                return bytes_of(d_sum.download(), d_out.download(), d_rstd.download());
            };
            std::vector<unsigned char> fused;
            for_each_order([&] { return fused = run(true); });
            EXPECT_TRUE(fused == run(false));
        }
}

#if defined(SIMT_GPU)  // g++ may fuse other additions and products in one than in the other
// What rmsnorm's kernels write if a lane keeps kKept vectors of its row; with 0 it reads the row again.
template <class T, int kKept>
std::vector<unsigned char> rmsnorm_bits(const MatrixSize& s) {
    constexpr int N = kVectorSize<T>;
    const size_t n = static_cast<size_t>(s.rows) * s.C;
    const DeviceArray<T> x(random_values<T>(n, 2, 31)), b(random_values<T>(n, 1, 32)),
        w(random_values<T>(s.C, 1, 33)), dx(random_values<T>(n, 1, 34));
    const DeviceArray<T> out(poisoned<T>(n)), sum(poisoned<T>(n)), out_of_sum(poisoned<T>(n));
    const DeviceArray<float> rstd(poisoned<float>(s.rows)), rstd_of_sum(poisoned<float>(s.rows));
    const dim3 blocks(blocks_of_rows(s.rows));
    launch<rmsnorm_forward_kernel<T, N, kKept, true>>(blocks, kBlockThreads, 0, kStream, out_of_sum.data(),
                                                      rstd_of_sum.data(), sum.data(), x.data(), b.data(),
                                                      w.data(), s.rows, s.C, s.C, kEpsilon, RmsProduct{});
    launch<rmsnorm_forward_kernel<T, N, kKept, false>>(blocks, kBlockThreads, 0, kStream, out.data(),
                                                       rstd.data(), nullptr, x.data(), nullptr, w.data(),
                                                       s.rows, s.C, s.C, kEpsilon, RmsProduct{});
    launch<rmsnorm_backward_input_kernel<T, N, kKept>>(blocks, kBlockThreads, 0, kStream, dx.data(), b.data(),
                                                       x.data(), rstd.data(), w.data(), s.rows, s.C, s.C,
                                                       0.f);
    return bytes_of(out.download(), sum.download(), out_of_sum.download(), dx.download(), rstd.download(),
                    rstd_of_sum.download());
}

TYPED_TEST(FamilyKernels, RmsnormOfRowsThatAreKeptHasTheSameBits) {
    using T = TypeParam;
    for (const int missing : {0, 1, 3}) {  // vectors missing from the most that are kept
        const auto size = [&](int kept) {
            return MatrixSize{11, (kept * kLanes - missing) * kVectorSize<T>};
        };
        for_each_order([&] {
            const std::vector<unsigned char> bits = rmsnorm_bits<T, 4>(size(4));
            EXPECT_TRUE(bits == (rmsnorm_bits<T, 0>(size(4))));
            EXPECT_TRUE((rmsnorm_bits<T, 8>(size(8))) == (rmsnorm_bits<T, 0>(size(8))));
            EXPECT_TRUE((rmsnorm_bits<T, 16>(size(16))) == (rmsnorm_bits<T, 0>(size(16))));
            return bits;
        });
    }
}
#endif

TYPED_TEST(FamilyKernels, RmsnormBackward) {
    using T = TypeParam;
    for (const RmsProduct& product : kProducts)
        for (const MatrixSize& s : matrix_sizes()) {
            SCOPED_TRACE(text(s) + text(product));
            const Shape matrix{s.rows, s.C}, row{s.C}, column{s.rows};
            const size_t n = static_cast<size_t>(s.rows) * s.C, C = s.C;
            const std::vector<T> x = rows_of_sizes<T>(s, 11), w = random_values<T>(C, 1, 12),
                                 dout = random_values<T>(n, 1, 13);
            const std::vector<T> dx_0 = random_values<T>(n, 1, 14), dw_0 = random_values<T>(C, 3, 15);
            const RmsnormReference forward(to_doubles(x), gains(w, product), double{kEpsilon});
            const std::vector<float> rstd(forward.rstd.begin(), forward.rstd.end());
            std::vector<T> dx, dw, dx_alone;
            for_each_order([&] {
                const DeviceArray<T> d_x(x), d_w(w), d_dout(dout), d_dx(dx_0), d_dw(dw_0), d_dx_alone(dx_0);
                const DeviceArray<float> d_rstd(rstd);
                const Shape scratch_shape = column_sums_scratch(s.rows, s.C, 1);
                const DeviceArray<float> d_scratch(poisoned<float>(scratch_shape.size()));
                Tensor<T> t_dx = d_dx.tensor(matrix), t_dw = d_dw.tensor(row);
                Tensor<float> scratch = d_scratch.tensor(scratch_shape);
                rmsnorm_backward(t_dx, t_dw, scratch, d_dout.tensor(matrix), d_x.tensor(matrix),
                                 d_rstd.tensor(column), d_w.tensor(row), kStream, product);
                Tensor<T> t_dx_alone = d_dx_alone.tensor(matrix), frozen;
                Tensor<float> none;
                rmsnorm_backward(t_dx_alone, frozen, none, d_dout.tensor(matrix), d_x.tensor(matrix),
                                 d_rstd.tensor(column), d_w.tensor(row), kStream, product);
                dx = d_dx.download(), dw = d_dw.download(), dx_alone = d_dx_alone.download();
                return bytes_of(dx, dw);
            });
            Doubles want_dx = to_doubles(dx_0), want_dw = to_doubles(dw_0);
            const Doubles doubles_x = to_doubles(x), doubles_w = gains(w, product),
                          doubles_dout = to_doubles(dout);
            for (size_t i = 0; i < n; i += C)
                add_rmsnorm_gradients(&want_dx[i], want_dw.data(), &doubles_dout[i], &doubles_x[i],
                                      forward.rstd[i / C], doubles_w.data(), C);
            EXPECT_LT(relative_error(dx, want_dx), tolerance<T>());
            EXPECT_LT(relative_error(dw, want_dw), tolerance<T>());
            EXPECT_TRUE(bytes_of(dx_alone) == bytes_of(dx)) << "a frozen weight changes dx";
        }
}

// Rows that are parts of wider rows, as OLMo 2 normalizes queries and keys: the rest stays as it is.
TYPED_TEST(FamilyKernels, RmsnormOfPartsOfRows) {
    using T = TypeParam;
    struct Case {
        int rows, C, first, apart;
    };
    for (const Case& s : {Case{37, 64, 128, 256}, {5, 36, 72, 144}, {9, 18, 72, 108}, {3, 72, 0, 108}}) {
        SCOPED_TRACE(std::to_string(s.C) + " of " + std::to_string(s.apart));
        const size_t n = static_cast<size_t>(s.rows) * s.apart;
        const std::vector<T> x = random_values<T>(n, 1, 41), dout = random_values<T>(n, 1, 42),
                             dx_0 = random_values<T>(n, 1, 45), w = random_values<T>(s.C, 1, 43),
                             dw_0 = random_values<T>(s.C, 3, 44);
        std::vector<T> out, dx, dw;
        for_each_order([&] {
            const DeviceArray<T> d_x(x), d_out(x), d_dout(dout), d_dx(dx_0), d_w(w), d_dw(dw_0);
            const DeviceArray<float> d_rstd(poisoned<float>(s.rows));
            const Shape scratch_shape = column_sums_scratch(s.rows, s.C, 1), part{s.rows, s.C};
            const DeviceArray<float> d_scratch(poisoned<float>(scratch_shape.size()));
            const Tensor<T> t_x(d_x.data() + s.first, part), t_dout(d_dout.data() + s.first, part),
                t_w = d_w.tensor({s.C});
            Tensor<T> t_out(d_out.data() + s.first, part), t_dx(d_dx.data() + s.first, part);
            Tensor<T> t_dw = d_dw.tensor({s.C});
            Tensor<float> rstd = d_rstd.tensor({s.rows}), scratch = d_scratch.tensor(scratch_shape);
            rmsnorm_forward(t_out, rstd, t_x, t_w, kStream, kEpsilon, {}, s.apart);
            rmsnorm_backward(t_dx, t_dw, scratch, t_dout, t_x, rstd, t_w, kStream, {}, s.apart);
            out = d_out.download(), dx = d_dx.download(), dw = d_dw.download();
            return bytes_of(out, dx, dw);
        });
        const Doubles in = to_doubles(x), d = to_doubles(dout), weight = to_doubles(w);
        Doubles want = in, want_dx = to_doubles(dx_0), want_dw = to_doubles(dw_0);
        for (size_t at = s.first; at < n; at += s.apart) {
            const RmsnormReference row(Doubles(&in[at], &in[at] + s.C), weight, double{kEpsilon});
            std::copy(row.out.begin(), row.out.end(), &want[at]);
            add_rmsnorm_gradients(&want_dx[at], want_dw.data(), &d[at], &in[at], row.rstd[0], weight.data(),
                                  s.C);
        }
        EXPECT_LT(relative_error(out, want), tolerance<T>());
        EXPECT_LT(relative_error(dx, want_dx), tolerance<T>());
        EXPECT_LT(relative_error(dw, want_dw), tolerance<T>());
    }
}

// Compared with inv_freq of `transformers` 5.23.
TEST(InverseFrequencies, AreThoseOfTransformers) {
    auto expect = [](const std::vector<float>& got, const Doubles& want) {
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < got.size(); i++) EXPECT_NEAR(got[i], want[i], 2e-7 * want[i]) << i;
    };
    expect(inverse_frequencies(16, {.theta = 1e5}),
           {1, 0.237137362, 0.0562341288, 0.0133352149, 0.00316227786, 0.000749894185, 0.00017782794,
            4.21696532e-05});
    expect(inverse_frequencies(16, {.type = RopeType::kLinear, .factor = 2.5}),
           {0.400000006, 0.1264911, 0.0399999991, 0.0126491114, 0.00399999972, 0.00126491114, 0.000400000019,
            0.000126491112});
    expect(inverse_frequencies(24, {.type = RopeType::kLlama3, .theta = 5e5, .factor = 32}),
           {1, 0.335031629, 0.112246193, 0.0376060307, 0.0125992084, 0.00422113482, 0.000429556705,
            1.48064501e-05, 4.96062694e-06, 1.66196742e-06, 5.5681187e-07, 1.86549485e-07});
    RopeScaling yarn{
        .type = RopeType::kYarn, .theta = 5e5, .factor = 4, .original_max_position_embeddings = 32768};
    expect(inverse_frequencies(24, yarn),
           {1.0, 0.335031629, 0.112246193, 0.0376060307, 0.0125992084, 0.00342967198, 0.000883883389,
            0.000207290301, 3.96850155e-05, 1.32957393e-05, 4.45449496e-06, 1.49239588e-06});
    EXPECT_DOUBLE_EQ(attention_factor(yarn), 1.138629436111989);
    yarn = {.type = RopeType::kYarn,
            .factor = 40,
            .original_max_position_embeddings = 4096,
            .beta_fast = 20,
            .beta_slow = 2,
            .truncate = false,
            .mscale = 0.7,
            .mscale_all_dim = 1.3};
    expect(inverse_frequencies(24, yarn),
           {1.0, 0.464158893, 0.215443447, 0.100000001, 0.046415884, 0.018319618, 0.00525321346,
            0.000929809292, 5.38608547e-05, 2.49999994e-05, 1.16039737e-05, 5.38608538e-06});
    EXPECT_DOUBLE_EQ(attention_factor(yarn), 0.8504057857806258);
    yarn.attention_factor = 1.5;
    EXPECT_EQ(attention_factor(yarn), 1.5);
    const RopeScaling dynamic{
        .type = RopeType::kDynamic, .factor = 2.5, .original_max_position_embeddings = 2048};
    expect(inverse_frequencies(20, dynamic, 3000),
           {1.0, 0.365419209, 0.133531198, 0.0487948582, 0.0178305786, 0.00651563657, 0.00238093827,
            0.000870040851, 0.000317929575, 0.000116177624});
    EXPECT_EQ(inverse_frequencies(20, dynamic, 2048), inverse_frequencies(20, {}));
}

// Packed queries, keys and values.
struct HeadsCase {
    int batch, seq_len, heads, kv_heads, head_size;
    int turned() const { return heads + kv_heads; }
    int row() const { return (heads + 2 * kv_heads) * head_size; }
    size_t size() const { return static_cast<size_t>(batch) * seq_len * row(); }
    Shape shape() const { return {batch, seq_len, row()}; }
};

std::string text(const HeadsCase& s) {
    return std::to_string(s.batch) + " x " + std::to_string(s.seq_len) + ", heads " +
           std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + " of " + std::to_string(s.head_size);
}

std::vector<HeadsCase> heads_cases() {
    if (kSmallShapes) return {{2, 3, 2, 1, 6}, {1, 9, 3, 3, 64}};
    return {{1, 1, 1, 1, 2},   {2, 3, 2, 1, 6},     {1, 40, 9, 3, 64}, {3, 17, 8, 2, 128},
            {2, 5, 7, 7, 96},  {1, 5, 5, 2, 70},    {2, 33, 4, 2, 80}, {1, 3, 5, 1, 256},
            {1, 2, 2, 2, 130}, {1, 2, 14, 14, 128}, {1, 4, 2, 1, 512}};
}

TYPED_TEST(FamilyKernels, Rope) {
    using T = TypeParam;
    for (const HeadsCase& s : heads_cases()) {
        for (int first_position : {0, 3000, (1 << 21) - s.seq_len, -1}) {  // -1: positions of documents
            SCOPED_TRACE(text(s) + " from " + std::to_string(first_position));
            std::vector<int> positions(s.size() / s.row());
            for (size_t row = 0; row < positions.size(); row++) {
                const uint64_t any = random_bits(22, row) % static_cast<uint64_t>(s.seq_len);
                positions[row] = first_position < 0 ? static_cast<int>(any)
                                                    : first_position + static_cast<int>(row % s.seq_len);
            }
            const DeviceArray<int> d_positions(positions);
            const Shape by_row{static_cast<int64_t>(positions.size()) / s.seq_len, s.seq_len};
            const Tensor<int> t_positions = first_position < 0 ? d_positions.tensor(by_row) : Tensor<int>();
            const std::vector<T> qkv = random_values<T>(s.size(), 1, 21);
            // From 3000 on the first half of the channels, or all but an odd one, are rotated, and queries
            // grow with their position.
            Rotation of = {s.heads, s.kv_heads, s.head_size, s.head_size};
            RopeScaling rope;
            if (first_position == 3000) {
                rope.partial_rotary_factor = s.head_size > 2 ? 0.5 : 1;
                of.rotated = rope.rotated(s.head_size), of.scale = 1.25f, of.beta = 0.1f, of.original = 700;
            }
            const std::vector<float> frequencies = inverse_frequencies(s.head_size, rope);
            const int half = of.rotated / 2;
            std::vector<T> turned_qkv, back;
            for_each_order([&] {
                const DeviceArray<T> d_qkv(qkv);
                const DeviceArray<float> d_frequencies(frequencies);
                Tensor<T> t_qkv = d_qkv.tensor(s.shape());
                rope_forward(t_qkv, d_frequencies.tensor({half}), of, std::max(first_position, 0),
                             t_positions, kStream);
                turned_qkv = d_qkv.download();
                rope_backward(t_qkv, d_frequencies.tensor({half}), of, std::max(first_position, 0),
                              t_positions, kStream);
                back = d_qkv.download();
                return bytes_of(turned_qkv, back);
            });
            Doubles want = to_doubles(qkv), want_back = want;
            bool others_kept = true;
            for (size_t row = 0; row < s.size() / s.row(); row++) {
                const float position = static_cast<float>(positions[row]);
                for (int h = 0; h < s.heads + 2 * s.kv_heads; h++) {
                    const size_t at = row * s.row() + h * s.head_size;
                    const double turns = std::floor(position / of.original);
                    const double factor =
                        h < s.heads ? of.scale * (1 + of.beta * std::log(1 + turns)) : of.scale;
                    const int turned = h < s.turned() ? of.rotated : 0;
                    for (int i = 0; i < turned / 2; i++) {
                        const size_t low = at + i, high = low + half;
                        const double angle = position * frequencies[i], a = want[low], b = want[high];
                        want[low] = factor * (a * std::cos(angle) - b * std::sin(angle));
                        want[high] = factor * (b * std::cos(angle) + a * std::sin(angle));
                        for (const size_t x : {low, high}) want_back[x] *= factor * factor;
                    }
                    for (size_t x = at + turned; x < at + s.head_size; x++)
                        others_kept &= bytes_of(std::vector{turned_qkv[x]}) == bytes_of(std::vector{qkv[x]});
                }
            }
            const double exact = std::is_same_v<T, float> ? 2e-7 : tolerance<T>();
            EXPECT_LT(relative_error(turned_qkv, want), exact);
            EXPECT_LT(relative_error(back, want_back), exact);
            EXPECT_TRUE(others_kept) << "values, or channels that are not rotated, have changed";
        }
    }
}

// Each position's cosine and sine: pairs (1, 0), rotated by it.
TEST(Rope, AnglesAreAccurateToTwoMillionPositions) {
    const int positions = kSmallShapes ? 500 : 1 << 14, half = 16;
    const std::vector<float> frequencies = inverse_frequencies(2 * half, {.theta = 500});
    for (int first : {0, 4000, 1 << 17, (1 << 21) - positions}) {
        std::vector<float> pairs(static_cast<size_t>(positions) * 2 * half);
        for (size_t i = 0; i < pairs.size(); i++) pairs[i] = i / half % 2 == 0;
        const DeviceArray<float> d_pairs(pairs), d_frequencies(frequencies);
        Tensor<float> t_pairs = d_pairs.tensor({1, positions, 2 * half});
        rope_forward(t_pairs, d_frequencies.tensor({half}), {1, 0, 2 * half, 2 * half}, first, {}, kStream);
        pairs = d_pairs.download();
        double worst = 0;
        for (size_t i = 0; i < pairs.size(); i++) {
            const float position = static_cast<float>(first + i / (2 * half));
            const double angle = position * frequencies[i % half];
            const double want = i / half % 2 == 0 ? std::cos(angle) : std::sin(angle);
            worst = std::max(worst, std::abs(pairs[i] - want));
        }
        EXPECT_LT(worst, 1.2e-7) << "from position " << first;
    }
}

std::vector<HeadsCase> head_norm_cases() {
    std::vector<HeadsCase> cases = heads_cases();
    cases.push_back({2, 3, 3, 1, 7});
    if (!kSmallShapes)
        cases.insert(cases.end(), {{2, 300, 2, 1, 16}, {1, 37, 3, 2, 1}});  // several chunks of rows
    return cases;
}

// Heads of different magnitudes.
template <class T>
std::vector<T> heads_of_sizes(const HeadsCase& s, uint64_t seed) {
    return rows_of_sizes<T>({static_cast<int>(s.size()) / s.head_size, s.head_size}, seed);
}

TYPED_TEST(FamilyKernels, HeadNormForward) {
    using T = TypeParam;
    for (const RmsProduct& product : kProducts)
        for (const HeadsCase& s : head_norm_cases()) {
            SCOPED_TRACE(text(s) + text(product));
            const std::vector<T> qkv = heads_of_sizes<T>(s, 22),
                                 q_weight = random_values<T>(s.head_size, 1, 23),
                                 k_weight = random_values<T>(s.head_size, 1, 24);
            std::vector<T> out, in_place;
            for_each_order([&] {
                const DeviceArray<T> d_qkv(qkv), d_out(poisoned<T>(s.size())), d_q_weight(q_weight),
                    d_k_weight(k_weight);
                Tensor<T> t_qkv = d_qkv.tensor(s.shape()), t_out = d_out.tensor(s.shape());
                for (Tensor<T>* to : {&t_out, &t_qkv})
                    head_norm_forward(*to, t_qkv, d_q_weight.tensor({s.head_size}),
                                      d_k_weight.tensor({s.head_size}), s.heads, s.kv_heads, kStream,
                                      kEpsilon, product);
                out = d_out.download(), in_place = d_qkv.download();
                return bytes_of(out);
            });
            Doubles want;
            bool values_kept = true;
            for (size_t at = 0; at < s.size(); at += s.head_size) {
                const int head = static_cast<int>(at % s.row()) / s.head_size;
                const std::vector<T> one(qkv.begin() + at, qkv.begin() + at + s.head_size);
                const bool normalized = head < s.turned();
                const RmsnormReference reference(
                    to_doubles(one), gains(head < s.heads ? q_weight : k_weight, product), double{kEpsilon});
                const Doubles part = normalized ? reference.out : to_doubles(one);
                want.insert(want.end(), part.begin(), part.end());
                values_kept &= normalized ||
                               bytes_of(std::vector<T>(out.begin() + at, out.begin() + at + s.head_size)) ==
                                   bytes_of(one);
            }
            EXPECT_LT(relative_error(out, want), tolerance<T>());
            EXPECT_TRUE(values_kept) << "other values";
            EXPECT_TRUE(bytes_of(in_place) == bytes_of(out)) << "other bits in place";
        }
}

TYPED_TEST(FamilyKernels, HeadNormBackward) {
    using T = TypeParam;
    for (const RmsProduct& product : kProducts)
        for (const HeadsCase& s : head_norm_cases()) {
            SCOPED_TRACE(text(s) + text(product));
            const int hs = s.head_size;
            const Shape row{hs};
            const std::vector<T> qkv = heads_of_sizes<T>(s, 25), q_weight = random_values<T>(hs, 1, 26),
                                 k_weight = random_values<T>(hs, 1, 27),
                                 d_qkv_0 = random_values<T>(s.size(), 1, 28),
                                 dq_0 = random_values<T>(hs, 3, 29), dk_0 = random_values<T>(hs, 3, 30);
            std::vector<T> d_qkv, dq, dk, d_qkv_alone;
            for_each_order([&] {
                const DeviceArray<T> x(qkv), d_x(d_qkv_0), d_x_alone(d_qkv_0), qw(q_weight), kw(k_weight),
                    d_qw(dq_0), d_kw(dk_0);
                const Shape scratch_shape = head_norm_scratch(s.batch * s.seq_len, hs);
                const DeviceArray<float> d_scratch(poisoned<float>(scratch_shape.size()));
                Tensor<T> t_d_x = d_x.tensor(s.shape()), t_d_qw = d_qw.tensor(row), t_d_kw = d_kw.tensor(row);
                Tensor<float> scratch = d_scratch.tensor(scratch_shape);
                head_norm_backward(t_d_x, t_d_qw, t_d_kw, scratch, x.tensor(s.shape()), qw.tensor(row),
                                   kw.tensor(row), s.heads, s.kv_heads, kStream, kEpsilon, product);
                Tensor<T> t_d_x_alone = d_x_alone.tensor(s.shape()), frozen;
                Tensor<float> none;
                head_norm_backward(t_d_x_alone, frozen, frozen, none, x.tensor(s.shape()), qw.tensor(row),
                                   kw.tensor(row), s.heads, s.kv_heads, kStream, kEpsilon, product);
                d_qkv = d_x.download(), dq = d_qw.download(), dk = d_kw.download();
                d_qkv_alone = d_x_alone.download();
                return bytes_of(d_qkv, dq, dk);
            });
            const Doubles x = to_doubles(qkv), d_out = to_doubles(d_qkv_0);
            Doubles want = d_out, want_dq = to_doubles(dq_0), want_dk = to_doubles(dk_0);
            for (size_t at = 0; at < s.size(); at += hs) {
                const int head = static_cast<int>(at % s.row()) / hs;
                if (head >= s.turned()) continue;
                const bool query = head < s.heads;
                const Doubles w = gains(query ? q_weight : k_weight, product);
                const RmsnormReference forward(Doubles(x.begin() + at, x.begin() + at + hs), w,
                                               double{kEpsilon});
                std::fill_n(want.begin() + at, hs, 0.0);
                add_rmsnorm_gradients(&want[at], (query ? want_dq : want_dk).data(), &d_out[at], &x[at],
                                      forward.rstd[0], w.data(), hs);
            }
            EXPECT_LT(relative_error(d_qkv, want), tolerance<T>());
            EXPECT_LT(relative_error(dq, want_dq), tolerance<T>());
            EXPECT_LT(relative_error(dk, want_dk), tolerance<T>());
            EXPECT_TRUE(bytes_of(d_qkv_alone) == bytes_of(d_qkv))
                << "frozen weights change the gradients of qkv";
        }
}

// GELU and its derivative.
struct GeluReference {
    double out, slope;
    explicit GeluReference(double x) {
        const double scale = std::sqrt(2 / std::acos(-1.0)),
                     t = std::tanh(scale * (x + 0.044715 * x * x * x));
        out = x / 2 * (1 + t);
        slope = (1 + t) / 2 + x / 2 * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x);
    }
};

std::vector<MatrixSize> swiglu_sizes() {
    std::vector<MatrixSize> sizes = matrix_sizes();
    if (!kSmallShapes) sizes.insert(sizes.end(), {{2, 4096}, {3, 5000}});  // rows in several pieces
    return sizes;
}

// [gate | up] by row, also with gates where sigmoid and tanh are flat.
template <class T>
std::vector<T> gates_and_ups(const MatrixSize& s, uint64_t seed) {
    std::vector<T> x = random_values<T>(static_cast<size_t>(s.rows) * 2 * s.C, 2, seed);
    const float far[] = {-1000.f, -100.f, -20.f, 0.f, 20.f, 100.f, 1000.f};
    for (size_t i = 0; i < std::min<size_t>(s.C, std::size(far)); i++)
        x[(s.rows - 1) * size_t{2} * s.C + i] = from_float<T>(far[i]);
    return x;
}

TYPED_TEST(FamilyKernels, SwigluAndGegluForward) {
    using T = TypeParam;
    for (const bool gelu : {false, true})
        for (const MatrixSize& s : swiglu_sizes()) {
            SCOPED_TRACE(text(s) + (gelu ? " GeGLU" : ""));
            const size_t F = s.C, n = s.rows * F;
            const std::vector<T> x = gates_and_ups<T>(s, 31);
            std::vector<T> out;
            for_each_order([&] {
                const DeviceArray<T> d_x(x), d_out(poisoned<T>(n));
                Tensor<T> t_out = d_out.tensor({s.rows, s.C});
                const Tensor<T> t_x = d_x.tensor({s.rows, 2 * s.C});
                gelu ? geglu_forward(t_out, t_x, kStream) : swiglu_forward(t_out, t_x, kStream);
                return bytes_of(out = d_out.download());
            });
            double worst = 0;
            for (size_t i = 0; i < n; i++) {
                const double gate = to_float(x[i / F * 2 * F + i % F]),
                             up = to_float(x[i / F * 2 * F + F + i % F]);
                const double want = (gelu ? GeluReference(gate).out : gate / (1 + std::exp(-gate))) * up;
                const double error = std::abs(to_float(out[i]) - want) / std::max(1.0, std::abs(want));
                if (!(error <= worst)) worst = error;
            }
            const double of_float = gelu ? 3e-6 : 1e-6;  // 1 + tanh cancels for negative gates
            EXPECT_LT(worst, (std::is_same_v<T, float> ? of_float : tolerance<T>()));
        }
}

TYPED_TEST(FamilyKernels, SwigluAndGegluBackward) {
    using T = TypeParam;
    for (const bool gelu : {false, true})
        for (const MatrixSize& s : swiglu_sizes()) {
            SCOPED_TRACE(text(s) + (gelu ? " GeGLU" : ""));
            const size_t F = s.C, n = s.rows * F;
            const std::vector<T> x = gates_and_ups<T>(s, 32), dout = random_values<T>(n, 1, 33);
            const Shape wide{s.rows, 2 * s.C};
            std::vector<T> dx, in_place;
            for_each_order([&] {
                const DeviceArray<T> d_x(x), d_dout(dout), d_dx(poisoned<T>(2 * n));
                Tensor<T> t_dx = d_dx.tensor(wide), t_x = d_x.tensor(wide);
                for (Tensor<T>* to : {&t_dx, &t_x}) {
                    const Tensor<T> t_dout = d_dout.tensor({s.rows, s.C});
                    gelu ? geglu_backward(*to, t_dout, t_x, kStream)
                         : swiglu_backward(*to, t_dout, t_x, kStream);
                }
                dx = d_dx.download(), in_place = d_x.download();
                return bytes_of(dx);
            });
            Doubles want(2 * n);
            for (size_t i = 0; i < n; i++) {
                const size_t gate_at = i / F * 2 * F + i % F;
                const double gate = to_float(x[gate_at]), up = to_float(x[gate_at + F]),
                             d = to_float(dout[i]);
                const double sigmoid = 1 / (1 + std::exp(-gate));
                const GeluReference of_gelu(gate);
                want[gate_at] = d * up * (gelu ? of_gelu.slope : sigmoid * (1 + gate * (1 - sigmoid)));
                want[gate_at + F] = d * (gelu ? of_gelu.out : gate * sigmoid);
            }
            EXPECT_LT(relative_error(dx, want), tolerance<T>());
            EXPECT_TRUE(bytes_of(in_place) == bytes_of(dx));
        }
}

// Parts of different widths and scales, and one scale for all.
TYPED_TEST(FamilyKernels, ScaleColumns) {
    using T = TypeParam;
    for (const ColumnScales& s :
         {ColumnScales{{3, 5, 21}, {2, -0.5f, 4}}, ColumnScales{{21, 21, 21}, {3, 3, 3}}}) {
        for (int rows : {1, 37, 1000}) {
            const std::vector<T> x = random_values<T>(static_cast<size_t>(rows) * 21, 1, 7);
            std::vector<T> out;
            for_each_order([&] {
                const DeviceArray<T> d(x);
                Tensor<T> t = d.tensor({rows, 21});
                scale_columns(t, s, kStream);
                return bytes_of(out = d.download());
            });
            bool same = true;
            for (size_t i = 0; i < x.size(); i++) {
                const int c = static_cast<int>(i % 21);
                const float scale = c < s.ends[0] ? s.scales[0] : c < s.ends[1] ? s.scales[1] : s.scales[2];
                same &= to_float(out[i]) == to_float(from_float<T>(to_float(x[i]) * scale));
            }
            EXPECT_TRUE(same) << rows;
        }
    }
}

// An element is zero with the probability, else scaled so that the mean stays. The same key and place give
// the same zeros in any build; other keys and places give others.
TYPED_TEST(FamilyKernels, Dropout) {
    using T = TypeParam;
    constexpr size_t kCount = 40003;
    constexpr double kProbability = 0.3;
    const std::vector<T> ones(kCount, from_float<T>(1.f));
    // The result from element `first` on.
    const auto dropped = [&](uint64_t sequence, uint64_t place, bool adds, size_t first = 0) {
        const size_t count = kCount - first;
        std::vector<T> out;
        for_each_order([&] {
            const DeviceArray<T> d(std::vector<T>(count, ones[0])),
                to(std::vector<T>(count, adds ? ones[0] : poisoned<T>(1)[0]));
            const DeviceArray<uint64_t> key(1);
            set_dropout_key(key.data(), 5, sequence, kStream);
            const Shape shape{static_cast<int64_t>(count)};
            Tensor<T> t = to.tensor(shape);
            const Dropout at = from_element(dropout_at(key.data(), place, kProbability), int64_t(first));
            adds ? dropout_add(t, d.tensor(shape), at, kStream) : dropout(t, d.tensor(shape), at, kStream);
            return bytes_of(out = to.download());
        });
        return to_doubles(out);
    };
    const Doubles first = dropped(11, 3, false);
    const double kept = to_float(from_float<T>(dropout_at(nullptr, 0, kProbability).scale));
    size_t zeros = 0;
    for (const double x : first) {
        ASSERT_TRUE(x == 0 || x == kept) << x;
        zeros += x == 0;
    }
    EXPECT_NEAR(static_cast<double>(zeros) / kCount, kProbability, 0.01);  // 4 standard deviations
    EXPECT_EQ(dropped(11, 3, false), first);
    const Doubles added = dropped(11, 3, true);
    const double one_more = to_float(from_float<T>(1 + dropout_at(nullptr, 0, kProbability).scale));
    for (size_t i = 0; i < kCount; i++) ASSERT_EQ(added[i], first[i] == 0 ? 1 : one_more);
    for (const size_t from : {kCount - 1003, kCount - 1002}) {  // the end of a larger tensor
        EXPECT_EQ(dropped(11, 3, false, from), Doubles(first.begin() + from, first.end())) << from;
        EXPECT_EQ(dropped(11, 3, true, from), Doubles(added.begin() + from, added.end())) << from;
    }
    for (const Doubles& other : {dropped(12, 3, false), dropped(11, 4, false)}) {
        size_t same = 0;
        for (size_t i = 0; i < kCount; i++) same += other[i] == first[i];
        EXPECT_NEAR(static_cast<double>(same) / kCount, 1 - 2 * kProbability * (1 - kProbability), 0.015);
    }
    EXPECT_FALSE(dropout_at(nullptr, 0, 0));
}

// The rows of a soft prompt come before every sequence, at the first positions; their gradients are the sums
// over the sequences.
TYPED_TEST(FamilyKernels, SoftPrompts) {
    using T = TypeParam;
    constexpr int kBatch = 3, kLength = 5, kPrompt = 4, kVocabulary = 11, kAll = kPrompt + kLength;
    constexpr EmbeddingScales kScales = {2, 4};  // powers of two, which round nothing
    for (const int C : {8, 13, 100}) {
        SCOPED_TRACE(C);
        const auto wte = random_values<T>(static_cast<size_t>(kVocabulary * C), 1, 1);
        const auto wpe = random_values<T>(static_cast<size_t>(kAll * C), 1, 2);
        const auto prompt = random_values<T>(static_cast<size_t>(kPrompt * C), 1, 3);
        const auto d_out = random_values<T>(static_cast<size_t>(kBatch * kAll * C), 1, 4);
        const auto before = random_values<T>(prompt.size(), 1, 5);
        std::vector<int> tokens(kBatch * kLength);
        for (size_t i = 0; i < tokens.size(); i++) tokens[i] = static_cast<int>(i * 7 % kVocabulary);
        std::vector<T> out, alone, d_prompt;
        for_each_order([&] {
            const DeviceArray<T> a(wte), b(wpe), p(prompt), g(before), d(d_out), o(poisoned<T>(d_out.size()));
            const DeviceArray<int> t(tokens);
            Tensor<T> to = o.tensor({kBatch, kAll, C}), gradient = g.tensor({kPrompt, C});
            embedding_forward(to, t.tensor({kBatch, kLength}), a.tensor({kVocabulary, C}), Tensor<T>(),
                              p.tensor({kPrompt, C}), 0, Tensor<int>(), kStream, kScales);
            alone = o.download();
            embedding_forward(to, t.tensor({kBatch, kLength}), a.tensor({kVocabulary, C}),
                              b.tensor({kAll, C}), p.tensor({kPrompt, C}), 0, Tensor<int>(), kStream,
                              kScales);
            prompt_backward(gradient, d.tensor({kBatch, kAll, C}), kStream, kScales.prompt);
            return bytes_of(out = o.download(), alone, d_prompt = g.download());
        });
        bool same = true, same_alone = true;
        Doubles sums = to_doubles(before);
        for (int b = 0; b < kBatch; b++)
            for (int t = 0; t < kAll; t++)
                for (int c = 0; c < C; c++) {
                    const size_t i = static_cast<size_t>((b * kAll + t) * C + c);
                    const T from = t < kPrompt
                                       ? prompt[static_cast<size_t>(t * C + c)]
                                       : wte[static_cast<size_t>(
                                             tokens[static_cast<size_t>(b * kLength + t - kPrompt)] * C + c)];
                    const float scaled = to_float(from) * (t < kPrompt ? kScales.prompt : kScales.tokens);
                    const float sum = scaled + to_float(wpe[static_cast<size_t>(t * C + c)]);
                    same &= to_float(out[i]) == to_float(from_float<T>(sum));
                    same_alone &= to_float(alone[i]) == scaled;
                    if (t < kPrompt)
                        sums[static_cast<size_t>(t * C + c)] += kScales.prompt * to_float(d_out[i]);
                }
        EXPECT_TRUE(same);
        EXPECT_TRUE(same_alone) << "without positions";
        EXPECT_LT(relative_error(d_prompt, sums), tolerance<T>());
    }
}

}  // namespace
