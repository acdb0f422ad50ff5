// attention.cpp - how long attention.cuh's forward and backward take, over head sizes and lengths.
//
// Prints a JSON object a line. Batch and heads follow from --tokens and --channels, which stay the same, so
// that the arrays are equally large everywhere and only the work grows with the length.

#include <algorithm>
#include <cstdio>
#include <vector>

#include <CLI/CLI.hpp>

#include "llmc/attention.cuh"
#include "llmc/device.h"
#include "llmc/random.h"
#include "llmc/rates_device.h"
#include "llmc/threads.h"

namespace {

struct Options {
    std::vector<int> head_sizes = {16, 32, 64, 128};
    std::vector<int> lengths = {256, 1024, 4096, 8192, 16384};
    std::string precision = "both", attention = "common";
    int tokens = 16384;
    int channels = kFastCpu ? 256 : 2048;
    double seconds = 0.2;  // that a case is repeated for
    int threads = 0;
    int document = 0;
};

// Milliseconds of f(), which only starts work on the device: the median of at least 3 measurements, each of
// as many calls as fill 10 ms.
template <class F>
double milliseconds(double seconds, F f) {
    const auto time = [&](int calls) {
        const WallClock clock;
        for (int i = 0; i < calls; i++) f();
        stream_synchronize(Stream{});
        return clock.seconds() / calls;
    };
    time(1);  // code is loaded, pages are touched
    const int calls = static_cast<int>(std::clamp(0.01 / time(1), 1.0, 1000.0));
    std::vector<double> times;
    const WallClock all;
    while (times.size() < 3 || all.seconds() < seconds) times.push_back(time(calls));
    std::sort(times.begin(), times.end());
    return 1000 * times[times.size() / 2];
}

// n normal numbers. A million different ones, again and again: drawing more takes longer than the benchmark.
template <class T>
DeviceBuffer random_buffer(int64_t n, uint64_t seed) {
    constexpr int64_t kDifferent = 1 << 20;
    std::vector<T> values(n);
    for (int64_t i = 0; i < n; i++)
        values[i] = i < kDifferent ? from_float<T>(static_cast<float>(random_normal(seed, i)))
                                   : values[i - kDifferent];
    DeviceBuffer buffer(values.size() * sizeof(T), "an input");
    copy_to_device(buffer.data(), values.data(), buffer.bytes(), Stream{});
    return buffer;
}

// The arrays of one precision, equally large for all cases: qkv packed as in training.
template <class T>
struct Arrays {
    int64_t elements;  // of q
    DeviceBuffer qkv, dout, out, dqkv, lse, delta;

    Arrays(int64_t n, int64_t most_rows)
        : elements(n),
          qkv(random_buffer<T>(3 * n, 1)),
          dout(random_buffer<T>(n, 2)),
          out(n * sizeof(T), "out"),
          dqkv(3 * n * sizeof(T), "dqkv"),
          lse(most_rows * sizeof(float), "lse"),
          delta(most_rows * sizeof(float), "delta") {}
};

template <class T>
T* elements_of(const DeviceBuffer& buffer) {
    return reinterpret_cast<T*>(buffer.data());
}

// Documents of `rows` rows in each sequence, the last as short as it must be; 0: a sequence is one.
struct DocumentRows {
    template <class T>
    DocumentRows(int rows, const AttentionInput<T>& in)
        : length(rows > 0 ? std::min(rows, in.queries) : in.queries) {
        if (rows == 0) return;
        const size_t count = static_cast<size_t>(in.batch) * in.queries;
        std::vector<int> numbers(2 * count);
        for (size_t i = 0; i < count; i++) {
            const int row = static_cast<int>(i % in.queries);
            numbers[i] = row % length;
            numbers[count + i] = std::min(row - row % length + length, in.queries);
        }
        memory = DeviceBuffer(numbers.size() * sizeof(int), "the documents");
        copy_to_device(memory.data(), numbers.data(), memory.bytes(), Stream{});
    }
    const int* positions() const { return reinterpret_cast<const int*>(memory.data()); }
    const int* ends() const {
        return memory.data() ? positions() + memory.bytes() / sizeof(int) / 2 : nullptr;
    }

