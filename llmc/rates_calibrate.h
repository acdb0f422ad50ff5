// rates_calibrate.h - --calibrate: measures how fast this device does each kind of operation, through the
// launchers that a step calls, each at a few sizes.
//
// The FLOPs and bytes of a case are those that its launcher counts in a dry run, so that a rate means the
// same here as in a plan. Caches are in the state that they have in a step. Weights are read from memory,
// because a step uses many others between two uses of one; and so are activations that a step has kept. What
// a step keeps is written to memory that has not been used for as long. Other activations are where the
// operation before left them, in a cache if they fit one. Calibration takes 200 MiB of a CPU's memory in bf16
// and 400 in fp32, more if its cache is large; 700 MiB of a GPU's in bf16, 1.2 GiB in fp32.
//
// On a GPU the cases are large: in small ones it waits for launches, and most of its multiprocessors are
// idle.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <vector>

#include "llmc/attention.cuh"
#include "llmc/bench.h"
#include "llmc/cross_entropy.cuh"
#include "llmc/elementwise.cuh"
#include "llmc/ranks_exchange.h"
#include "llmc/global_norm.cuh"
#include "llmc/gradient_sums.cuh"
#include "llmc/lora.cuh"
#include "llmc/matmul.h"
#include "llmc/norm_layer.h"
#include "llmc/offload_optimizer.h"
#include "llmc/offload_storage.h"
#include "llmc/optimizer.cuh"
#include "llmc/outputs.h"
#include "llmc/quant_formats.h"
#include "llmc/rates.h"
#include "llmc/rates_device.h"
#include "llmc/rmsnorm.cuh"
#include "llmc/rope.cuh"
#include "llmc/temporary_file.h"

// The median of what measure(0), measure(1), ... return.
inline double median_of(int times, const std::function<double(int)>& measure) {
    std::vector<double> all;
    for (int i = 0; i < times; i++) all.push_back(measure(i));
    return statistics(std::move(all)).median;
}

template <class T>
class Calibration {
  public:
    explicit Calibration(Stream stream) : stream_(stream), rates_(nominal_rates<T>(nominal_gpu())) {
        for (size_t i = 0; i < kDraws; i++)
            draws_.push_back(static_cast<float>(random_uniform(0, i) - 0.5));  // zeros take less power
        read_.fill(*this), written_.fill(*this);
    }
    // Measures everything twice if that is quick enough, and returns the mean: other users of the machine
    // disturb a measurement for some seconds, and they disturb a step too.
    Rates measure() {
        const WallClock clock;
        measure_once();
        if (clock.seconds() > kQuick) return rates_;
        const Rates first = std::exchange(rates_, Rates(rates_.nominal));
        measure_once();
        return mean_of(first, rates_);
    }

    // Calls measure(multiply, seconds), where multiply() is a product, and how long it takes alone.
    void beside_products(const std::function<void(const std::function<void()>&, double)>& measure) {
        run([&](Bench& b) {
            const TensorT x = b.values({kChannels, kChannels});
            TensorT y = b.values({kChannels, kChannels});
            const auto multiply = [&] { matmul(b.arena, stream_, y, x, far({kChannels, kChannels}), {}); };
            const double alone = b.time(multiply);
            if (!b.arena.rehearsing()) measure(multiply, alone);
        });
    }
    // The most bytes of the device's memory that it used at a time.
    size_t most_bytes() const { return 2 * passing_bytes() + most_bytes_; }

  private:
    using TensorT = Tensor<T>;
    using TensorF = Tensor<float>;
    using Queue = std::function<void()>;

    // ---- how a case is measured

    void measure_once() {
        measure_products();
        measure_attention();
        measure_passes();
        measure_norms();
        measure_heads();
        measure_updates();
        measure_formats();
        measure_transfers();
    }

