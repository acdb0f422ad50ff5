// test_matmul.cpp - matrix products in every form that the trainer uses, compared with double precision.
#include "llmc/matmul.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "llmc/matmul_search.h"
#include "test/file_helpers.h"
#include "test/kernel_test.h"

namespace {

struct Case {
    int64_t m, n, k;
    bool transpose_a, transpose_b, accumulate, bias, gelu, gelu_input;
    bool bias_gradient = false;
    bool alone = false;  // MatmulOptions::rows_alone
};

constexpr int64_t kShapes[][3] = {{64, 192, 64}, {37, 72, 24}, {1, 256, 64}, {33, 5, 7},    {130, 128, 300},
                                  {1, 1, 1},     {64, 16, 1},  {5, 64, 1},   {70, 40, 1100}};

std::vector<Case> forms_of_the_step(int64_t m, int64_t n, int64_t k) {
    return {
        {m, n, k, false, false, false, true, false, false},        // a linear layer
        {m, n, k, false, false, false, true, true, false},         // with GELU
        {m, n, k, false, true, false, false, false, false},        // logits, input gradients
        {m, n, k, false, true, false, false, false, true},         // through GELU's gradient
        {m, n, k, true, false, true, false, false, false},         // the head's weight gradient
        {m, n, k, false, false, false, false, false, false},       // and its input gradient
        {m, n, k, true, false, true, false, false, false, true},   // added gradients of weight and bias
        {m, n, k, true, false, false, false, false, false, true},  // the first of them
    };
}

double gelu(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
double gelu_slope(double x) { return (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5; }

size_t size(int64_t rows, int64_t columns) { return static_cast<size_t>(rows * columns); }

// The operands of a product: random numbers. Outputs that are not added to are poisoned; a bias's gradient is
// zero.
template <class T>
struct Operands {
    std::vector<T> a, b, bias, x, start, sums_start;
    explicit Operands(const Case& c)
        : a(random_values<T>(size(c.m, c.k), 1, 1)),
          b(random_values<T>(size(c.k, c.n), 1, 2)),
          bias(random_values<T>(size(1, c.n), 1, 3)),
          x(random_values<T>(size(c.m, c.n), 1, 4)),
          start(c.accumulate ? random_values<T>(size(c.m, c.n), 1, 5) : poisoned<T>(size(c.m, c.n))),
          sums_start(c.accumulate ? random_values<T>(size(1, c.n), 1, 6) : std::vector<T>(size(1, c.n))) {}
};

// The outputs of a product: the product, and the sums of b's columns if asked for.
template <class T>
struct Results {
    std::vector<T> out, sums;
};

template <class T>
Results<T> multiply(const Case& c, const Operands<T>& o) {
    DeviceArray<T> device_a(o.a), device_b(o.b), device_bias(o.bias), device_x(o.x), device_out(o.start),
        device_sums(o.sums_start);
    auto ta = device_a.tensor(c.transpose_a ? Shape{c.k, c.m} : Shape{c.m, c.k});
    auto tb = device_b.tensor(c.transpose_b ? Shape{c.n, c.k} : Shape{c.k, c.n});
    auto out = device_out.tensor({c.m, c.n}), t_bias = device_bias.tensor({c.n}),
         t_x = device_x.tensor({c.m, c.n}), t_sums = device_sums.tensor({c.n});
    MatmulOptions<T> options;
    options.transpose_a = c.transpose_a;
    options.transpose_b = c.transpose_b;
    options.accumulate = c.accumulate;
    options.gelu = c.gelu;
    options.rows_alone = c.alone ? c.m : 0;
    if (c.bias) options.bias = &t_bias;
    if (c.gelu_input) options.gelu_input = &t_x;
    if (c.bias_gradient) options.bias_gradient = &t_sums;
    Arena arena;
    auto run = [&] { matmul(arena, Stream{}, out, ta, tb, options); };
    Plan plan = arena.rehearse(run);
    arena.allocate({&plan});
    arena.run(plan, run);
    return {device_out.download(), device_sums.download()};
}

// Returns the bytes of what was written. Its error must be below `bound` and at least `least`.
template <class T>
std::vector<unsigned char> check(const Case& c, double bound = tolerance<T>(), double least = 0) {
    SCOPED_TRACE(testing::Message() << c.m << "x" << c.n << "x" << c.k << " ta" << c.transpose_a << " tb"
                                    << c.transpose_b << " acc" << c.accumulate << " bias" << c.bias << " gelu"
                                    << c.gelu << " dgelu" << c.gelu_input << " dbias" << c.bias_gradient);
    const Operands<T> o(c);
    std::vector<double> want(size(c.m, c.n));
    for (int64_t i = 0; i < c.m; i++)
        for (int64_t j = 0; j < c.n; j++) {
            double sum = 0;
            for (int64_t l = 0; l < c.k; l++)
                sum += double{to_float(o.a[size(1, c.transpose_a ? l * c.m + i : i * c.k + l)])} *
                       double{to_float(o.b[size(1, c.transpose_b ? j * c.k + l : l * c.n + j)])};
            const size_t at = size(1, i * c.n + j);
            if (c.bias) sum += to_float(o.bias[size(1, j)]);
            if (c.accumulate) sum += to_float(o.start[at]);
            if (c.gelu) sum = gelu(sum);
            if (c.gelu_input) sum *= gelu_slope(to_float(o.x[at]));
            want[at] = sum;
        }
    std::vector<double> want_sums(size(1, c.n));
    for (int64_t j = 0; j < c.n; j++) {
        if (c.accumulate) want_sums[size(1, j)] = to_float(o.sums_start[size(1, j)]);
        for (int64_t l = 0; l < c.k; l++) want_sums[size(1, j)] += to_float(o.b[size(1, l * c.n + j)]);
    }
    const Results<T> got = multiply(c, o);
    EXPECT_LT(relative_error(got.out, want), bound);
    EXPECT_GE(relative_error(got.out, want), least);
    if (c.bias_gradient) {
        EXPECT_LT(relative_error(got.sums, want_sums), bound);
    }
    return bytes_of(got.out, got.sums);
}

template <class T>
class Matmul : public testing::Test {};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Matmul, Types);

TYPED_TEST(Matmul, EveryFormOfTheStep) {
    for (const auto& [m, n, k] : kShapes)
        for (const Case& c : forms_of_the_step(m, n, k)) check<TypeParam>(c);
}

// One row, as in decoding, for which the fast CPU build has its own kernel; these sizes cut its blocks
// anywhere.
TYPED_TEST(Matmul, OneRow) {
    for (const auto& [n, k] : {std::array<int64_t, 2>{1, 1},
                               {15, 17},
                               {50, 33},
                               {31, 700},
                               {700, 31},
                               {257, 65},
                               {96, 128},
                               {1000, 193}}) {
        for (const bool alone : {false, true}) {
            for (Case c : forms_of_the_step(1, n, k)) {
                c.alone = alone;
                check<TypeParam>(c);
            }
            for (const bool by_outputs : {false, true})
                check<TypeParam>({1, n, k, false, by_outputs, false, true, true, false, false, alone});
        }
    }
}

#if defined(SIMT_LANES) && SIMT_LANES == 1
TYPED_TEST(Matmul, OneRowHasTheSameBitsWithAnyNumberOfThreads) {
    const int before = omp_get_max_threads();
    for (const bool by_outputs : {false, true}) {
        std::vector<unsigned char> first;
        for (const int threads : {1, 2, 5}) {
            omp_set_num_threads(threads);
            auto bytes =
                check<TypeParam>({1, 333, 555, false, by_outputs, false, true, false, false, false, true});
            if (threads == 1) first = bytes;
            EXPECT_TRUE(bytes == first) << threads << " threads";
        }
    }
    omp_set_num_threads(before);
}

// Rows of several texts: each has the bits of a product with this row alone, for any number of them, and
// those that do not count are not written. Sizes around whole runs and around what fits a core's first cache.
TYPED_TEST(Matmul, RowsOfSeveralTexts) {
    for (const bool by_outputs : {true, false})
        for (const int64_t k : {5, 16, 40, 577, 768, 769, 2050})
            for (const int64_t n : {1, 34, 70}) {
                constexpr int64_t kMost = 17;
                DeviceArray<TypeParam> a(random_values<TypeParam>(size(kMost, k), 1, 1)),
                    b(random_values<TypeParam>(size(k, n), 1, 2)),
                    bias(random_values<TypeParam>(size(1, n), 1, 3));
                const auto of_rows = [&](int64_t first, int64_t rows, int64_t counting) {
                    DeviceArray<TypeParam> c(poisoned<TypeParam>(size(rows, n)));
                    auto out = c.tensor({rows, n}), t_bias = bias.tensor({n});
                    const Tensor<TypeParam> left(a.data() + first * k, {rows, k});
                    const auto right = b.tensor(by_outputs ? Shape{n, k} : Shape{k, n});
                    Arena arena;
                    auto run = [&] {
                        matmul(arena, Stream{}, out, left, right,
                               {.transpose_b = by_outputs, .bias = &t_bias, .rows_alone = counting});
                    };
                    Plan plan = arena.rehearse(run);
                    arena.allocate({&plan});
                    arena.run(plan, run);
                    return c.download();
                };
                std::vector<TypeParam> alone;
                for (int64_t row = 0; row < kMost; row++)
                    for (const TypeParam x : of_rows(row, 1, 1)) alone.push_back(x);
                const std::vector<TypeParam> poison = poisoned<TypeParam>(size(2, n));
                for (int64_t rows = 1; rows <= kMost; rows++) {
                    const std::vector<TypeParam> all = of_rows(0, std::min(rows + 2, kMost), rows);
                    const size_t counting = size(rows, n);
                    ASSERT_EQ(0, memcmp(all.data(), alone.data(), counting * sizeof(TypeParam)))
                        << rows << " rows, n " << n << ", k " << k << ", by outputs " << by_outputs;
                    ASSERT_EQ(0, memcmp(all.data() + counting, poison.data(),
                                        (all.size() - counting) * sizeof(TypeParam)));
                }
            }
}
#endif

// Columns of a wider matrix, transposed, into fp32: a slice of a weight's gradient, and of LoRA's dB, for
// which b is columns of a wider matrix too.
TYPED_TEST(Matmul, ColumnsOfAWiderMatrixIntoFp32) {
    for (const auto& [m, n, k, width, first, b_width] : {std::array<int64_t, 6>{64, 48, 33, 192, 64, 0},
                                                         {37, 5, 70, 90, 53, 0},
                                                         {1, 1, 3, 2, 1, 0},
                                                         {64, 48, 33, 192, 64, 96},
                                                         {64, 16, 1, 64, 0, 0},
                                                         {64, 16, 1, 128, 64, 48},
                                                         {41, 6, 70, 90, 13, 19}}) {
        SCOPED_TRACE(testing::Message() << m << "x" << n << "x" << k << ", b of " << b_width);
        const int64_t b_row = b_width ? b_width : n;
        const auto a = random_values<TypeParam>(static_cast<size_t>(k * width), 1, 1);
        const auto b = random_values<TypeParam>(static_cast<size_t>(k * b_row), 1, 2);
        std::vector<double> want(static_cast<size_t>(m * n));
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++)
                for (int64_t l = 0; l < k; l++)
                    want[static_cast<size_t>(i * n + j)] +=
                        double{to_float(a[static_cast<size_t>(l * width + first + i)])} *
                        double{to_float(b[static_cast<size_t>(l * b_row + j)])};
        DeviceArray<TypeParam> device_a(a), device_b(b);
        DeviceArray<float> device_out(poisoned<float>(static_cast<size_t>(m * n)));
        Tensor<float> out = device_out.tensor({m, n});
        Arena arena;
        auto multiply = [&] {
            matmul(arena, Stream{}, out, Tensor<TypeParam>(device_a.data() + first, {k, m}),
                   Tensor<TypeParam>(device_b.data(), {k, n}),
                   {.transpose_a = true, .a_row = width, .b_row = b_width});
        };
        Plan plan = arena.rehearse(multiply);
        arena.allocate({&plan});
        arena.run(plan, multiply);
        EXPECT_LT(relative_error(device_out.download(), want), tolerance<float>());
    }
}

// Columns of wider matrices as operands and as output: LoRA's thin products beside a wide one, and the
// gradients of its factors, where a is transposed. What is beside the output's columns does not change. The
// scratch of oneDNN's product of many rows would be 40 MiB.
TYPED_TEST(Matmul, ColumnsOfWiderMatrices) {
    struct Shape3 {
        int64_t m, n, k;
        bool transpose_a, transpose_b;
    };
    std::vector<Shape3> cases = {{70, 33, 16, false, true},   {9, 16, 130, false, false},
                                 {1, 40, 3, false, true},     {48, 8, 70, true, false},
                                 {16, 130, 9, true, false},   {3, 57, 33, true, false},
                                 {130, 16, 257, true, false}, {64, 16, 1, true, false}};
    if (!kSmallShapes) cases.push_back({8100, 640, 16, false, true});
    for (const auto& [m, n, k, transpose_a, transpose_b] : cases) {
        SCOPED_TRACE(testing::Message() << m << "x" << n << "x" << k << " ta" << transpose_a);
        const int64_t a_row = (transpose_a ? m : k) + 11, b_row = (transpose_b ? k : n) + 5, out_row = n + 7;
        const auto a = random_values<TypeParam>(static_cast<size_t>((transpose_a ? k : m) * a_row), 1, 1);
        const auto b = random_values<TypeParam>(static_cast<size_t>((transpose_b ? n : k) * b_row), 1, 2);
        const auto before = random_values<TypeParam>(static_cast<size_t>(m * out_row), 1, 3);
        std::vector<double> want = to_doubles(before);
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++)
                for (int64_t l = 0; l < k; l++)
                    want[static_cast<size_t>(i * out_row + 2 + j)] +=
                        double{to_float(
                            a[static_cast<size_t>(transpose_a ? l * a_row + 3 + i : i * a_row + 3 + l)])} *
                        double{to_float(
                            b[static_cast<size_t>(transpose_b ? j * b_row + 1 + l : l * b_row + 1 + j)])};
        const DeviceArray<TypeParam> device_a(a), device_b(b), device_out(before);
        Tensor<TypeParam> out(device_out.data() + 2, {m, n});
        const Tensor<TypeParam> left(device_a.data() + 3, transpose_a ? Shape{k, m} : Shape{m, k}),
            right(device_b.data() + 1, transpose_b ? Shape{n, k} : Shape{k, n});
        Arena arena;
        auto multiply = [&] {
            matmul(arena, Stream{}, out, left, right,
                   {.transpose_a = transpose_a,
                    .transpose_b = transpose_b,
                    .accumulate = true,
                    .a_row = a_row,
                    .b_row = b_row,
                    .out_row = out_row});
        };
        Plan plan = arena.rehearse(multiply);
#if !defined(SIMT_GPU)
        EXPECT_LE(plan.workspace, size_t{16} << 20);
#endif
        arena.allocate({&plan});
        arena.run(plan, multiply);
        const std::vector<TypeParam> got = device_out.download();
        EXPECT_LT(relative_error(got, want), tolerance<TypeParam>());
        for (size_t i = 0; i < got.size(); i++) {
            const int64_t column = static_cast<int64_t>(i) % out_row;
            if (column < 2 || column >= n + 2) {
                ASSERT_EQ(to_float(got[i]), to_float(before[i]));
            }
        }
    }
}

