// train_gpt.cu - the training of a language model, top to bottom: the loop and the step, then the model's
// forward and backward, then what is rehearsed, taken and loaded before the first step.
//
// Every piece of the step takes its tensors from the arena (llmc/arena.h), where they are first written, and
// lets go of them where they are last read. What a block lets go of in forward, backward makes again: that is
// all there is to recompute. The kernels are in llmc/*.cuh, each with its launcher; matrix products in
// llmc/matmul.h.

#include <malloc.h>
#include <omp.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "llmc/adapter.h"
#include "llmc/arena.h"
#include "llmc/bench.h"
#include "llmc/calibrate.h"
#include "llmc/chosen_context.h"
#include "llmc/chosen_setting.h"
#include "llmc/cross_entropy.cuh"
#include "llmc/data_lines.h"
#include "llmc/dataset.h"
#include "llmc/device_rates.h"
#include "llmc/embedding_and_head.h"
#include "llmc/enough_memory.h"
#include "llmc/feeder.h"
#include "llmc/fit.h"
#include "llmc/graph.h"
#include "llmc/head_norm.cuh"
#include "llmc/linear.h"
#include "llmc/loss_by_position.h"
#include "llmc/matmul.h"
#include "llmc/matmul_search.h"
#include "llmc/merged_file.h"
#include "llmc/norm_layer.h"
#include "llmc/options_parse.h"
#include "llmc/parked_rows.h"
#include "llmc/parking.h"
#include "llmc/plans.h"
#include "llmc/position_losses.cuh"
#include "llmc/positions.h"
#include "llmc/precision.h"
#include "llmc/rates_file.h"
#include "llmc/recompute.h"
#include "llmc/report.h"
#include "llmc/residual.cuh"
#include "llmc/rope.cuh"
#include "llmc/rows.h"
#include "llmc/run_model.h"
#include "llmc/sample.h"
#include "llmc/schedule.h"
#include "llmc/sequence_keys.h"
#include "llmc/signals.h"
#include "llmc/swiglu.cuh"
#include "llmc/threads.h"
#include "llmc/timeline.h"
#include "llmc/updates.h"

using Parked = ParkedInputs<floatX>;

struct BlockActivations;  // defined at "---- forward"
struct MlpActivations;
struct HeadActivations;

// How a micro-batch is run.
struct MicroBatchOptions {
    int64_t head_rows = 0;   // rows that have logits at one time; 0: all
    std::vector<Keep> keep;  // of each layer
    bool adds = false;       // to the gradients of micro-batches before: else they are written
    DropoutOptions dropout;  // its key is the first micro-batch's; those of the others follow in memory
};

// The model: its parameters, seen through views, and the operations of a step on them. Nothing here owns
// memory; the parameters lie in a State, all else in the arena. What is trained lies in a State too: the
// same, or an adapter's, and then the model itself is frozen.
class Gpt {
  public:
    // The stream may be made later, before the first run.
    Gpt(Arena& arena, const Stream& stream, const State<floatX>& model, const OutsideState& outside,
        const State<floatX>& trained, bool hopper_attention)
        : arena_(arena),
          stream_(stream),
          config_(model.layout.config()),
          family_(*config_.family),
          weights_(arena, stream, model, outside, trained),
          gradients_(arena, stream, trained),
          norm_(arena, stream, config_),
          ends_(arena, stream, config_, outside, weights_, norm_),
          trained_(trained),
          parked_(arena, stream),
          parked_rows_(arena, stream),
          keys_(arena, stream, config_, position_factors_, hopper_attention) {}
    Weights& weights() { return weights_; }
    Gradients& gradients() { return gradients_; }
    EmbeddingAndHead& ends() { return ends_; }
    // Points the views at the states' memory, and at position_factors() on the device: when these are
    // allocated.
    void bind(float* position_factors_at) {
        position_factors_ =
            TensorF(position_factors_at, {static_cast<int64_t>(position_factors(config_).size())});
        weights_.bind();
    }
    // Sets the sizes of chunks: rows in an MLP, and queries of a sequence in attention; 0: all at once.
    void set_chunk_rows(int64_t of_mlp, int64_t of_attention) {
        mlp_rows_ = of_mlp, attention_rows_ = of_attention;
    }
    // Says where block inputs are offloaded: those of the first `layers` layers, of `passes` micro-batches
    // each; in chunks of `rows` rows, or whole: 0.
    void park_in(Elsewhere* place, int layers, int passes, int64_t rows) {
        parked_.use(rows > 0 ? 0 : layers, passes, place);
        parked_rows_.use(rows > 0 ? layers : 0, passes, rows, place);
    }
    // The same for keys and values, and for the fp32 sums of their gradients; 0: they stay on the device.
    void park_keys_in(Elsewhere* keys, Elsewhere* sums, int64_t rows) { keys_.offload_to(keys, sums, rows); }

    void forward_backward(const std::vector<const DeviceBatch*>& batches, const MicroBatchOptions& options,
                          float loss_scale, TensorF& loss);
    void evaluate(const DeviceBatch& batch, const MicroBatchOptions& options, float loss_scale, TensorF& loss,
                  TensorF position_losses = {});
    template <class Choose>
    void generate(const std::vector<int>& prompt, int new_tokens, Choose&& choose);
    template <class Visit>
    void for_each_merged(Visit&& visit);

  private:
    TensorX take(const char* name, Shape shape) { return arena_.take<floatX>(name, shape); }
    TensorX take_gradient(const char* name, Shape shape) {
        return arena_.take<floatX>(name, shape, "gradient");
    }
    TensorF take_float(const char* name, Shape shape) { return arena_.take<float>(name, shape); }
    float rotary_scale() const { return static_cast<float>(attention_factor(config_.rope)); }
    float epsilon() const { return static_cast<float>(config_.norm_epsilon); }
    int64_t prompt_len() const { return ends_.prompt_len(); }
    // The parts of a block, forward.
    TensorX linear(const char* name, const TensorX& x, const Linear<floatX>& w, const Rows& rows,
                   bool gelu = false) {
        return linear_forward(arena_, stream_, name, x, w, rows, gelu);
    }
    void hold(Linear<floatX>& w) { dequantize_once(arena_, stream_, w); }
    TensorX activate(const TensorX& up);
    template <class MakeX>
    void make_qkv(BlockActivations& a, MakeX&& make_x, const Block<floatX>& w, const Rows& rows,
                  bool for_backward, int first_position);
    void make_qkv_backward(TensorX& d_qkv, BlockActivations& a, const Block<floatX>& w,
                           BlockGradient<floatX>& g, const Rows& rows, int first_position);
    void attend(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv);

    void forward_attention(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv);
    void forward_attention_rows(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv);
    TensorX forward_attention_in_chunks(int layer, BlockActivations& a, const Rows& rows, Keep keep);
    TensorX projected(int layer, const TensorX& attention, const Rows& rows);
    void add_projected(TensorX& sum, const TensorX& x, const TensorX& attention, int layer, const Rows& rows);
    TensorX forward_mlp(int layer, BlockActivations& a, const Rows& rows, Keep keep);
    TensorX forward_mlp_rows(int layer, MlpActivations& m, const Rows& rows, Keep keep, const TensorX& x,
                             TensorX out);
    TensorX forward_block(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv = nullptr);
    TensorX forward_only(const Tensor<int>& tokens, const Rows& rows, KvCache* cache);
    TensorX append_tokens(const std::vector<int>& tokens, KvCache& cache);
    TensorX forward_cached(const std::vector<int>& tokens, KvCache& cache);
    TensorX forward_prompt(const std::vector<int>& tokens, KvCache& cache);
    HeadActivations forward_head(const TensorX& x);
    // Whether so many rows go through an MLP, and what is beside it, in more than one part.
    bool in_chunks(int64_t rows) const { return mlp_rows_ > 0 && mlp_rows_ < rows; }
    // And whether the queries of a sequence of x (B, T, C) go through attention so.
    bool attends_in_chunks(const TensorX& x) const {
        return attention_rows_ > 0 && attention_rows_ < x.shape().dims[1];
    }

    template <class MakeX>
    TensorX linear_backward(const char* name, LinearGradient<floatX>& g, MakeX&& make_x, const TensorX& d_out,
                            const Linear<floatX>& w, const Rows& rows, const TensorX* gelu_input = nullptr) {
        return ::linear_backward(arena_, stream_, name, g, make_x, d_out, w, rows, gelu_input);
    }

    // Whether backward reads what went into a layer.
    bool wants_input(const Linear<floatX>& w) const { return !weights_.is_frozen() || w.adapter; }
    TensorX dropped(const TensorX& d_out, const Dropout& d);

    void head(TensorX& stream, const Tensor<int>& targets, const MicroBatchOptions& options,
              LossScale loss_scale, TensorF& loss, Head<floatX>& g);
    void backward_mlp(int layer, BlockGradient<floatX>& g, BlockActivations& a, const Rows& rows,
                      TensorX& d_stream);
    void backward_mlp_in_chunks(int layer, BlockGradient<floatX>& g, const TensorX& x, const Rows& rows,
                                TensorX& d_stream);
    void backward_mlp_rows(int layer, BlockGradient<floatX>& g, MlpActivations& m, const TensorX& x,
                           const Rows& rows, TensorX& d_stream);
    void attention_backward_in_place(TensorX& qkv, const TensorX& d_attention, const TensorF& lse,
                                     const TensorF& delta, int layer, const Rows& rows, KvRows* kv);
    void backward_attention(int layer, BlockGradient<floatX>& g, BlockActivations& a, const Rows& rows,
                            TensorX& d_stream, KvRows* kv = nullptr);
    void backward_block_in_chunks(int layer, BlockGradient<floatX>& g, const TensorX& x, const Rows& rows,
                                  TensorX& d_stream);
    void backward_block(int layer, BlockGradient<floatX>& g, BlockActivations& a, const Rows& rows,
                        TensorX& d_stream);

    // A micro-batch on its way through the model.
    struct Pass;
    void forward_blocks(std::vector<Pass>& passes);
    void fetch_rows(int layer, int pass, BlockActivations& a, Shape shape);
    void backward_blocks(std::vector<Pass>& passes, const MicroBatchOptions& options);

    Arena& arena_;
    const Stream& stream_;
    const ModelConfig& config_;
    const Family& family_;
    Weights weights_;
    Gradients gradients_;
    const NormLayer norm_;
    EmbeddingAndHead ends_;
    const State<floatX>& trained_;
    Parked parked_;
    ParkedRows<floatX> parked_rows_;
    TensorF position_factors_;
    SequenceKeys keys_;
    int64_t mlp_rows_ = 0, attention_rows_ = 0;  // in an MLP, in attention at one time; 0: all
    // All rows of a batch. With a soft prompt each sequence holds one example, so there are no documents.
    Rows rows_of(const DeviceBatch& batch) const {
        Rows rows;
        if (prompt_len() == 0) rows.documents = &batch.documents;
        return rows;
    }
};

