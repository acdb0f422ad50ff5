// test_kernels.cpp - every kernel except attention's and the optimizer's, compared with plain loops in double
// precision, in every order of threads.
//
// Outputs start as NaN; gradients that are added to start as random numbers.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/column_sums.cuh"
#include "llmc/cross_entropy.cuh"
#include "llmc/data_feeder.h"
#include "llmc/elementwise.cuh"
#include "llmc/embedding.cuh"
#include "llmc/layernorm.cuh"
#include "llmc/loss_by_position.cuh"
#include "llmc/matmul_tiled.cuh"
#include "test/kernel_test.h"

namespace {

using Doubles = std::vector<double>;
const Stream kStream{};

std::vector<int> vector_sizes() {
    if (kSmallShapes) return {1, 7, 100, 5003};
    std::vector<int> sizes = {1, 7, 64, 100, 1000, 4096, 100003};
    sizes.insert(sizes.end(), std::begin(kTailSizes), std::end(kTailSizes));
    return sizes;
}

template <class T>
class Kernels : public testing::Test {};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Kernels, Types);

// The input of a layernorm: each row has its own mean and deviation.
template <class T>
std::vector<T> uneven_rows(const MatrixSize& s, uint64_t seed) {
    std::vector<T> x = random_values<T>(static_cast<size_t>(s.rows) * s.C, 1, seed);
    for (size_t i = 0; i < x.size(); i++) {
        const size_t row = i / s.C;
        x[i] = from_float<T>(to_float(x[i]) * (1 + row % 3) + static_cast<float>(row % 5) - 2);
    }
    return x;
}

struct LayernormReference {
    Doubles out, mean, rstd;
    LayernormReference(const Doubles& x, const Doubles& weight, const Doubles& bias, double epsilon = 1e-5)
        : out(x.size()) {
        const size_t C = weight.size();
        for (size_t start = 0; start < x.size(); start += C) {
            double m = 0, variance = 0;
            for (size_t c = 0; c < C; c++) m += x[start + c] / C;
            for (size_t c = 0; c < C; c++) variance += (x[start + c] - m) * (x[start + c] - m) / C;
            const double r = 1 / std::sqrt(variance + epsilon);
            for (size_t c = 0; c < C; c++) out[start + c] = (x[start + c] - m) * r * weight[c] + bias[c];
            mean.push_back(m);
            rstd.push_back(r);
        }
    }
};

TYPED_TEST(Kernels, LayernormForward) {
    using T = TypeParam;
    for (const MatrixSize& s : matrix_sizes()) {
        SCOPED_TRACE(text(s));
        const Shape matrix{s.rows, s.C}, row{s.C}, column{s.rows};
        const size_t n = static_cast<size_t>(s.rows) * s.C;
        const std::vector<T> x = uneven_rows<T>(s, 1), w = random_values<T>(s.C, 1, 2),
                             b = random_values<T>(s.C, 1, 3);
        std::vector<T> out, again;
        std::vector<float> mean, rstd;
        for_each_order([&] {
            const DeviceArray<T> d_x(x), d_w(w), d_b(b), d_out(poisoned<T>(n)), d_again(poisoned<T>(n));
            const DeviceArray<float> d_mean(poisoned<float>(s.rows)), d_rstd(poisoned<float>(s.rows));
            Tensor<T> t_out = d_out.tensor(matrix), t_again = d_again.tensor(matrix);
            Tensor<float> t_mean = d_mean.tensor(column), t_rstd = d_rstd.tensor(column);
            layernorm_forward(t_out, t_mean, t_rstd, d_x.tensor(matrix), d_w.tensor(row), d_b.tensor(row),
                              kStream);
            layernorm_normalize(t_again, d_x.tensor(matrix), t_mean, t_rstd, d_w.tensor(row), d_b.tensor(row),
                                kStream);
            out = d_out.download(), again = d_again.download();
            mean = d_mean.download(), rstd = d_rstd.download();
            return bytes_of(out, mean, rstd);
        });
        const LayernormReference want(to_doubles(x), to_doubles(w), to_doubles(b));
        EXPECT_LT(relative_error(out, want.out), tolerance<T>());
        EXPECT_LT(relative_error(mean, want.mean), tolerance<float>());
        EXPECT_LT(relative_error(rstd, want.rstd), tolerance<float>());
        EXPECT_TRUE(bytes_of(again) == bytes_of(out)) << "layernorm_normalize makes other bits";
    }
}

TEST(Layernorm, EpsilonIsAParameter) {
    const MatrixSize s{3, 100};
    const Shape matrix{s.rows, s.C}, row{s.C}, column{s.rows};
    const std::vector<float> x = uneven_rows<float>(s, 1), w = random_values<float>(s.C, 1, 2),
                             b = random_values<float>(s.C, 1, 3);
    const DeviceArray<float> d_x(x), d_w(w), d_b(b), d_zero(std::vector<float>(x.size()));
    const DeviceArray<float> d_sum(poisoned<float>(x.size())), d_mean(s.rows), d_rstd(s.rows);
    const LayernormReference want(to_doubles(x), to_doubles(w), to_doubles(b), 0.5);
    for (bool residual : {false, true}) {
        const DeviceArray<float> d_out(poisoned<float>(x.size()));
        Tensor<float> out = d_out.tensor(matrix), sum = d_sum.tensor(matrix), mean = d_mean.tensor(column),
                      rstd = d_rstd.tensor(column);
        if (residual)
            residual_layernorm_forward(sum, out, mean, rstd, d_x.tensor(matrix), d_zero.tensor(matrix),
                                       d_w.tensor(row), d_b.tensor(row), kStream, 0.5f);
        else
            layernorm_forward(out, mean, rstd, d_x.tensor(matrix), d_w.tensor(row), d_b.tensor(row), kStream,
                              0.5f);
        EXPECT_LT(relative_error(d_out.download(), want.out), tolerance<float>());
    }
}