// Beyond these sizes, oneDNN is called for pieces.
TYPED_TEST(Matmul, ManySummandsAndColumns) {
    if (kSmallShapes) return;
    for (const Case& c : forms_of_the_step(3, 70, 16500)) check<TypeParam>(c);
    for (const Case& c : forms_of_the_step(5, 2401, 40)) check<TypeParam>(c);
    check<TypeParam>({3, 2401, 16500, true, false, true, false, false, false});
}

#if !defined(SIMT_GPU)
TYPED_TEST(Matmul, PiecesCoverAProductInLittleScratch) {
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{5000, 2048, 20000},
                                  {64, 2400, 16385},
                                  {70, 48, 16384},
                                  {1, 50257, 64},
                                  {8100, 1, 16},
                                  {1, 1, 1}})
        for (const int form : {0, 1, 2}) {
            SCOPED_TRACE(testing::Message() << m << "x" << n << "x" << k << ", form " << form);
            const OnednnProduct p{.m = m,
                                  .n = n,
                                  .k = k,
                                  .a_row = form == 1 ? 1 : k,
                                  .a_column = form == 1 ? m : 1,
                                  .b_row = form == 2 ? 1 : n,
                                  .b_column = form == 2 ? k : 1,
                                  .c_row = n};
            const OnednnPiece piece = piece_of(p);
            EXPECT_TRUE(piece.rows > 0 && piece.rows <= m && piece.columns > 0 && piece.columns <= n);
            EXPECT_EQ((piece.summands < k), (k > kManySummands));
            const PiecesOfProduct<TypeParam, TypeParam> pieces(p);
            EXPECT_EQ(pieces.count(), ceil_div(m, piece.rows) * ceil_div(n, piece.columns));
            EXPECT_LE(pieces.bytes().scratch, size_t{2} << 20);
            EXPECT_LE(pieces.bytes().copied, size_t{2} << 20);
        }
}