    static constexpr size_t kDraws = 1 << 16;
    static constexpr double kQuick = 14;      // a second round follows if the first took less seconds
    static constexpr double kLongest = 0.06;  // seconds of the longest run
    static constexpr double kEnough = 0.012, kTooLong = 0.08;  // seconds of all runs of a case
    static constexpr double kAgree = 1.03;
    static constexpr int kFewest = 3, kMost = 60;
    static constexpr int64_t kChannels = 768, kVocabulary = 32000;
    // Rows of the smallest, a medium and the largest activation.
    static constexpr int64_t kRows[] = {kFastCpu ? 64 : 512, kFastCpu ? 512 : 4096, kFastCpu ? 4096 : 32768};
    // The most elements of a product's operand.
    static constexpr int64_t kWideElements = kFastCpu ? kChannels * kVocabulary : 8192 * 8192;
    // Bytes to use before some memory is used again, so that no cache still has it. A large cache is shared
    // by many cores.
    static size_t passing_bytes() {
        const auto widest = static_cast<size_t>(kWideElements) * sizeof(T);
        if (!kFastCpu) return std::max(widest, static_cast<size_t>(kRows[2] * 3 * kChannels) * sizeof(T));
        const auto cache = static_cast<size_t>(std::max(0L, sysconf(_SC_LEVEL3_CACHE_SIZE)));
        return std::max(widest, std::min(cache, size_t{256} << 20));
    }
    // Memory that is used part after part, so that no cache has a part when it is used again.
    class Passing {
      public:
        Tensor<T> next(Shape shape) {
            if (passed_ + shape.size() > all().size()) passed_ = 0;
            Tensor<T> t(all().at(passed_), shape);
            passed_ += ceil_div(t.size(), kVectorSize<T>) * kVectorSize<T>;
            return t;
        }
        void fill(const Calibration& with) {
            Tensor<T> t = all();
            with.fill(t);
        }

      private:
        Tensor<T> all() const {
            return {reinterpret_cast<T*>(memory_.data()),
                    {static_cast<int64_t>(memory_.bytes() / sizeof(T))}};
        }
        const DeviceBuffer memory_{passing_bytes(), "what the calibration passes by"};
        int64_t passed_ = 0;
    };
    // Memory for weights, or for an activation that was kept. Nothing writes there: values that went from one
    // product into the next would grow beyond all that a step has.
    TensorT far(Shape shape) { return read_.next(shape); }
    // Memory for an activation that is to be kept.
    TensorT kept(Shape shape) { return written_.next(shape); }

    // The seconds that the device takes for what queue() enqueues, the median of several runs. Runs until two
    // agree on the best, if that does not take too long. The best itself would be a time that no step
    // reaches.
    double typical_run(const Queue& queue) const {
        queue();
        stream_synchronize(stream_);
        std::vector<double> runs;
        double best = 1e30, second = 1e30;
        const WallClock all;
        for (int run = 0; run < kFewest || (run < kMost && all.seconds() < kEnough) ||
                          (second > kAgree * best && all.seconds() < kTooLong);
             run++) {
            const WallClock clock;
            for (int k = 0; k < kTimedTogether; k++) queue();
            stream_synchronize(stream_);
            runs.push_back(clock.seconds() / kTimedTogether);
            second = std::min(second, std::max(best, runs.back()));
            best = std::min(best, runs.back());
        }
        return statistics(std::move(runs)).median;
    }

    template <class E>
    void fill(Tensor<E>& t) const {
        std::vector<E> some(kDraws);
        for (size_t i = 0; i < kDraws; i++) {
            if constexpr (std::is_same_v<E, T> || std::is_same_v<E, float>)
                some[i] = from_float<E>(draws_[i]);
            else if constexpr (std::is_same_v<E, uint8_t>)  // scales made of them are normal numbers
                some[i] = static_cast<E>(0x3c + 4 * (draws_[i] + 0.5f));
        }
        for (int64_t i = 0; i < t.size(); i += kDraws) {
            const auto count = static_cast<size_t>(std::min<int64_t>(kDraws, t.size() - i));
            copy_to_device(t.at(i), some.data(), count * sizeof(E), stream_);
        }
    }

    // What cases are defined with: it takes their tensors, filled, and times what they enqueue.
    struct Bench {
        Calibration& of;
        Arena& arena;
        std::vector<double>& seconds;

