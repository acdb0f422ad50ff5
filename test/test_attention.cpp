// test_attention.cpp - products by warps and causal attention, forward and backward, compared with sums in
// double precision.

#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/attention.cuh"
#include "llmc/model_positions.h"
#include "test/kernel_test.h"

namespace {

struct Case {
    int batch, heads, head_size, queries, keys;
    // Columns of a packed qkv; a KV cache with spare rows; rows whose length is no multiple of a vector; a
    // packed qkv with q, k and v of each head side by side, as in BLOOM.
    enum Layout { kPacked, kCache, kUnaligned, kByHead };
    Layout layout;
    double scale = 1;  // of q, and so of the scores
    int kv_heads = heads;
    int window = 0;
    bool alibi = false;
    bool hopper = false;
    int document = 0;  // documents have up to this many rows; 0: each sequence is one
    double dropout = 0;
    double given_scale = 0, cap = 0;  // as in AttentionInput

    // For q, k or v: which = 0, 1, 2.
    int heads_of(int which) const { return which == 0 ? heads : kv_heads; }
    int channels(int which = 0) const { return heads_of(which) * head_size; }
    int rows(int which) const { return which == 0 ? queries : keys + spare(); }
    bool packed() const { return layout == kPacked || layout == kByHead; }
    int spare() const { return layout == kCache ? 3 : 0; }
    int64_t row(int which) const {
        return packed() ? channels(0) + channels(1) + channels(2) : channels(which) + (layout == kUnaligned);
    }
    // The distance between heads, and the first column of head 0.
    int head_distance() const { return (layout == kByHead ? 3 : 1) * head_size; }
    int64_t begin(int which) const {
        if (layout == kByHead) return which * head_size;
        return layout == kPacked && which > 0 ? channels(0) + (which - 1) * channels(1) : 0;
    }
    size_t size(int which) const { return batch * rows(which) * row(which); }
    std::string name() const {
        return "batch " + std::to_string(batch) + ", " + std::to_string(heads) + " heads of " +
               std::to_string(head_size) + " on " + std::to_string(kv_heads) + ", " +
               std::to_string(queries) + " queries, " + std::to_string(keys) + " keys, layout " +
               std::to_string(layout) + ", window " + std::to_string(window) + (alibi ? ", slopes" : "") +
               (document ? ", documents of up to " + std::to_string(document) : "") +
               (dropout > 0 ? ", dropout" : "") +
               (given_scale > 0 ? ", scale " + std::to_string(given_scale) : "") +
               (cap > 0 ? ", cap " + std::to_string(cap) : "");
    }
};

// Documents of random lengths, different in each sequence: for each row its position in its document, and
// where that ends.
struct RandomDocuments {
    std::vector<int> positions, ends;
    explicit RandomDocuments(const Case& c) {
        if (!c.document) return;
        std::mt19937 random(5);
        for (int b = 0; b < c.batch; b++)
            for (int begin = 0; begin < c.queries;) {
                const int end = std::min<int>(c.queries, begin + 1 + random() % c.document);
                for (int i = begin; i < end; i++) positions.push_back(i - begin), ends.push_back(end);
                begin = end;
            }
    }
    // The first key that query i of batch entry b sees.
    int begin(const Case& c, int b, int i) const { return i - positions[size_t(b) * c.queries + i]; }
};

constexpr uint64_t kDropoutKey = 0x1234567890ABCDEF, kDropoutPlace = 21;

// The dropout factor of each probability, (batch, heads, queries, keys).
std::vector<double> dropout_factors(const Case& c) {
    std::vector<double> factors(size_t(c.batch) * c.heads * c.queries * c.keys, 1);
    if (c.dropout == 0) return factors;
    const auto dropped = static_cast<uint64_t>(std::lround(c.dropout * 65536));
    for (size_t i = 0; i < factors.size(); i++) {
        const uint64_t bits = mix64(mix64(kDropoutKey ^ kDropoutPlace) ^ (i / 4)) >> (i % 4 * 16);
        factors[i] = (bits & 0xffff) < dropped ? 0 : 65536. / double(65536 - dropped);
    }
    return factors;
}

// The arrays with q, k and v, or with their gradients: one if packed, else three; and where q, k and v begin
// in them.
template <class T>
struct Arrays {
    std::vector<std::vector<T>> host;
    std::vector<std::unique_ptr<DeviceArray<T>>> device;
    T *q, *k, *v;
    std::unique_ptr<DeviceArray<float>> slopes;
    std::unique_ptr<DeviceArray<int>> positions, ends;
    std::unique_ptr<DeviceArray<uint64_t>> dropout_key;