// What oneDNN leaves open on a CPU without AVX-512 (run/% sets ONEDNN_MAX_CPU_ISA on others): a row's result
// has the same bits wherever it stands, and whatever other rows there are.
TYPED_TEST(Matmul, RowsHaveTheSameBitsAmongAnyOthers) {
    if (!kFastCpu || !onednn::without_avx512()) GTEST_SKIP() << "products of a CPU without AVX-512";
    constexpr int64_t kRows = 307;
    for (const auto& [n, k] : {std::array<int64_t, 2>{64, 256},
                               {256, 64},
                               {768, 700},
                               {1000, 65},
                               {2304, 768},
                               {30, 33},
                               {1, 400},
                               {5, 17}})
        for (const bool transposed_b : {false, true})
            for (const bool extras : {false, true}) {
                const DeviceArray<TypeParam> a(
                    random_values<TypeParam>(static_cast<size_t>(kRows * k), 1, 1)),
                    b(random_values<TypeParam>(static_cast<size_t>(n * k), 1, 2)),
                    bias(random_values<TypeParam>(static_cast<size_t>(n), 1, 3));
                const auto product = [&](int64_t first, int64_t rows) {
                    OnednnProduct p{rows, n, k, k, 1, n, 1, n};
                    if (transposed_b) p.b_row = 1, p.b_column = k;
                    p.accumulate = p.bias = extras;
                    const PiecesOfProduct<TypeParam, TypeParam> pieces(p);
                    std::vector<unsigned char> scratch(pieces.bytes().scratch + 64);
                    void* aligned = scratch.data();
                    size_t space = scratch.size();
                    std::align(64, space - 64, aligned, space);
                    std::vector<TypeParam> c(static_cast<size_t>(rows * n), from_float<TypeParam>(0.5f));
                    for (size_t i = 0; i < pieces.count(); i++)
                        pieces.multiply(i, c.data(), a.data() + first * k, b.data(), bias.data(),
                                        static_cast<unsigned char*>(aligned));
                    return c;
                };
                const auto all = product(0, kRows);
                for (const auto& [first, rows] : {std::array<int64_t, 2>{0, 1},
                                                  {1, 7},
                                                  {5, 12},
                                                  {130, 128},
                                                  {48, 256},
                                                  {306, 1},
                                                  {3, 304}}) {
                    SCOPED_TRACE(testing::Message() << rows << " rows from " << first << ", " << n << " x "
                                                    << k << (transposed_b ? ", transposed b" : ""));
                    const auto some = product(first, rows);
                    EXPECT_EQ(memcmp(some.data(), all.data() + first * n, some.size() * sizeof(TypeParam)),
                              0);
                }
            }
}