        template <class E>
        Tensor<E> take(Shape shape) {
            Tensor<E> t = arena.take<E>("calibrated", shape);
            if (!arena.rehearsing()) of.fill(t);
            return t;
        }
        TensorT values(Shape shape) { return take<T>(shape); }
        TensorF floats(Shape shape) { return take<float>(shape); }
        Tensor<uint8_t> codes(Shape shape) { return take<uint8_t>(shape); }
        // The seconds of what queue() enqueues; 0 in a dry run.
        double time(const Queue& queue) {
            if (arena.rehearsing()) return queue(), 0.0;
            seconds.push_back(of.typical_run(queue));
            return seconds.back();
        }
        // Times what makes an activation of this shape that is kept.
        void time_kept(Shape shape, const std::function<void(TensorT& made)>& make) {
            time([&, shape] {
                TensorT made = of.kept(shape);
                make(made);
            });
        }
    };
    using Cases = std::function<void(Bench&)>;
    // Runs the cases, and returns the operations of their dry run, and the seconds of each that was timed.
    std::pair<std::vector<Work>, std::vector<double>> run(const Cases& make) {
        Arena arena;
        std::vector<double> seconds;
        const auto all = [&] {
            Bench bench{*this, arena, seconds};
            make(bench);
        };
        Plan plan = arena.rehearse(all);
        arena.allocate({&plan});
        most_bytes_ = std::max(most_bytes_, arena.bytes());
        arena.run(plan, all);
        return {plan.work, seconds};
    }
    // Adds the rates of operations, each timed by itself: FLOP/s by its length for attention, otherwise
    // bytes/s by its bytes.
    void add(const Cases& make) {
        const auto [work, seconds] = run(make);
        assert(work.size() == seconds.size());
        for (size_t i = 0; i < work.size(); i++) {
            const Work& w = work[i];
            const bool by_length = cost_of(w) == Cost::Attention;
            rates_.operations[rate_name(w)].put(by_length ? w.variant.length : w.bytes,
                                                (by_length ? w.flops : w.bytes) / seconds[i]);
        }
    }
    // Adds those of cases(bench, rows), for tensors (rows, kChannels), some of which fit a cache.
    void add_for_rows(const std::function<void(Bench&, int64_t rows)>& cases) {
        for (const int64_t rows : kRows) add([&](Bench& b) { cases(b, rows); });
    }

    // ---- products

    // The sizes of a side of a product: a LoRA's rank, a few sequences, a model's width, and a size beyond
    // which rates do not rise. On a CPU also a vocabulary, for the side where logits have it, because rows of
    // logits are many pages apart. On a GPU also the rows of a whole batch, for the side that activations'
    // rows are.
    static std::vector<double> sides(bool of_logits, bool of_rows) {
        std::vector<double> sizes = {16, 128, 512, 2048, 8192};
        if (kFastCpu) sizes = {16, 128, kChannels, 3072};
        if (kFastCpu && of_logits) sizes.push_back(kVocabulary);
        if (!kFastCpu && of_rows) sizes.push_back(static_cast<double>(kRows[2]));
        return sizes;
    }
    void measure_products() {
        run([&](Bench& b) {
            const TensorT a = b.values({kWideElements}), near = b.values({kWideElements});
            measure_form(b, a, near, false, false);
            measure_form(b, a, near, false, true);
            measure_form(b, a, near, true, false);
        });
    }
    // Measures products of one form. Half of them write what forward keeps, half a gradient that backward
    // goes on with. With a transposed `a` they are a weight's gradients, computed from an activation that was
    // kept.
    void measure_form(Bench& b, const TensorT& a, const TensorT& near, bool transpose_a, bool transpose_b) {
        Product form;
        form.transpose_a = transpose_a, form.transpose_b = transpose_b;
        ProductRates& p = rates_.products[product_form(form)];
        p.sizes = {sides(transpose_a, !transpose_a), sides(transpose_b, false),
                   sides(!transpose_a && !transpose_b, transpose_a)};
        p.rates.resize(p.shapes());
        for_shapes(p, b.arena.rehearsing(), [&](int64_t m, int64_t n, int64_t k) {
            const TensorT x(a.data(), transpose_a ? Shape{k, m} : Shape{m, k});
            const auto multiply = [&](TensorT to) {
                matmul(b.arena, stream_, to, x, far(transpose_b ? Shape{n, k} : Shape{k, n}),
                       {.transpose_a = transpose_a, .transpose_b = transpose_b});
            };
            if (transpose_a) return b.time([&] { multiply(kept({m, n})); });
            return b.time([&] {
                multiply(kept({m, n}));
                multiply(TensorT(near.data(), {m, n}));
            }) / 2;
        });
    }
    // Measures the rates of all shapes with seconds(m, n, k), which is 0 in a dry run. A dry run has all
    // shapes, as nobody knows yet which will be quick enough. A shape that takes too long, or too much
    // memory, is assumed to be as fast as the best of those that are smaller by one side.
    static void for_shapes(ProductRates& p, bool rehearsing,
                           const std::function<double(int64_t, int64_t, int64_t)>& seconds) {
        for (size_t i = 0; i < p.sizes[0].size(); i++)
            for (size_t j = 0; j < p.sizes[1].size(); j++)
                for (size_t k = 0; k < p.sizes[2].size(); k++) {
                    const double smaller =
                        std::max({i > 0 ? p.of(i - 1, j, k) : 0, j > 0 ? p.of(i, j - 1, k) : 0,
                                  k > 0 ? p.of(i, j, k - 1) : 0});
                    const double x = p.sizes[0][i], y = p.sizes[1][j], z = p.sizes[2][k];
                    double& rate = p.of(i, j, k);
                    const bool too_long = !rehearsing && smaller > 0 && 2 * x * y * z / smaller > kLongest;
                    if (too_long || std::max({x * y, y * z, x * z}) > kWideElements) {
                        rate = smaller;
                        continue;
                    }
                    const double taken =
                        seconds(static_cast<int64_t>(x), static_cast<int64_t>(y), static_cast<int64_t>(z));
                    if (taken > 0) rate = 2 * x * y * z / taken;
                }
    }