// A run on the device: the model's state, the batch, the arena with its plans, and the loop over the steps.
class Trainer {
  public:
    using Element = floatX;  // of the weights

    // Takes no memory of the device yet.
    Trainer(const Options& options, RunInputs& inputs, Choices choices = {});

    void run();
    void bench();
    void print_plan() const;

    // Changes batch, formats of the state and recompute levels, for the search in chosen_setting.h.
    void use(const MemorySetting& s);
    Plan rehearse_training(bool adds, bool placed);
    Plan rehearse_validation(bool placed);
    // Rehearses every step that the run may take; a micro-batch of the training is placed if asked.
    const MemoryReport& rehearse(bool placed = true);

  private:
    // The loop.
    void train();
    bool train_step();
    void feed_training(int k, float loss_scale);
    void feed(Feeder& feeder, SequenceLoader& loader, uint64_t first, uint64_t count, float loss_scale);
    float step_loss_scale();
    template <class Operations>
    void run_step(Plan& plan, Operations&& operations);
    void micro_batch(float loss_scale);
    std::optional<double> validate();
    void validate_and_log();
    void do_what_is_due();
    void sample();
    void save();
    void save_if_asked();
    void check_logs() const;
    void finish();
    void stop();

    // Before it, and the bench.
    void open_device();
    void prepare();
    void prepare_saves();
    void choose_algorithms();
    void take_memory();
    void load();
    void print_start() const;
    void forward_step();

    bool is_time(int64_t every) const { return every > 0 && step_ > 0 && step_ % every == 0; }
    bool trains() const { return o_.steps > 0 && o_.bench.empty(); }
    bool saves() const { return !o_.out.empty(); }
    // Where the run says what it does: without training, stdout is for generated text.
    FILE* notes() const { return o_.steps > 0 ? stdout : stderr; }
    // The number of the first sequence of micro-batch k of the step.
    uint64_t first_of(int k) const {
        const auto done = static_cast<uint64_t>((step_ - first_step_) * o_.grad_accum + k);
        return static_cast<uint64_t>(first_sequence_) + done * batch();
    }
    // The sequences of all steps, those before a resume among them.
    double sequences_of_run() const {
        const int64_t steps = std::max<int64_t>(0, o_.steps - first_step_);
        return static_cast<double>(first_sequence_) + static_cast<double>(steps) * o_.batch * o_.grad_accum;
    }
    int passes() const { return o_.passes(); }
    size_t dropout_keys() const { return drops() ? static_cast<size_t>(passes()) : 0; }
    bool drops() const { return o_.dropout > 0 || in_.adapter.dropout > 0; }
    uint64_t batch() const { return static_cast<uint64_t>(o_.batch); }
    double step_tokens() const { return static_cast<double>(o_.batch) * o_.seq_len * o_.grad_accum; }
    double step_flops(bool forward_only = false) const;
    // Whether steps are run through graphs: of parked keys these would grow with the square of the sequence.
    bool replays() const { return replays_ && places_.rows_of_parked_keys() == 0; }
    void use_places();
    void merge();
    void write_merged();
    [[noreturn]] void fail_to_merge(const std::string& why);
    void check_room_on_disks() const;
    std::string step_text() const;
    void check_logits(const std::vector<float>& logits) const;
    uint64_t validation_sequences() const;

    Options o_;
    RunInputs& in_;
    const ModelConfig& config_;
    RunModel model_;
    std::optional<OwnStream> own_stream_;
    Stream stream_ = nullptr;  // that one, from open_device() on
    Arena arena_;
    Gpt gpt_;
    std::vector<Feeder> feeders_;  // of the micro-batches that are on their way together
    std::optional<SequenceLoader> loader_, val_loader_;
    MicroBatchOptions micro_;
    const SquareSums square_sums_;  // where the norm is that of all units
    Metrics metrics_;
    DeviceBuffer positions_memory_, dropout_memory_;
    LossByPosition loss_by_position_;  // of a validation
    Plans plans_;
    MemoryReport report_;
    const Choices choices_;
    const Rates rates_;  // that estimates are by
    Places<floatX> places_;
    Updates updates_;
    StepGraphs graphs_;
    bool replays_;                                 // whether steps may be run through them
    size_t used_before_ = 0;                       // of the device's memory
    int64_t step_ = 0;                             // steps done
    int64_t first_step_ = 0, first_sequence_ = 0;  // where a resumed run begins
    bool evaluated_ = false;                       // whether what is due at this step was made
    SaveFolder saves_;
    int64_t saved_step_ = -1;  // of what this run has saved last
};

// ---- the loop

void Trainer::run() {
    open_device();
    prepare();
    if (!o_.save_base.empty() && !file_exists(o_.save_base)) {  // a resumed run's is there
        model_.save_base(o_.save_base, stream_);
        fprintf(notes(), "saved the base in %s\n", o_.save_base.c_str());
    }
    stop_on_signals(saves());
    print_start();
    try {
        train();
    } catch (const RecoverableError&) {  // what was trained until then is good
        if (saves() && step_ > first_step_ && saved_step_ != step_) save();
        throw;
    }
    metrics_.finish();
    interrupted ? stop() : finish();
    check_logs();
}

// Fails where a log could not be written.
void Trainer::check_logs() const {
    metrics_.log().check();
    loss_by_position_.check();
}

// What was taken beside the device, where anything was.
void print_beside(const char* what, size_t taken, size_t planned) {
    if (taken + planned > 0)
        printf("%s: %.1f MiB; planned: %.1f MiB\n", what, mebibytes(taken), mebibytes(planned));
}

void Trainer::train() {
    const int settled = StepGraphs::kReplays && replays() ? 2 : 1;  // steps until graphs are recorded
    for (step_ = first_step_; step_ < o_.steps && !interrupted; step_++, evaluated_ = false) {
        save_if_asked();
        if (!evaluated_) do_what_is_due();
        if (interrupted) break;
        if (is_time(o_.save_every) && step_ > first_step_ && saved_step_ != step_) save();
        check_logs();
        if (!train_step()) break;
        if (step_ == std::min(o_.steps, first_step_ + settled) - 1) {
            metrics_.finish();
            printf("taken from the device: %.1f MiB; planned: %.1f MiB\n",
                   (static_cast<double>(device_bytes_in_use()) - static_cast<double>(used_before_)) / 1048576,
                   mebibytes(report_.total() - report_.context));
            print_beside("pinned in host memory", pinned_bytes_allocated, report_.all_pinned());
            print_beside("taken in files", working_file_bytes, report_.in_files());
        }
    }
}

// One training step. Returns false if it was interrupted between its micro-batches, whose gradients are then
// discarded.
bool Trainer::train_step() {
    Range range("step");
    metrics_.step_begins(step_);
    const float loss_scale = step_loss_scale();
    const double rate = learning_rate(o_.schedule, step_, o_.steps, o_.warmup, o_.lr, o_.min_lr);
    const OptimizerStep step = {.lr = static_cast<float>(rate),
                                .beta1 = static_cast<float>(o_.beta1),
                                .beta2 = static_cast<float>(o_.beta2),
                                .epsilon = static_cast<float>(o_.eps),
                                .weight_decay = static_cast<float>(o_.weight_decay),
                                .clip = static_cast<float>(o_.clip),
                                .step = static_cast<int>(step_ + 1),
                                .seed = o_.seed};
    updates_.begin_step(step);
    fill_zero(metrics_.loss(), stream_);
    for (int first = 0; first < o_.grad_accum; first += passes()) {
        if (first > 0 && interrupted) return false;
        if (first > 0) save_if_asked();
        for (int k = first; k < first + passes(); k++) {
            feed_training(k, loss_scale);
            if (drops())
                set_dropout_key(reinterpret_cast<uint64_t*>(dropout_memory_.data()) + k % passes(), o_.seed,
                                first_of(k), stream_);
        }
        micro_.adds = first > 0;
        run_step(micro_.adds ? plans_.add : plans_.train, [&] { micro_batch(loss_scale); });
    }
    if (!o_.update_in_backward) run_step(plans_.update, [&] { updates_.update_all(); });
    metrics_.step_ends(step_, rate, stream_);
    return true;
}

// 1 / losses, or 0 if there are none.
float mean_scale(uint64_t losses) { return losses > 0 ? 1.f / static_cast<float>(losses) : 0.f; }

// 1 / the step's tokens that have a loss. A line says so if there are none.
float Trainer::step_loss_scale() {
    uint64_t tokens = static_cast<uint64_t>(step_tokens());
    if (loader_)
        tokens = loader_->tokens_with_loss(first_of(0), batch() * static_cast<uint64_t>(o_.grad_accum));
    if (tokens == 0) {
        metrics_.finish();
        printf("step %5lld has no token to learn: it counts as no loss\n", static_cast<long long>(step_ + 1));
    }
    return mean_scale(tokens);
}

// Feeds micro-batch k of the step: from the data, or random tokens where a bench has none.
void Trainer::feed_training(int k, float loss_scale) {
    const uint64_t first = first_of(k);
    Feeder& feeder = feeders_[static_cast<size_t>(k % passes())];
    if (loader_) return feed(feeder, *loader_, first, batch(), loss_scale);
    const Feeder::Slot slot = feeder.slot();
    fill_random(slot.inputs, slot.targets, o_.seed, first, config_.vocabulary);
    feeder.send(stream_);
}

// Feeds `count` sequences from number `first` on; rows beyond them, up to a whole batch, do not count.
void Trainer::feed(Feeder& feeder, SequenceLoader& loader, uint64_t first, uint64_t count, float loss_scale) {
    const Feeder::Slot slot = feeder.slot();
    loader.fill_batch(first, count, slot.inputs, slot.targets, slot.positions, slot.ends);
    if (slot.loss_scale) *slot.loss_scale = loss_scale;
    if (val_loader_ && &loader == &*val_loader_) loss_by_position_.count(slot.targets, slot.positions);
    feeder.send(stream_);
}

// Runs operations in the memory of their plan, on a GPU as graphs from the second time on. They must be the
// same every time: what changes lies in the device's memory, or is the host's to do (host_act()).
template <class Operations>
void Trainer::run_step(Plan& plan, Operations&& operations) {
    const auto run = [&] { arena_.run(plan, operations); };
    if (replays())
        graphs_.run(&plan, stream_, run);
    else
        run();
}

// Forward and backward of one micro-batch, or of all with --by-block; also the update, with
// --update-in-backward.
void Trainer::micro_batch(float loss_scale) {
    // The micro-batches behind the first share one plan and one graph. So all of them compute what the last
    // one must, the sums for the norm.
    const bool may_be_last = o_.grad_accum == passes() || micro_.adds;
    updates_.begin_backward(may_be_last);
    std::vector<const DeviceBatch*> batches;
    for (const Feeder& feeder : feeders_) batches.push_back(&feeder.batch());
    gpt_.forward_backward(batches, micro_, loss_scale, metrics_.loss());
    updates_.end_backward();
}