// The pieces of a product depend on its shape alone. The shapes are those of steps: rows of text below and
// above what oneDNN divides among threads, ranks of LoRA from 1 to 64, narrow and wide layers.
TYPED_TEST(Matmul, TheNumberOfThreadsChangesNoBit) {
    if (!kFastCpu) GTEST_SKIP() << "the products are those of the fast build";
    std::vector<Case> cases;
    const auto add = [&](int64_t rows, int64_t in, int64_t out, int seed) {
        const auto form = [seed](int bit) { return (seed >> bit) % 2 == 1; };
        Case forward{rows, out, in, false, form(0), form(1), !form(1) && form(2), false, false};
        Case backward{rows, in, out, false, form(0), form(1), false, false, false};
        Case weights{in, out, rows, true, false, form(1), false, false, false};
        cases.insert(cases.end(), {forward, backward, weights});
    };
    std::mt19937 random(20261125);
    for (const int64_t rows : {64, 130, 260, 390, 1000, 2048, 3900, 4096, 8192})
        for (const int64_t width : {1, 2, 4, 16, 64, 192}) add(rows, width % 3 ? 64 : 100, width, random());
    for (int i = 0; i < 40; i++)
        add(1 + random() % 700, 1 + random() % 300, 1 + random() % 300, static_cast<int>(random() % 8));
    add(70, 2401, 16500, 3);
    const int before = omp_get_max_threads();
    for (const Case& c : cases) {
        SCOPED_TRACE(testing::Message() << c.m << "x" << c.n << "x" << c.k << (c.transpose_a ? " T" : " N")
                                        << (c.transpose_b ? "T" : "N"));
        const Operands<TypeParam> operands(c);
        std::vector<unsigned char> alone;
        for (const int threads : {1, 2, 3, 4, 8}) {
            omp_set_num_threads(threads);
            const Results<TypeParam> got = multiply(c, operands);
            const std::vector<unsigned char> bytes = bytes_of(got.out, got.sums);
            if (threads == 1) alone = bytes;
            EXPECT_TRUE(bytes == alone) << threads << " threads";
        }
    }
    omp_set_num_threads(before);
}
#endif