    Arrays(const Case& c, std::vector<std::vector<T>> values) : host(std::move(values)) {
        for (const std::vector<T>& h : host) device.push_back(std::make_unique<DeviceArray<T>>(h));
        const auto place = [&](int which) { return device[c.packed() ? 0 : which]->data() + c.begin(which); };
        q = place(0);
        k = place(1);
        v = place(2);
        if (c.alibi) slopes = std::make_unique<DeviceArray<float>>(alibi_slopes(c.heads));
        dropout_key = std::make_unique<DeviceArray<uint64_t>>(std::vector<uint64_t>{kDropoutKey});
        if (!c.document) return;
        const RandomDocuments documents(c);
        positions = std::make_unique<DeviceArray<int>>(documents.positions);
        ends = std::make_unique<DeviceArray<int>>(documents.ends);
    }
    void download() {
        for (size_t i = 0; i < host.size(); i++) host[i] = device[i]->download();
    }
    // Element (b, row, head, column) of q, k or v, once downloaded.
    double at(const Case& c, int which, int b, int64_t row, int head, int column) const {
        const int64_t i = (int64_t{b} * c.rows(which) + row) * c.row(which) + c.begin(which) +
                          head * c.head_distance() + column;
        return to_float(host[c.packed() ? 0 : which][i]);
    }
    // All of q, k or v as (batch, rows, channels).
    std::vector<float> compact(const Case& c, int which) const {
        std::vector<float> values;
        for (int b = 0; b < c.batch; b++)
            for (int i = 0; i < (which == 0 ? c.queries : c.keys); i++)
                for (int h = 0; h < c.heads_of(which); h++)
                    for (int e = 0; e < c.head_size; e++)
                        values.push_back(static_cast<float>(at(c, which, b, i, h, e)));
        return values;
    }
};

template <class T, class Fill>
Arrays<T> make_arrays(const Case& c, Fill fill) {
    if (c.packed()) return Arrays<T>(c, {fill(c.size(0), 0)});
    return Arrays<T>(c, {fill(c.size(0), 0), fill(c.size(1), 1), fill(c.size(2), 2)});
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
    return {.batch = c.batch,
            .heads = c.heads,
            .head_size = c.head_size,
            .queries = c.queries,
            .keys = c.keys,
            .q = arrays.q,
            .k = arrays.k,
            .v = arrays.v,
            .q_row = c.row(0),
            .kv_row = c.row(1),
            .q_batch = c.rows(0) * c.row(0),
            .kv_batch = c.rows(1) * c.row(1),
            .kv_heads = c.kv_heads,
            .q_head = c.head_distance(),
            .kv_head = c.head_distance(),
            .window = c.window,
            .alibi = c.alibi ? arrays.slopes->data() : nullptr,
            .hopper = c.hopper,
            .positions = c.document ? arrays.positions->data() : nullptr,
            .document_ends = c.document ? arrays.ends->data() : nullptr,
            .dropout = dropout_at(arrays.dropout_key->data(), kDropoutPlace, c.dropout),
            .given_scale = static_cast<float>(c.given_scale),
            .cap = static_cast<float>(c.cap)};
}

struct Reference {
    std::vector<double> out, lse, dq, dk, dv;
};

// Computes it by the definition, one row of scores at a time.
template <class T>
Reference reference(const Case& c, const Arrays<T>& x, const std::vector<double>& dout) {
    const size_t rows = static_cast<size_t>(c.batch) * c.queries,
                 key_rows = static_cast<size_t>(c.batch) * c.keys;
    Reference r{std::vector<double>(rows * c.channels()), std::vector<double>(rows * c.heads),
                std::vector<double>(rows * c.channels()), std::vector<double>(key_rows * c.channels(1)),
                std::vector<double>(key_rows * c.channels(1))};
    const double scale = c.given_scale > 0 ? c.given_scale : 1 / std::sqrt(double(c.head_size));
    const RandomDocuments documents(c);
    const std::vector<float> slopes = c.alibi ? alibi_slopes(c.heads) : std::vector<float>(c.heads);
    const std::vector<double> factors = dropout_factors(c);
    const std::vector<double> q = to_doubles(x.compact(c, 0)), k = to_doubles(x.compact(c, 1)),
                              v = to_doubles(x.compact(c, 2));
    const auto key_at = [&](int b, int j, int kv) {
        return (b * size_t(c.keys) + j) * c.channels(1) + kv * c.head_size;
    };
    for (int b = 0; b < c.batch; b++)
        for (int h = 0; h < c.heads; h++)
            for (int i = 0; i < c.queries; i++) {
                const int position = c.keys - c.queries + i, kv = h / (c.heads / c.kv_heads);
                int begin = c.window && c.window <= position ? position - c.window + 1 : 0;
                if (c.document) begin = std::max(begin, documents.begin(c, b, i));
                const size_t query = (b * size_t(c.queries) + i) * c.channels() + h * c.head_size;
                const double* const factor =
                    &factors[((size_t(b) * c.heads + h) * c.queries + i) * size_t(c.keys)];
                std::vector<double> p(c.keys), dp(c.keys), through_cap(c.keys, 1);
                double sum = 0, delta = 0;
                for (int j = begin; j <= position; j++) {
                    const size_t key = key_at(b, j, kv);
                    for (int e = 0; e < c.head_size; e++) {
                        p[j] += q[query + e] * k[key + e];
                        dp[j] += dout[query + e] * v[key + e];
                    }
                    dp[j] *= factor[j];
                    double score = p[j] * scale;
                    if (c.cap > 0) {
                        const double part = std::tanh(score / c.cap);
                        score = c.cap * part, through_cap[j] = 1 - part * part;
                    }
                    sum += p[j] = std::exp(score + slopes[h] * double(j - position));
                }
                for (int j = begin; j <= position; j++) delta += (p[j] /= sum) * dp[j];
                r.lse[(size_t(b) * c.heads + h) * c.queries + i] = std::log(sum);
                for (int j = begin; j <= position; j++) {
                    const size_t key = key_at(b, j, kv);
                    const double ds = p[j] * (dp[j] - delta) * through_cap[j] * scale;
                    for (int e = 0; e < c.head_size; e++) {
                        r.out[query + e] += p[j] * factor[j] * v[key + e];
                        r.dq[query + e] += ds * k[key + e];
                        r.dk[key + e] += ds * q[query + e];
                        r.dv[key + e] += p[j] * factor[j] * dout[query + e];
                    }
                }
            }
    return r;
}

// The relative error of dq or dk. If a query sees one key these are zero, and the error is the root mean
// square of what rounding leaves of differences of numbers like 1.
double gradient_error(const std::vector<float>& got, const std::vector<double>& want) {
    const bool zero = std::all_of(want.begin(), want.end(), [](double x) { return x == 0; });
    return relative_error(got, want) / (zero ? std::sqrt(double(want.size())) : 1);
}

// What forward and backward write to poisoned outputs, each (batch, rows, columns); dq, dk and dv only if
// queries == keys.
template <class T>
struct Results {
    std::vector<T> out;
    std::vector<float> lse, dq, dk, dv;
    std::vector<unsigned char> bytes() const { return bytes_of(out, lse, dq, dk, dv); }
};

template <class T>
Results<T> run(const Case& c, const Arrays<T>& x, const DeviceArray<T>& dout) {
    const size_t rows = static_cast<size_t>(c.batch) * c.queries;
    const AttentionInput<T> in = input_of(c, x);
    DeviceArray<T> out(poisoned<T>(rows * c.channels()));
    DeviceArray<float> lse(poisoned<float>(rows * c.heads)), delta(poisoned<float>(rows * c.heads));
    attention_forward(out.data(), lse.data(), in, Stream{});
    Results<T> results{out.download(), lse.download(), {}, {}, {}};
    if (c.queries != c.keys) return results;
    Arrays<T> gradients = poisoned_arrays<T>(c);
    attention_delta(delta.data(), dout.data(), out.data(), in, Stream{});
    attention_backward(gradients.q, gradients.k, gradients.v, dout.data(), lse.data(), delta.data(), in,
                       Stream{});
    gradients.download();
    results.dq = gradients.compact(c, 0);
    results.dk = gradients.compact(c, 1);
    results.dv = gradients.compact(c, 2);
    return results;
}

// Calls use(in) for each piece of `piece` keys of `in`. The last piece also has the keys of all queries. What
// is carried between pieces starts as poisoned memory.
template <class T, class Use>
void for_each_piece(const AttentionInput<T>& in, int piece, Use use) {
    DeviceArray<float> carried(poisoned<float>(in.carried_size(in.queries, in.heads, in.head_size)));
    for (int first = 0; first <= in.position(0); first += piece) {
        AttentionInput<T> part = in;
        part.drop_keys(first);
        if (first + piece <= in.position(0)) part.keys = piece;
        part.later = in.keys - first - part.keys;
        if (in.first_key(0) >= first + part.keys) continue;  // no query sees this piece
        part.continues = in.first_key(0) < first;
        part.in_pieces = true, part.carried = carried.data();
        if (part.document_ends) part.document_ends += first;
        const int64_t sums = int64_t{first} * in.kv_heads * in.head_size;
        part.dk_sums += sums, part.dv_sums += sums;
        use(part);
    }
}

// run() with `rows` queries of each sequence at a time: forward from the first to the last, backward from the
// last to the first; and with `piece` keys at a time, if not 0.
template <class T>
Results<T> run_in_ranges(const Case& c, const Arrays<T>& x, const DeviceArray<T>& dout, int rows,
                         int piece = 0) {
    const int64_t length = c.keys, channels = c.channels(), all = c.batch * length;
    DeviceArray<T> out(poisoned<T>(all * channels));
    Arrays<T> gradients = poisoned_arrays<T>(c);
    std::vector<float> lse_of_all(all * c.heads);
    for (int b = 0; b < c.batch; b++) {
        const std::vector<float> zeros(length * c.channels(1));
        DeviceArray<float> dk_sums(zeros), dv_sums(zeros);
        for (int64_t first = (length - 1) / rows * rows; first >= 0; first -= rows) {
            const int64_t count = std::min<int64_t>(rows, length - first), at = b * length + first;
            AttentionInput<T> in = input_of(c, x);
            const int64_t q_at = b * in.q_batch + first * in.q_row;
            in.batch = 1, in.queries = static_cast<int>(count), in.keys = static_cast<int>(first + count);
            in.q += q_at, in.k += b * in.kv_batch, in.v += b * in.kv_batch;
            if (c.document) in.positions += at, in.document_ends += b * length;
            in.length = c.keys, in.entry = b, in.in_chunks = true;
            in.dk_sums = dk_sums.data(), in.dv_sums = dv_sums.data();
            DeviceArray<float> lse(poisoned<float>(count * c.heads)), delta(lse.size());
            const auto for_keys = [&](auto use) { piece ? for_each_piece(in, piece, use) : use(in); };
            for_keys([&](const AttentionInput<T>& keys) {
                attention_forward(out.data() + at * channels, lse.data(), keys, Stream{});
            });
            const T* const d_out = dout.data() + at * channels;
            attention_delta(delta.data(), d_out, out.data() + at * channels, in, Stream{});
            const int64_t kv_at = b * in.dkv_batch + first * in.dkv_row;
            for_keys([&](const AttentionInput<T>& keys) {
                attention_backward(gradients.q + q_at, gradients.k + kv_at, gradients.v + kv_at, d_out,
                                   lse.data(), delta.data(), keys, Stream{});
            });
            const std::vector<float> statistics = lse.download();
            for (int h = 0; h < c.heads; h++)
                std::copy_n(&statistics[h * count], count,
                            &lse_of_all[(int64_t{b} * c.heads + h) * length + first]);
        }
    }
    gradients.download();
    return {out.download(), lse_of_all, gradients.compact(c, 0), gradients.compact(c, 1),
            gradients.compact(c, 2)};
}

// The bits must be the same if dq overwrites q, and dk and dv overwrite k and v or have rows of their own.
template <class T>
void check_in_place(const Case& c, const Arrays<T>& x, const DeviceArray<T>& dout, const Results<T>& want) {
    Arrays<T> place(c, x.host);
    AttentionInput<T> in = input_of(c, x);
    in.q = place.q, in.k = place.k, in.v = place.v;
    const DeviceArray<T> out(want.out);
    const DeviceArray<float> lse(want.lse), delta(poisoned<float>(want.lse.size()));
    attention_delta(delta.data(), dout.data(), out.data(), in, Stream{});
    const size_t n = static_cast<size_t>(c.batch) * c.keys * c.channels(1);
    DeviceArray<T> dk(poisoned<T>(n)), dv(poisoned<T>(n));
    if (!kOverwritesKeys) {
        in.dkv_row = c.channels(1), in.dkv_batch = int64_t{c.keys} * c.channels(1);
        in.dkv_head = c.head_size;
    }
    attention_backward(place.q, kOverwritesKeys ? place.k : dk.data(), kOverwritesKeys ? place.v : dv.data(),
                       dout.data(), lse.data(), delta.data(), in, Stream{});
    place.download();
    EXPECT_TRUE(bytes_of(place.compact(c, 0)) == bytes_of(want.dq)) << "dq in place of q";
    const auto floats = [](const std::vector<T>& v) {
        std::vector<float> f;
        for (const T e : v) f.push_back(to_float(e));
        return f;
    };
    const std::vector<float> got_k = kOverwritesKeys ? place.compact(c, 1) : floats(dk.download());
    const std::vector<float> got_v = kOverwritesKeys ? place.compact(c, 2) : floats(dv.download());
    EXPECT_TRUE(bytes_of(got_k) == bytes_of(want.dk) && bytes_of(got_v) == bytes_of(want.dv));
}

// Checks the results of run(), and returns their bytes.
template <class T>
std::vector<unsigned char> run_case(const Case& c, const Arrays<T>& x, const DeviceArray<T>& dout,
                                    const Reference& want) {
    const Results<T> got = run(c, x, dout);
    EXPECT_LT(relative_error(got.out, want.out), tolerance<T>());
    EXPECT_LT(relative_error(got.lse, want.lse), tolerance<T>());
    DeviceArray<T> out_only(poisoned<T>(got.out.size()));
    attention_forward(out_only.data(), static_cast<float*>(nullptr), input_of(c, x), Stream{});
    EXPECT_TRUE(bytes_of(out_only.download()) == bytes_of(got.out)) << "other bits without lse";
    if (c.queries == c.keys) {
        EXPECT_LT(gradient_error(got.dq, want.dq), tolerance<T>());
        EXPECT_LT(gradient_error(got.dk, want.dk), tolerance<T>());
        EXPECT_LT(relative_error(got.dv, want.dv), tolerance<T>());
        check_in_place(c, x, dout, got);
    }
    return got.bytes();
}

// Compared with the slopes of transformers' build_alibi_tensor.
TEST(Alibi, Slopes) {
    const std::vector<std::pair<int, std::vector<double>>> known = {
        {1, {0.00390625}},
        {3, {0.0625, 0.00390625, 0.25}},
        {7, {0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125, 0.03125}},
        {8, {0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625}},
        {12,
         {0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625, 0.707106769, 0.353553385,
          0.176776677, 0.0883883387}}};
    for (const auto& [heads, slopes] : known)
        EXPECT_LT(relative_error(alibi_slopes(heads), slopes), 1e-7) << heads << " heads";
}

// Whether attention_hopper.cuh's kernels run here: on such a GPU, and in the faithful build.
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
    if (kThreadSanitizer)
        return {{1, 1, 20, 70, 70, kPacked},
                {1, 1, 64, 5, 130, kCache},
                {1, 2, 16, 70, 70, kPacked, 1, 1, 17, true}};
    return {
        {1, 1, 8, 1, 1, kPacked},       {2, 3, 8, 63, 63, kPacked},      {1, 2, 20, 64, 64, kPacked},
        {1, 2, 21, 65, 65, kPacked},    {3, 1, 64, 65, 65, kPacked},     {1, 1, 64, 200, 200, kPacked, 3},
        {1, 1, 80, 130, 130, kPacked},  {1, 2, 128, 65, 65, kPacked},    {1, 2, 64, 70, 70, kUnaligned},
        {2, 2, 16, 100, 100, kCache},   {1, 1, 1, 17, 17, kPacked},      {1, 1, 128, 129, 129, kUnaligned},
        {2, 2, 64, 1, 77, kCache},      {2, 1, 32, 5, 130, kCache},      {1, 2, 48, 66, 67, kUnaligned},
        {1, 2, 33, 1, 300, kUnaligned}, {1, 1, 64, 100, 260, kCache, 3}, {1, 1, 32, 5, 67, kCache},
        {1, 2, 136, 65, 65, kPacked},   {1, 1, 250, 40, 70, kUnaligned}, {1, 1, 512, 70, 70, kPacked, 3},
        {2, 2, 256, 1, 77, kCache},
    };
}