// The mean loss over the validation data's first sequences, as many as --eval-batches steps read: the same
// whatever micro-batch was chosen. Nothing when the run is interrupted.
std::optional<double> Trainer::validate() {
    metrics_.finish();
    const uint64_t sequences = validation_sequences();
    fill_zero(metrics_.loss(), stream_);
    loss_by_position_.begin(stream_);
    // The same in every call, as run_step() asks for.
    const float scale = mean_scale(val_loader_->tokens_with_loss(0, sequences));
    for (uint64_t first = 0; first < sequences; first += batch()) {
        if (interrupted) return std::nullopt;
        feed(feeders_[0], *val_loader_, first, std::min(batch(), sequences - first), scale);
        run_step(plans_.evaluate, [&] {
            gpt_.evaluate(feeders_[0].batch(), micro_, scale, metrics_.loss(), loss_by_position_.sums());
        });
    }
    float loss = 0;
    copy_to_host(&loss, metrics_.loss().data(), sizeof loss, stream_);
    return double{loss};
}

void Trainer::validate_and_log() {
    const std::optional<double> loss = validate();
    if (!loss) return;
    if (!std::isfinite(*loss)) {
        if (o_.steps == 0) model_.check_streamed_finite();
        fail("%sthe validation loss is %g%s", o_.steps > 0 ? step_text().c_str() : "", *loss,
             o_.steps > 0 ? ("; the last good save: " + metrics_.last_save).c_str() : "");
    }
    if (o_.steps > 0)
        printf("step %5lld validation loss %.6f\n", static_cast<long long>(step_), *loss);
    else
        printf("validation loss %.6f, perplexity %.4f: %llu sequences of %d tokens\n", *loss, std::exp(*loss),
               static_cast<unsigned long long>(validation_sequences()), o_.seq_len);
    metrics_.log().write({{"step", step_}, {"val_loss", *loss}});
    loss_by_position_.end(step_, *loss, stream_);
}

uint64_t Trainer::validation_sequences() const {
    return std::min(val_loader_->sequences_per_epoch(),
                    batch() * static_cast<uint64_t>(o_.grad_accum) * static_cast<uint64_t>(o_.eval_batches));
}

// The validation and the sample that are due before the next step.
void Trainer::do_what_is_due() {
    if (val_loader_ && is_time(o_.eval_every)) validate_and_log();
    if (!interrupted && is_time(o_.sample_every) && in_.samples()) sample();
    evaluated_ = !interrupted;
}

// For messages: "step 12: ".
std::string Trainer::step_text() const { return format("step %lld: ", static_cast<long long>(step_)); }

// Fails where a sample would be drawn from what is no number.
void Trainer::check_logits(const std::vector<float>& logits) const {
    for (const float logit : logits) {
        if (std::isfinite(logit)) continue;
        if (o_.steps == 0) model_.check_streamed_finite();
        fail("%sa logit of the sample is %g", o_.steps > 0 ? step_text().c_str() : "", double{logit});
    }
}

// Prints the prompt and its continuation, of a training under a header. A sample longer than the window goes
// on from its latest half.
void Trainer::sample() {
    metrics_.finish();
    Sample text(o_, in_, step_);
    const std::vector<int> prompt = text.tokens();
    const auto choose = [&](const TensorX& device_logits) {
        std::vector<floatX> narrow(static_cast<size_t>(config_.vocabulary));
        copy_to_host(narrow.data(), device_logits.data(), narrow.size() * sizeof(floatX), stream_);
        std::vector<float> logits(narrow.size());
        for (size_t v = 0; v < logits.size(); v++) logits[v] = to_float(narrow[v]);
        check_logits(logits);
        const int token = text.next(logits);
        return interrupted ? -1 : token;
    };
    const int window = in_.sample_window(), half = window / 2;
    arena_.run(plans_.sample,
               [&] { gpt_.generate(prompt, window - static_cast<int>(prompt.size()), choose); });
    while (!text.ended() && !interrupted) {
        const std::vector<int> latest(text.tokens().end() - half, text.tokens().end());
        arena_.run(plans_.slide, [&] { gpt_.generate(latest, window - half, choose); });
    }
    text.finish();
}

void Trainer::save() {
    metrics_.finish();
    saves_.others.erase(step_);
    const bool good = metrics_.is_good();
    if (good) saves_.good = step_;
    Progress progress{.step = step_,
                      .sequences = first_sequence_ + (step_ - first_step_) * o_.batch * o_.grad_accum,
                      .evaluated = evaluated_,
                      .others = saves_.others,
                      .first_loss = metrics_.first_loss,
                      .last_good = saves_.good,
                      .data = in_.facts};
    remember_options(o_, progress);
    save_checkpoint(saves_, model_.trained(), progress, in_.saved_tokenizer(), o_.steps > 0, in_.adapter);
    if (good) metrics_.last_save = o_.out + "/" + step_name(step_);
    saved_step_ = step_;
    fprintf(notes(), "saved step %lld in %s\n", static_cast<long long>(step_), o_.out.c_str());
    if (!good)
        fprintf(stderr, "%s/%s: is of a step with %s; the last good save: %s\n", o_.out.c_str(),
                step_name(step_).c_str(), metrics_.why_bad().c_str(), metrics_.last_save.c_str());
}

// Saves the last complete step where a signal has asked for it. Before a run's first step is complete there
// is nothing to save, and the request waits.
void Trainer::save_if_asked() {
    if (!asked_to_save || !saves() || step_ == first_step_) return;
    asked_to_save = 0;
    if (saved_step_ != step_) save();
}

// The end of a run whose steps are all made.
void Trainer::finish() {
    const bool is_saved =
        step_ == first_step_ && !in_.resumed.empty() && same_file(folder_above(in_.resumed), o_.out);
    evaluated_ = true;
    if (saves() && !is_saved) save();
    if (val_loader_) validate_and_log();
    if (!interrupted && in_.samples()) sample();
    if (!o_.merge.empty() && !interrupted) merge();
}

// Saves the model with the adapter in its weights. Where that fails, what was trained is not lost.
void Trainer::merge() {
    metrics_.finish();
    try {
        write_merged();
    } catch (const UserError& error) {
        fail_to_merge(error.what());
    }
    fprintf(notes(), "merged the adapter into a model in %s\n", o_.merge.c_str());
}

// Fails with a line that says how to merge again. Without --out the adapter, which is small, is saved first.
void Trainer::fail_to_merge(const std::string& why) {
    const std::string failed = format("--merge %s: %s", o_.merge.c_str(), why.c_str());
    if (step_ == first_step_) fail("%s", failed.c_str());  // nothing was trained
    if (saves())
        fail("%s; the adapter is saved: --resume %s --steps 0 --merge DIR merges it", failed.c_str(),
             o_.out.c_str());
    const std::string wanted = without_last_slashes(o_.merge) + ".adapter";
    std::string kept = wanted;
    for (int i = 2; file_exists(kept); i++) kept = format("%s-%d", wanted.c_str(), i);
    try {
        write_folder(kept, [&](const std::string& folder) {
            write_adapter(folder, model_.trained(), in_.adapter, in_.saved_tokenizer());
        });
    } catch (const UserError& error) {
        fail("%s; nor can the adapter be saved: %s", failed.c_str(), error.what());
    }
    fail("%s; the adapter is saved: --model %s --adapter %s --steps 0 --merge DIR merges it", failed.c_str(),
         o_.model.c_str(), kept.c_str());
}

void Trainer::write_merged() {
    write_folder(o_.merge, [&](const std::string& folder) {
        write_settings<floatX>(folder, config_, in_.saved_tokenizer());
        const bool by_outputs = model_.quantized && model_.quantized->by_outputs();
        MergedFile<floatX> file(folder + "/model.safetensors", model_.state, by_outputs,
                                model_.fields_outside(), stream_);
        arena_.run(plans_.merge, [&] {
            gpt_.for_each_merged(
                [&](int layer, Field field, const TensorX& matrix) { file.append(layer, field, matrix); });
        });
        file.finish();
    });
}

// The end of a run that was interrupted.
void Trainer::stop() {
    if (step_ == first_step_)
        fprintf(notes(), "interrupted before step %lld\n", static_cast<long long>(step_ + 1));
    else
        printf("interrupted after step %lld\n", static_cast<long long>(step_));
    if (saves() && saved_step_ != step_) save();
}

// ---- forward

// The MLP's, of all rows or some.
struct MlpActivations {
    NormedX norm;
    TensorX up;         // before the activation; the gate's half first where there is one
    TensorX activated;  // (.., mlp_width)
};

// The tensors of one block's forward, in the order they are written. (B, T, C) unless said otherwise.
struct BlockActivations {
    TensorX input;  // the residual stream at the block's start
    NormedX norm_1;
    TensorX qkv;        // (B, T, qkv_width()), as attention reads it
    TensorX raw_qkv;    // the same before its heads were normalised, where they are
    TensorX attention;  // (B, T, query_width()), before the projection
    TensorF lse;        // (B, heads, T), the log of each softmax's denominator
    TensorX middle;     // the residual stream after attention
    MlpActivations mlp;
};

// The last norm and the logits of some rows.
struct HeadActivations {
    NormedX norm;    // (rows, C)
    TensorX logits;  // (rows, padded vocabulary)
};

// The activation of the MLP (.., mlp_width), of what its first product made.
TensorX Gpt::activate(const TensorX& up) {
    Shape shape = up.shape();
    shape.dims[shape.count - 1] = config_.mlp_width;
    TensorX out = take(family_.mlp == MlpKind::Gelu ? "gelu" : "swiglu", shape);
    if (family_.mlp == MlpKind::Gelu)
        gelu_forward(out, up, stream_);
    else
        swiglu_forward(out, up, stream_);
    return out;
}

// a.qkv (B, T, qkv_width()) as attention reads it: the product of the block's normalised input, its heads
// normalised and rotated as the family has it. Where heads are normalised, a backward needs the product too:
// a.raw_qkv is that, and where it was kept, no product is made again. make_x() hands over the input.
template <class MakeX>
void Gpt::make_qkv(BlockActivations& a, MakeX&& make_x, const Block<floatX>& w, const Rows& rows,
                   bool for_backward, int first_position) {
    const bool norms = static_cast<bool>(w.query_norm.weight);
    if (norms && for_backward) {
        if (!a.raw_qkv) a.raw_qkv = linear("qkv", make_x(), w.qkv, rows);
        a.qkv = take("normed_qkv", a.raw_qkv.shape());
    } else {
        a.qkv = linear("qkv", make_x(), w.qkv, rows);
    }
    if (norms)
        head_norm_forward(a.qkv, a.raw_qkv ? a.raw_qkv : a.qkv, w.query_norm.weight, w.key_norm.weight,
                          config_.heads, config_.kv_heads, stream_, epsilon());
    if (family_.position == PositionKind::Rotary)
        rope_forward(a.qkv, position_factors_, config_.heads + config_.kv_heads, first_position,
                     rows.positions(a.qkv.rows()), stream_, rotary_scale());
}