TYPED_TEST(Kernels, ResidualLayernormForwardIsAdditionThenLayernorm) {
    using T = TypeParam;
    for (const MatrixSize& s : matrix_sizes()) {
        SCOPED_TRACE(text(s));
        const Shape matrix{s.rows, s.C}, row{s.C}, column{s.rows};
        const size_t n = static_cast<size_t>(s.rows) * s.C;
        const std::vector<T> a = uneven_rows<T>(s, 4), b = random_values<T>(n, 1, 5);
        const DeviceArray<T> weight(random_values<T>(s.C, 1, 6)), bias(random_values<T>(s.C, 1, 7));
        std::vector<T> added(n);
        for (size_t i = 0; i < n; i++) added[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));

        // What the fused kernel and the separate ones write: sum, out, mean, rstd.
        auto run = [&](bool fused) {
            const DeviceArray<T> d_a(a), d_b(b), d_sum(fused ? poisoned<T>(n) : added), d_out(poisoned<T>(n));
            const DeviceArray<float> d_mean(poisoned<float>(s.rows)), d_rstd(poisoned<float>(s.rows));
            Tensor<T> sum = d_sum.tensor(matrix), out = d_out.tensor(matrix);
            Tensor<float> mean = d_mean.tensor(column), rstd = d_rstd.tensor(column);
            if (fused)
                residual_layernorm_forward(sum, out, mean, rstd, d_a.tensor(matrix), d_b.tensor(matrix),
                                           weight.tensor(row), bias.tensor(row), kStream);
            else
                layernorm_forward(out, mean, rstd, sum, weight.tensor(row), bias.tensor(row), kStream);
            return bytes_of(d_sum.download(), d_out.download(), d_mean.download(), d_rstd.download());
        };
        std::vector<unsigned char> fused;
        for_each_order([&] { return fused = run(true); });
        EXPECT_TRUE(fused == run(false));
    }
}

TYPED_TEST(Kernels, LayernormBackward) {
    using T = TypeParam;
    for (const MatrixSize& s : matrix_sizes()) {
        SCOPED_TRACE(text(s));
        const Shape matrix{s.rows, s.C}, row{s.C}, column{s.rows};
        const size_t n = static_cast<size_t>(s.rows) * s.C, C = s.C;
        const std::vector<T> x = uneven_rows<T>(s, 11), w = random_values<T>(C, 1, 12),
                             dout = random_values<T>(n, 1, 13);
        const std::vector<T> dx_0 = random_values<T>(n, 1, 14), dw_0 = random_values<T>(C, 3, 15),
                             db_0 = random_values<T>(C, 3, 16);
        const LayernormReference forward(to_doubles(x), to_doubles(w), Doubles(C));
        const std::vector<float> mean(forward.mean.begin(), forward.mean.end());
        const std::vector<float> rstd(forward.rstd.begin(), forward.rstd.end());
        std::vector<T> dx, dw, db, dx_alone;
        for_each_order([&] {
            const DeviceArray<T> d_x(x), d_w(w), d_dout(dout), d_dx(dx_0), d_dw(dw_0), d_db(db_0);
            const DeviceArray<T> d_dx_alone(dx_0);
            const DeviceArray<float> d_mean(mean), d_rstd(rstd);
            const Shape scratch_shape = column_sums_scratch(s.rows, s.C, 2);
            const DeviceArray<float> d_scratch(poisoned<float>(scratch_shape.size()));
            Tensor<T> t_dx = d_dx.tensor(matrix), t_dw = d_dw.tensor(row), t_db = d_db.tensor(row);
            Tensor<float> scratch = d_scratch.tensor(scratch_shape);
            layernorm_backward(t_dx, t_dw, t_db, scratch, d_dout.tensor(matrix), d_x.tensor(matrix),
                               d_mean.tensor(column), d_rstd.tensor(column), d_w.tensor(row), kStream);
            Tensor<T> t_dx_alone = d_dx_alone.tensor(matrix), frozen;
            Tensor<float> none;
            layernorm_backward(t_dx_alone, frozen, frozen, none, d_dout.tensor(matrix), d_x.tensor(matrix),
                               d_mean.tensor(column), d_rstd.tensor(column), d_w.tensor(row), kStream);
            dx = d_dx.download(), dw = d_dw.download(), db = d_db.download();
            dx_alone = d_dx_alone.download();
            return bytes_of(dx, dw, db);
        });
        Doubles want_dx = to_doubles(dx_0), want_dw = to_doubles(dw_0), want_db = to_doubles(db_0);
        for (size_t i = 0; i < n; i += C) {
            const double m = forward.mean[i / C], r = forward.rstd[i / C];
            auto xhat = [&](size_t c) { return (to_float(x[i + c]) - m) * r; };
            auto g = [&](size_t c) { return double{to_float(dout[i + c])} * to_float(w[c]); };
            double mean_g = 0, mean_gx = 0;
            for (size_t c = 0; c < C; c++) mean_g += g(c) / C, mean_gx += g(c) * xhat(c) / C;
            for (size_t c = 0; c < C; c++) {
                want_dx[i + c] += r * (g(c) - mean_g - xhat(c) * mean_gx);
                want_dw[c] += to_float(dout[i + c]) * xhat(c);
                want_db[c] += to_float(dout[i + c]);
            }
        }
        EXPECT_LT(relative_error(dx, want_dx), tolerance<T>());
        EXPECT_LT(relative_error(dw, want_dw), tolerance<T>());
        EXPECT_LT(relative_error(db, want_db), tolerance<T>());
        EXPECT_TRUE(bytes_of(dx_alone) == bytes_of(dx)) << "frozen weights change dx";
    }
}

#if defined(SIMT_GPU)  // g++ may fuse other additions and products in one than in the other
// What layernorm's kernels write if a lane keeps kKept vectors of its row; with 0 it reads the row again.
template <class T, int kKept>
std::vector<unsigned char> layernorm_bits(const MatrixSize& s) {
    constexpr int N = kVectorSize<T>;
    const size_t n = static_cast<size_t>(s.rows) * s.C;
    const DeviceArray<T> x(uneven_rows<T>(s, 31)), b(random_values<T>(n, 1, 32)),
        w(random_values<T>(s.C, 1, 33)), bias(random_values<T>(s.C, 1, 34)), dx(random_values<T>(n, 1, 35));
    const DeviceArray<T> out(poisoned<T>(n)), sum(poisoned<T>(n)), out_of_sum(poisoned<T>(n));
    const DeviceArray<float> mean(poisoned<float>(s.rows)), rstd(poisoned<float>(s.rows));
    const dim3 blocks(blocks_of_rows(s.rows));
    launch<layernorm_forward_kernel<T, N, kKept, true>>(
        blocks, kBlockThreads, 0, kStream, out_of_sum.data(), mean.data(), rstd.data(), sum.data(), x.data(),
        b.data(), w.data(), bias.data(), s.rows, s.C, kLayernormEpsilon);
    const std::vector<unsigned char> of_sum = bytes_of(mean.download(), rstd.download());
    launch<layernorm_forward_kernel<T, N, kKept, false>>(
        blocks, kBlockThreads, 0, kStream, out.data(), mean.data(), rstd.data(), nullptr, x.data(), nullptr,
        w.data(), bias.data(), s.rows, s.C, kLayernormEpsilon);
    launch<layernorm_backward_input_kernel<T, N, kKept>>(blocks, kBlockThreads, 0, kStream, dx.data(),
                                                         b.data(), x.data(), mean.data(), rstd.data(),
                                                         w.data(), s.rows, s.C);
    return bytes_of(out.download(), sum.download(), out_of_sum.download(), dx.download(), mean.download(),
                    rstd.download(), of_sum);
}