    // ---- attention

    void measure_attention() {
        std::vector<int> lengths = {32, 128, 512, 2048};
        if (!kFastCpu) lengths.push_back(8192);
        const auto rows = static_cast<int>(kFastCpu ? 512 : kRows[2]);
        for (const int head_size : {64, 128, 256})
            for (const int length : lengths)
                add([&](Bench& b) { attend(b, std::max(1, rows / length), length, head_size); });
    }
    void attend(Bench& b, int batch, int length, int head_size) {
        const int64_t width = 512, row = 3 * width;
        const int heads = static_cast<int>(width) / head_size;
        const Shape qkv_shape = {batch, length, row}, shape = {batch, length, width};
        const TensorT qkv = b.values(qkv_shape);
        TensorT d_qkv = b.values({batch, length, row});
        const TensorT d_out = b.values({batch, length, width});
        TensorF lse = b.floats({batch, heads, length});
        TensorF delta = b.floats({batch, heads, length});
        const auto of = [&](const TensorT& t) {
            return AttentionInput<T>{.batch = batch,
                                     .heads = heads,
                                     .head_size = head_size,
                                     .queries = length,
                                     .keys = length,
                                     .q = t.data(),
                                     .k = t.at(width),
                                     .v = t.at(2 * width),
                                     .q_row = row,
                                     .kv_row = row,
                                     .q_batch = length * row,
                                     .kv_batch = length * row,
                                     .hopper = true};
        };
        b.time([&] { attention_forward(kept(shape).data(), lse.data(), of(qkv), stream_); });
        b.time([&] { attention_delta(delta.data(), d_out.data(), far(shape).data(), of(qkv), stream_); });
        b.time([&] {
            attention_backward(d_qkv.data(), d_qkv.at(width), d_qkv.at(2 * width), d_out.data(), lse.data(),
                               delta.data(), of(far(qkv_shape)), stream_);
        });
    }

    // ---- passes over activations

    void measure_passes() {
        add_for_rows([&](Bench& b, int64_t rows) {
            const Shape shape = {rows, kChannels}, wide = {rows, 2 * kChannels};
            TensorT x = b.values(shape), d_y = b.values(shape), gates = b.values(wide);
            TensorT d_gates = b.values(wide), bias = b.values({kChannels});
            TensorF scratch = b.floats(column_sums_scratch(rows, kChannels, 1));
            b.time_kept(shape, [&](TensorT& y) { copy(y, far(shape)); });
            b.time_kept(shape, [&](TensorT& y) { residual_forward(y, d_y, x, stream_); });
            b.time_kept(shape, [&](TensorT& y) { gelu_forward(y, x, stream_); });
            b.time([&] { gelu_backward(d_y, x, far(shape), stream_); });
            b.time_kept(shape, [&](TensorT& y) { swiglu_forward(y, gates, stream_); });
            b.time([&] { swiglu_backward(d_gates, x, far(wide), stream_); });
            b.time([&] { bias_backward(bias, scratch, x, stream_); });
            b.time([&] { scale_columns(x, {{768, 768, 768}, {1, 1, 1}}, stream_); });
            if constexpr (std::is_same_v<T, bf16>) {
                TensorF term = b.floats(shape);
                Tensor<uint8_t> low = b.codes({rows, kChannels / 2});
                b.time_kept(shape, [&](TensorT& sum) { wide_sum_add(sum, low, term, stream_); });
            }
        });
    }
    // The operation whose rate stands for those that have none of their own.
    void copy(TensorT& out, const TensorT& x) const {
        const Operation operation(kCopyRate, 0, pass_bytes(out, x));
        launch<copy_kernel<T>>(elementwise_blocks<T>(x.size()), kBlockThreads, 0, stream_, out.data(),
                               x.data(), x.size());
    }