template <class T>
class Attention : public testing::Test {};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Attention, Types);

// Odd lengths, heads in groups, windows, ALiBi; some with a cache.
std::vector<Case> random_cases() {
    std::mt19937 random(12);
    const auto one_of = [&](const std::vector<int>& values) { return values[random() % values.size()]; };
    std::vector<Case> cases;
    for (int i = 0; i < (kFaithful ? 10 : 25); i++) {
        const int group = one_of({1, 2, 3, 8}), kv_heads = one_of({1, 2, 3}), longest = kFaithful ? 75 : 150;
        const int keys = 1 + 2 * (random() % longest);
        const auto layout =
            static_cast<Case::Layout>(one_of({Case::kPacked, Case::kCache, Case::kUnaligned}));
        Case c{one_of({1, 2}), kv_heads * group, one_of({8, 12, 20, 33, 64, 128}), keys, keys, layout};
        c.kv_heads = kv_heads;
        c.window = one_of({0, 1, 2, 5, 17, 64, keys + 1});
        if (layout == Case::kPacked && group == 1 && random() % 2) c.layout = Case::kByHead;
        if (layout != Case::kPacked && random() % 2) c.queries = random() % 2 ? 1 : 1 + random() % keys;
        c.alibi = random() % 2;
        cases.push_back(c);
    }
    // Some of them again with dropout, if queries and keys are the same rows as in training.
    for (size_t i = 0, count = cases.size(); i < count; i++) {
        Case c = cases[i];
        if (c.queries != c.keys || i % 3 == 2) continue;
        c.dropout = i % 2 ? 0.1 : 0.5;
        cases.push_back(c);
    }
    return cases;
}