// Turns d_qkv, the gradient of a.qkv, into that of the product which make_qkv() began with.
void Gpt::make_qkv_backward(TensorX& d_qkv, BlockActivations& a, const Block<floatX>& w,
                            BlockGradient<floatX>& g, const Rows& rows, int first_position) {
    if (family_.position == PositionKind::Rotary)
        rope_backward(d_qkv, position_factors_, config_.heads + config_.kv_heads, first_position,
                      rows.positions(d_qkv.rows()), stream_, rotary_scale());
    if (!w.query_norm.weight) return;
    TensorF scratch;
    if (g.query_norm.view.weight)
        scratch = take_float("column_sums", head_norm_scratch(d_qkv.rows(), config_.head_size));
    const auto backward = [&](auto& g_query, auto& g_key) {
        head_norm_backward(d_qkv, g_query, g_key, scratch, a.raw_qkv, w.query_norm.weight, w.key_norm.weight,
                           config_.heads, config_.kv_heads, stream_, epsilon());
    };
    g.query_norm.all ? backward(g.query_norm.sums.weight, g.key_norm.sums.weight)
                     : backward(g.query_norm.view.weight, g.key_norm.view.weight);
    a.raw_qkv.drop();
}

// a.attention (B, T, query_width()) = causal attention of a.qkv; of rows of one sequence, of these and of
// those before them, to which they are appended.
void Gpt::attend(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv) {
    const int64_t B = a.qkv.shape().dims[0], T = a.qkv.shape().dims[1];
    if (kv) keys_.append(a.qkv, *kv);
    a.attention = take("attention", {B, T, config_.query_width()});
    if (keep.backward) a.lse = take_float("attention_lse", {B, config_.heads, T});
    const auto forward = [&](const AttentionInput<floatX>& in) {
        attention_forward(a.attention.data(), a.lse.data(), in, stream_);
    };
    // In backward the same rows are next.
    const int64_t next_row = kv ? kv->length + (keep.backward ? 0 : T) : 0;
    keys_.for_each_piece(a.qkv, layer, rows, kv, false, next_row, forward);
}

// From a.input to a.attention.
void Gpt::forward_attention_rows(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv) {
    const Block<floatX>& w = weights_.block(layer);
    a.norm_1 = norm_.forward(kNorm1, a.input, w.norm_1);
    auto normed = [&] { return a.norm_1.out.view(); };
    make_qkv(a, normed, w, rows, keep.backward, kv ? kv->length : 0);
    if (!keep.norm || !wants_input(w.qkv)) a.norm_1.out.drop();
    attend(layer, a, rows, keep, kv);
    if (!keep.qkv) a.raw_qkv.drop();
    if (!keep.qkv || (a.raw_qkv && !keep.norm)) a.qkv.drop();
}

// From a.input to a.middle. If the MLP takes all rows at once, the kernel that adds the residual also
// computes its norm.
void Gpt::forward_attention(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv) {
    const bool in_chunks_here = !keep.middle && !kv && attends_in_chunks(a.input);
    if (parked_rows_.stores() && !in_chunks_here)
        for_each_rows_of_sequence(arena_, a.input, attention_rows_, From::First,
                                  [&](TensorX chunk) { parked_rows_.store(chunk); });
    if (in_chunks_here) {
        a.middle = forward_attention_in_chunks(layer, a, rows, keep);
        return;
    }
    forward_attention_rows(layer, a, rows, keep, kv);
    if (in_chunks(a.input.rows())) {
        a.middle = take(keep.middle ? "residual_middle" : "residual", a.input.shape());
        add_projected(a.middle, a.input, a.attention, layer, rows);
        if (!keep.attention) a.attention.drop(), a.lse.drop();
        return;
    }
    const TensorX summand = projected(layer, a.attention, rows);
    if (!keep.attention) a.attention.drop(), a.lse.drop();
    a.middle = take("residual_middle", a.input.shape());
    a.mlp.norm = norm_.add_and_forward(kNorm2, a.middle, a.input, summand, weights_.block(layer).norm_2);
}

// The output of the attention half for a.input (B, T, C), chunk by chunk. Only keys and values exist for a
// whole sequence, or not even these if they are offloaded. Nothing else is kept. The output overwrites
// a.input, of which x is a view, if backward does not read that here.
TensorX Gpt::forward_attention_in_chunks(int layer, BlockActivations& a, const Rows& rows, Keep keep) {
    Block<floatX>& w = weights_.block(layer);
    hold(w.qkv), hold(w.attention);
    const TensorX x = a.input.view();
    TensorX sum = parked_rows_.stores() || !keep.backward ? std::move(a.input) : take("residual", x.shape());
    keys_.begin_block(false);
    for_each_sequence(arena_, x, rows, [&](const Rows& sequence, int entry, int64_t length) {
        KvRows kv = keys_.begin_sequence(length, entry);
        const auto forward = [&](const Rows& chunk, int64_t first, int64_t count) {
            BlockActivations of_chunk;
            of_chunk.input = rows_of_sequence(x, chunk, count);
            if (parked_rows_.stores()) parked_rows_.store(of_chunk.input);
            kv.length = static_cast<int>(first);
            forward_attention_rows(layer, of_chunk, chunk, kKeepNothing, &kv);
            keys_.end_chunk(kv, count);
            TensorX to = sum.rows_at(chunk.first, count);
            residual_forward(to, of_chunk.input, projected(layer, of_chunk.attention, chunk), stream_);
        };
        for_each_chunk(arena_, sequence, length, attention_rows_, forward);
    });
    keys_.end_block();
    w.qkv.made.drop(), w.attention.made.drop();
    return sum;
}

// The projection of attention's output (.., query_width()).
TensorX Gpt::projected(int layer, const TensorX& attention, const Rows& rows) {
    const Linear<floatX>& w = weights_.block(layer).attention;
    TensorX out = linear("attention_projected", attention, w, rows);
    if (const Dropout d = rows.dropout_at(layer, kProjectedPlace, config_.channels))
        dropout(out, out, d, stream_);
    return out;
}

// sum = x + the projection of attention's output, chunk by chunk.
void Gpt::add_projected(TensorX& sum, const TensorX& x, const TensorX& attention, int layer,
                        const Rows& rows) {
    Linear<floatX>& w = weights_.block(layer).attention;
    hold(w);
    for_each_chunk(arena_, rows, x.rows(), mlp_rows_, [&](const Rows& chunk, int64_t first, int64_t count) {
        TensorX to = sum.rows_at(first, count);
        residual_forward(to, x.rows_at(first, count),
                         projected(layer, attention.rows_at(first, count), chunk), stream_);
    });
    w.made.drop();
}

// From a.middle, and its norm if all rows go at once, to the block's output. In chunks nothing is kept, and
// the output overwrites a.middle unless that is kept.
TensorX Gpt::forward_mlp(int layer, BlockActivations& a, const Rows& rows, Keep keep) {
    if (!in_chunks(a.middle.rows())) return forward_mlp_rows(layer, a.mlp, rows, keep, a.middle, {});
    Block<floatX>& w = weights_.block(layer);
    hold(w.up), hold(w.down);
    const TensorX x = a.middle.view();
    TensorX output = keep.middle ? take("residual", x.shape()) : std::move(a.middle);
    Keep nothing = kKeepNothing;
    nothing.backward = keep.backward;
    for_each_chunk(arena_, rows, x.rows(), mlp_rows_, [&](const Rows& chunk, int64_t first, int64_t count) {
        MlpActivations m;
        forward_mlp_rows(layer, m, chunk, nothing, x.rows_at(first, count), output.rows_at(first, count));
    });
    w.up.made.drop(), w.down.made.drop();
    return output;
}

// x (.., C) + the MLP of its norm: in `out`, which may be x, or where there is none in a tensor of its own.
TensorX Gpt::forward_mlp_rows(int layer, MlpActivations& m, const Rows& rows, Keep keep, const TensorX& x,
                              TensorX out) {
    const Block<floatX>& w = weights_.block(layer);
    if (!m.norm.rstd) m.norm = norm_.forward(kNorm2, x, w.norm_2);
    if (!keep.backward && family_.mlp == MlpKind::Gelu) {  // its input is not needed
        m.activated = linear("gelu", m.norm.out, w.up, rows, true);
        m.norm.out.drop();
    } else {
        m.up = linear("up", m.norm.out, w.up, rows);
        if (!keep.norm || !wants_input(w.up)) m.norm.out.drop();
        m.activated = activate(m.up);
        if (!keep.up) m.up.drop();
    }
    TensorX output = linear(out ? "mlp_output" : "residual", m.activated, w.down, rows);
    if (const Dropout d = rows.dropout_at(layer, kOutputPlace, config_.channels))
        dropout(output, output, d, stream_);
    if (!keep.gelu || !wants_input(w.down)) m.activated.drop();
    TensorX& sum = out ? out : output;
    residual_forward(sum, output, x, stream_);
    return std::move(sum);
}

// One block, from the residual stream in a.input to the one returned.
TensorX Gpt::forward_block(int layer, BlockActivations& a, const Rows& rows, Keep keep, KvRows* kv) {
    forward_attention(layer, a, rows, keep, kv);
    if (!keep.backward) a.input.drop();
    TensorX output = forward_mlp(layer, a, rows, keep);
    if (!keep.middle && keep.backward) {
        TensorX input = std::move(a.input);
        a = {};
        a.input = std::move(input);
    }
    return output;
}

// The last block's output for `tokens` (B, T), keeping nothing. With a cache the tokens follow what it holds.
TensorX Gpt::forward_only(const Tensor<int>& tokens, const Rows& rows, KvCache* cache) {
    TensorX stream = ends_.embed(tokens, rows, cache ? cache->length : 0);
    weights_.expect_blocks();
    for (int l = 0; l < config_.layers; l++) {
        BlockActivations a;
        a.input = std::move(stream);
        Range range("block", l);
        weights_.block(l);
        KvRows kv;
        if (cache) {
            kv = {cache->layers[static_cast<size_t>(l)].view()};
            kv.rows = kv.all.rows(), kv.length = cache->length;
        }
        stream = forward_block(l, a, rows, kKeepNothing, cache ? &kv : nullptr);
    }
    weights_.release();
    return stream;
}

HeadActivations Gpt::forward_head(const TensorX& x) {
    HeadActivations a{norm_.forward(kLastNorm, x, weights_.head.norm), {}};
    a.logits = ends_.logits(a.norm.out);
    return a;
}

// ---- backward

