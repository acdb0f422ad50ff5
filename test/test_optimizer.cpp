// test_optimizer.cpp - the update with every format of its state, compared with double precision; the formats
// themselves; the gradient's norm.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/global_norm.cuh"
#include "llmc/optimizer.cuh"
#include "llmc/rank_sums.cuh"
#include "test/gpt2_config.h"
#include "test/kernel_test.h"

namespace {

using Doubles = std::vector<double>;
const Stream kStream{};

uint16_t bits_of(bf16 x) {
    uint16_t bits;
    memcpy(&bits, static_cast<const void*>(&x), 2);
    return bits;
}
bf16 bf16_of(uint16_t bits) {
    bf16 x;
    memcpy(static_cast<void*>(&x), &bits, 2);
    return x;
}

// ---- fp32 in two parts

// Checks the parts of x: together they are x, to the bit; the high part is a nearest bf16.
void expect_split(uint32_t bits) {
    const float x = std::bit_cast<float>(bits);
    const Split<16> s = split<16>(x);
    ASSERT_EQ(std::bit_cast<uint32_t>(join<16>(s.high, s.low)), bits) << x;
    ASSERT_TRUE(-(1 << 15) <= s.low && s.low < 1 << 15) << x;
    const uint16_t cut = static_cast<uint16_t>(bits >> 16);
    const double below = double{to_float(bf16_of(cut))}, high = double{to_float(s.high)};
    const double above = double{to_float(bf16_of(static_cast<uint16_t>(cut + 1)))};
    if (!std::isfinite(above)) return;  // the next bf16 is an infinity, which is no neighbour
    ASSERT_LE(std::abs(high - double{x}), std::min(std::abs(below - double{x}), std::abs(above - double{x})))
        << x;
    const bool tie = (bits & 0xffff) == 0x8000;
    // A tie is rounded away from zero.
    if (tie) {
        ASSERT_EQ(bits_of(s.high), cut + 1) << x;
    }
    ASSERT_EQ(bits_of(narrow_master<bf16>(x)), bits_of(s.high));
    if (!tie) {
        ASSERT_EQ(bits_of(from_float<bf16>(x)), bits_of(s.high)) << x;
    }
}

TEST(Split, TheTwoPartsAreTheValue) {
    for (uint64_t i = 0; i < 200000; i++) {
        const auto bits = static_cast<uint32_t>(random_bits(1, i));
        if (std::isfinite(std::bit_cast<float>(bits))) expect_split(bits);
    }
    // Zeros, subnormals, ties, carries into the exponent and out of the subnormals, the largest; both signs.
    for (const uint32_t bits :
         {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0x18000u, 0x7f8000u, 0x7fffffu, 0x800000u, 0x3f7f7fffu,
          0x3f7f8000u, 0x3f7fffffu, 0x3f800000u, 0x3f808000u, 0x3f818000u, 0x7f7f0000u, 0x7f7f7fffu}) {
        expect_split(bits);
        expect_split(bits | 0x80000000u);
    }
    for (const uint32_t nan : {0x7fc00000u, 0x7fffffffu, 0xffffffffu, 0x7f800001u})
        EXPECT_TRUE(std::isnan(to_float(narrow_master<bf16>(std::bit_cast<float>(nan)))));
}

// ---- 8-bit codes

// The value of a code of `kBits` bits by the paper's formula, scaled so that the largest is 1.
double paper_value(int code, int kBits) {
    if (code == 0) return 0;
    const int i = std::bit_width(static_cast<unsigned>(code)) - 1, j = code - (1 << i);
    const double value = std::pow(10., i - (kBits - 1)) * (0.1 + 0.9 * (j + 0.5) / (1 << i));
    return value / (1 - 0.45 / (1 << (kBits - 1)));
}

template <int kBits>
void expect_map() {
    for (int code = 0; code < 1 << kBits; code++) {
        const float value = decode_magnitude<kBits>(code);
        EXPECT_NEAR(value, paper_value(code, kBits), 1e-4 * paper_value(code, kBits)) << code;
        EXPECT_EQ(encode_magnitude<kBits>(value), code);
        if (code == 0) continue;
        const float below = decode_magnitude<kBits>(code - 1), gap = value - below;
        EXPECT_GT(value, below);
        EXPECT_EQ(encode_magnitude<kBits>(below + 0.501f * gap), code);
        EXPECT_EQ(encode_magnitude<kBits>(below + 0.499f * gap), code - 1);
    }
    EXPECT_EQ(decode_magnitude<kBits>(0), 0.f);
    EXPECT_EQ(decode_magnitude<kBits>((1 << kBits) - 1), 1.f);
}

TEST(Quantize8, CodesAreThePapersAndEncodingFindsTheNearest) {
    expect_map<7>();
    expect_map<8>();
}

TEST(Quantize8, EveryCodeComesBack) {
    for (const float scale : {1.f, 0x1p-126f, 3e-30f, 0.37f, 1e30f}) {
        for (int code = 0; code < 256; code++) {
            const auto byte = static_cast<uint8_t>(code);
            const float inverse = inverse_scale(block_scale(scale)), m = SignedCode::decode(byte, scale);
            const uint8_t again = SignedCode::encode(m, inverse);
            // Zero has two codes, and the smallest values of the smallest blocks are zero in fp32.
            if (code != 0x80 && m != 0.f) {
                EXPECT_EQ(again, byte) << scale;
            }
            EXPECT_EQ(SignedCode::decode(again, scale), m);
            const float root = decode_magnitude<8>(code) * scale;
            if (root != 0.f) {
                EXPECT_EQ(RootCode::encode(root, inverse), byte) << scale;
            }
        }
        EXPECT_EQ(SignedCode::decode(0x7f, scale), scale);
        EXPECT_EQ(SignedCode::decode(0xff, scale), -scale);
        EXPECT_EQ(RootCode::decode(0xff, scale), scale * scale);
        EXPECT_EQ(RootCode::encode(std::numeric_limits<float>::denorm_min(), inverse_scale(scale)), 1);
    }
    EXPECT_EQ(RootCode::encode(0.f, 0.f), 0);
    EXPECT_EQ(SignedCode::encode(0.f, 0.f), 0);
}

// ---- the update

struct Formats {
    Optimizer optimizer = Optimizer::AdamW;
    Master master = Master::Fp32;
    Moment m = Moment::Fp32, v = Moment::Fp32;
    std::string text() const { return StateOptions{true, true, optimizer, master, m, v}.text(); }
};

// A moment on the host, in its format.
struct HostMoment {
    Moment format = Moment::Fp32;
    std::vector<float> fp32;
    std::vector<bf16> narrow;
    std::vector<uint8_t> codes;
    std::vector<float> scales;