TYPED_TEST(Kernels, LayernormOfRowsThatAreKeptHasTheSameBits) {
    using T = TypeParam;
    for (const int missing : {0, 1, 3}) {  // vectors missing from the most that are kept
        const auto size = [&](int kept) {
            return MatrixSize{11, (kept * kLanes - missing) * kVectorSize<T>};
        };
        for_each_order([&] {
            const std::vector<unsigned char> bits = layernorm_bits<T, 4>(size(4));
            EXPECT_TRUE(bits == (layernorm_bits<T, 0>(size(4))));
            EXPECT_TRUE((layernorm_bits<T, 8>(size(8))) == (layernorm_bits<T, 0>(size(8))));
            EXPECT_TRUE((layernorm_bits<T, 16>(size(16))) == (layernorm_bits<T, 0>(size(16))));
            return bits;
        });
    }
}
#endif

TYPED_TEST(Kernels, BiasBackward) {
    using T = TypeParam;
    std::vector<MatrixSize> sizes = matrix_sizes();
    // Also the most chunks, whose last ones are short or (in the fast build) empty.
    if (!kSmallShapes) sizes.insert(sizes.end(), {{1025, 100}, {8257, 72}});
    for (const MatrixSize& s : sizes) {
        SCOPED_TRACE(text(s));
        const std::vector<T> dout = random_values<T>(static_cast<size_t>(s.rows) * s.C, 1, 21);
        const std::vector<T> start = random_values<T>(s.C, 5, 22);
        std::vector<T> dbias;
        for_each_order([&] {
            const DeviceArray<T> d_dout(dout), d_dbias(start);
            const Shape scratch_shape = column_sums_scratch(s.rows, s.C, 1);
            const DeviceArray<float> d_scratch(poisoned<float>(scratch_shape.size()));
            Tensor<T> t_dbias = d_dbias.tensor({s.C});
            Tensor<float> scratch = d_scratch.tensor(scratch_shape);
            bias_backward(t_dbias, scratch, d_dout.tensor({s.rows, s.C}), kStream);
            return bytes_of(dbias = d_dbias.download());
        });
        Doubles want = to_doubles(start);
        for (size_t i = 0; i < dout.size(); i++) want[i % s.C] += to_float(dout[i]);
        EXPECT_LT(relative_error(dbias, want), tolerance<T>());
    }
}

TYPED_TEST(Kernels, AddBias) {
    using T = TypeParam;
    std::vector<MatrixSize> sizes = matrix_sizes();
    for (const int n : kTailSizes) sizes.push_back({1, n});
    for (const MatrixSize& s : sizes) {
        SCOPED_TRACE(text(s));
        const std::vector<T> start = random_values<T>(static_cast<size_t>(s.rows) * s.C, 1, 26);
        const std::vector<T> bias = random_values<T>(s.C, 1, 27);
        const DeviceArray<T> d_bias(bias);
        std::vector<T> out;
        for_each_order([&] {
            const DeviceArray<T> d_out(start);
            Tensor<T> t_out = d_out.tensor({s.rows, s.C});
            add_bias(t_out, d_bias.tensor({s.C}), kStream);
            return bytes_of(out = d_out.download());
        });
        Doubles want = to_doubles(start);
        for (size_t i = 0; i < want.size(); i++) want[i] += to_float(bias[i % s.C]);
        EXPECT_LT(relative_error(out, want), tolerance<T>());
    }
}

// Inputs of gelu: most of them where it bends, some where it is flat or straight.
template <class T>
std::vector<T> gelu_inputs(int n) {
    std::vector<T> x = random_values<T>(n, 2, 31);
    const float far[] = {-1000.f, -100.f, -20.f, -9.f, 0.f, 9.f, 20.f, 100.f, 1000.f};
    for (size_t i = 0; i < x.size() && i < std::size(far) * 7; i += 7) x[i] = from_float<T>(far[i / 7]);
    return x;
}

TYPED_TEST(Kernels, GeluForward) {
    using T = TypeParam;
    for (int n : vector_sizes()) {
        SCOPED_TRACE(n);
        const std::vector<T> x = gelu_inputs<T>(n);
        std::vector<T> out, in_place;
        for_each_order([&] {
            const DeviceArray<T> d_x(x), d_out(poisoned<T>(n));
            Tensor<T> t_out = d_out.tensor({n}), t_x = d_x.tensor({n});
            gelu_forward(t_out, t_x, kStream);
            gelu_forward(t_x, t_x, kStream);
            out = d_out.download(), in_place = d_x.download();
            return bytes_of(out);
        });
        double worst = 0;
        for (size_t i = 0; i < x.size(); i++) {
            const double v = to_float(x[i]);
            const double want = 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
            const double error = std::abs(to_float(out[i]) - want) / std::max(1.0, std::abs(want));
            if (!(error <= worst)) worst = error;
        }
        EXPECT_LT(worst, tolerance<T>());
        EXPECT_TRUE(bytes_of(in_place) == bytes_of(out));
    }
}

TYPED_TEST(Kernels, GeluBackward) {
    using T = TypeParam;
    for (int n : vector_sizes()) {
        SCOPED_TRACE(n);
        const std::vector<T> x = gelu_inputs<T>(n), dout = random_values<T>(n, 1, 32);
        std::vector<T> dx, in_place;
        for_each_order([&] {
            const DeviceArray<T> d_x(x), d_dout(dout), d_dx(poisoned<T>(n));
            Tensor<T> t_dx = d_dx.tensor({n}), t_dout = d_dout.tensor({n});
            gelu_backward(t_dx, t_dout, d_x.tensor({n}), kStream);
            gelu_backward(t_dout, t_dout, d_x.tensor({n}), kStream);
            dx = d_dx.download(), in_place = d_dout.download();
            return bytes_of(dx);
        });
        Doubles want;
        for (size_t i = 0; i < x.size(); i++) {
            const double v = to_float(x[i]), scale = std::sqrt(2 / M_PI);
            const double t = std::tanh(scale * (v + 0.044715 * v * v * v));
            const double slope = 0.5 * (1 + t) + 0.5 * v * (1 - t * t) * scale * (1 + 3 * 0.044715 * v * v);
            want.push_back(to_float(dout[i]) * slope);
        }
        EXPECT_LT(relative_error(dx, want), n > 1 ? tolerance<T>() : 1e-4);  // n = 1 is -1000: its slope is 0
        EXPECT_TRUE(bytes_of(in_place) == bytes_of(dx));
    }
}