// The head and the loss, chunk by chunk of rows: each goes forward and at once back, so that only one chunk's
// logits exist. `stream` (B, T, C), the last block's output, becomes its gradient.
void Gpt::head(TensorX& stream, const Tensor<int>& targets, const MicroBatchOptions& options,
               LossScale loss_scale, TensorF& loss, Head<floatX>& g) {
    const int64_t rows = stream.rows(), C = config_.channels;
    const bool chunks = options.head_rows > 0 && options.head_rows < rows;
    TensorF losses = take_float("losses", {rows, 1});
    NormGradient<floatX> d_norm_weights{std::move(g.norm)};
    d_norm_weights.begin_chunks(arena_, stream_, "d_ln_f_sums");
    if (g.logits.weight && chunks && !options.adds) fill_zero(g.logits.weight, stream_);
    Tensor<uint8_t> low;
    if (chunks) low = take_low_bits(arena_, stream_, "d_wte_low_bits", g.logits.weight);
    ends_.begin_head();
    for_each_chunk(arena_, {}, rows, options.head_rows, [&](const Rows&, int64_t first, int64_t count) {
        TensorX part = stream.rows_at(first, count), x = take("head_input", {count, C});
        copy_rows_on_device(x.data(), C, part.data(), C, C, count, stream_);
        HeadActivations a = forward_head(x);
        TensorF part_losses = losses.rows_at(first, count);
        cross_entropy_forward_backward(a.logits, part_losses, targets.view({rows, 1}).rows_at(first, count),
                                       loss_scale, config_.vocabulary, stream_);
        if (g.logits.weight)
            add_product(arena_, stream_, g.logits.weight, low, a.logits, a.norm.out, chunks || options.adds);
        TensorX d_norm = std::move(a.norm.out);  // its memory: the product above read it last
        ends_.logits_backward(d_norm, a.logits);
        a.logits.drop();
        fill_zero(part, stream_);
        norm_.backward(part, d_norm_weights, d_norm, x, a.norm, weights_.head.norm);
    });
    ends_.end_head();
    add_losses(loss, losses, loss_scale, stream_);
    d_norm_weights.end_chunks(stream_);
    g.norm = std::move(d_norm_weights.view);
}

// Backward of dropout: d_out through its mask, or a view of d_out if nothing is dropped.
TensorX Gpt::dropped(const TensorX& d_out, const Dropout& d) {
    if (!d) return d_out.view();
    TensorX d_in = take_gradient("d_dropped", d_out.shape());
    dropout(d_in, d_out, d, stream_);
    return d_in;
}

// The MLP half: d_stream, the gradient of the block's output, becomes that of a.middle.
void Gpt::backward_mlp(int layer, BlockGradient<floatX>& g, BlockActivations& a, const Rows& rows,
                       TensorX& d_stream) {
    if (!in_chunks(d_stream.rows())) return backward_mlp_rows(layer, g, a.mlp, a.middle, rows, d_stream);
    Block<floatX>& w = weights_.block(layer);
    hold(w.up), hold(w.down);
    g.begin_mlp_chunks(arena_, stream_);
    backward_mlp_in_chunks(layer, g, a.middle, rows, d_stream);
    w.up.made.drop(), w.down.made.drop();
    g.end_mlp_chunks(stream_);
}

// Backward of the MLP half in chunks of rows, where x is the residual stream before it.
void Gpt::backward_mlp_in_chunks(int layer, BlockGradient<floatX>& g, const TensorX& x, const Rows& rows,
                                 TensorX& d_stream) {
    for_each_chunk(arena_, rows, x.rows(), mlp_rows_, [&](const Rows& chunk, int64_t first, int64_t count) {
        const TensorX x_chunk = x.rows_at(first, count);
        TensorX d_chunk = d_stream.rows_at(first, count);
        MlpActivations m{norm_.forward(kNorm2, x_chunk, weights_.block(layer).norm_2), {}, {}};
        backward_mlp_rows(layer, g, m, x_chunk, chunk, d_chunk);
    });
}

// Backward of the MLP half for some rows or all: d_stream becomes the gradient of x. What costs no matrix
// product, the norm and the activation, is dropped after each use and computed again for the next.
void Gpt::backward_mlp_rows(int layer, BlockGradient<floatX>& g, MlpActivations& m, const TensorX& x,
                            const Rows& rows, TensorX& d_stream) {
    const Block<floatX>& w = weights_.block(layer);
    auto make_norm = [&] { return norm_.output(m.norm, kNorm2, x, w.norm_2); };
    if (!m.up) m.up = linear("up", make_norm(), w.up, rows);
    auto make_activated = [&] { return m.activated ? std::move(m.activated) : activate(m.up); };
    TensorX d_up, d_output = dropped(d_stream, rows.dropout_at(layer, kOutputPlace, config_.channels));
    if (family_.mlp == MlpKind::Gelu) {
        d_up = linear_backward("d_up", g.down, make_activated, d_output, w.down, rows, &m.up);
        m.up.drop();
    } else {
        const TensorX d = linear_backward("d_swiglu", g.down, make_activated, d_output, w.down, rows);
        d_up = std::move(m.up);
        swiglu_backward(d_up, d, d_up, stream_);
    }
    d_output.drop();
    TensorX d_norm = linear_backward("d_ln_2", g.up, make_norm, d_up, w.up, rows);
    d_up.drop();
    norm_.backward(d_stream, g.norm_2, d_norm, x, m.norm, w.norm_2);
}

// Replaces qkv (B, T, qkv_width()) by its gradient. Some kernels read k and v after dk and dv are written:
// then these go to buffers, and are copied at the end. With `kv`, keys and values are read there, and dk and
// dv are written into qkv.
void Gpt::attention_backward_in_place(TensorX& qkv, const TensorX& d_attention, const TensorF& lse,
                                      const TensorF& delta, int layer, const Rows& rows, KvRows* kv) {
    const auto run = [&](floatX* dq, floatX* dk, floatX* dv, const AttentionInput<floatX>& in) {
        attention_backward(dq, dk, dv, d_attention.data(), lse.data(), delta.data(), in, stream_);
    };
    const int64_t next_row = kv ? kv->length - attention_rows_ : 0;  // the last chunk goes first
    floatX *const k = qkv.at(keys_.keys_at()), *const v = qkv.at(keys_.values_at());
    if (kv || kOverwritesKeys)
        return keys_.for_each_piece(qkv, layer, rows, kv, true, next_row,
                                    [&](const AttentionInput<floatX>& in) { run(qkv.data(), k, v, in); });
    AttentionInput<floatX> in = keys_.input(qkv, layer, rows, nullptr);
    const int64_t count = qkv.rows(), kv_width = config_.kv_width();
    TensorX d_k = take_gradient("d_keys", {count, kv_width}),
            d_v = take_gradient("d_values", {count, kv_width});
    in.dkv_row = kv_width, in.dkv_batch = in.keys * kv_width, in.dkv_head = config_.head_size;
    run(qkv.data(), d_k.data(), d_v.data(), in);
    for (const auto& [from, to] : {std::pair{&d_k, k}, std::pair{&d_v, v}}) {
        const int64_t columns = family_.heads_together ? config_.head_size : kv_width;
        const int64_t stride = family_.heads_together ? in.kv_head : in.kv_row;
        copy_rows_on_device(to, stride, from->data(), columns, columns, count * kv_width / columns, stream_);
    }
}

// Backward of the attention half: d_stream, the gradient of a.middle, becomes that of a.input. With `kv` the
// rows are a chunk; later chunks went before, and what they add to its dk and dv is in the sums of `kv`.
void Gpt::backward_attention(int layer, BlockGradient<floatX>& g, BlockActivations& a, const Rows& rows,
                             TensorX& d_stream, KvRows* kv) {
    const Block<floatX>& w = weights_.block(layer);
    const int first = kv ? kv->length : 0;
    auto make_norm_1 = [&] { return norm_.output(a.norm_1, kNorm1, a.input, w.norm_1); };
    if (!a.qkv) make_qkv(a, make_norm_1, w, rows, true, first);
    if (!a.attention) attend(layer, a, rows, {}, kv);

    auto attention = [&] { return a.attention.view(); };
    TensorX d_projected = dropped(d_stream, rows.dropout_at(layer, kProjectedPlace, config_.channels));
    TensorX d_attention =
        linear_backward("d_attention", g.attention, attention, d_projected, w.attention, rows);
    d_projected.drop();
    TensorF delta = take_float("attention_delta", a.lse.shape());
    attention_delta(delta.data(), d_attention.data(), a.attention.data(),
                    keys_.input(a.qkv, layer, rows, nullptr), stream_);
    a.attention.drop();
    attention_backward_in_place(a.qkv, d_attention, a.lse, delta, layer, rows, kv);
    delta.drop();
    d_attention.drop();
    a.lse.drop();
    TensorX d_qkv = std::move(a.qkv);
    make_qkv_backward(d_qkv, a, w, g, rows, first);

    TensorX d_norm = linear_backward("d_ln_1", g.qkv, make_norm_1, d_qkv, w.qkv, rows);
    d_qkv.drop();
    norm_.backward(d_stream, g.norm_1, d_norm, a.input, a.norm_1, w.norm_1);
}

// A block of which only the input x (B, T, C) is there, or parked, some rows of a sequence at a time. First
// all keys and values are made. Then each chunk goes forward and back, from the last one on: no query before
// it sees its keys, so their gradients are complete with its own, and d_stream becomes that of x row by row.
void Gpt::backward_block_in_chunks(int layer, BlockGradient<floatX>& g, const TensorX& x, const Rows& rows,
                                   TensorX& d_stream) {
    Block<floatX>& w = weights_.block(layer);
    for (auto& [matrix, field] : linears(w)) hold(*matrix);
    g.begin_chunks(arena_, stream_);
    keys_.begin_block(true);
    const auto input = [&](const Rows& chunk, int64_t count) {
        return x ? rows_of_sequence(x, chunk, count) : parked_rows_.fetch(count);
    };
    for_each_sequence(arena_, d_stream, rows, [&](const Rows& sequence, int entry, int64_t length) {
        KvRows kv = keys_.begin_sequence(length, entry);
        const auto make_kv = [&](const Rows& chunk, int64_t first, int64_t count) {
            BlockActivations a;
            kv.length = static_cast<int>(first);
            a.norm_1 = norm_.forward(kNorm1, input(chunk, count), w.norm_1);
            auto normed = [&] { return a.norm_1.out.view(); };
            make_qkv(a, normed, w, chunk, false, kv.length);
            keys_.append(a.qkv, kv);
            keys_.end_chunk(kv, count);
        };
        for_each_chunk(arena_, sequence, length, attention_rows_, make_kv, From::Last);
        for (TensorF* const gradients : {&kv.dk_sums, &kv.dv_sums}) {
            if (kv.parked) continue;  // they come with the pieces
            *gradients = arena_.take<float>("d_kv_sums", {length, config_.kv_width()}, "gradient");
            fill_zero(*gradients, stream_);
        }
        const auto backward = [&](const Rows& chunk, int64_t first, int64_t count) {
            BlockActivations a;
            a.input = input(chunk, count);
            kv.length = static_cast<int>(first);
            forward_attention_rows(layer, a, chunk, {.norm = false}, &kv);
            a.middle = take("residual_middle", a.input.shape());
            residual_forward(a.middle, a.input, projected(layer, a.attention, chunk), stream_);
            TensorX d_chunk = rows_of_sequence(d_stream, chunk, count);
            backward_mlp_in_chunks(layer, g, a.middle, chunk, d_chunk);
            a.middle.drop();
            backward_attention(layer, g, a, chunk, d_chunk, &kv);
        };
        for_each_chunk(arena_, sequence, length, attention_rows_, backward, From::Last);
    });
    keys_.end_block();
    for (auto& [matrix, field] : linears(w)) matrix->made.drop();
    g.end_chunks(stream_);
}

