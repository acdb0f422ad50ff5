// run_inputs.h - opens everything that a run reads, before any memory is taken or anything is trained: the
// save or the model that it starts from, its data and its tokenizer. The checks are in run_inputs_check.h.
#pragma once

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/checkpoint.h"
#include "llmc/data_tokens.h"
#include "llmc/dataset.h"
#include "llmc/gguf_export.h"
#include "llmc/model_positions.h"
#include "llmc/offload_embeddings.h"
#include "llmc/options.h"
#include "llmc/options_placement.h"
#include "llmc/quant_weights.h"
#include "llmc/resume.h"
#include "llmc/tokenizer.h"
#include "llmc/tokenizer_gguf_write.h"

// The training data of a new model if none are given: Shakespeare's plays, 1.1 MB.
constexpr const char* kFirstText = "dev/data/tinyshakespeare.txt";

// The path of that text: in this folder, where `make install` puts it, or where the program was built; "" if
// it is in none of them.
inline std::string first_text() {
    const std::filesystem::path program = program_folder();
    for (const std::filesystem::path& folder :
         {std::filesystem::path(), program / "../share/train-gpt", program / "../.."})
        if (std::filesystem::exists(folder / kFirstText))
            return (folder / kFirstText).lexically_normal().string();
    return "";
}

inline std::unique_ptr<Dataset> open_data(const std::vector<std::string>& files, const char* option) {
    return std::make_unique<Dataset>(expand_files(files, option), option);
}

// A line of --prompts: the object, which the answer is added to, and the tokens of the prompt.
struct FilePrompt {
    OrderedJson line;
    std::vector<int> tokens;
};

// Host memory for what a run reads: what the tokenizer and the data hold, and the most that reading the data
// took.
struct InputBytes {
    size_t tokenizer = 0, data = 0, reading = 0;
};

class RunInputs {
  public:
    // `run`: what was asked for, perhaps with another length. `resumed_save` is the save of --resume, held
    // until it is loaded. `asked` must outlive the inputs.
    RunInputs(const Asked& asked, RunConfig run, std::optional<HeldSave> resumed_save);
    RunInputs(const RunInputs&) = delete;

    // The run's configuration with what follows from the inputs: the built-in text as --data, the length,
    // today as --chat-date, how tokens are drawn; and without a --merge whose model is there already.
    const RunConfig& run() const { return o_; }

    // The matrices of the model that are stored in formats of their own: in those of its files, or in those
    // of --base. Nothing if there are none. `weights` is their
    // placement, a name of kPlacementNames. `not_in_state`: the State has no matrices, so that even those in
    // the build's own format are among these.
    std::optional<QuantizedWeights> quantized_weights(Stage stage, const std::string& weights,
                                                      bool not_in_state) const;
    // True if --memory may place the blocks of a frozen model in `placement` instead of where --offload
    // weights= says: if check_placements() would accept that. Matrices that this run quantizes itself cannot
    // be on disk.
    bool may_stream_frozen(const std::string& placement) const {
        const bool in_files = adapter && !parse_new_model(o_.model) && o_.save_base.empty();
        return in_files && (placement != "disk" || stored().empty());
    }
    // True if --memory may place the embeddings outside the device.
    bool may_move_embeddings() const {
        return adapter && !parse_new_model(o_.model) && o_.head.empty() && o_.save_base.empty();
    }
    // The head's matrix in the format of --base head=; nothing without that.
    std::optional<QuantizedWeights> quantized_head() const;
    // The format that --base head= asks for.
    const WeightFormat& head_format() const {
        return o_.head == "8bit" ? kQ8_0 : o_.base == "nf4" ? kNf4 : kNf4Double;
    }
    // Embeddings and head, if `placement` places them outside the device; else nothing.
    std::optional<OffloadedEmbeddings> offloaded_embeddings(const std::string& placement) const;
    // True if the run samples. It does not if it only initializes, or if the first conversation of its data
    // leaves no position for a further token.
    bool samples() const;
    // The tokens that a sample starts from: the question, in a chat; else the prompt; without one, the token
    // that begins a text or the one that ends a text; without these, a line end.
    const std::vector<int>& first_tokens() const;
    // The tokens of a conversation up to where the next answer begins. Only with a `chat`.
    std::vector<int> conversation_tokens(const Conversation& conversation,
                                         const std::string& name = "the conversation") const {
        return naming(name, [&] {
            std::vector<int> tokens = encoded(chat->prompt(conversation));
            if (tokens.empty()) fail("%s writes no token of it", chat->description());
            return tokens;
        });
    }
    // The most bytes of a prompt: more than the model's positions have in any language.
    size_t longest_text() const { return (64 << 10) + 32 * static_cast<size_t>(config.longest()); }
    // The number of positions that a sample uses: as many as it has tokens. During training no more than the
    // trained length, but at least one after the prompt.
    int sample_window() const;
    // True if a sample may need more positions than sample_window().
    bool sample_slides() const;
    // True if a sample stops at this token. The model's files, or else the tokenizer, name these tokens; an
    // answer in a chat also ends at the tokenizer's and at the format's. In a model of bytes every token is
    // text.
    bool ends_text(int token) const;
    bool ends_text_by_files(int token) const;
    // The memory of what was read. Small amounts are left out: the process's part of a plan covers them.
    InputBytes bytes() const;
    // The longest sequences, in tokens, that the model can be trained on.
    int most_tokens() const {
        return goes_by_length() && (packs() || samples()) ? sample_positions() : token_positions();
    }
    // Says which of the folders of saves that the run reads show an older save, because the newer ones were
    // not good. Only while the saves are held.
    void remark_bad_saves() const {
        if (held_save)
            remark_newer_bad_save("--resume", o_.resume, resumed);
        else
            remark_newer_bad_save("--model", o_.model, model);
        if (held_adapter) remark_newer_bad_save("--adapter", o_.adapter, held_adapter->path());
    }
    // How JSON examples are read.
    ExampleOptions example_options() const;
    // Where saves get their tokenizer from.
    TokenizerSource saved_tokenizer() const;
    // The name of an exported model: that of its folder, or if this run changes it, that of the file.
    std::string export_name() const;
    // Releases what was held until it is loaded: from now on other runs may replace it.
    void release_files() {
        held_adapter.reset();
        held_save.reset();
        held_model.reset();
    }
    // True if --model is a GGUF file.
    static bool is_gguf(const std::string& path) { return path.ends_with(".gguf"); }
    // True if training batches are run: of data or, in a bench without --data, of random tokens.
    bool uses_training_batches() const { return o_.steps > 0 || o_.bench == "forward"; }
    // True if any batches are run: of training, or of a validation.
    bool uses_batches() const { return uses_training_batches() || val_data; }
    // True if a new model without data gets the vocabulary of bytes: if it is the default model, or will
    // train on the built-in text (which a bench does not).
    bool learns_bytes(const NewModel& made) const {
        return o_.is_default_model || (is_small(made) && o_.steps > 0 && o_.bench.empty());
    }
    // Describes where a new model's vocabulary comes from if there are neither files nor data to tell; else
    // empty.
    std::string assumed_vocabulary() const {
        const NewModel made = parse_new_model(o_.model);
        if (!made || data || val_data || !resumed.empty() || !tokenizer_folder.empty()) return "";
        return learns_bytes(made) ? "bytes"
                                  : std::string(made.family->name) + "'s own, as no --data says another";
    }
    // True if sequences hold several examples.
    bool packs() const {
        const auto is_packed = [](const std::unique_ptr<Dataset>& d) { return d && d->is_examples(); };
        return o_.plans_examples || is_packed(data) || is_packed(val_data);
    }