struct EmbeddingCase {
    int batch, seq_len, C, vocabulary;
    bool one_token;  // every row has the same token
};

std::vector<EmbeddingCase> embedding_cases() {
    if (kSmallShapes) return {{2, 5, 72, 3, false}, {2, 5, 7, 9, true}};
    return {{1, 1, 1, 1, false},     {1, 3, 7, 2, false},
            {3, 37, 64, 10, false},  {4, 75, 72, 50257, false},
            {2, 33, 100, 5, true},   {3, 100, 768, 40, false},
            {2, 8, 1000, 300, true}, {9, 3, 403, 20, false},
            {9, 2, 2072, 7, false},  {4, 90, 72, 3, false},
            {2, 130, 100, 9, true},  {2, 130, 7, 9, true}};  // the last two: tokens of many rows
}

std::vector<int> tokens_of(const EmbeddingCase& e) {
    std::vector<int> tokens(static_cast<size_t>(e.batch) * e.seq_len);
    for (size_t i = 0; i < tokens.size(); i++)
        tokens[i] =
            static_cast<int>(random_bits(41, e.one_token ? 0 : i) % static_cast<uint64_t>(e.vocabulary));
    return tokens;
}

TYPED_TEST(Kernels, EmbeddingForward) {
    using T = TypeParam;
    for (const EmbeddingCase& e : embedding_cases()) {
        for (int first_position : {0, 4}) {
            SCOPED_TRACE(text({e.batch * e.seq_len, e.C}));
            const std::vector<int> tokens = tokens_of(e);
            const int positions = e.seq_len + first_position;
            const size_t C = e.C;
            const std::vector<T> wte = random_values<T>(e.vocabulary * C, 1, 42),
                                 wpe = random_values<T>(positions * C, 1, 43);
            std::vector<T> out, alone, of_rows, of_rows_alone, rows;
            for (const int token : tokens)
                rows.insert(rows.end(), wte.begin() + token * e.C, wte.begin() + (token + 1) * e.C);
            for_each_order([&] {
                const DeviceArray<int> d_tokens(tokens);
                const DeviceArray<T> d_wte(wte), d_wpe(wpe), d_out(poisoned<T>(tokens.size() * C)),
                    d_rows(rows);
                Tensor<T> t_out = d_out.tensor({e.batch, e.seq_len, e.C});
                embedding_forward(t_out, d_tokens.tensor({e.batch, e.seq_len}),
                                  d_wte.tensor({e.vocabulary, e.C}), Tensor<T>(), Tensor<T>(), first_position,
                                  {}, kStream);
                alone = d_out.download();
                embedding_forward(t_out, Tensor<int>(nullptr, {e.batch, e.seq_len}),
                                  d_rows.tensor({e.batch * e.seq_len, e.C}), Tensor<T>(), Tensor<T>(),
                                  first_position, {}, kStream);
                of_rows_alone = d_out.download();
                embedding_forward(t_out, Tensor<int>(nullptr, {e.batch, e.seq_len}),
                                  d_rows.tensor({e.batch * e.seq_len, e.C}), d_wpe.tensor({positions, e.C}),
                                  Tensor<T>(), first_position, {}, kStream);
                of_rows = d_out.download();
                embedding_forward(t_out, d_tokens.tensor({e.batch, e.seq_len}),
                                  d_wte.tensor({e.vocabulary, e.C}), d_wpe.tensor({positions, e.C}),
                                  Tensor<T>(), first_position, {}, kStream);
                return bytes_of(out = d_out.download(), alone);
            });
            bool same = true, same_alone = true;
            for (size_t i = 0; i < out.size(); i++) {
                const size_t position = first_position + i / C % e.seq_len;
                const float token = to_float(wte[tokens[i / C] * C + i % C]);
                const float sum = token + to_float(wpe[position * C + i % C]);
                same &= to_float(out[i]) == to_float(from_float<T>(sum));
                same_alone &= to_float(alone[i]) == token;
            }
            EXPECT_TRUE(same);
            EXPECT_TRUE(same_alone) << "without positions";
            EXPECT_TRUE(bytes_of(of_rows, of_rows_alone) == bytes_of(out, alone)) << "of the tokens' rows";
        }
    }
}

// The result of group_tokens(), with memory for `spare` groups more than there can be.
struct TokenGroups {
    std::vector<int> order, starts;
    TokenGroups(const std::vector<int>& tokens, int vocabulary, int spare = 0)
        : order(tokens.size(), -1),
          starts(most_token_groups(static_cast<int64_t>(tokens.size()), vocabulary) + 1 + spare, -1) {
        group_tokens(tokens, vocabulary, order, starts);
    }
};