TYPED_TEST(Attention, MatchesTheDefinitionOnRandomShapes) {
    if (kSmallShapes) GTEST_SKIP() << "slow";
    for (const Case& c : random_cases())
        with_case<TypeParam>(c, [&](const auto& x, const auto& dout, const Reference& want) {
            for_each_order([&] { return run_case(c, x, dout, want); });
        });
}

TYPED_TEST(Attention, MatchesTheDefinition) {
    for (const Case& c : cases())
        with_case<TypeParam>(c, [&](const auto& x, const auto& dout, const Reference& want) {
            for_each_order([&] { return run_case(c, x, dout, want); });
        });
}

// Every kernel for a head size, with few rows and all options together. So each kernel is tested even where
// the tests with more rows take too long.
TYPED_TEST(Attention, MatchesTheDefinitionInEveryForm) {
    using enum Case::Layout;
    if (kThreadSanitizer) GTEST_SKIP() << "slow";
    for (const int size : {8, 16, 21, 32, 50, 64, 72, 128, 192, 250, 256, 512})
        for (const auto layout : {kPacked, kUnaligned}) {
            if (kSmallShapes && (size == 192 || size == 250)) continue;
            std::vector<Case> cases = {{1, 1, size, 70, 70, layout},
                                       {1, 4, size, 130, 130, layout, 1, 2, 90, true},
                                       {1, 4, size, 70, 70, layout, 1, 2}};
            for (const auto& [dropout, document] :
                 {std::pair{0.1, 0}, std::pair{0., 75}, std::pair{0.5, 75}}) {
                cases.push_back(cases[1]);
                cases.back().dropout = dropout;
                cases.back().document = document;
            }
            // Caps where many scores reach them, and where few do.
            for (const auto& [scale, cap] : {std::pair{0., 2.}, std::pair{0.1, 20.}, std::pair{0.15, 0.}}) {
                cases.push_back(cases[cap > 2 ? 5 : 1]);
                cases.back().given_scale = scale, cases.back().cap = cap;
                cases.back().alibi = cap == 0;
            }
            // Wide heads have a single form, so these are enough of them.
            if (size > 128) cases = {cases[0], cases[5], cases[7]};
            for (const Case& c : cases)
                with_case<TypeParam>(c, [&](const auto& x, const auto& dout, const Reference& want) {
                    run_case(c, x, dout, want);
                });
        }
}

// Some queries of a sequence at a time, also with all options together, and in ranges that are no whole
// tiles.
template <class T>
void check_ranges(const Case& c, std::initializer_list<int> ranges, int piece = 0) {
    with_case<T>(c, [&](const Arrays<T>& x, const DeviceArray<T>& dout, const Reference& want) {
        for (const int rows : ranges) {
            SCOPED_TRACE(testing::Message() << rows << " queries at a time");
            for_each_order([&] {
                const Results<T> got = run_in_ranges(c, x, dout, rows, piece);
                EXPECT_LT(relative_error(got.out, want.out), tolerance<T>());
                EXPECT_LT(relative_error(got.lse, want.lse), tolerance<T>());
                EXPECT_LT(gradient_error(got.dq, want.dq), tolerance<T>());
                EXPECT_LT(gradient_error(got.dk, want.dk), tolerance<T>());
                EXPECT_LT(relative_error(got.dv, want.dv), tolerance<T>());
                return got.bytes();
            });
        }
    });
}
TYPED_TEST(Attention, TakesSomeQueriesAtATime) {
    using enum Case::Layout;
    if (kThreadSanitizer) GTEST_SKIP() << "slow";
    for (const int size : {16, 21, 32, 64, 128, 256, 512})
        for (const auto layout : {kPacked, kUnaligned}) {
            if (kSmallShapes && size > 128 && layout == kUnaligned) continue;
            Case c{size > 128 ? 1 : 2, size > 128 ? 2 : 4, size, 150, 150, layout, 1, size > 128 ? 1 : 2};
            check_ranges<TypeParam>(c, {64, 150});
            c.window = 50, c.alibi = true;
            check_ranges<TypeParam>(c, {37});
            c.document = 60, c.dropout = 0.1;
            check_ranges<TypeParam>(c, {40, 149});  // the last range has a single query
        }
    if (kSmallShapes) return;
    check_ranges<TypeParam>({1, 2, 64, 700, 700, kPacked, 1, 1}, {128, 200});
    check_ranges<TypeParam>({1, 3, 20, 900, 900, kByHead, 1, 3, 300}, {256});
}