    template <class Code>
    static HostMoment make(Moment format, const std::vector<float>& values) {
        HostMoment h{format, {}, {}, {}, {}};
        if (format == Moment::Fp32) h.fp32 = values;
        if (format == Moment::Bf16)
            for (float x : values) h.narrow.push_back(from_float<bf16>(x));
        if (format != Moment::Bits8) return h;
        for (size_t first = 0; first < values.size(); first += kQuantizedBlock) {
            const size_t end = std::min(values.size(), first + kQuantizedBlock);
            float scale = 0;
            for (size_t i = first; i < end; i++) scale = std::max(scale, std::abs(Code::quantity(values[i])));
            for (size_t i = first; i < end; i++)
                h.codes.push_back(Code::encode(Code::quantity(values[i]), inverse_scale(scale)));
            h.scales.push_back(scale);
        }
        return h;
    }
    // The values of the moment, by the paper's formula.
    Doubles values(bool root) const {
        if (format == Moment::Fp32) return to_doubles(fp32);
        if (format == Moment::Bf16) return to_doubles(narrow);
        Doubles result;
        for (size_t i = 0; i < codes.size(); i++) {
            const double scale = double{scales[i / kQuantizedBlock]};
            const double x = scale * (root ? paper_value(codes[i], 8) : paper_value(codes[i] & 0x7f, 7));
            result.push_back(root ? x * x : codes[i] & 0x80 ? -x : x);
        }
        return result;
    }
    std::vector<unsigned char> bytes() const { return bytes_of(fp32, narrow, codes, scales); }
};

struct DeviceMoment {
    DeviceArray<float> fp32;
    DeviceArray<bf16> narrow;
    DeviceArray<uint8_t> codes;
    DeviceArray<float> scales;

    explicit DeviceMoment(const HostMoment& h)
        : fp32(h.fp32), narrow(h.narrow), codes(h.codes), scales(h.scales) {}
    MomentArray array(Moment format) const {
        if (format == Moment::Fp32) return {format, fp32.data(), nullptr};
        if (format == Moment::Bf16) return {format, narrow.data(), nullptr};
        return {format, codes.data(), scales.data()};
    }
    HostMoment download(Moment format) const {
        return {format, fp32.download(), narrow.download(), codes.download(), scales.download()};
    }
};

// Weights and their state.
template <class T>
struct Training {
    Formats formats;
    std::vector<T> weights;
    std::vector<float> master;  // for Master::Fp32
    std::vector<int16_t> low;   // for Master::Split
    HostMoment m, v;