TYPED_TEST(Kernels, EmbeddingBackward) {
    using T = TypeParam;
    for (const EmbeddingCase& e : embedding_cases()) {
        SCOPED_TRACE(text({e.batch * e.seq_len, e.C}));
        const std::vector<int> tokens = tokens_of(e);
        const size_t C = e.C;
        const std::vector<T> dout = random_values<T>(tokens.size() * C, 1, 44);
        const std::vector<T> dwte_0 = random_values<T>(e.vocabulary * C, 1, 45);
        const std::vector<T> dwpe_0 =
            random_values<T>((e.seq_len + 2) * C, 1, 46);  // also positions that are not used
        constexpr float kScale = 1.75f;                    // of the tokens' vectors
        std::vector<T> dwte, dwpe;
        auto run = [&](int spare, bool token_frozen = false, bool position_frozen = false) {
            const TokenGroups groups(tokens, e.vocabulary, spare);
            const int64_t starts = static_cast<int64_t>(groups.starts.size());
            for_each_order([&] {
                const DeviceArray<int> d_tokens(tokens), d_order(groups.order), d_starts(groups.starts);
                const DeviceArray<T> d_dout(dout), d_dwte(dwte_0), d_dwpe(dwpe_0);
                Tensor<T> t_dwte = d_dwte.tensor({e.vocabulary, e.C}),
                          t_dwpe = d_dwpe.tensor({e.seq_len + 2, e.C});
                if (token_frozen) t_dwte.drop();
                if (position_frozen) t_dwpe.drop();
                embedding_backward(t_dwte, t_dwpe, d_dout.tensor({e.batch, e.seq_len, e.C}),
                                   d_tokens.tensor({e.batch, e.seq_len}),
                                   d_order.tensor({e.batch * e.seq_len}), d_starts.tensor({starts}), {},
                                   kStream, kScale);
                dwte = d_dwte.download(), dwpe = d_dwpe.download();
                return bytes_of(dwte, dwpe);
            });
            return bytes_of(dwte, dwpe);
        };
        EXPECT_TRUE(run(37) == run(0));
        const std::vector<T> both_dwte = dwte, both_dwpe = dwpe;
        EXPECT_TRUE(run(0, true, false) == bytes_of(dwte_0, both_dwpe)) << "a frozen token embedding";
        EXPECT_TRUE(run(0, false, true) == bytes_of(both_dwte, dwpe_0)) << "no position embedding";
        EXPECT_TRUE(run(0, true, true) == bytes_of(dwte_0, dwpe_0));
        dwte = both_dwte, dwpe = both_dwpe;
        Doubles want_dwte = to_doubles(dwte_0), want_dwpe = to_doubles(dwpe_0);
        for (size_t i = 0; i < dout.size(); i++) {
            want_dwte[tokens[i / C] * C + i % C] += kScale * to_float(dout[i]);
            want_dwpe[i / C % e.seq_len * C + i % C] += to_float(dout[i]);
        }
        EXPECT_LT(relative_error(dwte, want_dwte), tolerance<T>());
        EXPECT_LT(relative_error(dwpe, want_dwpe), tolerance<T>());
    }
}

// Positions that restart: forward reads each row's own position, backward sums the rows of a position; others
// stay.
TYPED_TEST(Kernels, EmbeddingOfDocuments) {
    using T = TypeParam;
    for (const EmbeddingCase& e : embedding_cases()) {
        SCOPED_TRACE(text({e.batch * e.seq_len, e.C}));
        const std::vector<int> tokens = tokens_of(e);
        const size_t C = e.C;
        std::vector<int> places(tokens.size());
        for (size_t i = 0; i < places.size(); i++)
            places[i] = i % e.seq_len == 0 || random_bits(47, i) % 4 == 0 ? 0 : places[i - 1] + 1;
        const std::vector<T> wte = random_values<T>(e.vocabulary * C, 1, 42),
                             wpe = random_values<T>(e.seq_len * C, 1, 43),
                             dout = random_values<T>(tokens.size() * C, 1, 44),
                             dwpe_0 = random_values<T>(e.seq_len * C, 1, 46);
        const TokenGroups groups(tokens, e.vocabulary), by_place(places, e.seq_len, 1);
        ASSERT_GE(by_place.starts.size(), std::min<size_t>(tokens.size(), e.seq_len) + 1);
        std::vector<T> out, dwpe;
        for_each_order([&] {
            const Shape rows{e.batch, e.seq_len};
            const DeviceArray<int> d_tokens(tokens), d_places(places), d_order(by_place.order),
                d_starts(by_place.starts), d_token_order(groups.order), d_token_starts(groups.starts);
            const DeviceArray<T> d_wte(wte), d_wpe(wpe), d_out(poisoned<T>(dout.size())), d_dout(dout),
                d_dwte(wte), d_dwpe(dwpe_0);
            Tensor<T> t_out = d_out.tensor({e.batch, e.seq_len, e.C}),
                      t_dwte = d_dwte.tensor({e.vocabulary, e.C}), t_dwpe = d_dwpe.tensor({e.seq_len, e.C});
            const int64_t starts = static_cast<int64_t>(by_place.starts.size());
            const Documents documents{
                d_places.tensor(rows), {}, d_order.tensor({rows.size()}), d_starts.tensor({starts})};
            embedding_forward(t_out, d_tokens.tensor(rows), d_wte.tensor({e.vocabulary, e.C}),
                              d_wpe.tensor({e.seq_len, e.C}), Tensor<T>(), 0, documents.positions, kStream);
            embedding_backward(t_dwte, t_dwpe, d_dout.tensor({e.batch, e.seq_len, e.C}),
                               d_tokens.tensor(rows), d_token_order.tensor({rows.size()}),
                               d_token_starts.tensor({static_cast<int64_t>(groups.starts.size())}), documents,
                               kStream);
            out = d_out.download(), dwpe = d_dwpe.download();
            return bytes_of(out, dwpe);
        });
        Doubles want(dout.size()), want_dwpe = to_doubles(dwpe_0);
        for (size_t i = 0; i < dout.size(); i++) {
            const size_t place = places[i / C] * C + i % C;
            want[i] = double{to_float(wte[tokens[i / C] * C + i % C])} + to_float(wpe[place]);
            want_dwpe[place] += to_float(dout[i]);
        }
        EXPECT_LT(relative_error(out, want), tolerance<T>());
        EXPECT_LT(relative_error(dwpe, want_dwpe), tolerance<T>());
    }
}

TEST(GroupTokens, GroupsRowsByTokenInOrder) {
    for (const EmbeddingCase& e :
         std::vector<EmbeddingCase>{{2, 50, 1, 7, false}, {1, 9, 1, 50257, false}, {1, 5, 1, 3, true}}) {
        const std::vector<int> tokens = tokens_of(e);
        std::vector<int> rows(tokens.size());
        std::iota(rows.begin(), rows.end(), 0);
        std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) { return tokens[a] < tokens[b]; });
        std::vector<int> starts;
        for (size_t i = 0; i < rows.size(); i++)
            if (i == 0 || tokens[rows[i]] != tokens[rows[i - 1]]) starts.push_back(static_cast<int>(i));
        for (const int spare : {0, 5}) {
            const TokenGroups groups(tokens, e.vocabulary, spare);
            EXPECT_EQ(groups.order, rows);
            std::vector<int> padded = starts;
            padded.resize(groups.starts.size(), static_cast<int>(rows.size()));
            EXPECT_EQ(groups.starts, padded);
        }
    }
    EXPECT_EQ(TokenGroups({}, 5).starts, std::vector<int>{0});
}

struct CrossEntropyCase {
    int rows, V, stride;
};

std::vector<CrossEntropyCase> cross_entropy_cases() {
    if (kSmallShapes) return {{3, 130, 160}, {3, 1000, 1024}};
    return {{3, 1, 32}, {5, 50257, 50304}, {37, 256, 256}, {300, 130, 160}, {7, 130, 256}, {1, 1000, 1024}};
}