    void measure_norms() {
        for (const NormKind kind : {NormKind::Layer, NormKind::Rms})
            add_for_rows([&](Bench& b, int64_t rows) {
                const Shape shape = {rows, kChannels};
                TensorF mean = b.floats({rows}), rstd = b.floats({rows});
                Normed<T> n = {std::move(mean), std::move(rstd), {}};
                TensorT x = b.values(shape), d_x = b.values(shape);
                const Norm<T> w = {b.values({kChannels}), b.values({kChannels})};
                Norm<T> g = {b.values({kChannels}), b.values({kChannels})};
                TensorF scratch = b.floats(column_sums_scratch(rows, kChannels, norm_sums(kind)));
                b.time([&] {
                    n.out = kept(shape);
                    norm_forward(kind, n, x, w, 1e-5f, stream_);
                });
                b.time_kept(shape, [&](TensorT& sum) {
                    n.out = kept(shape);
                    residual_norm_forward(kind, sum, n, x, d_x, w, 1e-5f, stream_);
                });
                b.time([&] { normalize(kind, d_x, far(shape), n, w, stream_); });
                b.time([&] { norm_backward(kind, d_x, g, scratch, x, far(shape), n, w, stream_); });
            });
    }

    // ---- operations around attention, and the loss

    void measure_heads() {
        constexpr int kHeads = 12, kSize = 64;
        add_for_rows([&](Bench& b, int64_t rows) {
            const Shape shape = {1, rows, 3 * kHeads * kSize};
            const Tensor<int> none;
            const Rotation rotation = {kHeads, kHeads, kSize, kSize};
            TensorT qkv = b.values(shape), d_qkv = b.values(shape);
            const TensorF factors = b.floats({kSize / 2});
            TensorT q = b.values({kSize}), k = b.values({kSize});
            TensorT d_q = b.values({kSize}), d_k = b.values({kSize});
            TensorF scratch = b.floats(head_norm_scratch(rows, kSize));
            b.time([&] { rope_forward(qkv, factors, rotation, 0, none, stream_); });
            b.time([&] { rope_backward(qkv, factors, rotation, 0, none, stream_); });
            b.time_kept(shape, [&](TensorT& out) {
                head_norm_forward(out, qkv, q, k, kHeads, kHeads, stream_, 1e-6f);
            });
            b.time([&] {
                head_norm_backward(d_qkv, d_q, d_k, scratch, far(shape), q, k, kHeads, kHeads, stream_,
                                   1e-6f);
            });
        });
        for (const int64_t rows : {kRows[0], kFastCpu ? kRows[1] : 2048})
            add([&](Bench& b) {
                TensorT logits = b.values({rows, kVocabulary});
                TensorF losses = b.floats({rows, 1});
                const Tensor<int> targets = b.template take<int>({rows, 1});
                b.time([&] { cross_entropy_forward(logits, losses, targets, kVocabulary, stream_); });
                b.time([&] {
                    cross_entropy_forward_backward(logits, losses, targets, LossScale{1, nullptr},
                                                   kVocabulary, stream_);
                });
            });
    }

    // ---- the update, and matrices in other formats

    static constexpr int64_t kUpdated = kFastCpu ? 4 << 20 : 16 << 20;  // parameters at a time