    static Training make(const Formats& f, const std::vector<float>& w, const std::vector<float>& m,
                         const std::vector<float>& v) {
        Training t{f, {}, {}, {}, {}, {}};
        for (float x : w) t.weights.push_back(narrow_master<T>(x));
        if constexpr (!std::is_same_v<T, float>) {
            if (f.master == Master::Fp32) t.master = w;
            if (f.master == Master::Split)
                for (float x : w) t.low.push_back(static_cast<int16_t>(split<16>(x).low));
        }
        if (f.optimizer == Optimizer::AdamW) {
            t.m = HostMoment::make<SignedCode>(f.m, m);
            t.v = HostMoment::make<RootCode>(f.v, v);
        }
        return t;
    }
    // The weights with all their bits.
    std::vector<float> full() const {
        if (!master.empty()) return master;
        std::vector<float> x;
        for (size_t i = 0; i < weights.size(); i++) {
            if constexpr (std::is_same_v<T, float>)
                x.push_back(weights[i]);
            else
                x.push_back(low.empty() ? to_float(weights[i]) : join<16>(weights[i], low[i]));
        }
        return x;
    }
    std::vector<unsigned char> bytes() const {
        std::vector<unsigned char> all = bytes_of(weights, master, low);
        for (const HostMoment* h : {&m, &v}) {
            const auto more = h->bytes();
            all.insert(all.end(), more.begin(), more.end());
        }
        return all;
    }
};

struct Problem {
    OptimizerStep step{0.1f, 0.9f, 0.95f, 1e-8f, 0.5f, 0.f, 1, 5};
    float norm = 7;
    int64_t decayed = 0, first = 0;
};

// A step's factors, on the device.
struct DeviceFactors {
    explicit DeviceFactors(const OptimizerStep& step) : array(1) { set_factors(array.data(), step, kStream); }
    DeviceArray<UpdateFactors> array;
};

// One update of `start`.
template <class T>
Training<T> updated(const Training<T>& start, const std::vector<T>& gradients, const Problem& p) {
    const Formats& f = start.formats;
    const bool read = std::is_same_v<T, float> || f.master != Master::Fp32;
    const DeviceArray<T> weights(read ? start.weights : poisoned<T>(start.weights.size())), d_g(gradients);
    const DeviceArray<float> master(start.master), norm(std::vector<float>{p.norm});
    const DeviceArray<int16_t> low(start.low);
    const DeviceMoment m(start.m), v(start.v);
    void* behind = start.low.empty() ? static_cast<void*>(master.data()) : low.data();
    const DeviceFactors factors(p.step);
    optimizer_update(factors.array.data(),
                     UpdateArrays<T>{.weights = weights.data(),
                                     .gradients = d_g.data(),
                                     .optimizer = f.optimizer,
                                     .master_format = f.master,
                                     .master = behind,
                                     .m = m.array(f.m),
                                     .v = v.array(f.v),
                                     .decayed = p.decayed,
                                     .n = static_cast<int64_t>(gradients.size()),
                                     .first = p.first},
                     norm.tensor({1}), kStream);
    return {f, weights.download(), master.download(), low.download(), m.download(f.m), v.download(f.v)};
}

// The optimizer's update in double precision and plain loops, without rounding. Changes w, m and v in place.
void reference_update(const Problem& p, Optimizer optimizer, Doubles& w, const Doubles& gradients, Doubles& m,
                      Doubles& v) {
    const OptimizerStep& o = p.step;
    const double scale = o.clip > 0 && p.norm > o.clip ? o.clip / p.norm : 1;
    const double beta1 = o.beta1, beta2 = o.beta2;
    for (size_t i = 0; i < w.size(); i++) {
        const double g = gradients[i] * scale;
        const double decay = static_cast<int64_t>(i) < p.decayed ? o.weight_decay : 0;
        double direction = g;
        if (optimizer == Optimizer::AdamW) {
            m[i] = beta1 * m[i] + (1 - beta1) * g;
            v[i] = beta2 * v[i] + (1 - beta2) * g * g;
            const double m_hat = m[i] / (1 - std::pow(beta1, o.step));
            const double v_hat = v[i] / (1 - std::pow(beta2, o.step));
            direction = m_hat / (std::sqrt(v_hat) + o.epsilon);
        }
        w[i] -= o.lr * (direction + decay * w[i]);
    }
}

// The distance from x to the nearest value of the map, both as fractions of the scale.
double nearest_code(double x, int kBits) {
    double nearest = 1;
    for (int code = 0; code < 1 << kBits; code++)
        nearest = std::min(nearest, std::abs(paper_value(code, kBits) - x));
    return nearest;
}

// Expects a moment to be `want` in the moment's format. fp32 state that came from codes has their map's
// deviation from the paper's formula, 1e-4.
void expect_moment(const HostMoment& got, const Doubles& want, bool root, double slack) {
    const Doubles values = got.values(root);
    ASSERT_EQ(values.size(), want.size());
    if (got.format == Moment::Fp32) {
        EXPECT_LT(relative_error(got.fp32, want), slack);
        return;
    }
    for (size_t i = 0; i < want.size(); i++) {
        if (got.format == Moment::Bf16) {  // a neighbour, less than their distance away; m may cancel
            EXPECT_LT(std::abs(values[i] - want[i]), (0x1p-7 + slack) * std::abs(want[i]) + 0.01 * slack)
                << i;
            continue;
        }
        const size_t block = i / kQuantizedBlock * kQuantizedBlock;
        const auto quantity = [&](double x) { return root ? std::sqrt(x) : std::abs(x); };
        double scale = 0;
        for (size_t k = block; k < std::min(want.size(), block + kQuantizedBlock); k++)
            scale = std::max(scale, quantity(want[k]));
        EXPECT_NEAR(got.scales[i / kQuantizedBlock], scale, slack * scale);
        const double nearest = nearest_code(quantity(want[i]) / scale, root ? 8 : 7) * scale;
        const double smallest = root ? paper_value(1, 8) * scale : 0;
        EXPECT_LE(std::abs(quantity(values[i]) - quantity(want[i])),
                  std::max(nearest, smallest) + slack * scale);
        if (std::abs(values[i]) > 0) {
            EXPECT_EQ(values[i] < 0, want[i] < 0);
        }
        if (root) {
            EXPECT_EQ(values[i] == 0, want[i] == 0);
        }
    }
}

std::vector<Formats> all_formats(bool narrow) {
    std::vector<Formats> all;
    for (const Master master : {Master::Fp32, Master::Split, Master::None}) {
        if (!narrow && master != Master::Fp32) continue;
        for (const Moment m : {Moment::Fp32, Moment::Bf16, Moment::Bits8})
            for (const Moment v : {Moment::Fp32, Moment::Bf16, Moment::Bits8})
                all.push_back({Optimizer::AdamW, master, m, v});
        all.push_back({Optimizer::Sgd, master, Moment::Fp32, Moment::Fp32});
    }
    return all;
}

std::vector<float> random_squares(size_t n, uint64_t seed) {
    std::vector<float> v = random_values<float>(n, 1, seed);
    for (float& x : v) x *= x;
    return v;
}

// One step from a random state. lr and decay are so large that an error in either is large beside the
// weights.
template <class T>
void expect_update(const Formats& formats, size_t n, const Problem& p) {
    SCOPED_TRACE(formats.text() + ", n " + std::to_string(n) + ", step " + std::to_string(p.step.step));
    const std::vector<T> gradients = random_values<T>(n, 1, 71);
    const auto start = Training<T>::make(formats, random_values<float>(n, 0.2, 72),
                                         random_values<float>(n, 1, 73), random_squares(n, 74));
    Training<T> end;
    for_each_order([&] {
        end = updated(start, gradients, p);
        return end.bytes();
    });
    Doubles w = to_doubles(start.full()), m = start.m.values(false), v = start.v.values(true);
    reference_update(p, formats.optimizer, w, to_doubles(gradients), m, v);
    const bool coded = formats.m == Moment::Bits8 || formats.v == Moment::Bits8;
    const double slack = coded ? 2e-4 : tolerance<float>();
    if (formats.optimizer == Optimizer::AdamW) {
        expect_moment(end.m, m, false, slack);
        expect_moment(end.v, v, true, slack);
    }
    const std::vector<float> full = end.full();
    if (std::is_same_v<T, float> || formats.master != Master::None) {
        EXPECT_LT(relative_error(full, w), slack);
        for (size_t i = 0; i < n; i++)
            ASSERT_EQ(to_float(end.weights[i]), to_float(narrow_master<T>(full[i]))) << i;
    } else {
        for (size_t i = 0; i < n; i++)
            EXPECT_LT(std::abs(double{full[i]} - w[i]), (0x1p-7 + slack) * std::abs(w[i]) + slack);
    }
}

template <class T>
class OptimizerUpdate : public testing::Test {};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(OptimizerUpdate, Types);

TYPED_TEST(OptimizerUpdate, IsTheReferencesInEveryFormat) {
    for (const Formats& formats : all_formats(!std::is_same_v<TypeParam, float>)) {
        for (const int n : {1, 7, 255, 256, 1003, 5003}) {
            if (n > (kSmallShapes ? 256 : kFaithful ? 1003 : 5003)) continue;
            Problem p;
            p.decayed = n / 2 + 1;  // in the middle of a vector
            expect_update<TypeParam>(formats, static_cast<size_t>(n), p);
            p.step.clip = 1;
            p.step.step = 20;
            p.decayed = n / 3;
            if (!kThreadSanitizer) expect_update<TypeParam>(formats, static_cast<size_t>(n), p);
        }
    }
    Problem p;  // clipping is not needed
    p.step.clip = 10;
    expect_update<TypeParam>({}, 100003, p);
    p.decayed = 1000;
    p.norm = p.step.clip = 1;
    expect_update<TypeParam>({}, 1000, p);
}

TEST(OptimizerUpdate, SplitIsTheFp32MasterToTheBit) {
    const size_t n = 5003;
    const auto w = random_values<float>(n, 0.2, 1), m = random_values<float>(n, 1, 2);
    for (const Formats& f : all_formats(true)) {
        if (f.master != Master::Fp32) continue;
        SCOPED_TRACE(f.text());
        Formats g = f;
        g.master = Master::Split;
        auto whole = Training<bf16>::make(f, w, m, random_squares(n, 3)),
             parts = Training<bf16>::make(g, w, m, random_squares(n, 3));
        Problem p;
        for (p.step.step = 1; p.step.step <= 5; p.step.step++) {
            const auto gradients = random_values<bf16>(n, 1, 10 + static_cast<uint64_t>(p.step.step));
            whole = updated(whole, gradients, p);
            parts = updated(parts, gradients, p);
        }
        EXPECT_TRUE(bytes_of(whole.full()) == bytes_of(parts.full()));
        EXPECT_TRUE(bytes_of(whole.weights) == bytes_of(parts.weights));
        EXPECT_TRUE(whole.m.bytes() == parts.m.bytes() && whole.v.bytes() == parts.v.bytes());
    }
}

// Stochastic rounding gives one of the two neighbours of the exact value, and is exact on average.
class Rounding {
  public:
    explicit Rounding(size_t n) : sum_(n) {}
    void add(const std::vector<bf16>& rounded, const std::vector<float>& exact) {
        count_++;
        for (size_t i = 0; i < exact.size(); i++) {
            const auto cut = static_cast<uint16_t>(std::bit_cast<uint32_t>(exact[i]) >> 16);
            const double down = double{to_float(bf16_of(cut))}, x = double{exact[i]};
            const double gap = double{to_float(bf16_of(static_cast<uint16_t>(cut + 1)))} - down;
            const uint16_t got = bits_of(rounded[i]);
            ASSERT_TRUE(got == cut || (got == cut + 1 && x != down))
                << exact[i] << " " << to_float(rounded[i]);
            sum_[i] += (double{to_float(rounded[i])} - x) / gap;
        }
    }
    // The standard deviation of one rounding is at most half a gap; the mean may be off by six of its own.
    void expect_unbiased() const {
        double total = 0;
        for (double s : sum_) {
            EXPECT_LT(std::abs(s / count_), 3 / std::sqrt(count_));
            total += s;
        }
        const double roundings = count_ * static_cast<double>(sum_.size());
        EXPECT_LT(std::abs(total / roundings), 3 / std::sqrt(roundings));
    }