// Random logits: some rows have large ones, one has equal ones; the padding has garbage.
template <class T>
std::vector<T> logits_of(const CrossEntropyCase& s) {
    std::vector<T> logits = random_values<T>(static_cast<size_t>(s.rows) * s.stride, 2, 51);
    const float garbage[] = {NAN, INFINITY, -INFINITY, 1e30f};
    for (size_t i = 0; i < logits.size(); i++) {
        const size_t row = i / s.stride, c = i % s.stride;
        if (c >= static_cast<size_t>(s.V))
            logits[i] = from_float<T>(garbage[i % 4]);
        else if (row % 3 == 1)
            logits[i] = from_float<T>(to_float(logits[i]) > 0 ? 80.f : -80.f);
        else if (row == 2)
            logits[i] = from_float<T>(3.f);
    }
    return logits;
}

std::vector<int> targets_of(const CrossEntropyCase& s) {
    std::vector<int> targets;
    for (int row = 0; row < s.rows; row++) {
        const int target =
            static_cast<int>(random_bits(52, static_cast<uint64_t>(row)) % static_cast<uint64_t>(s.V));
        targets.push_back(row % 5 == 3 ? -1 : row == 0 ? s.V - 1 : target);
    }
    return targets;
}

TYPED_TEST(Kernels, CrossEntropy) {
    using T = TypeParam;
    const float scale = 0.125f;
    for (const CrossEntropyCase& s : cross_entropy_cases()) {
        SCOPED_TRACE(text({s.rows, s.V}));
        const std::vector<T> logits = logits_of<T>(s);
        const std::vector<int> targets = targets_of(s);
        const Shape matrix{s.rows, s.stride}, column{s.rows};
        std::vector<T> gradient, kept;
        std::vector<float> losses, losses_alone;
        for_each_order([&] {
            const DeviceArray<T> d_logits(logits);
            const DeviceArray<int> d_targets(targets);
            const DeviceArray<float> d_losses(poisoned<float>(s.rows)), d_alone(poisoned<float>(s.rows));
            Tensor<T> t_logits = d_logits.tensor(matrix);
            Tensor<float> t_losses = d_losses.tensor(column), t_alone = d_alone.tensor(column);
            cross_entropy_forward(t_logits, t_alone, d_targets.tensor(column), s.V, kStream);
            kept = d_logits.download(), losses_alone = d_alone.download();
            cross_entropy_forward_backward(t_logits, t_losses, d_targets.tensor(column), {scale}, s.V,
                                           kStream);
            gradient = d_logits.download(), losses = d_losses.download();
            return bytes_of(gradient, losses, losses_alone);
        });
        Doubles want_losses, want_gradient(logits.size());
        for (int row = 0; row < s.rows; row++) {
            const T* x = &logits[static_cast<size_t>(row) * s.stride];
            double most = -INFINITY, total = 0;
            for (int c = 0; c < s.V; c++) most = std::max(most, double{to_float(x[c])});
            for (int c = 0; c < s.V; c++) total += std::exp(to_float(x[c]) - most);
            const int target = targets[row];
            want_losses.push_back(target < 0 ? 0 : std::log(total) + most - to_float(x[target]));
            for (int c = 0; target >= 0 && c < s.V; c++)
                want_gradient[static_cast<size_t>(row) * s.stride + c] =
                    scale * (std::exp(to_float(x[c]) - most) / total - (c == target));
        }
        EXPECT_TRUE(bytes_of(kept) == bytes_of(logits)) << "cross_entropy_forward writes to the logits";
        EXPECT_LT(relative_error(losses, want_losses), tolerance<float>());
        EXPECT_LT(relative_error(losses_alone, want_losses), tolerance<float>());
        EXPECT_LT(relative_error(gradient, want_gradient), tolerance<T>());
        int not_zero = 0;
        for (size_t i = 0; i < gradient.size(); i++)
            if (i % s.stride >= static_cast<size_t>(s.V) || targets[i / s.stride] < 0)
                not_zero += to_float(gradient[i]) != 0;
        EXPECT_EQ(not_zero, 0) << "a gradient in padding, or of a row that does not count";
    }
}

// With a soft cap the gradient is that of the logits before it: the derivative follows from the capped ones.
TYPED_TEST(Kernels, CrossEntropyOfCappedLogits) {
    using T = TypeParam;
    const CrossEntropyCase s{7, 130, 256};
    const float cap = 3;
    const Shape matrix{s.rows, s.stride}, column{s.rows};
    const std::vector<T> logits = random_values<T>(static_cast<size_t>(s.rows) * s.stride, 4, 51);
    const std::vector<int> targets = targets_of(s);
    std::vector<T> capped, gradient;
    for_each_order([&] {
        const DeviceArray<T> d_logits(logits);
        const DeviceArray<int> d_targets(targets);
        const DeviceArray<float> d_losses(poisoned<float>(s.rows));
        Tensor<T> t_logits = d_logits.tensor(matrix);
        Tensor<float> t_losses = d_losses.tensor(column);
        soft_cap(t_logits, cap, kStream);
        capped = d_logits.download();
        cross_entropy_forward_backward(t_logits, t_losses, d_targets.tensor(column), {}, s.V, kStream, cap);
        return bytes_of(capped, gradient = d_logits.download());
    });
    const DeviceArray<T> d_capped(capped);
    const DeviceArray<int> d_targets(targets);
    const DeviceArray<float> d_losses(poisoned<float>(s.rows));
    Tensor<T> t_capped = d_capped.tensor(matrix);
    Tensor<float> t_losses = d_losses.tensor(column);
    cross_entropy_forward_backward(t_capped, t_losses, d_targets.tensor(column), {}, s.V, kStream);
    Doubles want = to_doubles(d_capped.download()), want_capped = to_doubles(logits);
    for (size_t i = 0; i < want.size(); i++) {
        want[i] *= 1 - std::pow(to_float(capped[i]) / cap, 2);
        want_capped[i] = cap * std::tanh(want_capped[i] / cap);
    }
    EXPECT_LT(relative_error(capped, want_capped), tolerance<T>());
    EXPECT_LT(relative_error(gradient, want), tolerance<T>());
}