// Writes or adds the block's gradients; d_stream (B, T, C), the gradient of its output, becomes that of its
// input.
void Gpt::backward_block(int layer, BlockGradient<floatX>& g, BlockActivations& a, const Rows& rows,
                         TensorX& d_stream) {
    if (!a.middle && attends_in_chunks(d_stream)) {
        backward_block_in_chunks(layer, g, a.input, rows, d_stream);
        a = {};
        return;
    }
    if (!a.middle) forward_attention(layer, a, rows, {.norm = false}, nullptr);
    backward_mlp(layer, g, a, rows, d_stream);
    a.middle.drop();
    backward_attention(layer, g, a, rows, d_stream);
    a = {};
}

// ---- the steps

struct Gpt::Pass {
    const DeviceBatch& batch;
    MicroBatchOptions options;  // its own: all but the first add
    Rows rows = {};             // all of its batch
    std::vector<BlockActivations> blocks = {};
    TensorX stream = {};  // backward its gradient
};

void Gpt::forward_blocks(std::vector<Pass>& passes) {
    weights_.expect_blocks();
    for (int l = 0; l < config_.layers; l++) {
        Range range("block", l);
        weights_.block(l);
        for (size_t k = 0; k < passes.size(); k++) {
            BlockActivations& a = passes[k].blocks[static_cast<size_t>(l)];
            a.input = std::move(passes[k].stream);
            parked_.park(l, static_cast<int>(k), a.input);
            if (parked_rows_.parks(l)) parked_rows_.begin_forward(l, static_cast<int>(k));
            passes[k].stream =
                forward_block(l, a, passes[k].rows, passes[k].options.keep[static_cast<size_t>(l)]);
            if (parked_rows_.parks(l)) parked_rows_.end_forward();
            if (parked_.parks(l) || parked_rows_.parks(l)) a.input.drop();
        }
    }
    if (ends_.streams_head()) weights_.release();  // else the last blocks stay for backward
}

// Has a block's parked input (B, T, C) come: chunk by chunk, as its backward asks for it, or all of it now.
void Gpt::fetch_rows(int layer, int pass, BlockActivations& a, Shape shape) {
    const bool by_chunk = !a.middle;  // backward_block_in_chunks(): for keys and values, then for all else
    parked_rows_.begin_backward(layer, pass, by_chunk ? 2 : 1);
    if (by_chunk) return;
    a.input = take("residual", shape);
    const auto copy = [&](TensorX rows) {
        const int64_t count = rows.rows(), C = rows.columns();
        copy_rows_on_device(rows.data(), C, parked_rows_.fetch(count).data(), C, C, count, stream_);
    };
    for_each_rows_of_sequence(arena_, a.input, attention_rows_, From::Last, copy);
}

void Gpt::backward_blocks(std::vector<Pass>& passes, const MicroBatchOptions& options) {
    gradients_.begin_backward(options.adds);
    for (int l = config_.layers - 1; l >= 0; l--) {
        Range range("block", l);
        Gradients::OfUnit gradients = gradients_.take(l + 1, options.adds);
        weights_.block(l);
        for (size_t k = 0; k < passes.size(); k++) {
            BlockActivations& a = passes[k].blocks[static_cast<size_t>(l)];
            parked_.fetch(l, static_cast<int>(k), a.input);
            if (parked_rows_.parks(l)) fetch_rows(l, static_cast<int>(k), a, passes[k].stream.shape());
            BlockGradient<floatX> g(trained_.layout.block(gradients.all.data(), l), passes[k].options.adds);
            backward_block(l, g, a, passes[k].rows, passes[k].stream);
        }
        gradients_.complete(l + 1, gradients);
    }
    weights_.release();
    gradients_.end_backward();
    parked_.give_back();
    parked_rows_.give_back();
}

// Forward and backward of one micro-batch, or of several of which all pass a block before the next one
// (--by-block). Gradients are written, or added if options.adds. Adds loss_scale, or a batch's own, times the
// sum of its losses to `loss` (1).
void Gpt::forward_backward(const std::vector<const DeviceBatch*>& batches, const MicroBatchOptions& options,
                           float loss_scale, TensorF& loss) {
    std::vector<Pass> passes;
    for (size_t k = 0; k < batches.size(); k++) {
        passes.push_back({*batches[k], options});
        passes[k].options.adds = options.adds || k > 0;
        passes[k].rows = rows_of(*batches[k]);
        passes[k].rows.dropout = options.dropout;
        if (options.dropout.key) passes[k].rows.dropout.key += k;
        passes[k].blocks.resize(static_cast<size_t>(config_.layers));
    }
    std::optional<Range> range(std::in_place, "forward");
    for (Pass& p : passes) p.stream = ends_.embed(p.batch.inputs, p.rows, 0);
    parked_.take(passes[0].stream.shape());
    parked_rows_.take(passes[0].stream.shape());
    forward_blocks(passes);

    range.emplace("head");
    const Layout& layout = trained_.layout;
    const int embeddings_unit = layout.embeddings_unit(), head_unit = layout.head_unit();
    const bool tied = config_.tied && !weights_.is_frozen();
    Gradients::OfUnit of_embeddings;
    Embeddings<floatX> d_embeddings;
    auto take_embeddings = [&] {
        of_embeddings = gradients_.take(embeddings_unit, options.adds);
        d_embeddings = layout.embeddings(of_embeddings.all.data());
        if (!options.adds && d_embeddings.position) fill_zero(d_embeddings.position, stream_);
        if (!options.adds && !tied && d_embeddings.token) fill_zero(d_embeddings.token, stream_);
        if (!options.adds && d_embeddings.prompt) fill_zero(d_embeddings.prompt, stream_);
    };
    if (tied) take_embeddings();
    Gradients::OfUnit of_head = gradients_.take(head_unit, options.adds);
    Head<floatX> d_head = layout.head(of_head.all.data());
    if (tied) d_head.logits.weight = d_embeddings.token.view();
    for (Pass& p : passes) {
        p.stream = ends_.without_prompt(std::move(p.stream));
        head(p.stream, p.batch.targets, p.options, {loss_scale, p.batch.loss_scale.data()}, loss, d_head);
        p.stream = ends_.with_prompt(std::move(p.stream));
    }
    gradients_.complete(head_unit, of_head);
    weights_.expect_blocks(true);

    range.emplace("backward");
    backward_blocks(passes, options);
    if (!tied) take_embeddings();
    for (Pass& p : passes) {
        if (!weights_.is_frozen() || d_embeddings.prompt)
            ends_.embed_backward(d_embeddings, p.stream, p.batch, p.rows);
        p.stream.drop();
    }
    gradients_.complete(embeddings_unit, of_embeddings);
}

// Adds loss_scale, or the batch's own, times the sum of the batch's losses to `loss` (1), and those of each
// position to position_losses (T), where that is there.
void Gpt::evaluate(const DeviceBatch& batch, const MicroBatchOptions& options, float loss_scale,
                   TensorF& loss, TensorF position_losses) {
    Range range("evaluate");
    const TensorX stream = ends_.without_prompt(forward_only(batch.inputs, rows_of(batch), nullptr));
    const int64_t rows = stream.rows();
    TensorF losses = take_float("losses", {rows, 1});
    ends_.begin_head();
    for_each_chunk(arena_, {}, rows, options.head_rows, [&](const Rows&, int64_t first, int64_t count) {
        const HeadActivations a = forward_head(stream.rows_at(first, count));
        TensorF part = losses.rows_at(first, count);
        cross_entropy_forward(a.logits, part, batch.targets.view({rows, 1}).rows_at(first, count),
                              config_.vocabulary, stream_);
    });
    ends_.end_head();
    add_losses(loss, losses, {loss_scale, batch.loss_scale.data()}, stream_);
    if (position_losses) add_position_losses(position_losses, losses, batch.documents, stream_);
}

// Runs `tokens`, which follow what the cache holds, and appends them to it. The last block's output.
TensorX Gpt::append_tokens(const std::vector<int>& tokens, KvCache& cache) {
    const Tensor<int> inputs = tokens_on_device(arena_, stream_, tokens);
    TensorX stream = forward_only(inputs, {}, &cache);
    cache.length += static_cast<int>(stream.rows());
    return stream;
}

// The same; the logits (1, V) after the last token.
TensorX Gpt::forward_cached(const std::vector<int>& tokens, KvCache& cache) {
    const TensorX stream = append_tokens(tokens, cache);
    ends_.begin_head();
    HeadActivations a = forward_head(stream.rows_at(stream.rows() - 1, 1));
    ends_.end_head();
    return std::move(a.logits);
}

// A long prompt runs in parts of this many tokens, so that beside them it takes only its keys and values. The
// rest joins the last part: no part is so short that it would use other matrix products.
constexpr int64_t kPromptRows = 2048;

// Runs a prompt from its begin, part by part. The logits (1, V) after its last token.
TensorX Gpt::forward_prompt(const std::vector<int>& tokens, KvCache& cache) {
    const int64_t parts = static_cast<int64_t>(tokens.size()) / kPromptRows;
    if (parts < 2) return forward_cached(tokens, cache);
    auto next = tokens.begin();
    const auto append = [&] {
        append_tokens({next, next + kPromptRows}, cache);
        next += kPromptRows;
        return true;
    };
    append();  // a soft prompt is in front of these
    arena_.repeat(static_cast<int>(parts - 2), append);
    next = tokens.begin() + (parts - 1) * kPromptRows;
    if (arena_.rehearsing()) cache.length = static_cast<int>(prompt_len() + (parts - 1) * kPromptRows);
    return forward_cached({next, tokens.end()}, cache);
}