  private:
    Doubles sum_;
    double count_ = 0;
};

TEST(OptimizerUpdate, RandomRoundingIsUnbiased) {
    const size_t n = 300;
    std::vector<float> w, m = random_values<float>(n, 1, 2);
    for (bf16 x : random_values<bf16>(n, 0.2, 1)) w.push_back(to_float(x));
    for (float& x : m) x = to_float(from_float<bf16>(x));
    std::vector<float> v = random_squares(n, 3);
    for (float& x : v) x = to_float(from_float<bf16>(x));
    const auto gradients = random_values<bf16>(n, 1, 4);
    Problem p;
    const Formats narrow{Optimizer::AdamW, Master::None, Moment::Bf16, Moment::Bf16};
    const auto exact = updated(Training<bf16>::make({}, w, m, v), gradients, p);
    const auto start = Training<bf16>::make(narrow, w, m, v);
    Rounding of_w(n), of_m(n), of_v(n);
    for (p.step.seed = 0; p.step.seed < (kSmallShapes ? 50 : 400); p.step.seed++) {
        const auto end = updated(start, gradients, p);
        of_w.add(end.weights, exact.master);
        of_m.add(end.m.narrow, exact.m.fp32);
        of_v.add(end.v.narrow, exact.v.fp32);
    }
    for (const Rounding* r : {&of_w, &of_m, &of_v}) r->expect_unbiased();
}

TEST(OptimizerUpdate, RandomRoundingIsAFunctionOfSeedStepAndElement) {
    const size_t n = 1024, half = 512;
    const auto w = random_values<float>(n, 0.2, 1);
    const auto gradients = random_values<bf16>(n, 1e-3, 4);
    const Formats sgd{Optimizer::Sgd, Master::None, Moment::Fp32, Moment::Fp32};
    Problem p;
    const auto start = Training<bf16>::make(sgd, w, {}, {});
    const auto whole = bytes_of(updated(start, gradients, p).weights);
    EXPECT_TRUE(whole == bytes_of(updated(start, gradients, p).weights));
    std::vector<bf16> pieces;
    for (const size_t first : {size_t{0}, half}) {
        const auto at = static_cast<std::ptrdiff_t>(first), end = static_cast<std::ptrdiff_t>(first + half);
        const std::vector<float> part(w.begin() + at, w.begin() + end);
        p.first = static_cast<int64_t>(first);
        const auto piece = updated(Training<bf16>::make(sgd, part, {}, {}),
                                   std::vector<bf16>(gradients.begin() + at, gradients.begin() + end), p);
        pieces.insert(pieces.end(), piece.weights.begin(), piece.weights.end());
    }
    EXPECT_TRUE(whole == bytes_of(pieces));
    for (int change = 0; change < 3; change++) {
        Problem other;
        if (change == 0) other.step.seed++;
        if (change == 1) other.step.step++;
        if (change == 2) other.first = 1 << 20;
        EXPECT_FALSE(whole == bytes_of(updated(start, gradients, other).weights)) << change;
    }
}

TEST(OptimizerUpdate, RandomRoundingKeepsWhatBf16Holds) {
    std::vector<float> values = {0.f, -0.f, 1.f, -3.5f, 0x1p-133f, std::numeric_limits<float>::infinity(),
                                 NAN};
    for (const float x : values) {
        for (const uint32_t random : {0u, 0x7fffu, 0xffffu}) {
            const float rounded = to_float(round_randomly(x, random));
            EXPECT_TRUE(std::isnan(x) ? std::isnan(rounded) : rounded == x) << x;
        }
    }
}

// With any rounding.
TYPED_TEST(OptimizerUpdate, ANaNStaysOne) {
    using T = TypeParam;
    const size_t n = 2 * kQuantizedBlock;
    std::vector<T> gradients(n, from_float<T>(0.5f));
    for (size_t i = 0; i < n; i += 9) gradients[i] = poisoned<T>(1)[0];
    const std::vector<float> zeros(n, 0.f), ones(n, 1.f);
    for (const Formats& formats : {Formats{Optimizer::AdamW, Master::Fp32, Moment::Bf16, Moment::Bf16},
                                   Formats{Optimizer::AdamW, Master::None, Moment::Fp32, Moment::Fp32},
                                   Formats{Optimizer::AdamW, Master::Split, Moment::Fp32, Moment::Fp32}}) {
        if (std::is_same_v<T, float> && formats.master != Master::Fp32) continue;
        const auto end = updated(Training<T>::make(formats, ones, zeros, zeros), gradients, Problem());
        for (size_t i = 0; i < n; i++)
            EXPECT_EQ(std::isnan(to_float(end.weights[i])), std::isnan(to_float(gradients[i]))) << i;
    }
}

// Blocks of zeros, of one element, of magnitudes far apart, and of the smallest numbers.
TEST(OptimizerUpdate, CodesOfExtremeBlocks) {
    const size_t n = 5 * kQuantizedBlock;
    std::vector<float> gradients(n, 0.f);
    gradients[kQuantizedBlock + 17] = -3;
    for (size_t i = 0; i < kQuantizedBlock; i++) {
        gradients[2 * kQuantizedBlock + i] = std::pow(10.f, -static_cast<float>(i % 30));
        gradients[3 * kQuantizedBlock + i] = i == 5 ? 1e-18f : 1e-20f;
        gradients[4 * kQuantizedBlock + i] = 0x1p-140f;  // m is subnormal, v is zero
    }
    const Formats coded{Optimizer::AdamW, Master::Fp32, Moment::Bits8, Moment::Bits8};
    const std::vector<float> zeros(n, 0.f), ones(n, 1.f);
    Problem p;
    p.step.weight_decay = 0;
    const auto exact = updated(Training<float>::make({}, ones, zeros, zeros), gradients, p);
    const auto end = updated(Training<float>::make(coded, ones, zeros, zeros), gradients, p);
    const std::vector<bool> has_m = {false, true, true, true, false},
                            has_v = {false, true, true, true, false};
    for (size_t block = 0; block < 5; block++) {
        SCOPED_TRACE(block);
        EXPECT_EQ(end.m.scales[block] > 0, has_m[block]);
        EXPECT_EQ(end.v.scales[block] > 0, has_v[block]);
        size_t largest = block * kQuantizedBlock;
        for (size_t i = largest; i < (block + 1) * kQuantizedBlock; i++) {
            if (std::abs(gradients[i]) > std::abs(gradients[largest])) largest = i;
            EXPECT_EQ(end.v.codes[i] == 0, exact.v.fp32[i] == 0) << i;
            EXPECT_TRUE(std::isfinite(end.weights[i])) << i;
        }
        const float m = SignedCode::decode(end.m.codes[largest], end.m.scales[block]);
        if (has_m[block]) {
            EXPECT_EQ(m, exact.m.fp32[largest]);
        }
        if (has_v[block]) {
            EXPECT_EQ(end.v.codes[largest], 255);
        }
    }
    // The next step is no larger than AdamW's from exact moments; the smallest moments were rounded up.
    const auto next = updated(end, zeros, p), exact_next = updated(exact, zeros, p);
    for (size_t i = 0; i < n; i++)
        EXPECT_LT(std::abs(next.weights[i] - end.weights[i]),
                  1.3f * std::abs(exact_next.weights[i] - exact.weights[i]) + 1e-6f)
            << i << " " << gradients[i];
}

TEST(OptimizerUpdate, FactorsAreTheSteps) {
    for (const int step : {1, 2, 1000, 1000000}) {
        const OptimizerStep o{3e-4f, 0.9f, 0.999f, 1e-8f, 0.1f, 1.f, step, 7};
        const UpdateFactors f = DeviceFactors(o).array.download()[0];
        EXPECT_EQ(f.lr, o.lr);
        EXPECT_EQ(f.beta1, o.beta1);
        EXPECT_EQ(f.beta2, o.beta2);
        EXPECT_EQ(f.epsilon, o.epsilon);
        EXPECT_EQ(f.weight_decay, o.weight_decay);
        EXPECT_EQ(f.clip, o.clip);
        EXPECT_NEAR(f.m_correction * (1 - std::pow(double{o.beta1}, step)), 1, 1e-7);
        EXPECT_NEAR(f.v_correction * (1 - std::pow(double{o.beta2}, step)), 1, 1e-7);
        OptimizerStep next = o;
        next.step++;
        EXPECT_NE(f.random_key, DeviceFactors(next).array.download()[0].random_key);
    }
}

// The arguments of a launch stay the same from step to step; the factors that they point to do not.
TEST(OptimizerUpdate, TheSameLaunchFollowsItsFactors) {
    const size_t n = 3 * kQuantizedBlock + 5;
    const auto gradients = random_values<float>(n, 1, 71), zeros = std::vector<float>(n, 0.f);
    const auto start = Training<float>::make({}, random_values<float>(n, 1, 72), zeros, zeros);
    Problem first, second;
    second.step.step = 2;
    second.step.lr = 0.02f;
    second.step.clip = 3;
    const auto want = updated(updated(start, gradients, first), gradients, second);

    const DeviceArray<float> weights(start.weights), d_g(gradients), norm(std::vector<float>{first.norm});
    const DeviceMoment m(start.m), v(start.v);
    const DeviceFactors factors(first.step);
    const UpdateArrays<float> arrays{.weights = weights.data(),
                                     .gradients = d_g.data(),
                                     .m = m.array(Moment::Fp32),
                                     .v = v.array(Moment::Fp32),
                                     .n = static_cast<int64_t>(n)};
    optimizer_update(factors.array.data(), arrays, norm.tensor({1}), kStream);
    set_factors(factors.array.data(), second.step, kStream);
    optimizer_update(factors.array.data(), arrays, norm.tensor({1}), kStream);
    EXPECT_TRUE(bytes_of(weights.download()) == bytes_of(want.weights));
}

TEST(OptimizerUpdate, CountsTheBytesItMoves) {
    const auto bytes = [](auto type, const Formats& f) {
        UpdateArrays<decltype(type)> a{};
        a.optimizer = f.optimizer;
        a.master_format = f.master;
        a.m.format = f.m;
        a.v.format = f.v;
        a.n = 1024;
        Plan plan;
        const int clock = 0;
        DryRun dry{plan, clock};
        dry_run = &dry;
        simt::launches_off = true;
        optimizer_update(nullptr, a, Tensor<float>(nullptr, {1}), kStream);
        simt::launches_off = false;
        dry_run = nullptr;
        EXPECT_EQ(plan.work.size(), 1u);
        return plan.work[0].bytes / 1024;
    };
    const Moment coded = Moment::Bits8;
    EXPECT_EQ(bytes(0.f, {}), 4 + 6 * 4);         // the gradient is read, three values are updated
    EXPECT_EQ(bytes(bf16{}, {}), 2 + 2 + 6 * 4);  // the weight is only written
    EXPECT_EQ(bytes(bf16{}, {Optimizer::AdamW, Master::Split, coded, coded}), 2 + 4 + 4 + 2 * (2 + 8 / 256.));
    EXPECT_EQ(bytes(bf16{}, {Optimizer::AdamW, Master::None, Moment::Bf16, Moment::Fp32}), 2 + 4 + 4 + 8);
    EXPECT_EQ(bytes(bf16{}, {Optimizer::Sgd, Master::None, Moment::Fp32, Moment::Fp32}), 2 + 4);
}

// A unit of a State is updated where its buffers are, and nothing beside it changes.
template <class T>
void expect_unit_update(const StateOptions& options) {
    SCOPED_TRACE(options.text());
    State<T> state(Layout(gpt2_config(300, 32, 2, 2, 24)), options);
    EXPECT_EQ(state.find(StatePart::Gradients) != nullptr, options.gradients);
    state.allocate();
    const Unit& unit = state.layout.units()[1];
    const auto n = static_cast<size_t>(unit.size);
    const DeviceArray<T> gradients(std::vector<T>(n, from_float<T>(0.5f)));
    const DeviceArray<float> norm(std::vector<float>{1});
    const DeviceFactors factors(Problem{}.step);
    optimizer_update(factors.array.data(),
                     arrays_of_unit(state, unit, state.template data<T>(StatePart::Weights, unit.offset),
                                    static_cast<const T*>(gradients.data())),
                     norm.tensor({1}), kStream);
    for (const StateBuffer& b : state.buffers()) {
        std::vector<char> host(b.bytes());
        copy_to_host(host.data(), b.memory.data(), host.size(), kStream);
        const auto begin = static_cast<size_t>(unit.offset / b.span) * b.width;
        const auto end = begin + n / static_cast<size_t>(b.span) * b.width;
        for (size_t i = 0; i < host.size(); i++)
            if (i < begin || i >= end) {
                ASSERT_EQ(host[i], 0) << b.name << " " << i;
            }
        if (b.part == StatePart::Gradients) continue;
        for (size_t i = begin; i < end; i += b.width)
            ASSERT_TRUE(std::any_of(&host[i], &host[i] + b.width, [](char c) { return c != 0; })) << b.name;
    }
}

TEST(OptimizerUpdate, UpdatesAUnitOfAState) {
    expect_unit_update<float>({});
    expect_unit_update<float>({.m = Moment::Bits8, .v = Moment::Bits8});
    expect_unit_update<bf16>(
        {.gradients = false, .master = Master::Split, .m = Moment::Bits8, .v = Moment::Bf16});
    expect_unit_update<bf16>({.optimizer = Optimizer::Sgd, .master = Master::None});
}

TYPED_TEST(OptimizerUpdate, GlobalNorm) {
    using T = TypeParam;
    // There are always 1024 blocks, so few sizes are enough.
    for (int n : {0, 7, 100003, kNormBlocks * kVectorSize<T> * 3 + 5}) {
        if (kThreadSanitizer && n != 7) continue;
        SCOPED_TRACE(n);
        const std::vector<T> x = random_values<T>(n, 3, 81);
        std::vector<float> norm;
        auto run = [&] {
            const DeviceArray<T> d_x(x);
            const DeviceArray<float> d_norm(poisoned<float>(1)), d_scratch(poisoned<float>(kNormBlocks));
            Tensor<float> t_norm = d_norm.tensor({1}), scratch = d_scratch.tensor({kNormBlocks});
            global_norm(t_norm, scratch, d_x.data(), n, kStream);
            return bytes_of(norm = d_norm.download());
        };
        if (kThreadSanitizer)
            run();
        else
            for_each_order(run);
        double squares = 0;
        for (double v : to_doubles(x)) squares += v * v;
        EXPECT_LT(relative_error(norm, {std::sqrt(squares)}), tolerance<float>());
    }
}

// The sums of what ranks send, rounded once: in fp32 the bits of adding one term after the other.
TYPED_TEST(OptimizerUpdate, SumOfRanks) {
    using T = TypeParam;
    for (const int ranks : {1, 2, 3, 8})
        for (const int64_t n : {int64_t{1}, int64_t{kVectorSize<T>}, int64_t{1003}}) {
            if (kThreadSanitizer && ranks != 3) continue;
            SCOPED_TRACE(testing::Message() << ranks << " ranks, " << n << " elements");
            const int64_t columns = ceil_div(n + 1, int64_t{kVectorSize<T>}) * kVectorSize<T>;
            const std::vector<T> parts = random_values<T>(static_cast<size_t>(ranks * columns), 3, 82);
            std::vector<T> sum;
            for_each_order([&] {
                const DeviceArray<T> d_parts(parts), d_sum(poisoned<T>(static_cast<size_t>(n)));
                sum_ranks(d_sum.tensor({n}), d_parts.tensor({ranks, columns}), kStream);
                return bytes_of(sum = d_sum.download());
            });
            for (int64_t i = 0; i < n; i++) {
                float expected = to_float(parts[static_cast<size_t>(i)]);
                for (int r = 1; r < ranks; r++)
                    expected += to_float(parts[static_cast<size_t>(r * columns + i)]);
                ASSERT_EQ(to_float(sum[static_cast<size_t>(i)]), to_float(from_float<T>(expected))) << i;
            }
        }
}

// The longest slice of a block of Llama 3.1 8B, 70B and 405B is at most 15% longer than 1/N of the block.
TEST(Slices, OfLargeModelsAreNearlyEqual) {
    for (const auto& [all, block] : {std::pair<int64_t, int64_t>{8030261248, 218112000},
                                     {70553706496, 855654400},
                                     {405853388800, 3189178368}})
        for (const int ranks : {2, 4, 8, 16, 64})
            EXPECT_LE(static_cast<double>(Slices{0, ranks, norm_stretch(all)}.own(block).count),
                      1.15 * static_cast<double>(block) / ranks)
                << all << " " << ranks;
}

// Slices cover a unit once, begin with whole stretches, and a stretch has whole blocks of 8-bit state.
TEST(Slices, CoverAUnit) {
    for (const int64_t all :
         {int64_t{1}, int64_t{300}, int64_t{100000}, int64_t{124439808}, int64_t{405853388800}}) {
        const int64_t stretch = norm_stretch(all);
        EXPECT_EQ(stretch % kQuantizedBlock, 0);
        EXPECT_LE(ceil_div(all, stretch), all <= 1 << 28 ? kNormBlocks : kMostNormBlocks);
        for (const int ranks : {1, 2, 3, 8, 64})
            for (const int64_t size : {int64_t{0}, int64_t{1}, all / 3, all}) {
                int64_t next = 0;
                for (int r = 0; r < ranks; r++) {
                    const Slices slices{r, ranks, stretch};
                    const Slice own = slices.own(size);
                    EXPECT_TRUE(own.count == 0 || (own.first == next && own.first % stretch == 0));
                    EXPECT_LE(own.count, slices.length(size));
                    next += own.count;
                }
                EXPECT_EQ(next, size);
            }
    }
}

}  // namespace