TYPED_TEST(Matmul, GivesTheSameBitsEveryTime) {
    const int64_t m = 70, n = 90, k = 110;
    DeviceArray<TypeParam> a(random_values<TypeParam>(m * k, 1, 1)), b(random_values<TypeParam>(k * n, 1, 2));
    std::vector<TypeParam> first;
    for (int turn = 0; turn < 3; turn++) {
        DeviceArray<TypeParam> c(poisoned<TypeParam>(m * n));
        auto out = c.tensor({m, n});
        Arena arena;
        auto multiply = [&] { matmul(arena, Stream{}, out, a.tensor({m, k}), b.tensor({k, n})); };
        Plan plan = arena.rehearse(multiply);
        arena.allocate({&plan});
        arena.run(plan, multiply);
        const auto got = c.download();
        if (turn == 0) first = got;
        EXPECT_EQ(0, memcmp(first.data(), got.data(), got.size() * sizeof(TypeParam)));
    }
}

// With the approximate tanh, fp32 does not fuse GELU; bf16 fuses its gradient if rows are as the library
// needs.
TEST(Fusable, GeluInBf16Alone) {
    for (const int64_t n : {64, 72, 5})
        for (const bool fp32 : {false, true}) {
            const Product asked{.n = n, .bias = true, .gelu = true, .gelu_backward = true};
            Product want = asked;
            want.gelu = !fp32;
            want.gelu_backward = !fp32 && n != 5;
            EXPECT_TRUE(fusable(asked, fp32) == want) << n << " columns, fp32 " << fp32;
        }
}