// Continues a prompt of at least one token by up to new_tokens: choose(logits) reads the logits (1, V) and
// returns the next token, or a negative one to stop. The cache holds what came before, so that a new token
// costs one row.
template <class Choose>
void Gpt::generate(const std::vector<int>& prompt, int new_tokens, Choose&& choose) {
    Range range("generate");
    KvCache cache;
    const int64_t positions = prompt_len() + static_cast<int64_t>(prompt.size()) + new_tokens;
    for (int l = 0; l < config_.layers; l++)
        cache.layers.push_back(take("kv_cache", {positions, 2 * config_.kv_width()}));
    std::vector<int> next = {choose(forward_prompt(prompt, cache))};
    arena_.repeat(new_tokens - 1, [&] {
        // The turn that is rehearsed is the last, of most keys.
        if (arena_.rehearsing()) cache.length = static_cast<int>(positions) - 2;
        if (next[0] >= 0) next = {choose(forward_cached(next, cache))};
        return next[0] >= 0;
    });
}

// Calls visit(layer, field, matrix) for each linear layer's matrix with its adapter in it, W + scale B A, as
// W lies: (in, out) or, if by outputs or quantized, (out, in). Then for the rows of embeddings and head that
// the State has not, some at a time, with the number of blocks as the layer.
template <class Visit>
void Gpt::for_each_merged(Visit&& visit) {
    Range range("merge");
    weights_.expect_blocks();
    for (int l = 0; l < config_.layers; l++) {
        for (const auto& [w, field] : linears(weights_.block(l))) {
            const int64_t outputs = w->outputs(), inputs = w->inputs();
            TensorX matrix = take("merged", w->by_outputs ? Shape{outputs, inputs} : Shape{inputs, outputs});
            const TensorX weight = weight_of(arena_, stream_, *w);
            copy_rows_on_device(matrix.data(), inputs, weight.data(), inputs, inputs, outputs, stream_);
            merge_lora(arena_, stream_, matrix, w->adapter, w->by_outputs);
            visit(l, field, matrix);
        }
    }
    weights_.release();
    ends_.for_each_outside_rows(
        [&](Field field, const TensorX& rows) { visit(config_.layers, field, rows); });
}

// ---- before the first step

Trainer::Trainer(const Options& options, RunInputs& inputs, Choices choices)
    : o_(options),
      in_(inputs),
      config_(inputs.config),
      model_(o_, in_),
      gpt_(arena_, stream_, model_.state, model_.outside(), model_.trained(), o_.attention != "common"),
      square_sums_(square_sums_of(model_.trained().layout)),
      metrics_(static_cast<int64_t>(model_.state.layout.units().size()), o_.clip_per_block,
               o_.steps == 0 || o_.clip_per_block ? 0 : square_sums_.first.back()),
      loss_by_position_(o_.loss_by_position.empty() ? 0 : o_.seq_len),
      choices_(std::move(choices)),
      rates_(rates_of<floatX>(o_.rates)),
      places_(o_, in_.adapter.prompt_tokens, model_.state, model_.trained(), pointer_to(model_.quantized)),
      updates_(o_, arena_, stream_, model_.trained(), gpt_.weights(), gpt_.gradients(), places_, square_sums_,
               metrics_),
      replays_(o_.graph == "on") {
    check_attention<floatX>(o_, config_);
    metrics_.explain = [this] { model_.check_streamed_finite(); };
    MemorySetting given = setting_of(o_);
    given.mlp_rows = std::max<int64_t>(0, given.mlp_rows);  // what is automatic is chosen with this trainer
    given.attention_rows = std::max<int64_t>(0, given.attention_rows);
    given.levels = parse_levels(o_.recompute, recompute_names(), config_.layers, "--recompute");
    use(given);
}

void Trainer::use(const MemorySetting& s) {
    apply_setting(s, o_);
    model_.choose();
    feeders_.resize(static_cast<size_t>(passes()));
    for (Feeder& f : feeders_) f.choose(s.batch, o_.seq_len, config_.vocabulary, in_.packs());
    micro_ = {.head_rows = s.head_rows, .keep = {}, .dropout = {}};
    gpt_.set_chunk_rows(s.mlp_rows, s.attention_rows);
    micro_.dropout = {o_.dropout, in_.adapter.dropout,
                      reinterpret_cast<const uint64_t*>(dropout_memory_.data())};
    use_places();
    for (int level : s.levels) micro_.keep.push_back(kRecomputeLevels[level].keep);
}

// Connects the model to what is kept off the device.
void Trainer::use_places() {
    gpt_.weights().stream_blocks_from(places_.blocks(), way_from(named<Home>(kHomeNames, o_.weights)),
                                      places_.block_loans(), o_.prefetch);
    gpt_.gradients().stream_blocks_from(places_.gradients(), places_.gradient_loans(), o_.prefetch);
    gpt_.ends().stream_head();
    gpt_.park_in(places_.parking(), places_.parked_layers(), passes(), places_.parked_rows());
    gpt_.park_keys_in(places_.keys(), places_.key_sums(), places_.rows_of_parked_keys());
}

Plan Trainer::rehearse_training(bool adds, bool placed) {
    micro_.adds = adds;
    return arena_.rehearse([&] { micro_batch(1); }, placed);
}

Plan Trainer::rehearse_validation(bool placed) {
    return arena_.rehearse(
        [&] { gpt_.evaluate(feeders_[0].batch(), micro_, 1, metrics_.loss(), loss_by_position_.sums()); },
        placed);
}

const MemoryReport& Trainer::rehearse(bool placed) {
    if (o_.steps > 0) {
        plans_.train = rehearse_training(false, placed);
        // It takes the same tensors as `train`, but its products add.
        plans_.add = o_.grad_accum > passes() ? rehearse_training(true, placed) : Plan();
        plans_.train.workspace = std::max(plans_.train.workspace, plans_.add.workspace);
        if (!o_.update_in_backward) plans_.update = arena_.rehearse([&] { updates_.update_all(); });
    }
    if (in_.val_data || o_.bench == "forward") plans_.evaluate = rehearse_validation(true);
    if (in_.samples() && plans_.sample.takes.empty()) {  // once: no setting changes these
        const auto any = [](const TensorX&) { return 0; };
        const std::vector<int> prompt = in_.first_tokens();
        const int window = in_.sample_window(), half = window / 2;
        const int rest = window - static_cast<int>(prompt.size());
        plans_.sample = arena_.rehearse([&] { gpt_.generate(prompt, rest, any); });
        if (in_.sample_slides())
            plans_.slide =
                arena_.rehearse([&] { gpt_.generate(std::vector<int>(half), window - half, any); });
    }
    const std::vector<Feeder>* feeders = in_.feeds() ? &feeders_ : nullptr;
    if (!o_.merge.empty() && plans_.merge.work.empty())
        plans_.merge = arena_.rehearse([&] { gpt_.for_each_merged([](int, Field, const TensorX&) {}); });
    if (in_.gguf) plans_.load = arena_.rehearse([&] { model_.load_gguf(arena_, stream_, nullptr); });
    if (model_.looks_up_prompt())
        plans_.first_prompt = arena_.rehearse([&] { gpt_.ends().token_rows(in_.first_prompt); });
    report_ = make_report<floatX>(o_, plans_, in_.bytes(), choices_, rates_);
    places_.add_to(report_);
    if (model_.embeddings) model_.embeddings->add_to(report_);
    report_.staged = metrics_.pinned_bytes();
    if (feeders) report_.staged += feeders->size() * feeders->front().pinned_bytes();
    if (model_.quantized) add_stored<floatX>(report_, *model_.quantized, plans_, o_.grad_accum, rates_);
    report_.parameters = model_.whole.count();
    report_.trained = model_.trained_count();
    report_.vocabulary = config_.vocabulary;
    report_.vocabulary_of = in_.assumed_vocabulary();
    report_.buffers =
        buffers_of(model_.state, pointer_to(model_.quantized), pointer_to(model_.quantized_head),
                   model_.embeddings.has_value(), pointer_to(model_.adapter), feeders, metrics_.count(),
                   dropout_keys(), loss_by_position_.numbers());
    return report_;
}

// The device, there to be used.
void Trainer::open_device() {
    check_device(o_);
    limit_launches(rates_, o_.tf32);
    stream_ = own_stream_.emplace().get();
}

void Trainer::print_plan() const {
    if (!o_.timeline.empty()) write_timeline(o_.timeline, report_, plans_.update, rates_);
    if (o_.json)
        printf("%s\n", json_text(report_json(report_)).c_str());
    else if (o_.plan)
        print_report(stdout, report_);
    else
        print_summary(stdout, report_, "allocating", memory_free_at_start());
    if (o_.plan) remark_shortage(report_);
}

// Checks what can be checked, takes the memory, and loads or initialises the model.
void Trainer::prepare() {
    used_before_ = kHostIsDevice ? 0 : device_bytes_in_use();  // a plan counts all of a process
    if (saves()) prepare_saves();
    if (trains()) remark_no_validation(in_, o_.seq_len);
    PeakRate peak = {};
    if (trains()) print_plan();
    require_memory(report_, memory_free_at_start(), trains());
    if (trains()) {
        peak = device_peak_flops<floatX>(stream_, report_.allocated());
        printf("MFU is relative to %.0f GFLOP/s, %s\n", peak.flops / 1e9, peak.of);
    }
    choose_algorithms();
    take_memory();
    check_room_on_disks();
    load();
    if (in_.data) loader_.emplace(*in_.data, o_.seq_len, o_.seed, true);
    if (in_.val_data) val_loader_.emplace(*in_.val_data, o_.seq_len, o_.seed, false);
    if (trains())
        metrics_.print_to(StepLines(stdout, first_step_, o_.steps, o_.print_every,
                                    {step_tokens(), step_flops(), peak.flops}));
    metrics_.log().open(o_.log, !o_.resume.empty());
    loss_by_position_.open(o_.loss_by_position, !o_.resume.empty());
    if (loader_ && trains())
        print_data(o_, in_, *loader_, val_loader_,
                   {sequences_of_run(), val_loader_ ? validation_sequences() : 0});
}

void Trainer::prepare_saves() {
    saves_ = open_save_folder(o_.out, o_.keep, in_.resumed);
    remove_unfinished(o_.out);
    if (!saves_.others.empty())
        fprintf(stderr,
                "%s holds saves of another run, up to step %lld: they stay, but for steps that are saved "
                "again\n",
                o_.out.c_str(), static_cast<long long>(*saves_.others.rbegin()));
}

// Fails where what the run will save cannot be written, beside its own files, which are there already. Where
// it keeps all saves, they need not all fit: somebody may move them.
void Trainer::check_room_on_disks() const {
    std::vector<Written> all;
    if (saves()) {
        const int64_t left = std::max<int64_t>(0, o_.steps - (in_.progress ? in_.progress->step : 0));
        const int64_t made = std::max<int64_t>(1, o_.save_every > 0 ? ceil_div(left, o_.save_every) : 1);
        const int64_t more = std::max<int64_t>(1, o_.keep + 1 - saves_.own_count());
        const WrittenFiles save = bytes_of_save(model_.trained(), o_.steps > 0);
        const int64_t at_once = o_.keep > 0 ? std::min(made, more) : 1;
        all.push_back({"--out", o_.out, "a save", save, static_cast<double>(at_once)});
        const double free = disk_of(o_.out).free, bytes = save.bytes * static_cast<double>(made);
        if (o_.keep == 0 && free >= 0 && bytes > free)
            fprintf(notes(), "--out %s: all saves take %s, and %s are free there; --keep N keeps fewer\n",
                    o_.out.c_str(), size_text(static_cast<size_t>(bytes)).c_str(),
                    size_text(static_cast<size_t>(free)).c_str());
    }
    if (!o_.merge.empty()) {
        WrittenFiles merged;
        merged.add(static_cast<size_t>(model_.whole.count()) * sizeof(floatX) +
                   128 * model_.whole.parameters().size());
        all.push_back({"--merge", o_.merge, "the merged model", merged});
    }
    check_disk_room(all);
}