  private:
    const Asked& asked_;  // for refusals, and for values that the model or the data decide unless given
    RunConfig o_;
    mutable std::vector<int> first_tokens_;  // filled by the first call of first_tokens()

  public:
    std::string adapter_is_of;  // the model that --adapter names, if it is here and is not --model
    std::optional<HeldSave> held_save, held_model, held_adapter;  // held until they are loaded
    std::string resumed;                      // the save that --resume continues from; empty without --resume
    std::string model;                        // the folder of --model, or the save that it shows
    std::optional<Progress> progress;         // the progress of that save, if the run trains
    std::unique_ptr<Dataset> data, val_data;  // val_data: if the run validates
    std::shared_ptr<GgufModel> gguf;          // --model, if it is a GGUF file
    std::string tokenizer_folder;  // where the tokenizer was found, for saves; may be empty, or a GGUF file
    std::shared_ptr<const GgufFile> tokenizer_file;  // the GGUF file that has the tokenizer, if one has
    std::optional<Tokenizer> given_tokenizer;        // --tokenizer, if this run begins with it
    ModelConfig config;
    std::optional<Tokenizer> tokenizer;
    ChatUsed chat_used;            // what wrote the conversations of the data, if there are any
    std::set<std::string> unread;  // fields of examples, or of prompts, that were not read
    // The format in which prompts are written and samples are drawn: that of the conversations that are
    // trained on; without training the model's own. Absent if texts are continued as they are.
    std::optional<Chat> chat;
    std::vector<Message> question;             // what a sample answers, in a chat
    std::vector<FilePrompt> prompts;           // those of --prompts
    std::vector<int> first_prompt;             // the tokens whose embeddings a new soft prompt starts from
    AdapterConfig adapter;                     // the adapter that is trained or used, if any
    GgufKeys exported_tokenizer;               // for --export
    std::map<std::string, std::string> facts;  // by option: data_facts() of its data, for saves
    uint64_t sequences_per_epoch = 0;          // of the data
    // True if a resumed run's validations read other data than those before, although the name is the same.
    bool validates_on_other_data = false;