// Sets products back to fp32, also when a test fails.
struct WithTf32 {
    WithTf32() { tf32_products = true; }
    ~WithTf32() { tf32_products = false; }
};

// A product in TF32 is another product: in its name, under which algorithms are kept, and in its time.
TEST(Tf32, IsAskedOfFp32Alone) {
    const DeviceRates rates = {.flops = 1e12, .bandwidth = 1e12, .latency = 0, .tf32_flops = 8e12};
    const Tensor<float> a(nullptr, {64, 512}), b(nullptr, {512, 64}), out(nullptr, {64, 64});
    const Tensor<bf16> a16(nullptr, {64, 512}), b16(nullptr, {512, 64}), out16(nullptr, {64, 64});
    const auto seconds = [&](const Product& p) {
        return seconds_of(Work{.range = "", .name = "matmul", .flops = 1e12, .bytes = 0, .product = p},
                          rates);
    };
    const Product exact = matmul_product<float>(out, a, b, {});
    const WithTf32 set;
    const Product rounded = matmul_product<float>(out, a, b, {}),
                  narrow = matmul_product<bf16>(out16, a16, b16, {});
    EXPECT_EQ(rounded.text(), exact.text() + " tf32");
    EXPECT_TRUE(narrow == exact && rounded != exact);
    EXPECT_EQ(seconds(exact), 8 * seconds(rounded));
}