// With --advanced algorithms=FILE: has every product that the run will make whole take its algorithm from the
// file. The steps are rehearsed again, as a product may now make a bias's gradient too: other operations, in
// the same memory.
void Trainer::choose_algorithms() {
#ifdef SIMT_GPU
    if (o_.matmul_algorithms.empty()) return;
    std::set<Product> products;
    for (const Plan* plan : plans_.all())
        for (const Work& w : plan->work)
            if (w.product.m > 0 && w.product.flops() <= longest_product) products.insert(w.product);
    search_matmul_algorithms<floatX>(o_.matmul_algorithms, products, stream_);
    rehearse();
#endif
}

// Takes all device memory of the run: what the report says, to the byte. From here on nothing may be taken.
void Trainer::take_memory() {
    arena_.allocate(plans_.all());
    metrics_.allocate();
    for (Feeder& f : feeders_)
        if (in_.feeds()) f.allocate();
    loss_by_position_.allocate();
    if (drops()) dropout_memory_ = DeviceBuffer(dropout_keys() * sizeof(uint64_t), "the dropout's keys");
    micro_.dropout.key = reinterpret_cast<const uint64_t*>(dropout_memory_.data());
    model_.allocate();
    places_.make();
    use_places();
    updates_.allocate();
    if (places_.any() || model_.embeddings) metrics_.count_waiting(stream_);
    if (model_.adapter) model_.adapter->allocate();
    const int length = in_.feeds() ? o_.seq_len + in_.adapter.prompt_tokens : 0;
    if (const std::vector<float> positions = position_factors(config_, length); !positions.empty()) {
        const size_t bytes = positions.size() * sizeof(float);
        positions_memory_ = DeviceBuffer(bytes, "the positions' factors");
        copy_to_device(positions_memory_.data(), positions.data(), bytes, stream_);
    }
    gpt_.bind(reinterpret_cast<float*>(positions_memory_.data()));
    const auto compare = [](const char* what, size_t taken, size_t planned) {
        if (taken != planned) bug("%zu bytes of %s were taken where %zu were planned", taken, what, planned);
    };
    compare("the device", device_bytes_allocated, report_.allocated());
    compare("pinned host memory", pinned_bytes_allocated, report_.all_pinned());
    compare("files", working_file_bytes, report_.in_files());
    forbid_device_allocation();
}

void Trainer::load() {
    if (model_.adapter || in_.resumed.empty()) {
        if (parse_new_model(o_.model))
            initialize_weights(model_.state, o_.seed);
        else if (in_.gguf)
            arena_.run(plans_.load, [&] { model_.load_gguf(arena_, stream_, places_.blocks_in_files()); });
        else
            model_.load_folder(places_.blocks_in_files());
    }
    if (!in_.resumed.empty() && o_.steps == 0) {
        model_.adapter ? load_adapter(*model_.adapter, in_.resumed) : load_weights(model_.state, in_.resumed);
    } else if (!in_.resumed.empty()) {
        load_training_state(model_.trained(), in_.resumed, in_.adapter);
        step_ = first_step_ = in_.progress->step;
        first_sequence_ = in_.progress->sequences;
        evaluated_ = in_.progress->evaluated;
        metrics_.first_loss = in_.progress->first_loss;
        const std::optional<int64_t> good = in_.progress->last_good;
        const bool is_good = !metrics_.first_loss || good == step_;
        metrics_.last_save = is_good ? o_.resume
                             : good  ? folder_above(in_.resumed) + "/" + step_name(*good)
                                     : "none";
        printf("resuming %s at step %lld\n", o_.resume.c_str(), static_cast<long long>(first_step_));
        if (!is_good)
            fprintf(stderr, "%s: step %lld was not good when it was saved; the last good save: %s\n",
                    o_.resume.c_str(), static_cast<long long>(step_), metrics_.last_save.c_str());
    } else if (model_.adapter && in_.held_adapter) {
        load_adapter(*model_.adapter, in_.held_adapter->path());
    } else if (model_.adapter && in_.adapter.kind == Trained::Prompt) {
        model_.initialize_prompt([&](std::vector<floatX>& rows) {
            arena_.run(plans_.first_prompt, [&] {
                const TensorX made = gpt_.ends().token_rows(in_.first_prompt);
                copy_to_host(rows.data(), made.data(), rows.size() * sizeof(floatX), stream_);
            });
        });
    } else if (model_.adapter) {
        initialize_weights(*model_.adapter, o_.seed);
    }
    in_.held_adapter.reset();
    in_.held_save.reset();
    in_.held_model.reset();
}

// What a user might not expect of what begins now.
void Trainer::print_start() const {
    if (!o_.resume.empty() && o_.steps > 0 && first_step_ >= o_.steps)
        printf("%s is at step %lld: of --steps %lld nothing is left to train\n", o_.resume.c_str(),
               static_cast<long long>(first_step_), static_cast<long long>(o_.steps));
    else if (o_.has("--resume") && o_.resume.empty())
        printf("--resume auto: %s holds no save yet: beginning\n", o_.out.c_str());
    if (model_.adapter || in_.resumed.empty())
        print_longer_positions(notes(), config_, o_.rope_scaling, model_.adapter.has_value());
    if (o_.steps > first_step_ && o_.update_in_backward && o_.clip > 0)
        printf("--update-in-backward: the gradient of each block is clipped by its own norm\n");
    if (o_.steps > first_step_ && !saves())
        printf("nothing will be saved%s: no --out\n", o_.merge.empty() ? "" : " before the merge");
}

// 2 FLOPs a token and parameter that is multiplied with, which positions are not, and twice that in backward
// (Kaplan et al., arXiv:2001.08361); of frozen parameters backward makes no gradient: 2. Causal attention
// takes 2 layers C T forward, where T is an example's length if examples are packed.
double Trainer::step_flops(bool forward_only) const {
    const double attention = static_cast<double>(config_.layers * config_.query_width()) *
                             (loader_ ? loader_->attended() : static_cast<double>(o_.seq_len));
    const double model = static_cast<double>(model_.whole.multiplied());
    const bool has_lora = model_.adapter && in_.adapter.kind == Trained::Lora;
    const double lora = has_lora ? static_cast<double>(model_.adapter->layout.count()) : 0;
    const double forward = 2 * (model + lora + attention);
    const double backward = (model_.adapter ? 2 : 4) * model + 4 * (lora + attention);
    return step_tokens() * (forward_only ? forward : forward + backward);
}

// ---- the bench

// The forward of a step alone, as a validation runs it.
void Trainer::forward_step() {
    Range range("step");
    fill_zero(metrics_.loss(), stream_);
    for (int k = 0; k < o_.grad_accum; k++) {
        feed_training(k * passes(), 1);  // all through the first feeder
        Range forward("forward");
        run_step(plans_.evaluate, [&] { gpt_.evaluate(feeders_[0].batch(), micro_, 1, metrics_.loss()); });
    }
}

// --bench: runs steps, or their forwards alone, and prints what they took and reached.
void Trainer::bench() {
    open_device();
    require_memory(report_, memory_free_at_start(), false);
    const bool forward_only = o_.bench == "forward";
    BenchReport r = {.memory = report_,
                     .forward_only = forward_only,
                     .profiled = o_.profile_ops,
                     .threads = omp_get_max_threads(),
                     .warmup = o_.bench_warmup,
                     .plans = {},
                     .tokens = step_tokens(),
                     .flops = 0,  // when the data are open
                     .matmul_peak = measured_matmul_flops<floatX>(stream_, report_.allocated()),
                     .copy_peak = measured_copy_bandwidth(stream_),
                     .limits = rates_.measured() ? rates_.transfers : kNoLimits};
    if (forward_only)
        r.plans = {{&plans_.evaluate, o_.grad_accum}};
    else
        r.plans = {{&plans_.train, 1}, {&plans_.add, o_.grad_accum - 1}, {&plans_.update, 1}};
    prepare();
    r.flops = step_flops(forward_only);
    const auto run_one = [&](int64_t step) {
        step_ = step;
        if (forward_only)
            forward_step();
        else
            train_step();
    };
    const bool graphs = StepGraphs::kReplays && replays() && !o_.profile_ops;
    replays_ = false;  // a graph has no phases that could be seen
    bench_phases(r, stream_, o_.bench_steps, run_one);
    metrics_.finish();
    replays_ = graphs;
    if (graphs) bench_replays(r, stream_, o_.bench_steps, run_one);
    metrics_.finish();
    r.taken_bytes = std::max(device_bytes_in_use(), used_before_) - used_before_;
    if (o_.json)
        printf("%s\n", json_text(bench_json(r)).c_str());
    else
        print_bench(stdout, r);
}

// ---- the program

int main(int argc, char** argv) {
    open_standard_streams();
    set_openmp_environment(argv);
    prepare_signals();
    setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // a line is there when it is printed, in a file too
    try {
        std::optional<HeldSave> resumed;
        const auto parse = [&] {
            resumed.reset();
            return parse_options(argc, argv, [&](const std::string& folder) {
                return saved_options(resumed.emplace(folder).path());
            });
        };
        Options options = parse();
        std::optional<HeldFolder> out;
        if (options.plan && !options.out.empty()) check_writable(options.out);
        if (options.saves()) {
            out.emplace(options.out);
            if (options.has("--resume")) options = parse();  // the run that held it may have saved since
        }
        start_threads(options.threads);
        tf32_products = options.tf32;
        if (!options.calibrate.empty()) return check_device(options), calibrate<floatX>(options.calibrate), 0;
        Choices choices;
        options = with_chosen_context<Trainer>(options, choices);
        RunInputs inputs(options, std::move(resumed));
        malloc_trim(0);  // what reading and tokenizing let go of is the run's again
        const Options chosen = with_chosen_setting<Trainer>(options, inputs, choices);
        Trainer trainer(chosen, inputs, std::move(choices));
        trainer.rehearse();
        if (options.plan)
            trainer.print_plan();
        else if (!options.bench.empty())
            trainer.bench();
        else
            trainer.run();
        if (interrupted) return 128 + interrupted;
        if (fflush(stdout) != 0 || ferror(stdout)) fail("what was printed could not all be written");
    } catch (...) {
        return report_error();
    }
    return 0;
}