// Keys in pieces are summed in the same order as all at once, unless rows begin at their windows or
// documents.
template <class T>
void check_pieces(const Case& c, int rows, int piece) {
    check_ranges<T>(c, {rows}, piece);
    if (c.window || c.document) return;
    with_case<T>(c, [&](const Arrays<T>& x, const DeviceArray<T>& dout, const Reference&) {
        const Results<T> whole = run_in_ranges(c, x, dout, rows),
                         got = run_in_ranges(c, x, dout, rows, piece);
        EXPECT_TRUE(bytes_of(got.out, got.lse) == bytes_of(whole.out, whole.lse)) << "forward";
        EXPECT_TRUE(bytes_of(got.dq) == bytes_of(whole.dq)) << "backward of queries";
        EXPECT_TRUE(bytes_of(got.dk, got.dv) == bytes_of(whole.dk, whole.dv)) << "backward of keys";
    });
}
TYPED_TEST(Attention, TakesKeysInPieces) {
    using enum Case::Layout;
    if (kThreadSanitizer) GTEST_SKIP() << "slow";
    const int length = 2 * kKeyPiece + 44;
    for (const int size : {16, 21, 64, 128}) {
        if (kSmallShapes && size == 16) continue;
        Case c{1, 4, size, length, length, size == 21 ? kUnaligned : kPacked, 1, 2};
        check_pieces<TypeParam>(c, kKeyPiece, kKeyPiece);
        c.window = 150, c.alibi = true;
        check_pieces<TypeParam>(c, kKeyPiece, kKeyPiece);
        c.document = 200, c.dropout = 0.1;
        check_pieces<TypeParam>(c, 100, kKeyPiece);
    }
    if (kFaithful || kSmallShapes) return;
    check_pieces<TypeParam>({2, 2, 64, 2100, 2100, kPacked, 1, 1}, 700, 2 * kKeyPiece);
    check_pieces<TypeParam>({1, 3, 20, 1300, 1300, kByHead, 1, 3, 300}, 512, kKeyPiece);
}

// Keys in pieces, in every kernel for a head size, with few rows; also with windows where the last queries
// see none of the first piece.
TYPED_TEST(Attention, TakesKeysInPiecesInEveryForm) {
    using enum Case::Layout;
    if (kThreadSanitizer) GTEST_SKIP() << "slow";
    const int length = kKeyPiece + 34;
    for (const int size : {16, 32, 64, 128, 256, 512})
        for (const auto layout : {kPacked, kUnaligned}) {
            if (size > 128 && layout == kUnaligned && kSmallShapes) continue;
            Case c{1, 2, size, length, length, layout, 1, 1};
            check_pieces<TypeParam>(c, 32, kKeyPiece);
            c.queries = c.keys = 2 * kKeyPiece + 34;
            c.window = 70, c.alibi = true, c.document = 150;
            check_pieces<TypeParam>(c, kKeyPiece + 22, kKeyPiece);
            c.dropout = 0.1;
            check_pieces<TypeParam>(c, kKeyPiece + 22, kKeyPiece);
        }
}

// The results for a range do not depend on other ranges: with whole tiles they have the bits of all queries
// at once.
TYPED_TEST(Attention, RangesOfWholeTilesHaveTheSameBitsForward) {
    if (kSmallShapes) GTEST_SKIP() << "slow";
    const Case c{1, 2, 64, 600, 600, Case::kPacked};
    with_case<TypeParam>(c, [&](const auto& x, const auto& dout, const Reference&) {
        const auto whole = run(c, x, dout), ranges = run_in_ranges(c, x, dout, 128);
        EXPECT_TRUE(bytes_of(whole.out, whole.lse, whole.dq) == bytes_of(ranges.out, ranges.lse, ranges.dq));
    });
}

// Large enough for several tiles of the fast CPU build in both directions.
TYPED_TEST(Attention, MatchesTheDefinitionInManyTiles) {
    if (kSmallShapes) GTEST_SKIP() << "slow";
    for (const Case& c : {Case{1, 2, 64, 700, 700, Case::kPacked}, Case{1, 1, 40, 300, 900, Case::kCache},
                          Case{1, 6, 24, 500, 500, Case::kPacked, 1, 2, 0, true},
                          Case{1, 2, 20, 900, 900, Case::kPacked, 1, 1, 300},
                          Case{1, 1, 20, 200, 900, Case::kCache, 1, 1, 270}})
        with_case<TypeParam>(
            c, [&](const auto& x, const auto& dout, const Reference& want) { run_case(c, x, dout, want); });
}

// Documents of a row each, of less than a tile, of several tiles; with all other options together.
TYPED_TEST(Attention, MatchesTheDefinitionInDocuments) {
    std::vector<Case> cases;
    const int length = kSmallShapes ? 70 : kFaithful ? 150 : 600;
    for (const int longest : {1, 5, 40, 200, length + 1}) {
        if (kThreadSanitizer && longest != 40) continue;
        cases.push_back({2, 2, 16, length, length, Case::kPacked});
        cases.push_back({2, 4, 20, length + 1, length + 1, Case::kPacked, 1, 2, 30, true});
        if (!kSmallShapes) {
            cases.push_back({1, 3, 64, length - 7, length - 7, Case::kByHead, 1, 3, 0, true});
            cases.push_back({1, 2, 33, length, length, Case::kUnaligned, 1, 1, 17});
            cases.push_back({1, 1, 128, length, length, Case::kPacked, 3});
        }
        for (Case& c : cases)
            if (!c.document) c.document = longest;
    }
    for (const Case& c : cases)
        with_case<TypeParam>(c, [&](const auto& x, const auto& dout, const Reference& want) {
            for_each_order([&] { return run_case(c, x, dout, want); });
        });
}

TEST(HopperAttention, MatchesTheDefinition) {
    if (!has_hopper_attention())
        GTEST_SKIP() << "needs a GPU of compute capability 9.0, or the faithful build";
    using enum Case::Layout;
    // One tile and less, tiles that are just full and just begun, several rounds of the ring, scores that
    // grow far in later rounds, a cache; heads in groups, windows of less than a tile and of several, ALiBi,
    // all of these together.
    std::vector<Case> cases{{1, 1, 64, 1, 1, kPacked},
                            {2, 2, 64, 63, 63, kPacked},
                            {1, 1, 64, 192, 192, kPacked},
                            {1, 2, 64, 193, 193, kPacked},
                            {1, 1, 64, 641, 641, kPacked, 3},
                            {1, 1, 64, 641, 641, kPacked, 4},
                            {1, 1, 128, 515, 515, kPacked, 4},
                            {1, 3, 64, 100, 260, kCache, 3},
                            {2, 1, 64, 1, 700, kCache},
                            {1, 2, 128, 65, 65, kPacked},
                            {2, 1, 128, 128, 128, kPacked},
                            {1, 1, 128, 129, 129, kPacked},
                            {1, 1, 128, 515, 515, kPacked},
                            {2, 1, 128, 37, 300, kCache},
                            {2, 6, 64, 70, 70, kPacked, 1, 2},
                            {1, 8, 128, 131, 131, kPacked, 1, 1},
                            {1, 1, 64, 300, 300, kPacked, 1, 1, 17},
                            {1, 1, 128, 200, 200, kPacked, 1, 1, 1},
                            {1, 1, 64, 500, 500, kPacked, 1, 1, 300},
                            {1, 2, 128, 270, 270, kPacked, 1, 1, 129},
                            {1, 3, 64, 200, 200, kByHead, 1, 3, 0, true},
                            {1, 3, 64, 70, 600, kCache, 1, 1, 64, true},
                            {2, 4, 64, 200, 200, kPacked, 1, 2, 90, true}};
    if (kThreadSanitizer)
        cases = {{1, 1, 64, 130, 130, kPacked},
                 {1, 1, 128, 5, 300, kCache},
                 {1, 2, 64, 200, 200, kPacked, 1, 1, 30, true}};
    const auto in_documents = [&](Case c, int longest) {
        c.document = longest;
        cases.push_back(c);
    };
    if (!kThreadSanitizer)
        for (const int longest : {3, 60, 400}) {
            in_documents({2, 2, 64, 500, 500, kPacked}, longest);
            in_documents({1, 4, 128, 300, 300, kPacked, 1, 2, 90, true}, longest);
        }
    // Some groups of a block's rows skip tiles that others need.
    if (!kThreadSanitizer) in_documents({2, 1, 128, 500, 500, kPacked}, 450);
    in_documents({1, 1, 64, 200, 200, kPacked}, 90);
    for (Case c : cases) {
        c.hopper = true;
        with_case<bf16>(c, [&](const auto& x, const auto& dout, const Reference& want) {
            for_each_order([&] { return run_case(c, x, dout, want); });
        });
    }
}