    void measure_updates() {
        add([&](Bench& b) {
            const int64_t of_one = kUpdated * int64_t{2 * sizeof(T) + 3 * sizeof(float)};
            const int64_t parts = ceil_div(static_cast<int64_t>(passing_bytes()), of_one);
            const int64_t all = parts * kUpdated;
            int64_t passed = 0;
            TensorT weights = b.values({all});
            const TensorT gradients = b.values({all});
            TensorF norm = b.floats({1}), scratch = b.floats({kNormBlocks});
            TensorF state[3], scales[2];
            for (TensorF& t : state) t = b.floats({all});
            for (TensorF& t : scales) t = b.floats({all / kQuantizedBlock});
            const Tensor<uint8_t> factors = b.codes({int64_t{sizeof(UpdateFactors)}});
            auto* const at = reinterpret_cast<UpdateFactors*>(factors.data());
            if (!b.arena.rehearsing()) set_factors(at, {1e-6f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1}, stream_);
            b.time([&] { global_norm(norm, scratch, far({kUpdated}).data(), kUpdated, stream_); });
            const auto update = [&](Optimizer optimizer, Master master, Moment m, Moment v) {
                b.time([&] {
                    const int64_t first = passed++ % parts * kUpdated, block = first / kQuantizedBlock;
                    const UpdateArrays<T> arrays{.weights = weights.at(first),
                                                 .gradients = gradients.at(first),
                                                 .optimizer = optimizer,
                                                 .master_format = master,
                                                 .master = state[0].at(first),
                                                 .m = {m, state[1].at(first), scales[0].at(block)},
                                                 .v = {v, state[2].at(first), scales[1].at(block)},
                                                 .decayed = kUpdated,
                                                 .n = kUpdated};
                    optimizer_update(at, arrays, norm, stream_);
                });
            };
            for (const Master master : {Master::Fp32, Master::Split, Master::None}) {
                if (master != Master::Fp32 && std::is_same_v<T, float>) break;
                for (const Moment m : {Moment::Fp32, Moment::Bf16, Moment::Bits8})
                    for (const Moment v : {Moment::Fp32, Moment::Bf16, Moment::Bits8})
                        update(Optimizer::AdamW, master, m, v);
                update(Optimizer::Sgd, master, Moment::Fp32, Moment::Fp32);
            }
        });
    }

    void measure_formats() {
        for (const WeightFormat* format : kWeightFormats)
            add([&](Bench& b) {
                constexpr int64_t rows = kFastCpu ? 1024 : 8192, columns = 4096;
                const Tensor<uint8_t> codes = b.codes({quantized_bytes(*format, rows * columns)});
                TensorT out = b.values({rows, columns});
                b.time([&] {
                    dequantize(out.data(), QuantizedView{format, codes.data(), rows, columns}, stream_);
                });
            });
    }

    // ---- transfers

    static constexpr int kTransfers = 6;
    static constexpr size_t kTransferred = size_t{16} << 20;  // bytes
    static constexpr uint64_t kChunksUpdated = 4;             // by the host, at a time