// A scale on the device gives the same results. With a zero scale there is neither loss nor gradient, nor a
// NaN.
TYPED_TEST(Kernels, CrossEntropyScaledOnTheDevice) {
    using T = TypeParam;
    const CrossEntropyCase s{7, 130, 256};
    const std::vector<T> logits = logits_of<T>(s);
    const DeviceArray<int> d_targets(targets_of(s));
    const auto run = [&](LossScale scale) {
        const DeviceArray<T> d_logits(logits);
        const DeviceArray<float> d_losses(poisoned<float>(s.rows)), d_total(std::vector<float>{0.f});
        Tensor<T> t_logits = d_logits.tensor({s.rows, s.stride});
        Tensor<float> t_losses = d_losses.tensor({s.rows}), t_total = d_total.tensor({1});
        cross_entropy_forward_backward(t_logits, t_losses, d_targets.tensor({s.rows}), scale, s.V, kStream);
        add_losses(t_total, t_losses, scale, kStream);
        return std::pair(d_logits.download(), d_total.download());
    };
    const DeviceArray<float> quarter(std::vector<float>{0.25f}), zero(std::vector<float>{0.f});
    const auto [by_device, sum_by_device] = run({NAN, quarter.data()});
    const auto [by_value, sum_by_value] = run({0.25f});
    EXPECT_TRUE(bytes_of(by_device, sum_by_device) == bytes_of(by_value, sum_by_value));
    const auto [gradient, total] = run({NAN, zero.data()});
    EXPECT_EQ(total[0], 0.f);
    for (const T& x : gradient) ASSERT_EQ(to_float(x), 0.f);
}

// Elementwise operations on arrays that begin at any element, as rows of an odd length do, have the results
// that they have on aligned ones: on a GPU the same bits. For a CPU the compiler may contract other products
// and sums of single elements than of vectors, and arrays may begin anywhere.
TYPED_TEST(Kernels, ElementwiseFromAnyElement) {
    using T = TypeParam;
    constexpr int64_t n = 1029;
    const std::vector<T> a = random_values<T>(n, 1, 81), b = random_values<T>(n, 1, 82),
                         bias = random_values<T>(7, 1, 83);
    // Where the arrays begin, and what each operation makes of them.
    const auto results = [&](int64_t of_out, int64_t of_a, int64_t of_b) {
        const auto beginning = [](const std::vector<T>& values, int64_t at) {
            std::vector<T> later(static_cast<size_t>(at), from_float<T>(0.f));
            later.insert(later.end(), values.begin(), values.end());
            return later;
        };
        const DeviceArray<T> d_a(beginning(a, of_a)), d_b(beginning(b, of_b)), d_bias(bias);
        const Tensor<T> t_a(d_a.tensor({n + of_a}).at(of_a), {n}), t_b(d_b.tensor({n + of_b}).at(of_b), {n});
        const Tensor<T> t_bias = d_bias.tensor({7});
        std::vector<std::vector<T>> all;
        const auto add = [&](auto&& operation) {
            const DeviceArray<T> d_out(beginning(poisoned<T>(n), of_out));
            Tensor<T> out(d_out.tensor({n + of_out}).at(of_out), {n / 7, 7});
            operation(out);
            const std::vector<T> got = d_out.download();
            for (int64_t i = 0; i < of_out; i++) EXPECT_EQ(to_float(got[static_cast<size_t>(i)]), 0.f);
            all.emplace_back(got.begin() + of_out, got.end());
        };
        add([&](Tensor<T>& out) { residual_forward(out, t_a, t_b, kStream); });
        add([&](Tensor<T>& out) { gelu_forward(out, t_a, kStream); });
        add([&](Tensor<T>& out) { gelu_backward(out, t_a, t_b, kStream); });
        add([&](Tensor<T>& out) { scale(out, t_a, 0.22, kStream); });
        add([&](Tensor<T>& out) {
            residual_forward(out, t_a, t_b, kStream);
            add_bias(out, t_bias, kStream);
        });
        return all;
    };
    const auto aligned = results(0, 0, 0);
    for (const auto& [of_out, of_a, of_b] :
         {std::array<int64_t, 3>{1, 1, 1}, {3, 0, 0}, {0, 2, 0}, {0, 0, 5}}) {
        const auto got = results(of_out, of_a, of_b);
        for (size_t i = 0; i < got.size(); i++) {
            SCOPED_TRACE(testing::Message()
                         << "operation " << i << ", from " << of_out << " " << of_a << " " << of_b);
            EXPECT_LT(relative_error(got[i], to_doubles(aligned[i])), tolerance<T>());
#if defined(SIMT_GPU)
            EXPECT_TRUE(bytes_of(got[i]) == bytes_of(aligned[i]));
#endif
        }
    }
}

TYPED_TEST(Kernels, Scale) {
    using T = TypeParam;
    for (int n : vector_sizes()) {
        const std::vector<T> x = random_values<T>(n, 1, 64);
        std::vector<T> out, in_place;
        for_each_order([&] {
            const DeviceArray<T> d_x(x), d_out(poisoned<T>(n));
            Tensor<T> t_x = d_x.tensor({n}), t_out = d_out.tensor({n});
            scale(t_out, t_x, 0.22, kStream);
            scale(t_x, t_x, 0.22, kStream);
            return bytes_of(out = d_out.download(), in_place = d_x.download());
        });
        Doubles want = to_doubles(x);
        for (double& value : want) value *= 0.22;
        EXPECT_LT(relative_error(out, want), tolerance<T>());
        EXPECT_TRUE(bytes_of(out) == bytes_of(in_place));
    }
}

TYPED_TEST(Kernels, ResidualForward) {
    using T = TypeParam;
    for (int n : vector_sizes()) {
        const std::vector<T> a = random_values<T>(n, 1, 62), b = random_values<T>(n, 1, 63);
        std::vector<T> out, in_place;
        for_each_order([&] {
            const DeviceArray<T> d_a(a), d_b(b), d_out(poisoned<T>(n));
            Tensor<T> t_a = d_a.tensor({n}), t_out = d_out.tensor({n});
            residual_forward(t_out, t_a, d_b.tensor({n}), kStream);
            residual_forward(t_a, t_a, d_b.tensor({n}), kStream);
            return bytes_of(out = d_out.download(), in_place = d_a.download());
        });
        Doubles want = to_doubles(a);
        for (int i = 0; i < n; i++) want[i] += to_float(b[i]);
        EXPECT_LT(relative_error(out, want), tolerance<T>());
        EXPECT_TRUE(bytes_of(out) == bytes_of(in_place));
    }
}

// A product whose operands' rows are longer in memory than the matrix, by an odd number.
Product product_in_memory(int64_t m, int64_t n, int64_t k, int form) {
    Product p{.m = m, .n = n, .k = k};
    p.transpose_a = form & 1, p.transpose_b = form & 2, p.accumulate = form & 4;
    if (form & 8) {
        p.a_row = (p.transpose_a ? m : k) + 3;
        p.b_row = (p.transpose_b ? k : n) + 5;
        p.out_row = n + 7;
    }
    return p;
}