#if defined(SIMT_GPU)
// A mantissa of 10 bits: the error is at most what cutting off the other bits of two operands costs, and
// above fp32's; but for a single row the library takes kernels that compute in fp32.
TEST(Tf32, EveryFormOfTheStep) {
    const WithTf32 set;
    for (const auto& [m, n, k] : kShapes)
        if (k > 1)  // a single product may cancel what is added to it
            for (const Case& c : forms_of_the_step(m, n, k))
                check<float>(c, 2e-3, k > 20 && c.m > 1 ? 1e-5 : 0);
}

Product product_of(const Case& c) {
    return {.m = c.m,
            .n = c.n,
            .k = c.k,
            .transpose_a = c.transpose_a,
            .transpose_b = c.transpose_b,
            .accumulate = c.accumulate,
            .bias = c.bias,
            .gelu = c.gelu,
            .gelu_backward = c.gelu_input,
            .bias_gradient = c.bias_gradient && !c.accumulate};
}

// Sets products back to the heuristics, also when a test fails.
struct WithoutSearch {
    ~WithoutSearch() { cublaslt::use_algorithms({}); }
};

TYPED_TEST(Matmul, SearchedAlgorithmsAreRightAndAreKept) {
    const WithoutSearch afterwards;
    const TempFolder folder;
    const std::string file = folder / "algorithms.json";
    std::vector<Case> cases;
    for (const auto& [m, n, k] : kShapes)
        for (const Case& c : forms_of_the_step(m, n, k))
            if (!kSmallShapes || m == kShapes[0][0]) cases.push_back(c);
    std::set<Product> products, doable;
    const auto key_of = [](const Product& p) { return matmul_search::key_of<TypeParam>(p); };
    for (const Case& c : cases) {
        products.insert(product_of(c));
        if (const auto key = cublaslt::doable(key_of(product_of(c)), matmul_search::aligned_operands()))
            doable.insert(key->product);
    }
    std::vector<std::vector<unsigned char>> first;
    std::string written;
    for (int run = 0; run < 2; run++) {
        search_matmul_algorithms<TypeParam>(file, products, Stream{});
        ASSERT_TRUE(cublaslt::searched().has_value());
        EXPECT_EQ(cublaslt::searched()->size(), doable.size());
        if (run == 0) written = read_text(file);
        EXPECT_EQ(read_text(file), written);  // the second run measures nothing
        for (const Product& p : doable) EXPECT_NE(cublaslt::find_searched(key_of(p)), nullptr);
        for (size_t i = 0; i < cases.size(); i++) {
            auto bytes = check<TypeParam>(cases[i]);
            if (run == 0) first.push_back(bytes);
            EXPECT_TRUE(bytes == first[i]);
        }
    }
}

// As if products took long: they are computed some rows at a time.
TYPED_TEST(Matmul, DividedProducts) {
    struct Limit {
        explicit Limit(double flops) { longest_product = flops; }
        ~Limit() { longest_product = std::numeric_limits<double>::infinity(); }
    };
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{700, 72, 24}, {513, 5, 7}}) {
        const Limit limit(2.0 * 300 * n * k);
        EXPECT_EQ(rows_at_once({.m = m, .n = n, .k = k}), 256);
        EXPECT_EQ(rows_at_once({.m = 300, .n = n, .k = k}), 300);
        for (const Case& c : forms_of_the_step(m, n, k)) check<TypeParam>(c);
    }
}