  private:
    std::unique_ptr<Dataset> open_training_data();
    void check_has_data() const;
    ModelConfig choose_config() const;
    std::vector<int> choose_first_tokens() const;
    AdapterConfig choose_adapter();
    void choose_length();
    void check_chunks() const;
    void check_base() const;
    const WeightFormat* format_in_base(const LinearModule& m, const SafetensorsFolder* files) const;
    AdapterBase describe_base() const;
    void check_adapter_base();
    // The formats that --base asks for.
    std::vector<StoredAs> stored() const {
        return parse_stored(o_.base.empty() ? o_.store : std::vector{"all=" + o_.base});
    }
    void check_placement(const char* key, const std::string& placement) const;
    void check_frozen_placement(const char* key, const std::string& placement) const;
    void check_updates() const;
    void check_placements() const;
    void check_saved_base() const;
    std::vector<int> choose_first_prompt() const;
    // The number of positions that the model has for tokens.
    int token_positions() const { return config.longest() - adapter.prompt_tokens; }
    // The number of positions that a sample may have. With `dynamic` and `longrope` no more than those of
    // training, because these scale by the length of the sequence, which grows during a sample.
    int sample_positions() const {
        const int longest = config.longest();
        return (goes_by_length() ? std::min(unscaled_positions(config), longest) : longest) -
               adapter.prompt_tokens;
    }
    bool goes_by_length() const { return config.rope.goes_by_length(); }
    // True if batches have sequences that such a scaling scales.
    bool scales_by_length() const {
        return goes_by_length() && uses_batches() &&
               o_.seq_len + adapter.prompt_tokens > unscaled_positions(config);
    }
    std::optional<Tokenizer> open_given_tokenizer();
    std::optional<Tokenizer> open_tokenizer();
    void tokenize_texts();
    void tokenize_lines(Dataset& lines);
    TokenizerSource tokenizer_source() const;
    void stop_at(int token);
    int end_of_turn() const;
    // The tokens of a prompt. Fails if it is far too long, before it takes memory.
    std::vector<int> encoded(const std::string& text, Ends ends = Ends::None) const {
        if (text.size() > longest_text())
            fail("%zu bytes are too many for the model's %d positions", text.size(), config.longest());
        return tokenizer->encode(text, ends);
    }
    std::vector<int> prompt_tokens(const std::string& text, const std::string& name) const;
    // Fails if a prompt leaves no position for an answer.
    void check_room(const std::string& name, const std::vector<int>& tokens) const {
        if (static_cast<int>(tokens.size()) >= sample_positions())
            fail("%s has %zu tokens, which leaves no room in the model's %d positions", name, tokens.size(),
                 sample_positions());
    }
    void open_prompts();
    // What the tokenizer and the chat template are of.
    const std::string& model_of_tokenizer() const {
        return tokenizer_folder.empty() ? model : tokenizer_folder;
    }
    void open_chat(const ExampleOptions& options);
    void open_own_chat();
    void choose_sampling();
    int end_of_answer_ = -1;   // in the chat
    size_t prompts_held_ = 0;  // bytes that the prompts of a file take
    void open_validation();
    void check_example_options() const;
    void check_data();
    void check_resumed_data();
    void check_output_files() const;
    void check_other_log() const;
    void keep_merged();
    void read_exported();
};

inline RunInputs::RunInputs(const Asked& asked, RunConfig run, std::optional<HeldSave> resumed_save)
    : asked_(asked),
      o_(std::move(run)),
      held_save(std::move(resumed_save)),
      held_model(o_.model),
      resumed(held_save ? held_save->path() : ""),
      model(held_model->path()),
      data(open_training_data()),
      val_data(o_.val_data.empty() ? nullptr : open_data(o_.val_data, "--val-data")),
      gguf(is_gguf(o_.model) ? std::make_shared<GgufModel>(o_.model) : nullptr),
      given_tokenizer(open_given_tokenizer()),
      config(choose_config()),
      tokenizer(open_tokenizer()),
      adapter(choose_adapter()) {
    check_base();
    check_placements();
    check_saved_base();
    check_adapter_base();
    if (o_.dropout > 0 && !config.family->drops)
        fail("--dropout %g: a %s has none", o_.dropout, config.family->name);
    if (held_save && o_.steps > 0) progress = read_progress(resumed);
    choose_sampling();
    if (o_.steps == 0) open_own_chat();
    if (!o_.prompts.empty()) open_prompts();
    choose_length();
    check_chunks();
    check_example_options();
    tokenize_texts();
    if (!o_.prompt.empty() && o_.sample_tokens > 0) check_room("--prompt", first_tokens());
    if (data && uses_training_batches() && o_.bench.empty()) open_validation();
    if (!o_.loss_by_position.empty() && !val_data)
        fail("--loss-by-position %s: there is nothing to validate on; give --val-data", o_.loss_by_position);
    check_data();
    // A plan does not tokenize long texts, so it has no data_facts() of their tokens to compare.
    const bool is_untouched = o_.plan && data && data->is_bytes() && !tokenizer_folder.empty();
    if (data && o_.bench.empty() && !is_untouched) check_resumed_data();
    if (!o_.merge.empty() && adapter.kind == Trained::Prompt)
        fail("--merge %s: a soft prompt is no part of the weights: --out saves it", o_.merge);
    keep_merged();
    check_output_files();
    read_exported();
    check_has_data();
}