template <class T, class Out>
void check_tiled_product(const Product& p) {
    SCOPED_TRACE(p.text());
    const auto row = [](int64_t given, int64_t own) { return static_cast<size_t>(given ? given : own); };
    const size_t m = p.m, n = p.n, k = p.k, a_row = row(p.a_row, p.transpose_a ? p.m : p.k),
                 b_row = row(p.b_row, p.transpose_b ? p.k : p.n), out_row = row(p.out_row, p.n);
    const std::vector<T> a = random_values<T>((p.transpose_a ? k : m) * a_row, 1, 71),
                         b = random_values<T>((p.transpose_b ? n : k) * b_row, 1, 72);
    const std::vector<Out> before = random_values<Out>(m * out_row, 1, 73);
    std::vector<Out> out, product;
    for_each_order([&] {
        const DeviceArray<T> d_a(a), d_b(b);
        const DeviceArray<Out> d_out(before);
        matmul_tiled<T, Out>(p, d_out.data(), d_a.data(), d_b.data(), kStream);
        return bytes_of(out = d_out.download());
    });
    const DeviceArray<T> d_a(a), d_b(b);
    const DeviceArray<Out> in_parts(before);
    matmul_tiled<T, Out>(p, in_parts.data(), d_a.data(), d_b.data(), kStream, p.flops() / 3);
    EXPECT_TRUE(bytes_of(in_parts.download()) == bytes_of(out)) << "in several launches";
    Doubles want;
    bool outside_is_kept = true;
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < out_row; j++) {
            const size_t at = i * out_row + j;
            if (j >= n) {
                outside_is_kept &= to_float(out[at]) == to_float(before[at]);
                continue;
            }
            double sum = p.accumulate ? double{to_float(before[at])} : 0;
            for (size_t l = 0; l < k; l++)
                sum += double{to_float(a[p.transpose_a ? l * a_row + i : i * a_row + l])} *
                       double{to_float(b[p.transpose_b ? j * b_row + l : l * b_row + j])};
            want.push_back(sum);
            product.push_back(out[at]);
        }
    EXPECT_LT(relative_error(product, want), tolerance<Out>());
    EXPECT_TRUE(outside_is_kept);
}

TYPED_TEST(Kernels, TiledProducts) {
    using Sizes = std::vector<std::array<int64_t, 3>>;
    const Sizes few = {{3, 35, 33}}, many = {{1, 1, 1}, {33, 5, 7}, {32, 64, 96}, {65, 31, 130}};
    for (const auto& [m, n, k] : kSmallShapes ? few : many)
        for (int form = 0; form < 16; form++) {
            check_tiled_product<TypeParam, TypeParam>(product_in_memory(m, n, k, form));
            check_tiled_product<TypeParam, float>(product_in_memory(m, n, k, form));
        }
}

TEST(AddLosses, AddsTheScaledSum) {
    for (int rows : {1, 37, 300, 5003}) {
        const std::vector<float> losses = random_values<float>(rows, 3, 61);
        std::vector<float> total;
        for_each_order([&] {
            const DeviceArray<float> d_losses(losses), d_total(std::vector<float>{2.5f});
            Tensor<float> t_total = d_total.tensor({1});
            add_losses(t_total, d_losses.tensor({rows}), {0.5f}, kStream);
            return bytes_of(total = d_total.download());
        });
        const Doubles terms = to_doubles(losses);
        EXPECT_NEAR(total[0], 2.5 + 0.5 * std::accumulate(terms.begin(), terms.end(), 0.0),
                    1e-4 * std::sqrt(rows));
    }
}

// Whole sequences, and packed ones, whose positions restart. A position that no row has stays unchanged.
TEST(PositionLosses, AreSumsByPosition) {
    for (const auto& [batch, seq_len] :
         {std::pair{1, 1}, std::pair{3, 37}, std::pair{2, 300}, std::pair{40, 5}}) {
        const auto rows = static_cast<size_t>(batch * seq_len), T = static_cast<size_t>(seq_len);
        const std::vector<float> losses = random_values<float>(rows, 3, 71),
                                 before = random_values<float>(T, 1, 72);
        std::vector<int> positions(rows), order(rows), starts(T + 1);
        for (size_t row = 1; row < rows; row++)  // documents of at most seven eighths of a sequence
            positions[row] =
                row % T == 0 || random_bits(73, row) % 9 == 0 || positions[row - 1] >= seq_len * 7 / 8
                    ? 0
                    : positions[row - 1] + 1;
        group_tokens(positions, seq_len, order, starts);
        for (const bool packed : {false, true}) {
            Doubles want = to_doubles(before);
            for (size_t row = 0; row < rows; row++)
                want[packed ? static_cast<size_t>(positions[row]) : row % T] += losses[row];
            const DeviceArray<int> d_positions(positions), d_order(order), d_starts(starts);
            std::vector<float> sums;
            for_each_order([&] {
                const DeviceArray<float> d_losses(losses), d_sums(before);
                Documents documents;
                if (packed) {
                    documents.positions = d_positions.tensor({batch, seq_len});
                    documents.rows_by_position = d_order.tensor({batch * seq_len});
                    documents.position_starts = d_starts.tensor({seq_len + 1});
                }
                Tensor<float> t_sums = d_sums.tensor({seq_len});
                add_position_losses(t_sums, d_losses.tensor({batch * seq_len, 1}), documents, kStream);
                return bytes_of(sums = d_sums.download());
            });
            for (size_t p = 0; p < T; p++)
                EXPECT_NEAR(sums[p], want[p], 1e-6 * static_cast<double>(rows)) << p;
        }
    }
}

// Contexts of 1 to 8 tokens have a bucket each, then each doubling has four; buckets follow one another.
TEST(PositionLosses, BucketsCoverAllContexts) {
    std::vector<size_t> lasts;
    for (size_t first = 1; first <= 64; first = lasts.back() + 1) lasts.push_back(last_of_bucket(first));
    EXPECT_EQ(lasts,
              (std::vector<size_t>{1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64}));
    const std::vector<float> sums = {2, 3, 0, 4};
    const std::vector<uint64_t> counts = {1, 2, 0, 4};
    EXPECT_EQ(position_losses_json(sums, counts).dump(),
              R"([{"first":1,"last":1,"tokens":1,"loss":2.0},{"first":2,"last":2,"tokens":2,"loss":1.5},)"
              R"({"first":4,"last":4,"tokens":4,"loss":1.0}])");
}

}  // namespace