// As if the library fused nothing: kernels do the rest afterwards.
TYPED_TEST(Matmul, WhatTheLibraryDoesNotFuseIsDoneAfterwards) {
    for (const Case& c : forms_of_the_step(37, 72, 24)) {
        const Product asked = product_of(c);
        Product bare = asked;
        bare.bias = bare.gelu = bare.gelu_backward = false;
        const auto values = random_values<TypeParam>(37 * 72, 1, 1),
                   bias = random_values<TypeParam>(72, 1, 2), x = random_values<TypeParam>(37 * 72, 1, 3);
        const DeviceArray<TypeParam> device(values), device_bias(bias), device_x(x);
        std::vector<double> want = to_doubles(values);
        for (size_t i = 0; i < want.size(); i++) {
            if (c.bias) want[i] += to_float(bias[i % 72]);
            if (c.gelu) want[i] = gelu(want[i]);
            if (c.gelu_input) want[i] *= gelu_slope(to_float(x[i]));
        }
        Tensor<TypeParam> out = device.tensor({37, 72});
        const Tensor<TypeParam> t_bias = device_bias.tensor({72}), t_x = device_x.tensor({37, 72});
        cublaslt::finish(asked, bare, out, {.bias = &t_bias, .gelu_input = &t_x}, Stream{});
        EXPECT_LT(relative_error(device.download(), want), tolerance<TypeParam>());
        cublaslt::finish(asked, asked, out, {.bias = &t_bias, .gelu_input = &t_x}, Stream{});  // does nothing
        EXPECT_LT(relative_error(device.download(), want), tolerance<TypeParam>());
    }
}

// Whether or not a search would choose such an algorithm.
TYPED_TEST(Matmul, BiasGradientMadeByTheProduct) {
    const WithoutSearch afterwards;
    const TempFolder folder;
    MatmulAlgorithms algorithms(folder / "algorithms.json", matmul_search::machine());
    std::vector<Case> cases;
    for (const auto& [m, n, k] : kShapes) {
        const Case c = {m, n, k, true, false, false, false, false, false, true};
        const cublaslt::Key key = matmul_search::key_of<TypeParam>(product_of(c));
        const cublaslt::Description description(key, matmul_search::aligned_operands(), true);
        const std::vector<MatmulAlgorithm> candidates = description.candidates(1);
        if (candidates.empty()) continue;
        EXPECT_TRUE(candidates[0].bias_gradient);
        algorithms.add(key.text(), candidates[0]);
        cases.push_back(c);
    }
    if (cases.empty()) GTEST_SKIP() << "cuBLASLt makes no bias gradients of this type here";
    cublaslt::use_algorithms(algorithms);
    for (const Case& c : cases) EXPECT_TRUE(check<TypeParam>(c) == check<TypeParam>(c));
}
#endif

#ifdef LLMC_ASAN
// The library is not instrumented, so its operands are checked before the call.
TEST(MatmulDeathTest, OfATensorThatWasLetGo) {
    Arena arena;
    const auto step = [&](bool let_go) {
        Tensor<float> a = arena.take<float>("a", {5, 7}), b = arena.take<float>("b", {7, 3}),
                      out = arena.take<float>("out", {5, 3});
        const Tensor<float> kept = a.view();
        device_fill(a.data(), 0, static_cast<size_t>(a.bytes()), Stream{});
        device_fill(b.data(), 0, static_cast<size_t>(b.bytes()), Stream{});
        if (let_go) a.drop();
        matmul(arena, Stream{}, out, kept, b);
    };
    for (const bool let_go : {false, true}) {
        Plan plan = arena.rehearse([&] { step(let_go); });
        arena.allocate({&plan});
        if (let_go) {
            EXPECT_DEATH(arena.run(plan, [&] { step(true); }), "ERROR: AddressSanitizer");
        } else {
            arena.run(plan, [&] { step(false); });
        }
    }
}
#endif

}  // namespace