// Chooses the length of sequences if none is given. Fails if a sequence is longer than the model's positions.
inline void RunInputs::choose_length() {
    if (sample_positions() < 1)
        fail("a soft prompt of %d tokens leaves no room in the model's %d positions", adapter.prompt_tokens,
             config.positions);
    if (o_.open.length) o_.seq_len = std::min(o_.seq_len, sample_positions());
    if (o_.seq_len > token_positions()) {
        const bool scaled = !o_.rope_scaling.empty();
        const bool made = static_cast<bool>(parse_new_model(o_.model));
        fail("--seq-len %d is more than the model's %d positions%s%s", o_.seq_len, config.longest(),
             adapter.prompt_tokens > 0 ? format(", of which the soft prompt takes %d", adapter.prompt_tokens)
                                       : "",
             made || scaled                                     ? ""
             : config.family->position == PositionKind::Learned ? "; --positions N adds to them"
             : config.family->position == PositionKind::Rotary
                 ? format("; --rope-scaling yarn:%ld stretches them",
                          factor_for(config, o_.seq_len + adapter.prompt_tokens))

                 : "");
    }
    if (!scales_by_length()) return;
    const std::string why = format("the scaling \"%s\" goes by the length of a whole sequence",
                                   kRopeNames[static_cast<int>(config.rope.type)]);
    const int most = unscaled_positions(config) - adapter.prompt_tokens;
    if (packs())
        fail(
            "--seq-len %d: %s, and examples share them: at most %d, or --rope-scaling yarn:4 on the model "
            "without it",
            o_.seq_len, why, most);
    if (samples())
        fail("--seq-len %d: %s, which grows in a sample: add --sample tokens=0, or at most %d", o_.seq_len,
             why, most);
}

// Opens the data of --data, or the built-in text for a new model. Returns nothing if the run does not train.
inline std::unique_ptr<Dataset> RunInputs::open_training_data() {
    if (o_.data.empty()) {
        if (o_.steps == 0 || !o_.bench.empty()) return nullptr;
        const NewModel made = parse_new_model(o_.model);
        const std::string text = made && is_small(made) ? first_text() : "";
        if (text.empty()) return nullptr;  // check_has_data() reports this
        o_.data = {text};
        o_.settings["--data"] = o_.data;
    }
    return open_data(o_.data, "--data");
}

// The model's sizes, from the save, the folder or the depth that the options name.
inline ModelConfig RunInputs::choose_config() const {
    std::optional<ModelConfig> saved;
    if (!resumed.empty() && !is_adapter_folder(resumed)) saved = read_model_config(resumed, "--resume");
    ModelConfig config;
    if (const NewModel made = parse_new_model(o_.model)) {
        const Dataset* of = data ? data.get() : val_data.get();
        config = saved ? new_config(made, saved->vocabulary, saved->positions)
                       : new_config_for(made, of, learns_bytes(made), o_.seq_len, given_tokenizer);
    } else if (saved && !std::filesystem::exists(model)) {
        config = *saved;  // the folder that the run started from may have been removed
    } else if (gguf) {
        config = gguf->config();
    } else if (const KnownModel* known = known_shape(model); known && o_.plan) {
        config = config_of(*known);
    } else {
        config = read_model_config(model, "--model");
    }
    lengthen(config, o_.rope_scaling, o_.positions, static_cast<bool>(parse_new_model(o_.model)));
    if (saved && (config.positions != saved->positions || !(config.rope == saved->rope)))
        fail(
            "--resume %s holds a model of %d positions (rotary scaling: %s), and --model %s has %d (%s): "
            "--rope-scaling and --positions are those that it began with",
            o_.resume, saved->positions, kRopeNames[static_cast<int>(saved->rope.type)], o_.model,
            config.positions, kRopeNames[static_cast<int>(config.rope.type)]);
    if (saved && !(config == *saved))
        fail(
            "--resume %s holds another model (%d layers, %d channels, %d heads) than --model %s (%d, %d, %d)",
            o_.resume, saved->layers, saved->channels, saved->heads, o_.model, config.layers, config.channels,
            config.heads);
    if (saved) saved->grown_from = config.grown_from;
    return saved.value_or(config);
}

inline std::optional<QuantizedWeights> RunInputs::quantized_weights(Stage stage, const std::string& weights,
                                                                    bool not_in_state) const {
    using Values = QuantizedWeights::Values;
    const bool trained = o_.steps > 0 && !adapter;
    const Placement placement = trained ? Placement::Device : named<Placement>(kPlacementNames, weights);
    if (gguf)
        return QuantizedWeights(config, stage, placement, Values::Quantized,
                                [&](const LinearModule& m, const std::string& name) {
                                    return &format_of(*gguf->get(name, {m.outputs, m.inputs}).tensor);
                                });
    if (const std::vector<StoredAs> formats = stored(); !formats.empty())
        return QuantizedWeights(
            config, stage, placement, Values::Quantized,
            [&](const LinearModule& m, const std::string&) { return stored_format(formats, config, m); });
    if (!config.has_nf4 && placement == Placement::Device && !not_in_state) return std::nullopt;
    if (!config.has_nf4 && o_.plan && !has_weights(model))  // most published models are in bf16
        return QuantizedWeights(config, stage, placement, Values::FloatsOfFiles,
                                [](const LinearModule&, const std::string&) { return &kStoredBf16; });
    const SafetensorsFolder files(model, config.family->prefix);
    if (!config.has_nf4)
        return QuantizedWeights(config, stage, placement, Values::FloatsOfFiles,
                                [&](const LinearModule& m, const std::string& name) {
                                    const Shape shape = config.family->by_outputs
                                                            ? Shape{m.outputs, m.inputs}
                                                            : Shape{m.inputs, m.outputs};
                                    return &format_of(files.get(name, file_shape(shape)), model);
                                });
    return QuantizedWeights(
        config, stage, placement, Values::Quantized, [&](const LinearModule&, const std::string& name) {
            if (!Nf4File::has(files, name))
                fail("%s: tensor \"%s\" is not quantized, and the folder's others are", model, name);
            return &Nf4File(files, name).format();
        });
}