TEST(HopperAttention, TakesKeysInPieces) {
    if (!has_hopper_attention())
        GTEST_SKIP() << "needs a GPU of compute capability 9.0, or the faithful build";
    if (kThreadSanitizer) GTEST_SKIP() << "slow";
    for (const int size : {64, 128}) {
        Case c{1, 4, size, 300, 300, Case::kPacked, 1, 2};
        c.hopper = true;
        check_pieces<bf16>(c, kKeyPiece, kKeyPiece);
        check_pieces<bf16>(c, 70, kKeyPiece);
    }
}

TEST(HopperAttention, TakesSomeQueriesAtATime) {
    if (!has_hopper_attention())
        GTEST_SKIP() << "needs a GPU of compute capability 9.0, or the faithful build";
    if (kThreadSanitizer) GTEST_SKIP() << "slow";
    for (const int size : {64, 128}) {
        Case c{1, 4, size, 300, 300, Case::kPacked, 1, 2};
        c.hopper = true;
        check_ranges<bf16>(c, {128, 200});
        c.window = 90, c.alibi = true;
        check_ranges<bf16>(c, {100});
        c.document = 120;
        check_ranges<bf16>(c, {70});
    }
}

#if !defined(SIMT_GPU) && SIMT_LANES == 32
// A block has several consumers of 64 rows; those whose rows are beyond the end have nothing to multiply.
TEST(HopperAttention, RowsBeyondTheEndCostNothing) {
    if (kThreadSanitizer) GTEST_SKIP() << "slow";
    const auto products = [](const Case& c) {
        const Arrays<bf16> x = random_arrays<bf16>(c);
        const DeviceArray<bf16> dout(random_values<bf16>(c.batch * c.queries * c.channels(), 1, 11));
        const int64_t before = simt::products_made;
        run(c, x, dout);
        return simt::products_made - before;
    };
    for (const int head_size : {64, 128})
        for (const int groups : {1, 2, 3, 4, 7}) {
            Case c{1, 1, head_size, 64 * groups, 64 * groups, Case::kPacked};
            c.hopper = true;
            // Products of four warps, by tiles of 128 keys in forward and of 64 in backward, in steps of 16.
            const int columns = head_size / 16;
            int64_t want = 0;
            for (int group = 1; group <= groups; group++)
                want += 4 * ((group + 1) / 2 * (columns + 128 / 16) + 2 * group * (2 * columns + 64 / 16) +
                             group * 64 / 16);
            EXPECT_EQ(products(c), want) << groups << " groups of heads of " << head_size;
        }
}
#endif

// On a GPU there are more blocks than multiprocessors.
TEST(HopperAttention, AgreesWithTheCommonKernels) {
    if (!has_hopper_attention())
        GTEST_SKIP() << "needs a GPU of compute capability 9.0, or the faithful build";
    const int length = kSmallShapes ? 130 : kFaithful ? 300 : 3001, heads = kFaithful ? 2 : 16;
    using enum Case::Layout;
    for (Case c : {Case{2, heads, 64, length, length, kPacked}, Case{2, heads, 128, length, length, kPacked},
                   Case{2, heads, 64, length, length, kPacked, 1, heads / 2, length / 3, true}}) {
        SCOPED_TRACE(c.name());
        const Arrays<bf16> x = random_arrays<bf16>(c);
        const DeviceArray<bf16> dout(random_values<bf16>(c.batch * c.queries * c.channels(), 1, 11));
        const Results<bf16> common = run(c, x, dout);
        c.hopper = true;
        const Results<bf16> hopper = run(c, x, dout);
        EXPECT_LT(relative_error(hopper.out, to_doubles(common.out)), tolerance<bf16>());
        EXPECT_LT(relative_error(hopper.lse, to_doubles(common.lse)), tolerance<bf16>());
        EXPECT_LT(relative_error(hopper.dq, to_doubles(common.dq)), tolerance<bf16>());
        EXPECT_LT(relative_error(hopper.dk, to_doubles(common.dk)), tolerance<bf16>());
        EXPECT_LT(relative_error(hopper.dv, to_doubles(common.dv)), tolerance<bf16>());
        EXPECT_FALSE(hopper.bytes() == common.bytes()) << "the same kernels ran";
        EXPECT_TRUE(run(c, x, dout).bytes() == hopper.bytes()) << "other bits at the second time";
    }
}

// random_arrays() with NaN in some rows of q, k or v. A product with one of them is NaN, even times a
// probability of zero.
struct RowsOf {
    int which, begin, end;
};
template <class T>
Arrays<T> random_arrays_but(const Case& c, const std::vector<RowsOf>& nan) {
    Arrays<T> x = random_arrays<T>(c);
    for (const RowsOf& rows : nan)
        for (int b = 0; b < c.batch; b++)
            for (int row = rows.begin; row < rows.end; row++) {
                T* const values = x.host[c.packed() ? 0 : rows.which].data() +
                                  (b * c.rows(rows.which) + row) * c.row(rows.which) + c.begin(rows.which);
                std::fill(values, values + c.channels(rows.which), poisoned<T>(1)[0]);
            }
    return Arrays<T>(c, std::move(x.host));
}

// Whether rows begin ... end - 1 of (1, rows, columns) have the same bits in both; and whether a row is NaN.
template <class T>
bool same_rows(const std::vector<T>& a, const std::vector<T>& b, int begin, int end, int columns) {
    return memcmp(&a[begin * columns], &b[begin * columns], (end - begin) * columns * sizeof(T)) == 0;
}
template <class T>
bool is_nan(const std::vector<T>& a, int row, int columns) {
    return std::all_of(&a[row * columns], &a[(row + 1) * columns],
                       [](T x) { return std::isnan(to_float(x)); });
}

