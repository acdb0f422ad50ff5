// run_inputs_check.h - the checks of what a run reads: mistakes that show only when the options are seen
// beside the model, the data, the save that is resumed and the device. Each fails in one line.
#pragma once

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "llmc/outputs.h"
#include "llmc/run_inputs.h"
#include "llmc/resume.h"
#include "llmc/run_records.h"

// Identifies data: the number of tokens, and a hash (FNV-1a) of up to a million of them, evenly spread, and
// of where streams end.
inline std::string data_facts(const Dataset& data) {
    constexpr uint64_t kPieces = 256, kPiece = 4096;
    const uint64_t total = data.token_count(), stride = std::max(kPiece, total / kPieces);
    uint64_t hash = 0xcbf29ce484222325;
    const auto add = [&](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
    std::vector<int32_t> tokens(kPiece);
    uint64_t begin = 0, next = 0;
    for (size_t stream = 0; stream < data.stream_count(); stream++) {
        const uint64_t count = data.token_count(stream);
        add(count);
        for (; next < begin + count; next += stride) {
            const uint64_t at = next - begin, n = std::min(kPiece, count - at);
            data.read(stream, at, n, tokens.data());
            for (uint64_t i = 0; i < n; i++) add(static_cast<uint32_t>(tokens[i]));
        }
        begin += count;
    }
    return format("%lu tokens, hash %016lx", total, hash);
}

// Fails if the data of an option, with data_facts() `now`, are not those that `save` was trained on. If the
// user has `chosen` the data for this run, only reports it.
inline void check_same_data(const char* option, const std::string& name, const std::string& now,
                            const Progress& saved, const std::string& save, bool chosen) {
    const auto before = saved.data.find(option);
    if (before == saved.data.end() || before->second == now) return;
    const std::string then = printable(before->second);
    if (!chosen)
        fail(
            "%s %s has changed since %s was saved: %s now, %s then (if its files have not, an option like "
            "--seq-len or --loss-on has); to go on with what there is, give %s",
            option, name, save, now, then, option);
    print(stderr, "%s %s: other data than those of %s: %s now, %s then\n", option, name, save, now, then);
}

// Fails if chunks of rows were given that are larger than all rows (unless the length is still to be chosen),
// or if no block would use them.
inline void RunInputs::check_chunks() const {
    const auto given = [&](const char* option, int64_t rows) { return rows > 0 && asked_.has_here(option); };
    const int64_t length = o_.chose_length ? kMostPositions : o_.seq_len + adapter.prompt_tokens;
    const int64_t batch_rows = o_.batch * length, of_mlp = o_.mlp_rows, of_attention = o_.attention_rows;
    if (given("--chunk-rows.mlp", of_mlp) && o_.batch > 0 && of_mlp > 8 * ceil_div(batch_rows, 8))
        fail("--chunk-rows mlp=%ld: a micro-batch has %ld; all takes all", of_mlp, batch_rows);
    if (!given("--chunk-rows.attention", of_attention)) return;
    if (of_attention > 128 * ceil_div(length, 128))
        fail("--chunk-rows attention=%ld: a sequence has %ld; all takes all", of_attention, length);
    if (o_.offload_keys && of_attention >= length)
        fail(
            "--offload keys=%s: --chunk-rows attention=%ld takes all rows of a sequence at once, so that no "
            "keys can be offloaded",
            activation_placement_name(), of_attention);
    const std::vector<int> levels = recompute_levels(o_.recompute, config.layers);
    if (o_.steps > 0 && o_.memory.empty() && std::ranges::find(levels, kLastLevel) == levels.end())
        fail("--chunk-rows attention=%ld: is for blocks that keep nothing: --recompute block", of_attention);
}

// Fails if a run has no data to train on.
inline void RunInputs::check_has_data() const {
    if (data || o_.plan || o_.steps == 0 || !o_.bench.empty()) return;
    if (parse_new_model(o_.model))
        fail(
            "--data is missing: only new models of less than 12 layers are trained on %s without it, if that "
            "is in this folder or beside the program",
            kFirstText);
    fail(
        "--data is missing: what --model %s is to be trained on; --prompt generates without, and --steps 0 "
        "validates, merges or saves without training",
        o_.model);
}

// Fails if options for examples are given and no data are examples.
inline void RunInputs::check_example_options() const {
    if (packs()) return;
    for (const char* name : {"--loss-on", "--chat-format", "--chat-date", "--show-example"})
        if (asked_.has(name) && !(chat && std::string_view(name).starts_with("--chat-")))
            fail("%s %s is for examples in JSON (.jsonl, .ndjson, .json), and the data have none", name,
                 asked_.first(name));
}

// Fails if a model with quantized matrices would be trained or saved as a whole, or if its matrices cannot be
// quantized as asked.
inline void RunInputs::check_base() const {
    const bool is_so = config.has_nf4 || gguf, stores = !o_.base.empty() || !o_.store.empty(),
               quantizes = stores || !o_.head.empty();
    std::string asked = "--base " + (!o_.base.empty() ? o_.base : stores ? o_.store[0] : "head=" + o_.head);
    if (!asked_.has("--base")) asked = "--model " + o_.model + ": its name asks for " + asked;
    check_stored(stored(), config);
    const std::string why =
        is_so ? "--model " + o_.model + ": its files are " + (gguf ? "GGUF" : "NF4") : asked;
    if ((is_so || quantizes) && o_.steps > 0 && !adapter)
        fail("%s: %s weights are not trained; --train lora or prompt trains beside them", why,
             gguf ? "such" : "quantized");
    if (is_so && stores) fail("%s: the files of --model %s are quantized already", asked, o_.model);
    if ((is_so || quantizes) && o_.steps == 0 && !o_.out.empty() && !adapter)
        fail("--out %s is for what is trained; --save-base DIR saves a base in NF4, --merge DIR a model",
             o_.out);
    if (quantizes && !resumed.empty() && !adapter)
        fail("%s: --resume %s is a whole model: give it as --model", asked, o_.resume);
    if (quantizes && parse_new_model(o_.model) && o_.bench.empty())
        fail("%s is for a model that was trained: give its folder as --model", asked);
    if (gguf && !o_.head.empty())
        fail("--base head=%s is for a folder; a GGUF's head is kept in the build's precision", o_.head);
    if (o_.head == "8bit" && config.channels % Q8_0::kElements != 0)
        fail("--base head=8bit: blocks of %d do not divide the model's %d channels; use head=nf4",
             Q8_0::kElements, config.channels);
}

// The format of a linear layer's matrix; null if it is not quantized. `files` is a folder in NF4, or null.
inline const WeightFormat* RunInputs::format_in_base(const LinearModule& m,
                                                     const SafetensorsFolder* files) const {
    const WeightFormat* format = nullptr;
    const std::string name = full_name(config, m) + ".weight";
    if (gguf) format = &format_of(*gguf->get(name, {m.outputs, m.inputs}).tensor);
    if (files) format = &Nf4File(*files, name).format();
    for (const StoredAs& s : stored())
        if (is_among(config, m, s.target)) format = s.format;
    const bool floats = format == &kStoredF32 || format == &kStoredF16 || format == &kStoredBf16;
    return floats ? nullptr : format;
}

// Describes how this run's base is quantized: by one format for all layers, or by the layer's name if it is
// the same in all blocks, or else layer by layer.
inline AdapterBase RunInputs::describe_base() const {
    AdapterBase base;
    if (gguf) base.gguf = lasting_name(model);
    std::optional<SafetensorsFolder> files;
    if (config.has_nf4) files.emplace(model, config.family->prefix);
    std::map<std::string, std::map<std::string, std::string>>
        formats;  // by the layer's name in a block, then by its whole name
    std::set<std::string> all;
    for (const LinearModule& m : linear_modules(config)) {
        const WeightFormat* const format = format_in_base(m, files ? &*files : nullptr);
        const std::string name = format ? stored_name(*format) : "";
        all.insert(formats[m.name][full_name(config, m)] = name);
    }
    const auto add = [&](const std::string& layers, const std::string& format) {
        if (!format.empty()) base.linear_layers[layers] = format;
    };
    if (all.size() == 1) add("all", *all.begin());
    for (const auto& [module, of_blocks] : formats) {
        if (all.size() == 1) break;
        std::set<std::string> different;
        for (const auto& [name, format] : of_blocks) different.insert(format);
        if (different.size() == 1) add(module, *different.begin());
        for (const auto& [name, format] : of_blocks)
            if (different.size() > 1) add(name, format);
    }
    if (!o_.head.empty()) base.head = stored_name(head_format());
    return base;
}

// Fails if an adapter was trained with a model that was quantized differently. If this run's options
// explicitly say how the model is quantized, only prints that.
inline void RunInputs::check_adapter_base() {
    if (!adapter || parse_new_model(o_.model)) return;
    if (o_.plan && config.has_nf4 && !has_weights(model)) return;  // the weights' files would say the formats
    const auto name = adapter.json.find("base_model_name_or_path");
    if (held_adapter && o_.save_base.empty() && name != adapter.json.end() && name->is_string())
        if (const auto of = name->get<std::string>(); file_exists(of) && !same_file(resolve_save(of), model))
            adapter_is_of = of;
    const AdapterBase now = describe_base();
    const std::optional<AdapterBase> then = adapter.base;
    if (o_.steps > 0 || !then) adapter.base = now;
    if (!then || then->is_quantized_as(now)) return;
    const std::string named = held_adapter ? "--adapter " + o_.adapter : "--resume " + o_.resume;
    const std::string what = format("%s was trained beside a model %s, and --model %s is one %s", named,
                                    then->text(), o_.model, now.text());
    if (o_.any_base || asked_.has_here("--base")) {
        print(stderr, "%s\n", what);
        return;
    }
    const bool can = !gguf && !config.has_nf4 && then->is_quantized() && then->has_options();
    fail("%s: %s, or --base none to take this one", what,
         can ? ("add --base " + then->option_value()) : "give that model as --model");
}

// Fails if what is trained cannot be placed in `placement`.
inline void RunInputs::check_placement(const char* key, const std::string& placement) const {
    if (placement == "host" && kHostIsDevice)
        fail("--offload %s=host: on a CPU the host's memory is the device's; %s=disk takes none", key, key);
}

// Fails if a frozen model's weights cannot be placed in `placement`.
inline void RunInputs::check_frozen_placement(const char* key, const std::string& placement) const {
    if (placement == "host" && kHostIsDevice) check_placement(key, placement);
    if (parse_new_model(o_.model))
        fail("--offload %s=%s is for a model that is in files, and --model %s is a new one", key, placement,
             o_.model);
    if (o_.steps == 0 && !o_.out.empty() && !adapter)
        fail("--offload %s=%s: nothing is trained that --out %s could save", key, placement, o_.out);
    if (!resumed.empty() && !adapter)
        fail("--offload %s=%s: --resume %s is a whole model: give it as --model", key, placement, o_.resume);
    if (!o_.save_base.empty())
        fail("--offload %s=%s: --save-base %s is for a base on the device", key, placement, o_.save_base);
}

// Fails if the host's cores cannot do the updates.
inline void RunInputs::check_updates() const {
    if (kHostIsDevice) fail("--offload updates=host: is for a GPU's host; on a CPU that is the device");
    if (o_.of_save.contains("--offload.updates"))
        return;  // it only applies if the state is still outside the device
    if (o_.state == "device" && (o_.memory.empty() || asked_.has("--offload.state")))
        fail("--offload updates=host: is for state outside the device: add state=host or state=disk");
    for (const auto& [placement, key] :
         {std::pair{&o_.weights, "weights"}, std::pair{&o_.gradients, "gradients"}})
        if (*placement == "disk" && !adapter)
            fail(
                "--offload updates=host: what the host updates is in its memory or on the device, and not "
                "%s=disk",
                key);
}

// Fails if --offload asks for an impossible placement.
inline void RunInputs::check_placements() const {
    const bool trains_model = o_.steps > 0 && !adapter;
    if (o_.steps > 0) check_placement("state", o_.state);
    if (o_.gradients != "device" && o_.steps > 0) {
        if (adapter) fail("--offload gradients=%s is for a model that is trained whole", o_.gradients);
        if (o_.update_in_backward)
            fail("--offload gradients=%s: with --update-in-backward only one block's are there at a time",
                 o_.gradients);
        check_placement("gradients", o_.gradients);
    }
    if (o_.updates == "host" && o_.steps > 0) check_updates();
    if (asked_.has_here("--prefetch") && !streams_blocks_of(o_) && o_.memory.empty())
        fail("--prefetch %d: is for offloaded blocks: add --offload weights=disk", o_.prefetch);
    if (o_.embeddings != "device") {
        if (trains_model)
            fail("--offload embeddings=%s is for a frozen model; --train lora or prompt trains beside one",
                 o_.embeddings);
        if (!o_.head.empty())
            fail("--offload embeddings=%s: --base head=%s is of a head on the device", o_.embeddings,
                 o_.head);
        check_frozen_placement("embeddings", o_.embeddings);
    }
    if (o_.weights == "device") return;
    if (trains_model) return check_placement("weights", o_.weights);
    check_frozen_placement("weights", o_.weights);
    if (o_.weights == "disk" && !o_.store.empty())
        fail(
            "--offload weights=disk: --base %s is of matrices in memory; those of files are streamed as they "
            "are: --base nf4 --save-base DIR writes files that have them in NF4",
            o_.store[0]);
    if (o_.weights == "disk" && !o_.base.empty())
        fail(
            "--offload weights=disk: --base %s would be quantized anew each time; save it once with "
            "--save-base DIR, and give --model DIR",
            o_.base);
}

// Fails if --save-base cannot be written, or would overwrite a folder. For a resumed run, a folder that
// exists is the one that it has saved itself.
inline void RunInputs::check_saved_base() const {
    const std::string& folder = o_.save_base;
    if (folder.empty()) return;
    if (gguf) fail("--save-base %s: the matrices of a GGUF are not in NF4", folder);
    if (!o_.head.empty())
        fail("--save-base %s: such a base has its head in 16 or 32 bits: leave head=%s to the training",
             folder, o_.head);
    if (o_.base.empty() && !config.has_nf4)
        fail("--save-base %s is for matrices in NF4: add --base nf4-double", folder);
    for (const auto& [option, path] : {std::pair{"--out", &o_.out}, std::pair{"--merge", &o_.merge}})
        if (!path->empty() && same_file(o_.save_base, *path))
            fail("--save-base %s is %s too", folder, option);
    if (!file_exists(o_.save_base)) return;
    if (!asked_.has("--resume")) fail("--save-base %s is there already; name a folder that is not", folder);
    const ModelConfig there = read_model_config(o_.save_base, "--save-base");
    if (!there.has_nf4 || !(there == config))
        fail("--save-base %s holds another model than --model %s in NF4", folder, o_.model);
}

// Fails if the data do not fit the model: too few tokens, or tokens beyond the vocabulary.
inline void RunInputs::check_data() {
    for (Dataset* d : {data.get(), val_data.get()})
        if (d && !d->is_examples() && (!d->is_text() || tokenizer_folder.empty()))
            d->check_tokens(config.vocabulary);
    if (val_data) SequenceLoader(*val_data, o_.seq_len, o_.seed, false);
    if (!data || o_.show_example > 0) return;
    sequences_per_epoch = SequenceLoader(*data, o_.seq_len, o_.seed, true).sequences_per_epoch();
    const uint64_t all = sequences_per_epoch;
    if (o_.batch > 0 && all < static_cast<uint64_t>(o_.batch))
        fail("--batch %d: the data fill only %lu sequence%s of %d tokens; give --batch %lu%s", o_.batch, all,
             all == 1 ? "" : "s", o_.seq_len, all, all == 1 ? "" : " or less");
}

// Fails if the data are not those that the save was trained on, unless they were chosen for this run.
inline void RunInputs::check_resumed_data() {
    const auto check = [&](const char* option, const Dataset& d, bool chosen) {
        const std::string& now = facts[option] = data_facts(d);
        if (progress) check_same_data(option, d.stream_name(0), now, *progress, o_.resume, chosen);
    };
    const bool chosen = !o_.of_save.contains("--data");
    const bool val_chosen = asked_.has_here("--val-data");
    check("--data", *data, chosen || val_chosen);  // without --val-data its last tenth is held out
    if (!o_.val_data.empty()) check("--val-data", *val_data, val_chosen);
    // What is validated on: --val-data or, without it, a part of --data.
    const auto validated = [](const auto& of_run) {
        const auto at = of_run.contains("--val-data") ? of_run.find("--val-data") : of_run.find("--data");
        return at == of_run.end() ? std::pair<std::string, std::string>() : std::pair{at->first, at->second};
    };
    if (progress && !progress->data.empty())
        validates_on_other_data = validated(progress->data) != validated(facts);
    else
        validates_on_other_data = asked_.changed.contains("--data") || asked_.changed.contains("--val-data");
}

// A run that merges its adapter, and is resumed after that, does not do it again: the --merge is that of the
// save, or the same command was given again.
inline void RunInputs::keep_merged() {
    if (o_.merge.empty() || resumed.empty() || !file_exists(o_.merge + "/config.json")) return;
    if (!o_.of_save.contains("--merge") && std::string_view(asked_.first("--resume")) != "auto") return;
    if (o_.rank.is_first()) print(stderr, "--merge %s is there already, and stays as it is\n", o_.merge);
    o_.merge_is_there = true;
    o_.merge.clear();
}

// Fails unless --report-with is a log that this run does not write.
inline void RunInputs::check_other_log() const {
    const std::string& path = o_.report_with;
    if (!o_.log.empty() && same_file(o_.log, path))
        fail("--report-with %s: this run writes it (--log)", path);
    bool has_records = false;
    naming("--report-with", [&] { read_log(path, [&](auto&&...) { return has_records = true, false; }); });
    if (!has_records) fail("--report-with %s has no line that --log wrote", path);
}

// Fails if an output cannot be written, or would overwrite an input. Only the first of several ranks writes.
inline void RunInputs::check_output_files() const {
    if (!o_.rank.is_first()) return;
    std::vector<Output> files = {{"--timeline", o_.timeline, "{\"model\":"},
                                 {"--log", o_.log, is_csv(o_.log) ? "step,loss" : "{\"step\":"},
                                 {"--report", o_.report, kReportBegins, Output::Replaced},
                                 {"--loss-by-position", o_.loss_by_position, "{\"step\":"},
                                 {"--advanced algorithms", o_.matmul_algorithms, "", Output::Replaced},
                                 {"--merge", o_.merge, "", Output::Folder}};
    if (!o_.report.empty())
        files.push_back({"--report", o_.report + ".tmp", kReportBegins, Output::Replaced});
    if (!o_.report_with.empty()) check_other_log();
    if (!o_.tensorboard.empty())
        files.push_back({"--tensorboard", o_.tensorboard + "/events.out.tfevents", "", Output::InFolder});
    if (!o_.export_file.empty()) {
        if (gguf && same_file(o_.export_file, o_.model))
            fail("--export %s is the file of --model", o_.export_file);
        files.push_back({"--export", o_.export_file, "GGUF", Output::Replaced});
        files.push_back({"--export", o_.export_file + ".tmp", "", Output::Replaced});
    }
    if (!file_exists(o_.save_base)) files.push_back({"--save-base", o_.save_base, "", Output::Folder});
    for (const Output& file : files)
        for (const Dataset* d : {data.get(), val_data.get()})
            if (d && d->reads(file.path)) fail("%s %s is a file of the data", file.option, file.path);
    std::vector<std::string> inputs;
    if (!parse_new_model(o_.model)) inputs.push_back(o_.model);
    if (!o_.resume.empty()) inputs.push_back(o_.resume);
    if (!o_.adapter.empty()) inputs.push_back(o_.adapter);
    if (!o_.tokenizer.empty()) inputs.push_back(o_.tokenizer);
    check_outputs(files, o_.out, inputs);
}

// The token that ends an answer, or -1 if it is the one that ends a text. It is the end that the data's chat
// format or the model's chat template writes; without either, the first end of generation_config.json that
// does not end a text.
inline int RunInputs::end_of_turn() const {
    if (!tokenizer || tokenizer_folder.empty()) return -1;
    int end = chat_used.end_of_answer;
    const ExampleOptions options = example_options();
    try {
        if (end < 0 && !options.templates.sources.empty())
            end = Chat(options.chat, options.templates, options.model, *tokenizer).end_of_answer();
    } catch (const UserError&) {  // a template that does not write a short conversation
    }
    const auto ends_text = [&](int token) {
        return token == tokenizer->end_of_text() ||
               std::ranges::find(config.end_of_text, token) != config.end_of_text.end();
    };
    if (end < 0)
        if (const auto stop = std::ranges::find_if_not(config.stops, ends_text); stop != config.stops.end())
            end = *stop;
    return end < config.vocabulary && end != tokenizer->end_of_text() ? end : -1;
}

// Reads what --export writes beside the weights. Fails if a GGUF cannot hold the model or its tokenizer.
inline void RunInputs::read_exported() {
    if (o_.export_file.empty()) return;
    const std::string option = "--export " + o_.export_file;
    if (adapter.kind == Trained::Prompt) fail("%s: GGUF has no soft prompts", option);
    if (!*gguf_architecture(*config.family))
        fail("%s: an %s is not written as GGUF", option, config.family->name);
    check_layers_for_gguf(config, option);
    if (o_.export_part == "adapter") return;
    check_rope_for_gguf(config, option);
    std::map<std::string, std::string> templates;
    if (!chat_used.own_source.empty())
        templates = {{"default", chat_used.own_source}};
    else if (!tokenizer_folder.empty())
        templates = example_options().templates.sources;
    exported_tokenizer =
        tokenizer_keys(tokenizer_file.get(), tokenizer_folder, config, templates, end_of_turn());
    const std::string arch = gguf_architecture(*config.family);
    const bool is_in_model_keys = config.family->gguf.rotary_pairs;
    if (tokenizer_folder.empty() && config.vocabulary != 256 && !is_in_model_keys)
        exported_tokenizer.add(arch + ".vocab_size", static_cast<uint32_t>(config.vocabulary));
}

inline std::string RunInputs::export_name() const {
    namespace fs = std::filesystem;
    const bool is_changed = o_.steps > 0 || adapter || parse_new_model(o_.model);
    const std::string path = is_changed || gguf ? o_.export_file : without_last_slashes(model);
    return is_changed || gguf ? fs::path(path).stem().string() : fs::path(path).filename().string();
}

// Fails if --advanced attention=hopper asks for kernels that do not exist in this build or for this model's
// heads.
template <class T>
void check_attention(const RunConfig& o, const ModelConfig& config) {
    if (o.attention != "hopper") return;
    if (!kHopperAttention<T>)
        fail(
            "--advanced attention=hopper: this build has no such kernels; make DEVICE=cuda PRECISION=bf16 "
            "with 90a in CUDA_ARCH does, and attention=common is in each");
    if (config.scales.attention_cap > 0)
        fail("--advanced attention=hopper has no soft cap of scores, as the model has: use attention=common");
    for (int l = 0; l < config.layers; l++)
        if (const int size = config.layer(l).head_size; !hopper_attention_supports(size))
            fail(
                "--advanced attention=hopper does heads of 64 and 128 channels, and the model's have %d: use "
                "attention=common",
                size);
}

// Fails unless there is a device for this binary and for the attention that was asked for.
inline void check_device([[maybe_unused]] const RunConfig& o) {
#ifdef SIMT_GPU
    if (o.planned_gpu) return;
    check_gpu();
    if (o.attention == "hopper" && !device_is_hopper())
        fail(
            "--advanced attention=hopper is for GPUs of compute capability 9.0, which this one is not: use "
            "attention=common");
#endif
}