inline std::optional<QuantizedWeights> RunInputs::quantized_head() const {
    if (o_.head.empty()) return std::nullopt;
    return QuantizedWeights(config, head_format());
}

inline std::optional<OffloadedEmbeddings> RunInputs::offloaded_embeddings(const std::string& name) const {
    const Placement placement = named<Placement>(kPlacementNames, name);
    if (placement == Placement::Device) return std::nullopt;
    if (gguf)
        return OffloadedEmbeddings(config, placement, [&](Field, const Parameter::Part& part) {
            return &format_of(*gguf->get(part.name, file_shape(part.shape)).tensor);
        });
    if (o_.plan && !has_weights(model))  // most published models are in bf16
        return OffloadedEmbeddings(config, placement,
                                   [](Field, const Parameter::Part&) { return &kStoredBf16; });
    const SafetensorsFolder files(model, config.family->prefix);
    return OffloadedEmbeddings(config, placement, [&](Field field, const Parameter::Part& part) {
        return &format_of(find_part(files, config, field, part), model);
    });
}

// The adapter: that of the save or of --adapter, or a new one as the options ask.
inline AdapterConfig RunInputs::choose_adapter() {
    const std::string path = o_.save_base.empty() ? lasting_name(model) : resolved(o_.save_base),
                      base = gguf ? published_name(gguf->file().metadata(), path) : path;
    const auto read = [&](const std::string& folder) {
        AdapterConfig found = read_adapter(folder, config);
        const std::string generation = folder + "/generation_config.json";
        if (file_exists(generation)) read_generation(generation, config);
        if (!o_.save_base.empty()) found.json["base_model_name_or_path"] = base;
        const Trained asked = named<Trained>(kTrainedNames, o_.train);
        if (asked_.has("--train") && asked != found.kind)
            fail("--train %s: %s is a %s adapter", o_.train, folder,
                 kTrainedNames[static_cast<int>(found.kind)]);
        if (asked_.has("--lora-dropout")) found.dropout = o_.lora_dropout;
        return found;
    };
    if (!resumed.empty() && is_adapter_folder(resumed)) return read(resumed);
    if (!resumed.empty() && o_.trains_adapter())
        fail("--resume %s holds a whole model, and no adapter", o_.resume);
    if (!o_.adapter.empty()) return read(held_adapter.emplace(o_.adapter).path());
    AdapterConfig made;
    if (o_.train == "lora") {
        made = new_lora(config, {o_.lora_rank, o_.lora_alpha, o_.lora_dropout, o_.lora_targets}, base);
    } else if (o_.train == "prompt") {
        first_prompt = choose_first_prompt();
        made = new_prompt(config, static_cast<int>(first_prompt.size()), o_.soft_prompt_text, base);
    } else {
        return made;
    }
    // PEFT then loads this commit of the base, too.
    if (const std::string revision = o_.save_base.empty() ? other_revision(model) : ""; !revision.empty())
        made.json["revision"] = revision;
    return made;
}

// The first tokens of a soft prompt: those of its text, cut or repeated to its length, as in PEFT;
// without a text, random tokens.
inline std::vector<int> RunInputs::choose_first_prompt() const {
    size_t count = static_cast<size_t>(o_.soft_prompt);
    std::vector<int> tokens(count);
    if (o_.soft_prompt_text.empty()) {
        for (size_t i = 0; i < count; i++)
            tokens[i] = static_cast<int>(random_bits(o_.seed, name_hash("soft prompt"), 0, i) %
                                         static_cast<uint64_t>(config.vocabulary));
        return tokens;
    }
    if (!tokenizer) fail("--soft-prompt: the model's folder has no tokenizer to read it with");
    const std::vector<int> text =
        naming("--soft-prompt", [&] { return tokenizer->encode(o_.soft_prompt_text); });
    if (text.empty())
        fail("--soft-prompt: its tokenizer has no token for any of \"%s\"", printable(o_.soft_prompt_text));
    if (o_.soft_prompt == 0) tokens.resize(text.size());
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = text[i % text.size()];
    return tokens;
}