// A tile of queries touches the keys that one of its queries sees, and no others; likewise a tile of keys. So
// the work is proportional to the length times the window plus a tile.
template <class T>
void check_window_work(Case c, int block) {
    const int length = c.keys, columns = c.channels();
    SCOPED_TRACE(c.name());
    const DeviceArray<T> dout(random_values<T>(size_t(length) * columns, 1, 11));
    const Results<T> clean = run(c, random_arrays<T>(c), dout);
    const int last = block - 1;  // rows of a block after or before its first
    const int buffer = length - c.window - 2 * last;
    for (const int begin : {1, buffer / 2, buffer}) {
        SCOPED_TRACE(testing::Message() << "row " << begin);
        // Keys and values before `begin` are seen up to query begin + window - 2.
        const Results<T> after = run(c, random_arrays_but<T>(c, {{1, 0, begin}, {2, 0, begin}}), dout);
        const int first = begin + c.window - 1;
        EXPECT_TRUE(is_nan(after.out, first - 1, columns)) << "a window of less keys";
        EXPECT_TRUE(same_rows(after.out, clean.out, first + last, length, columns));
        EXPECT_TRUE(same_rows(after.dq, clean.dq, first + last, length, columns));
        EXPECT_TRUE(same_rows(after.dk, clean.dk, first + 2 * last, length, columns));
        EXPECT_TRUE(same_rows(after.dv, clean.dv, first + 2 * last, length, columns));
        // Queries from length - begin on see no key before length - begin - window + 1.
        const Results<T> before = run(c, random_arrays_but<T>(c, {{0, length - begin, length}}), dout);
        const int end = length - begin - c.window + 1;
        EXPECT_TRUE(is_nan(before.dk, end, columns)) << "a window of less keys";
        EXPECT_TRUE(same_rows(before.dk, clean.dk, 0, std::max(end - last, 0), columns));
        EXPECT_TRUE(same_rows(before.dv, clean.dv, 0, std::max(end - last, 0), columns));
    }
}

TYPED_TEST(Attention, AWindowCostsOnlyItsTiles) {
    if (kThreadSanitizer) GTEST_SKIP() << "slow";
    for (const int window : {1, 17, 100})
        check_window_work<TypeParam>({1, 1, 16, 600, 600, Case::kPacked, 1, 1, window}, kFastCpu ? 128 : 64);
    const bool hopper = has_hopper_attention() && std::is_same_v<TypeParam, bf16>;
    if (hopper) {
        Case c{1, 1, 64, 900, 900, Case::kPacked, 1, 1, 100};
        c.hopper = true;
        check_window_work<TypeParam>(c, 192 + 64);
    }
    // Keys of a cache that are before all windows are not even loaded, which AddressSanitizer checks.
    for (Case c :
         {Case{1, 4, 64, 1, 300, Case::kCache, 1, 2, 40}, Case{1, 4, 64, 100, 600, Case::kCache, 1, 2, 40}})
        for (int version = 0; version <= hopper; version++) {
            c.hopper = version;
            const int first = c.keys - c.queries + 1 - c.window;
            const DeviceArray<TypeParam> dout(0);
            const Arrays<TypeParam> x = random_arrays_but<TypeParam>(c, {{1, 0, first}, {2, 0, first}});
            const Results<TypeParam> clean = run(c, random_arrays<TypeParam>(c), dout);
#if defined(__SANITIZE_ADDRESS__)
            for (const TypeParam* p : {x.k, x.v})
                __asan_poison_memory_region(p, first * c.row(1) * sizeof *p);
#endif
            EXPECT_TRUE(run(c, x, dout).bytes() == clean.bytes());
        }
}

// The work is that of a document's tiles: NaN in keys, values and queries of other documents does not spread
// further.
TYPED_TEST(Attention, ADocumentCostsOnlyItsTiles) {
    if (kThreadSanitizer) GTEST_SKIP() << "slow";
    const int length = 800, block = kFastCpu ? 128 : 64;
    Case c{1, 1, 16, length, length, Case::kPacked};
    c.document = 100;
    const RandomDocuments documents(c);
    const int columns = c.channels();
    const DeviceArray<TypeParam> dout(random_values<TypeParam>(size_t(length) * columns, 1, 11));
    const Results<TypeParam> clean = run(c, random_arrays<TypeParam>(c), dout);
    // The rows of the documents that begin before row 300.
    const int end = documents.ends[299];
    ASSERT_TRUE(end < 450 && end > block);
    const Results<TypeParam> after =
        run(c, random_arrays_but<TypeParam>(c, {{1, 0, end}, {2, 0, end}}), dout);
    EXPECT_TRUE(is_nan(after.out, end - 1, columns));
    for (const auto& [got, want] : {std::pair(&after.dq, &clean.dq), std::pair(&after.dk, &clean.dk)})
        EXPECT_TRUE(same_rows(*got, *want, end + 2 * block, length, columns));
    EXPECT_TRUE(same_rows(after.out, clean.out, end + block, length, columns));
    const Results<TypeParam> before = run(c, random_arrays_but<TypeParam>(c, {{0, end, length}}), dout);
    EXPECT_TRUE(is_nan(before.dk, end, columns));
    EXPECT_TRUE(same_rows(before.dk, clean.dk, 0, end - block, columns));
    EXPECT_TRUE(same_rows(before.dv, clean.dv, 0, end - block, columns));
}

TYPED_TEST(Attention, ADocumentOfTheWholeLengthIsNone) {
    Case c{2, 2, 64, 130, 130, Case::kPacked};
    const DeviceArray<TypeParam> dout(random_values<TypeParam>(2 * 130 * c.channels(), 1, 11));
    Arrays<TypeParam> x = random_arrays<TypeParam>(c);
    const std::vector<unsigned char> without = run(c, x, dout).bytes();
    std::vector<int> positions(2 * 130), ends(2 * 130, 130);
    for (size_t i = 0; i < positions.size(); i++) positions[i] = static_cast<int>(i % 130);
    x.positions = std::make_unique<DeviceArray<int>>(positions);
    x.ends = std::make_unique<DeviceArray<int>>(ends);
    c.document = 130;
    EXPECT_TRUE(run(c, x, dout).bytes() == without);
}

// Launches that are split run every block once, and no part has more work than is allowed, if a block of the
// first row of tiles has at most twice the mean's.
TEST(LongLaunches, PartsCoverTheGrid) {
    std::mt19937 random(9);
    for (int turn = 0; turn < 300; turn++) {
        const dim3 grid(1 + random() % 40, 1 + random() % 70);
        const double work = 1e12, parts = turn % 3 == 0 ? 1 : 1 + random() % 900, most = work / parts;
        std::vector<int> seen(grid.x * grid.y);
        int launched = 0;
        for_each_part(grid, work, most, [&](dim3 part, const GridPart& at) {
            launched++;
            EXPECT_EQ(at.whole_y, int(grid.y));
            double part_work = 0;
            for (unsigned y = 0; y < part.y; y++)
                for (unsigned x = 0; x < part.x; x++) {
                    const unsigned row = at.y + y;
                    seen.at(row * grid.x + at.x + x)++;
                    part_work += work / grid.x * 2 * (grid.y - row - 0.5) / grid.y / grid.y;
                }
            const bool divisible = part.x > 1 || part.y > 1;
            EXPECT_LE(part_work, divisible ? most * 1.0001 : work);
        });
        EXPECT_EQ(std::set<int>(seen.begin(), seen.end()), std::set<int>{1});
        EXPECT_TRUE(launched == 1 || parts > 1);
    }
}