    int length;
    DeviceBuffer memory;
};

template <class T>
void measure(const Options& o, const Arrays<T>& arrays, int head_size, int length) {
    const int heads = o.channels / head_size, batch = o.tokens / length;
    const int64_t C = o.channels, row = 3 * C, rows = int64_t{batch} * heads * length;
    const T* const q = elements_of<T>(arrays.qkv);
    T* const dq = elements_of<T>(arrays.dqkv);
    AttentionInput<T> in{batch, heads,     head_size, length, length,       q,
                         q + C, q + 2 * C, row,       row,    length * row, length * row};
    in.hopper = o.attention == "hopper";
    const DocumentRows documents(o.document, in);
    in.positions = documents.positions();
    in.document_ends = documents.ends();
    T* const out = elements_of<T>(arrays.out);
    float* const lse = elements_of<float>(arrays.lse);
    const double forward_ms = milliseconds(o.seconds, [&] { attention_forward(out, lse, in, Stream{}); });
    const double backward_ms = milliseconds(o.seconds, [&] {
        float* const delta = elements_of<float>(arrays.delta);
        attention_delta(delta, elements_of<T>(arrays.dout), out, in, Stream{});
        attention_backward(dq, dq + C, dq + 2 * C, elements_of<T>(arrays.dout), lse, delta, in, Stream{});
    });
    // Of the half of the products that is seen: two in forward, five in backward.
    const double product = static_cast<double>(rows) * documents.length * head_size;
    // q, k, v, out, lse; backward's dout, dq, dk, dv, delta are as many again.
    const int64_t bytes = 4 * arrays.elements * sizeof(T) + rows * sizeof(float);
    printf(
        "{\"head_size\": %d, \"seq_len\": %d, \"document\": %d, \"batch\": %d, \"heads\": %d, \"precision\": "
        "\"%s\", "
        "\"attention\": \"%s\", \"forward_ms\": %.6g, \"backward_ms\": %.6g, "
        "\"forward_flops_per_second\": %.4g, \"backward_flops_per_second\": %.4g, \"bytes\": %lld}\n",
        head_size, length, documents.length, batch, heads, dtype_name<T>(), o.attention.c_str(), forward_ms,
        backward_ms, 2 * product / (forward_ms / 1000), 5 * product / (backward_ms / 1000),
        static_cast<long long>(bytes));
    fflush(stdout);
}

template <class T>
void sweep(const Options& o) {
    const int smallest = *std::min_element(o.head_sizes.begin(), o.head_sizes.end());
    const int64_t n = int64_t{o.tokens} * o.channels;
    const Arrays<T> arrays(n, n / smallest);
    for (int length : o.lengths)
        for (int head_size : o.head_sizes) measure(o, arrays, head_size, length);
}

// Fails where --attention hopper would be the common kernels.
void check_hopper(const Options& o) {
    if (o.precision != "bf16")
        fail("--attention hopper is bf16's alone, not --precision %s's", o.precision.c_str());
    for (int h : o.head_sizes)
        if (!hopper_attention_supports(h)) fail("--head-sizes %d: --attention hopper does 64 and 128", h);
    if (!kHopperAttention<bf16> || !device_is_hopper())
        fail("--attention hopper needs a GPU of compute capability 9.0, and 90a in CUDA_ARCH");
}

Options parse_options(int argc, char** argv) {
    Options o;
    CLI::App app("Times causal attention, forward and backward; prints JSON lines.");
    app.option_defaults()->always_capture_default();
    app.add_option("--head-sizes", o.head_sizes)->delimiter(',')->check(CLI::Range(1, 512));
    app.add_option("--lengths", o.lengths)->delimiter(',')->check(CLI::PositiveNumber);
    app.add_option("--precision", o.precision)->check(CLI::IsMember({"fp32", "bf16", "both"}));
    app.add_option("--attention", o.attention, "which kernels")->check(CLI::IsMember({"common", "hopper"}));
    app.add_option("--tokens", o.tokens, "batch x length")->check(CLI::PositiveNumber);
    app.add_option("--document", o.document, "rows of each document in a sequence; 0: one is all of it")
        ->check(CLI::NonNegativeNumber);
    app.add_option("--channels", o.channels, "heads x head size")->check(CLI::PositiveNumber);
    app.add_option("--seconds", o.seconds, "that a case is repeated for")->check(CLI::NonNegativeNumber);
    app.add_option("--threads", o.threads, "on a CPU; 0: all cores")->check(CLI::NonNegativeNumber);
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        printf("%s", app.help().c_str());
        exit(0);
    } catch (const CLI::ParseError& e) {
        fail("%s", e.what());
    }
    for (int h : o.head_sizes)
        if (o.channels % h) fail("--head-sizes %d: --channels %d is no multiple of it", h, o.channels);
    for (int length : o.lengths)
        if (o.tokens % length) fail("--lengths %d: --tokens %d is no multiple of it", length, o.tokens);
    if (o.attention == "hopper") check_hopper(o);
    return o;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const Options o = parse_options(argc, argv);
        start_threads(o.threads);
        if (o.precision != "bf16") sweep<float>(o);
        if (o.precision != "fp32") sweep<bf16>(o);
    } catch (const UserError& e) {
        fprintf(stderr, "attention: %s\n", e.what());
        return 2;
    }
    return 0;
}