// Tokenizes text if the model has a tokenizer. A text that is not read is left as it is, and so is one that
// is so long that its tokens do not change a plan.
inline void RunInputs::tokenize_texts() {
    const bool chooses = !o_.memory.empty() || o_.batch == 0;
    for (Dataset* d : {data.get(), val_data.get()}) {
        if (!d || !d->is_text()) continue;
        if (d->is_examples()) {
            tokenize_lines(*d);
            continue;
        }
        if (tokenizer_folder.empty()) {
            check_bytes(*d, config.vocabulary);
            continue;
        }
        if (d == data.get() && !uses_training_batches()) continue;
        const uint64_t batch_tokens = static_cast<uint64_t>(o_.batch) * static_cast<uint64_t>(o_.seq_len);
        if (o_.plan && !chooses && is_long_text(*d, batch_tokens)) continue;
        tokenize_text(*d, *tokenizer);
    }
}

inline InputBytes RunInputs::bytes() const {
    constexpr size_t kLittleHeld = 256 << 10, kLittleRead = 4 << 20;
    InputBytes bytes{tokenizer ? tokenizer->held_bytes() : 0, prompts_held_, 0};
    if (o_.chat) bytes.data += kCopiesOfLine * longest_text();
    if (tokenizer_file) bytes.tokenizer += tokenizer_file->held_bytes();  // most of it is the vocabulary
    if (!o_.export_file.empty())
        bytes.tokenizer += exported_tokenizer.bytes().size() + export_buffers(config, kChunkElements);
    for (const Dataset* d : {data.get(), val_data.get()}) {
        if (!d) continue;
        bytes.data += d->held_bytes();
        bytes.reading = std::max(bytes.reading, d->reading_bytes());
    }
    if (bytes.data < kLittleHeld) bytes.data = 0;
    if (bytes.reading < kLittleRead) bytes.reading = 0;
    return bytes;
}

// Tokenizes JSON examples. A plan needs this too, to know the number of sequences.
inline void RunInputs::tokenize_lines(Dataset& lines) {
    if (!tokenizer) check_bytes(lines, config.vocabulary);
    if (adapter.prompt_tokens > 0) lines.keep_apart();  // a soft prompt comes before each sequence
    ExampleOptions options = example_options();
    if (o_.steps > 0 && o_.chat_date.empty() && options.templates.may_write_date()) {
        // The run keeps its date, so that a resumed one reads the same text on another day.
        char today[16] = "";
        const std::tm date = chat_date("");
        strftime(today, sizeof today, "%Y-%m-%d", &date);
        options.chat.date = o_.chat_date = today;
        o_.settings["--chat-date"] = {today};
    }
    const ChatUsed used = tokenize_examples(lines, *tokenizer, options, o_.seq_len, most_tokens(), &unread);
    if (used.description.empty()) return;
    if (chat_used.description.empty()) chat_used = used;  // of --data if it has chats, else of --val-data
    if (used.end_of_answer >= 0) stop_at(used.end_of_answer);
    if (&lines != data.get() || o_.steps == 0 || o_.raw_prompt) return;
    question = o_.prompt.empty() ? used.question : std::vector<Message>{said("user", o_.prompt)};
    open_chat(options);
    try {
        conversation_tokens({question});
    } catch (const UserError&) {  // a template that cannot ask for an answer: samples continue texts
        chat.reset();
        question.clear();
    }
}

inline ExampleOptions RunInputs::example_options() const {
    const std::string& folder = model_of_tokenizer();
    ExampleOptions options{{o_.loss_on, o_.chat_format, o_.chat_date}, {}, folder, false};
    options.is_new_model = tokenizer_folder.empty() && parse_new_model(o_.model);
    if (tokenizer_file)
        options.templates = chat_templates_of(tokenizer_file->metadata(), tokenizer_file->path());
    else if (!options.is_new_model)
        options.templates = chat_templates_of(folder, *tokenizer);
    return options;
}

inline void RunInputs::open_chat(const ExampleOptions& options) {
    chat.emplace(options.chat, options.templates, options.model, *tokenizer);
    end_of_answer_ = chat->end_of_answer();
    first_tokens_.clear();
}

// For a run that answers and trains nothing: opens the model's chat format. A model without a chat template
// has one if it ends its texts as answers end there.
inline void RunInputs::open_own_chat() {
    if (o_.raw_prompt || (o_.prompt.empty() && !o_.only_answers())) return;
    if (!tokenizer || tokenizer_folder.empty()) {
        if (o_.chat) fail("--chat: %s has no tokenizer with the special tokens of a chat format", o_.model);
        return;
    }
    question = {said("user", o_.prompt)};
    const ExampleOptions options = example_options();
    if (o_.chat || asked_.has("--chat-format") || !options.templates.sources.empty())
        return open_chat(options);
    try {
        open_chat(options);
    } catch (const UserError&) {
        return;
    }
    if (!ends_text_by_files(end_of_answer_)) chat.reset();
}