    void measure_transfers() {
        const std::unique_ptr<char, decltype(&std::free)> buffer(
            static_cast<char*>(std::aligned_alloc(kStorageAlignment, kTransferred)), &std::free);
        if (!buffer) fail("--calibrate: no %zu MiB of memory are free", kTransferred >> 20);
        std::memset(buffer.get(), 1, kTransferred);
        DiskStorage disk(temporary_folder(), kTransfers * kTransferred, kTransferred, "--calibrate");
        const auto write = [&](int i) { return disk.start(buffer.get(), i, {}, stream_); };
        const auto read = [&](int i) { return disk.start(buffer.get(), {}, i, stream_); };
        measure_route(Route::DiskWrite, [&](int i) { disk.finish(write(i), stream_); });
        measure_route(Route::DiskRead, [&](int i) { disk.finish(read(i), stream_); });
        if (kHostIsDevice) {
            measure_beside(Route::DiskWrite, disk, write);
            measure_beside(Route::DiskRead, disk, read);
            return;
        }
        const DeviceBuffer slot(aligned_buffer_bytes(kTransferred), "what the calibration copies");
        HostStorage host(kTransfers * kTransferred, kTransferred);
        const auto copy = [&](std::optional<int> to, std::optional<int> from) {
            host.finish(host.start(slot.data(), to, from, stream_), stream_);
        };
        measure_route(Route::ToHost, [&](int i) { copy(i, {}); });
        measure_route(Route::FromHost, [&](int i) { copy({}, i); });
        measure_host_update();
    }
    // Measures how much of its speed a product keeps during transfers. These take cores' time, and more if
    // the disk is a virtual machine's. Starts three transfers, and multiplies for as long as two take.
    void measure_beside(Route route, OffloadStorage& place, const std::function<size_t(int)>& start) {
        beside_products([&](const auto& multiply, double alone) {
            const double products = std::ceil(2 * rates_.seconds_moving(kTransferred, route) / alone);
            const double share = median_of(kTransfers, [&](int i) {
                size_t last = 0;
                for (int k = 0; k < 3; k++) last = start((3 * i + k) % kTransfers);
                const WallClock clock;
                for (int k = 0; k < products; k++) multiply();
                const double seconds = clock.seconds();
                place.finish(last, stream_);
                return products * alone / seconds;
            });
            rates_.beside[route] = std::min(1.0, share);
        });
    }
    // Updates with AdamW and all of its state in fp32, in several places one after another, so that no cache
    // has them.
    void measure_host_update() {
        std::vector<T> weights(kTransfers * kChunksUpdated * kStateChunk), gradients(weights.size());
        std::vector<float> state[3];
        for (auto& s : state) s.resize(weights.size());
        const UpdateFactors factors = factors_of({1e-6f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1});
        const auto chunk = [&](uint64_t i) {
            const size_t at = i * kStateChunk;
            return UpdateArrays<T>{.weights = &weights[at],
                                   .gradients = &gradients[at],
                                   .master = &state[0][at],
                                   .m = {Moment::Fp32, &state[1][at], nullptr},
                                   .v = {Moment::Fp32, &state[2][at], nullptr},
                                   .n = kStateChunk};
        };
        const auto update = [&](uint64_t i) {
            for (uint64_t c = 0; c < kChunksUpdated; c++) {
                const UpdateArrays<T> a = chunk(kChunksUpdated * i + c);
                update_on_host(&a, &factors, 0);
            }
        };
        measure_route(Route::HostUpdate, update, kChunksUpdated * update_bytes(chunk(0)));
    }
    void measure_route(Route route, const std::function<void(int)>& move, double bytes = kTransferred) {
        rates_.transfers[route] = bytes / median_of(kTransfers, [&](int i) {
                                      const WallClock clock;
                                      move(i);
                                      stream_synchronize(stream_);
                                      return clock.seconds();
                                  });
    }

    const Stream stream_;
    Rates rates_;
    std::vector<float> draws_;
    Passing read_, written_;
    size_t most_bytes_ = 0;
};

// Measures how fast ranks exchange bytes, in pieces as large as those of a step, and, on CPUs, how much of
// its speed a product keeps meanwhile: with ranks on this machine, and with those on others. All ranks must
// call it.
class RanksCalibration {
  public:
    RanksCalibration(RankEngine& engine, const Rank& rank)
        : engine_(engine), rank_(rank), slices_(slices_of(rank)), exchange_(none_, stream_, slices_) {
        exchange_.connect(engine);
        exchange_.connect_devices(rank);
        hosts_ = exchange_.gather(std::vector<uint64_t>{name_hash(host_name())});
    }
    template <class T>
    void measure(Rates& rates, Calibration<T>& calibration) {
        for (const bool here : {true, false}) {
            if (!some_send(here)) continue;  // if some do, those with nothing to send take part too
            const Parts parts(hosts_, static_cast<size_t>(rank_.number), here, stream_);
            double seconds = seconds_of(parts);
            if (kHostIsDevice)
                calibration.beside_products([&](const auto& multiply, double alone) {
                    const Beside b = beside(parts, seconds, multiply, alone);
                    rates.beside[here ? Route::ToRanks : Route::ToMachines] = b.share;
                    seconds = b.seconds;
                });
            if (parts.sent == 0) continue;
            if (here)
                rates.transfers[Route::ToRanks] = parts.sent / seconds;
            else  // which all ranks of this machine send at the same time
                rates.ranks.network = parts.sent / seconds * parts.ranks_here;
        }
    }

  private:
    static constexpr size_t kSlice = size_t{4} << 20;
    static constexpr int kTimes = 15;

    // What a rank sends to those on its machine, or on others, while it receives as much.
    struct Parts {
        DeviceBuffer to, from;
        ExchangeRound round;
        double sent = 0;        // bytes
        double ranks_here = 0;  // on this rank's machine