#if defined(SIMT_GPU) || SIMT_LANES > 1
// Limits the FLOPs of a launch of attention, so that launches are split.
struct LongestAttention {
    explicit LongestAttention(double flops) { longest_attention = flops; }
    ~LongestAttention() { longest_attention = std::numeric_limits<double>::infinity(); }
};
template <class T>
void check_divided(const Case& c) {
    SCOPED_TRACE(c.name());
    const DeviceArray<T> dout(random_values<T>(size_t(c.batch) * c.queries * c.channels(), 1, 11));
    const Arrays<T> x = random_arrays<T>(c);
    const std::vector<unsigned char> whole = run(c, x, dout).bytes();
    // Also with some heads, and with single ones, before the others.
    for (const double cached : {cached_attention, 4.0 * sizeof(T) * c.keys * c.head_size, 1.})
        for (const double parts : {1., 2., 3., 1000.}) {
            const LongestAttention divided(input_of(c, x).flops(2) / parts);
            const double before = std::exchange(cached_attention, cached);
            EXPECT_TRUE(run(c, x, dout).bytes() == whole) << parts << " parts, " << cached << " bytes";
            cached_attention = before;
        }
}

TEST(AttentionGrid, SomeHeadsComeBeforeTheOthers) {
    EXPECT_EQ(heads_at_a_time(768, 262144), 64u);    // 76 fit
    EXPECT_EQ(heads_at_a_time(768, 1), 768u);        // all fit
    EXPECT_EQ(heads_at_a_time(25, 2e9), 1u);         // not even one fits
    EXPECT_EQ(heads_at_a_time(65537, 2e9), 65537u);  // a prime beyond the groups that a grid may have
    EXPECT_EQ(heads_at_a_time(2 * 65537, 2e9), 2 * 65537u);
}

TYPED_TEST(Attention, DividedLaunchesHaveTheSameBits) {
    using enum Case::Layout;
    for (const Case& c : {Case{2, 3, 20, 131, 131, kPacked}, Case{1, 4, 64, 150, 150, kPacked, 1, 2},
                          Case{1, 2, 192, 70, 70, kPacked, 1, 1},
                          Case{1, 2, 33, 140, 140, kUnaligned, 1, 1, 30, true, false, 50, 0.1},
                          Case{2, 2, 16, 70, 200, kCache, 1, 1}})
        check_divided<TypeParam>(c);
}
TEST(HopperAttention, DividedLaunchesHaveTheSameBits) {
    if (!has_hopper_attention())
        GTEST_SKIP() << "needs a GPU of compute capability 9.0, or the faithful build";
    using enum Case::Layout;
    for (Case c :
         {Case{1, 2, 64, 200, 200, kPacked, 1, 1}, Case{1, 1, 128, 140, 140, kPacked, 1, 1, 40, true}}) {
        c.hopper = true;
        check_divided<bf16>(c);
    }
}
#endif

// The FLOPs that the launcher counts, compared with the scores of each query; a score on the diagonal counts
// half.
TEST(AttentionWork, CountsTheScoresThatAreSeen) {
    using enum Case::Layout;
    for (const Case& c : {Case{2, 6, 8, 100, 100, kPacked, 1, 2}, Case{2, 6, 8, 100, 100, kPacked, 1, 2, 30},
                          Case{1, 1, 8, 100, 100, kPacked, 1, 1, 1}, Case{2, 6, 8, 7, 100, kCache, 1, 2, 30},
                          Case{2, 6, 8, 50, 100, kCache, 1, 2, 60}, Case{1, 2, 8, 1, 100, kCache},
                          Case{1, 2, 8, 2000, 2000, kPacked, 1, 2, 30}}) {
        SCOPED_TRACE(c.name());
        Plan plan;
        const int clock = 0;
        DryRun dry{plan, clock};
        dry_run = &dry;
        simt::launches_off = true;
        attention_forward<float>(nullptr, nullptr, input_of(c, poisoned_arrays<float>(c)), Stream{});
        simt::launches_off = false;
        dry_run = nullptr;
        double seen = 0;
        for (int i = 0; i < c.queries; i++) {
            const int position = c.keys - c.queries + i;
            seen += c.window ? std::min(position + 1, c.window) : position + 1;
        }
        const int rows_of_keys = c.window ? std::min(c.keys, c.queries + c.window - 1) : c.keys;
        const double flops_of_score = 2 * 2 * c.head_size, heads = c.batch * c.heads;
        ASSERT_EQ(plan.work.size(), 1u);
        EXPECT_LE(plan.work[0].flops, flops_of_score * heads * seen);
        EXPECT_GE(plan.work[0].flops, flops_of_score * heads * (seen - 0.5 * c.queries));
        EXPECT_EQ(plan.work[0].bytes,
                  2.0 * c.batch * (c.channels() * c.queries + c.channels(1) * rows_of_keys) * sizeof(float));
    }
}

#if !defined(SIMT_GPU)
TYPED_TEST(Attention, DoesNotDependOnTheNumberOfThreads) {
    if (kThreadSanitizer) GTEST_SKIP() << "slow";
    const int before = omp_get_max_threads();
    // One head of few rows is a single block, whose products in the fast build could use all threads.
    std::vector<Case> cases = {{2, 3, 64, 150, 150, Case::kPacked},
                               {1, 1, 64, 100, 100, Case::kPacked},
                               {2, 6, 64, 150, 150, Case::kPacked, 1, 2}};
#if SIMT_LANES == 1
    // In backward all threads share one head of many rows, in each of these forms.
    Case c{1, 3, 33, 1030, 1030, Case::kUnaligned, 1, 1};
    for (const int threads : {2, 3, 5})
        ASSERT_TRUE(shares_heads(input_of(c, random_arrays<TypeParam>(c)), threads));
    cases.push_back(c);
    for (const auto& [window, document, dropout] :
         {std::tuple{300, 0, 0.}, std::tuple{0, 400, 0.}, std::tuple{0, 0, 0.1}, std::tuple{70, 90, 0.5}}) {
        c.window = window, c.document = document, c.dropout = dropout, c.alibi = window > 0;
        cases.push_back(c);
    }
#endif
    for (const Case& c : cases)
        with_case<TypeParam>(c, [&](const auto& x, const auto& dout, const Reference& want) {
            const auto results = [&](int threads) {
                omp_set_num_threads(threads);
                std::vector<unsigned char> bytes = run_case(c, x, dout, want);
                const std::vector<unsigned char> of_ranges = run_in_ranges(c, x, dout, 256).bytes();
                bytes.insert(bytes.end(), of_ranges.begin(), of_ranges.end());
                return bytes;
            };
            const std::vector<unsigned char> one = results(1);
            for (const int threads : {2, 3, 5})
                EXPECT_TRUE(results(threads) == one) << "other bits with " << threads << " threads";
        });
    omp_set_num_threads(before);
}
#endif

#if defined(SIMT_GPU) || SIMT_LANES == 32
constexpr int kRows = 32, kInner = 16, kColumns = 16, kTileStride = 24;

// d = a b, and e = d b with d rounded to T; a (32, 16), b (16, 16); `b_by_column` is b transposed.
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