// Takes from generation_config.json how tokens are drawn, where options do not say it. Sampling without a
// temperature has one of 1 in transformers, and none at all if it says so.
inline void RunInputs::choose_sampling() {
    if (!config.generation.is_object()) return;
    const ConfigReader file(config.generation, model + "/generation_config.json");
    const auto read = [&](const char* key, const char* option, double low, double high, auto& value) {
        if (!file.has(key) || asked_.has(option)) return;
        const nlohmann::json& number = file.json()[key];
        if (!number.is_number() || number < low || number > high)
            file.refuse(key, format("a number from %g to %g", low, high));
        value = number.get<std::remove_reference_t<decltype(value)>>();
    };
    Sampling& s = o_.sampling;
    const bool samples = file.truth("do_sample", false);
    if (!asked_.has("--sample.temperature") && file.has("do_sample")) s.temperature = samples ? 1 : 0;
    if (samples || !file.has("do_sample")) read("temperature", "--sample.temperature", 0, 1e3, s.temperature);
    read("top_k", "--sample.top-k", 0, kMostVocabulary, s.top_k);
    read("top_p", "--sample.top-p", 0, 1, s.top_p);
    read("min_p", "--sample.min-p", 0, 1, s.min_p);
    read("repetition_penalty", "--sample.repetition-penalty", 1e-3, 1e3, s.repetition_penalty);
    if (!file.has("stop_strings") || asked_.has("--sample.stop")) return;
    const nlohmann::json& stops = file.json()["stop_strings"];
    for (const nlohmann::json& stop : stops.is_array() ? stops : nlohmann::json::array({stops})) {
        if (!stop.is_string() || stop.get_ref<const std::string&>().empty())
            file.refuse("stop_strings", "a text that is not empty, or a list of such texts");
        o_.stops.push_back(stop.get<std::string>());
    }
}

// Makes generation stop at this token as well: a model that learns conversations ends its answers with it.
inline void RunInputs::stop_at(int token) {
    std::vector<int>& stops = config.stops;
    if (stops.empty() && tokenizer->end_of_text() >= 0) stops.push_back(tokenizer->end_of_text());
    if (std::ranges::find(stops, token) == stops.end()) stops.push_back(token);
}

// Without --val-data, holds out a part of the text or of the examples, if it is long enough for a sequence.
inline void RunInputs::open_validation() {
    const uint64_t least = data->is_examples() ? 1 : static_cast<uint64_t>(o_.seq_len) + 1;
    if (!val_data && data->is_text()) val_data = data->hold_out(least);
    if (o_.eval_every > 0 && !val_data)
        fail("--eval-every %ld: there is nothing to validate on; give --val-data", o_.eval_every);
}

// Opens --tokenizer: a folder, the first file of one, or a GGUF file. A resumed run has that of its save.
inline std::optional<Tokenizer> RunInputs::open_given_tokenizer() {
    if (o_.tokenizer.empty() || !resumed.empty()) return std::nullopt;
    tokenizer_folder = o_.tokenizer;
    if (is_gguf(o_.tokenizer)) {
        tokenizer_file = std::make_shared<GgufFile>(o_.tokenizer);
        return read_gguf_tokenizer(tokenizer_file->metadata(), o_.tokenizer);
    }
    bool is_read = std::filesystem::is_directory(o_.tokenizer);  // or is the file of a folder that is read
    if (!is_read) tokenizer_folder = folder_above(o_.tokenizer);
    for (const char* name : {"tokenizer.json", "vocab.json", "tokenizer.model"})
        if (const std::string file = tokenizer_folder + "/" + name; !is_read && file_exists(file)) {
            is_read = same_file(file, o_.tokenizer);
            break;
        }
    if (std::optional<Tokenizer> found = is_read ? Tokenizer::open(tokenizer_folder) : std::nullopt)
        return found;
    fail(
        "--tokenizer %s: neither a GGUF file, nor a folder with tokenizer.json, vocab.json and merges.txt, "
        "or tokenizer.model, nor the first of these files in a folder",
        o_.tokenizer);
}

// Opens the run's tokenizer: that of --tokenizer, else of the model's folder or file, else the one beside the
// shards. A vocabulary of 256 without a tokenizer means bytes.
inline std::optional<Tokenizer> RunInputs::open_tokenizer() {
    std::vector<std::string> folders;
    if (given_tokenizer) return given_tokenizer;
    if (gguf && has_gguf_tokenizer(gguf->file().metadata(), model)) {
        tokenizer_folder = model;  // a file, not a folder
        tokenizer_file = {gguf, &gguf->file()};
        return read_gguf_tokenizer(gguf->file().metadata(), model);
    }
    if (!resumed.empty()) folders.push_back(resumed);
    if (!parse_new_model(o_.model)) folders.push_back(model);
    for (const Dataset* d : {data.get(), val_data.get()})
        if (d && !d->is_text()) folders.push_back(::tokenizer_folder(*d));
    for (const std::string& folder : folders) {
        auto t = Tokenizer::open(folder);
        if (t && t->size() > config.vocabulary && (folder == resumed || folder == model))
            fail("%s: its tokenizer has %d tokens and its model %d", folder, t->size(), config.vocabulary);
        if (!t || t->size() > config.vocabulary) continue;
        tokenizer_folder = folder;
        return t;
    }
    if (config.vocabulary == 256) return Tokenizer::bytes();
    return std::nullopt;
}