        Parts(const std::vector<uint64_t>& hosts, size_t own, bool here, Stream stream)
            : to(hosts.size() * kSlice, "what ranks send"), from(to.bytes(), "what ranks receive") {
            device_fill(to.data(), 1, to.bytes(), stream);
            device_fill(from.data(), 1, from.bytes(), stream);
            stream_synchronize(stream);
            round.send.resize(hosts.size()), round.receive.resize(hosts.size());
            for (size_t r = 0; r < hosts.size(); r++) {
                const bool same = hosts[r] == hosts[own];
                ranks_here += same;
                if (same != here || r == own) continue;
                round.send[r] = {to.data() + r * kSlice, kSlice};
                round.receive[r] = {from.data() + r * kSlice, kSlice};
                sent += static_cast<double>(kSlice);
            }
        }
    };
    bool some_send(bool here) const {
        for (size_t a = 0; a < hosts_.size(); a++)
            for (size_t b = 0; b < a; b++)
                if ((hosts_[a] == hosts_[b]) == here) return true;
        return false;
    }
    double seconds_of(const Parts& parts) {
        const auto exchange = [&](int) {
            exchange_.largest(0);  // all ranks begin together
            const WallClock clock;
            exchange_.transfers().finish(exchange_.transfers().start({parts.round}, stream_), stream_);
            stream_synchronize(stream_);
            return clock.seconds();
        };
        exchange(0);  // the first one is slower
        return median_of(kTimes - 1, exchange);
    }
    // The share of its speed that computing keeps beside exchanges, and the seconds of one of these.
    struct Beside {
        double share, seconds;
    };
    // Starts exchanges, three or as many as last longer than ten products, and multiplies for two thirds of
    // the time that they take alone: all ranks do both at a time.
    Beside beside(const Parts& parts, double seconds, const std::function<void()>& multiply, double alone) {
        // As many on every rank, though each has measured its own times. One with nothing to send measured
        // how long nothing takes.
        const int enough = parts.sent > 0 ? static_cast<int>(15 * alone / seconds) : 0;
        const int exchanges = exchange_.largest(std::max(3, enough));
        const double products = std::ceil(2. / 3 * exchanges * seconds / alone);
        std::vector<double> shares, each;
        for (int i = 0; i < kTimes; i++) {
            exchange_.largest(0);
            size_t last = 0;
            for (int k = 0; k < exchanges; k++) last = exchange_.transfers().start({parts.round}, stream_);
            const WallClock clock;
            for (int k = 0; k < products; k++) multiply();
            const double computed = clock.seconds();
            exchange_.transfers().finish(last, stream_);
            const double exchanged = engine_.seconds_of(last);
            // If the exchanges ended first, the rest of the products went at full speed.
            const double rest = std::max(0.0, computed - exchanged);
            shares.push_back((products * alone - rest) / (computed - rest));
            each.push_back(exchanged / exchanges);
        }
        return {std::clamp(statistics(std::move(shares)).median, 0.05, 1.0),
                statistics(std::move(each)).median};
    }

    RankEngine& engine_;
    const Rank rank_;
    const Slices slices_;
    Arena none_;
    const Stream stream_ = nullptr;
    Exchange exchange_;
    std::vector<uint64_t> hosts_;  // by rank: a digest of the machine's name
};

// Measures the device, and writes its rates into a file. Of several ranks, each measures its own device at
// the same time, as they also compute at the same time; then how fast they exchange bytes. The first one
// writes the file.
template <class T>
void calibrate(const RunConfig& o, RankEngine* engine) {
    const std::string& file = o.calibrate;
    if (o.rank.is_first()) {
        check_output_file({"--calibrate", file, "{\n \"rates\":", Output::Replaced});
        check_rates_writable(file);
    }
    const WallClock clock;
    const OwnStream stream;
    Calibration<T> calibration(stream.get());
    Rates rates = calibration.measure();
    if (engine) RanksCalibration(*engine, o.rank).measure(rates, calibration);
    if (!o.rank.is_first()) return;
    write_rates(file, rates, measured_on(dtype_name<T>()));
    print(stdout, "measured %s in %.1f s, in %.0f MiB of memory: %s\n", device_name(), clock.seconds(),
          mebibytes(calibration.most_bytes()), file);
}