// The tokenizer of saves, with the chat template that the run uses.
inline TokenizerSource RunInputs::saved_tokenizer() const {
    TokenizerSource source = tokenizer_source();
    source.chat_template = chat_used.own_source;
    return source;
}

// If the run was given a folder of saves, returns that folder and not the save in it, which may be removed
// later. If the folder itself is gone, the run's own saves have the tokenizer.
inline TokenizerSource RunInputs::tokenizer_source() const {
    if (tokenizer_file)
        return TokenizerSource([this](const std::string& to) {
            write_gguf_tokenizer(tokenizer_file->metadata(), tokenizer_folder, config.longest(), to);
        });
    const bool is_folder = !parse_new_model(o_.model) && std::filesystem::exists(o_.model);
    std::string folder = is_folder ? o_.model : o_.resume;
    if (!tokenizer_folder.empty() && tokenizer_folder == resumed)
        folder = o_.resume;
    else if (!tokenizer_folder.empty() && tokenizer_folder != model)
        folder = tokenizer_folder;
    if (!folder.empty() && !file_exists(folder) && !o_.out.empty()) folder = o_.out + "/latest";
    return folder;
}

// The tokens of a text that is continued as it is. `name` is its name in messages.
inline std::vector<int> RunInputs::prompt_tokens(const std::string& text, const std::string& name) const {
    if (!tokenizer)
        fail(
            "%s: no tokenizer.json, vocab.json with merges.txt, or tokenizer.model in the model's folder or "
            "beside the data to read it with",
            name);
    std::vector<int> tokens = naming(name, [&] { return encoded(text, Ends::Add); });
    if (tokens.empty()) fail("%s: its tokenizer has no token for any of \"%s\"", name, printable(text));
    return tokens;
}

// Reads the lines of --prompts: objects with a "prompt", or with "messages" of a conversation.
inline void RunInputs::open_prompts() {
    for_each_line(FileReader(o_.prompts), [&](std::span<char> line, size_t, const std::string& place) {
        const std::string where = "--prompts " + place;
        JsonPrompt read = read_prompt(line, where, chat.has_value(), unread);
        if (!chat && read.has_messages)
            fail("%s has messages, and %s: --chat-format NAME gives one", where,
                 o_.raw_prompt ? "--raw-prompt leaves out the chat format" : "the model has no chat format");
        FilePrompt p{std::move(read.line), {}};
        p.tokens = chat ? conversation_tokens(read.conversation, where) : prompt_tokens(read.text, where);
        check_room(where, p.tokens);
        prompts_held_ += read.bytes + p.tokens.size() * sizeof(int);
        prompts.push_back(std::move(p));
    });
    if (prompts.empty()) fail("--prompts %s has no prompt", o_.prompts);
}

inline const std::vector<int>& RunInputs::first_tokens() const {
    if (first_tokens_.empty()) first_tokens_ = choose_first_tokens();
    return first_tokens_;
}

inline std::vector<int> RunInputs::choose_first_tokens() const {
    if (chat) return conversation_tokens({question});
    if (!o_.prompt.empty()) return prompt_tokens(o_.prompt, "--prompt");
    if (tokenizer && tokenizer->begin_of_text() >= 0) return {tokenizer->begin_of_text()};
    if (tokenizer && tokenizer->end_of_text() >= 0) return {tokenizer->end_of_text()};
    if (config.vocabulary == 256) return {'\n'};
    for (const std::vector<int>& marks : {config.begin_of_text, config.end_of_text})
        if (!marks.empty()) return {marks[0]};
    return {0};
}

inline bool RunInputs::ends_text(int token) const {
    if (tokenizer && tokenizer_folder.empty()) return false;
    if (chat && (token == end_of_answer_ || token == tokenizer->end_of_text())) return true;
    return ends_text_by_files(token);
}

inline bool RunInputs::ends_text_by_files(int token) const {
    const std::vector<int>& stops = config.stops;
    if (stops.empty()) return tokenizer && token == tokenizer->end_of_text();
    return std::ranges::find(stops, token) != stops.end();
}

inline bool RunInputs::samples() const {
    if (o_.only_answers()) return true;
    if (o_.sample_tokens == 0 || (o_.steps == 0 && o_.prompt.empty())) return false;
    return static_cast<int>(first_tokens().size()) < sample_positions();
}

inline int RunInputs::sample_window() const {
    if (o_.chat) return o_.open.length ? sample_positions() : std::min(o_.seq_len, sample_positions());
    int64_t prompt = prompts.empty() ? static_cast<int64_t>(first_tokens().size()) : 0;
    for (const FilePrompt& p : prompts) prompt = std::max(prompt, static_cast<int64_t>(p.tokens.size()));
    const int64_t all = prompt + o_.sample_tokens;
    const int64_t trained = std::max<int64_t>(o_.seq_len, prompt + 1);
    return static_cast<int>(
        std::min<int64_t>(sample_positions(), o_.steps > 0 ? std::min(all, trained) : all));
}

inline bool RunInputs::sample_slides() const {
    return static_cast<int64_t>(first_tokens().size()) + o_.sample_tokens > sample_window();
}
