// checkpoint.h - loads, initializes, saves and resumes the model and its training state.
//
// A save can be opened as a Hugging Face model, and so can the folder of saves that contains it
// (save_folder.h):
//
//   config.json, generation_config.json, model.safetensors, the tokenizer's files;
//   to resume from: trainer_state.json (save_folder.h), trainer_state.safetensors
//
// The Layout (model.h) says which tensors there are, with their names and shapes.
//
// Copies to and from the device use the default stream: kernels on other streams must be done by then.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "llmc/adapter.h"
#include "llmc/model_names.h"
#include "llmc/model_positions.h"
#include "llmc/quant_formats.h"
#include "llmc/safetensors.h"
#include "llmc/save_folder.h"
#include "llmc/state.h"

// Host copies of device memory hold at most this many elements.
constexpr int64_t kChunkElements = int64_t{1} << 19;

// Calls f(first, count) for one chunk after another of n elements.
template <class F>
void for_each_chunk(int64_t n, F f) {
    for (int64_t first = 0; first < n; first += kChunkElements) f(first, std::min(kChunkElements, n - first));
}

// Converts a shape to the type that safetensors.h uses.
inline std::vector<int64_t> file_shape(const Shape& shape) { return {shape.dims, shape.dims + shape.count}; }

// A tensor in a save that stores part of a buffer: the model's elements from `at` on.
struct SavedTensor {
    std::string name;
    std::vector<int64_t> shape;
    int64_t at, elements;
};

// The tensors that a save has of a buffer. Weights have the names of the model's files, all else our own.
inline std::vector<SavedTensor> saved_tensors(const StateBuffer& b, const Layout& layout) {
    std::vector<SavedTensor> all;
    for (const Parameter& p : layout.parameters()) {
        if (b.part == StatePart::Weights) {
            for (const Parameter::Part& part : p.parts)
                all.push_back({part.name, file_shape(part.shape), p.offset + part.offset, part.shape.size()});
        } else {
            const Shape shape = b.span == 1 ? p.shape : Shape{ceil_div(p.shape.size(), b.span)};
            all.push_back({b.prefix + p.name, file_shape(shape), p.offset, p.shape.size()});
        }
    }
    return all;
}
inline FileType file_type(const StateBuffer& b) {
    const std::string dtype = b.dtype;
    if (dtype == dtype_name<float>()) return FileType::F32;
    if (dtype == dtype_name<bf16>()) return FileType::BF16;
    return dtype == dtype_name<int16_t>() ? FileType::I16 : FileType::U8;
}

// The buffers of one file, those with the widest elements first, so that all tensors in it are aligned.
using Buffers = std::vector<const StateBuffer*>;

template <class T>
Buffers weight_buffers(const State<T>& state) {
    return {state.find(StatePart::Weights)};
}
template <class T>
Buffers training_buffers(const State<T>& state) {
    Buffers buffers;
    for (const StateBuffer& b : state.buffers())
        if (b.prefix && b.part != StatePart::Weights) buffers.push_back(&b);
    std::ranges::stable_sort(buffers,
                             [](const StateBuffer* a, const StateBuffer* b) { return a->width > b->width; });
    return buffers;
}

// Sets the weights from element `at` on to fp32 values. When training, they are rounded as an update rounds
// its master weights, and the master gets what rounding drops.
template <class T>
void put_weights(State<T>& state, int64_t at, const std::vector<float>& values) {
    const auto put = [&](auto element, StatePart part) {
        std::vector<decltype(element(0.f))> host(values.size());
        for (size_t i = 0; i < values.size(); i++) host[i] = element(values[i]);
        state.find(part)->write(at, static_cast<int64_t>(host.size()), host.data());
    };
    const bool trained = state.options.training;
    put([=](float x) { return trained ? narrow_master<T>(x) : from_float<T>(x); }, StatePart::Weights);
    if (!state.find(StatePart::Master)) return;
    if (state.options.master == Master::Fp32) put([](float x) { return x; }, StatePart::Master);
    if (state.options.master == Master::Split)
        put([](float x) { return static_cast<int16_t>(split<16>(x).low); }, StatePart::Master);
}

// Reads generation_config.json: the tokens that stop generation, and settings that are only copied to saves.
inline void read_generation(const std::string& path, ModelConfig& config) {
    const nlohmann::json json = read_json(path);
    config.stops = ConfigReader(json, path).tokens("eos_token_id", config.vocabulary);
    config.generation = json;
}

// Reads the sizes of the model in a folder, which `option` named. Fails if it is not a folder with a
// config.json, or if that file is damaged or describes an unsupported model.
inline ModelConfig read_model_config(const std::string& folder, const char* option) {
    const std::string file = folder + "/config.json";
    if (is_adapter_folder(folder))
        fail("%s %s is an adapter: give it as --adapter, and the model that it is of as --model", option,
             folder);
    if (!file_exists(folder) && folder.find('/') == folder.npos) refuse_unsupported(option, folder);
    if (!file_exists(file))
        fail("%s %s is not a folder with config.json%s", option, folder,
             file_exists(folder)        ? ""
             : find_known_model(folder) ? "; the shape of this model is known, but only --plan needs no more"
                                        : "; models are not downloaded: give the folder of one; --model list "
                                          "prints those that a plan knows");
    ModelConfig config = parse_config(read_json(file), file);
    // The tokens that stop generation come from generation_config.json if there is one, else from
    // config.json.
    const std::string generation = folder + "/generation_config.json";
    if (file_exists(generation)) read_generation(generation, config);
    return config;
}

// Gives every weight its initial value (model.h). The padding stays zero.
template <class T>
void initialize_weights(State<T>& state, uint64_t seed) {
    const int layers = state.layout.config().layers;
    std::vector<float> values;
    for (const Parameter& p : state.layout.parameters())
        for_each_chunk(p.shape.size(), [&](int64_t first, int64_t count) {
            values.resize(static_cast<size_t>(count));
            constexpr int64_t kPiece = 1 << 14;  // elements per thread at a time
#pragma omp parallel for schedule(static)
            for (int64_t at = 0; at < count; at += kPiece)
                initial_values(p, first + at, layers, seed,
                               {values.data() + at, static_cast<size_t>(std::min(kPiece, count - at))});
            put_weights(state, p.offset + first, values);
        });
}

// Fails naming the tensor if a weight is not finite, because quantizing would hide that. `first` is the
// number of the first value in the tensor.
inline void check_finite(const std::vector<float>& values, int64_t first, const std::string& tensor,
                         const std::string& folder) {
    uint32_t bad = 0;
    for (const float value : values)
        bad |= (std::bit_cast<uint32_t>(value) & 0x7f800000u) == 0x7f800000u ? 1 : 0;
    if (!bad) return;
    const auto at = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
    fail("%s: tensor \"%s\" has %g as value %ld, and a weight must be a finite number", folder,
         printable(tensor), double{*at}, first + (at - values.begin()));
}

// Calls use(first, values) for one chunk after another of a tensor, as floats. Fails naming the folder if the
// dtype is not supported, and naming the tensor if a value is not finite.
template <class Use>
void read_chunks(const SafetensorsEntry& entry, int64_t elements, const std::string& folder, Use&& use) {
    std::vector<float> values;
    for_each_chunk(elements, [&](int64_t first, int64_t count) {
        values.resize(static_cast<size_t>(count));
        naming(folder,
               [&] { read_as_float(entry, values.data(), static_cast<size_t>(first), values.size()); });
        check_finite(values, first, entry.name, folder);
        use(first, values);
    });
}

// Loads a part of a parameter from its tensor in a folder's file.
template <class T>
void load_part(State<T>& state, const Parameter& p, const Parameter::Part& part,
               const SafetensorsEntry& entry, const std::string& folder) {
    read_chunks(entry, part.shape.size(), folder, [&](int64_t first, const std::vector<float>& values) {
        put_weights(state, p.offset + part.offset + first, values);
    });
}

// True if this part is a table of learned positions that is longer than the one in the folder's file
// (model_positions.h).
inline bool grows(const SafetensorsFolder& files, const ModelConfig& config, const Parameter& p,
                  const Parameter::Part& part) {
    if (p.field != Field::PositionEmbedding || config.grown_from == 0) return false;
    const SafetensorsEntry* entry = files.find(part.name);
    return entry && !entry->shape.empty() && entry->shape[0] == config.grown_from;
}

// Loads learned positions, stretched from the shorter table in the folder (model_positions.h).
template <class T>
void load_grown(State<T>& state, const Parameter& p, const SafetensorsEntry& entry,
                const std::string& folder) {
    const int64_t columns = p.shape.dims[1], rows = p.shape.dims[0];
    std::vector<float> trained;
    read_chunks(entry, state.layout.config().grown_from * columns, folder,
                [&](int64_t, const std::vector<float>& values) {
                    trained.insert(trained.end(), values.begin(), values.end());
                });
    for (int64_t j = 0; j < rows; j++)
        put_weights(state, p.offset + j * columns, stretched_row(trained, columns, j, rows));
}

// Fails if the files have a tied head that differs from the token embedding.
inline void check_tied_head(const SafetensorsFolder& files, const Parameter::Part& embedding,
                            const std::string& folder) {
    const SafetensorsEntry *head = files.find("lm_head.weight"), *tokens = files.find(embedding.name);
    if (!head || !tokens) return;
    const SafetensorsEntry& same = files.get("lm_head.weight", file_shape(embedding.shape));
    std::vector<float> other;
    read_chunks(
        *tokens, embedding.shape.size(), folder, [&](int64_t first, const std::vector<float>& values) {
            other.resize(values.size());
            read_as_float(same, other.data(), static_cast<size_t>(first), other.size());
            if (other != values)
                fail("%s: lm_head.weight is not %s, to which 'tie_word_embeddings' ties it: is that false?",
                     folder, embedding.name);
        });
}

// The tensor of a field's part in a folder's files. A tied matrix may have either of its two names there.
inline const SafetensorsEntry& find_part(const SafetensorsFolder& files, const ModelConfig& config,
                                         Field field, const Parameter::Part& part) {
    const bool is_head = config.tied && field == Field::TokenEmbedding;
    if (is_head) check_tied_head(files, part, files.folder());
    const bool as_head = is_head && !files.find(part.name) && files.find("lm_head.weight");
    return files.get(as_head ? "lm_head.weight" : part.name, file_shape(part.shape));
}

// True for tensors that may be ignored although no table lists them: buffers that older versions of
// `transformers` saved, and a tied head.
inline bool is_harmless(const std::string& name) {
    for (const char* end : {"rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", "lm_head.weight"})
        if (name.ends_with(end)) return true;
    return false;
}

// Loads every weight from a folder's safetensors: F32, F16 or BF16, names with or without the family's
// prefix. Other tensors are ignored, as `transformers` does, with a message if they might have mattered.
// load_more(files, used) loads those of the model's tensors that are not in this State, and adds them to
// `used`. Fails naming a tensor that is missing, has another shape or dtype, or is a tied head that differs
// from the embedding. The padding stays zero.
using LoadMore = std::function<void(const SafetensorsFolder& files, std::set<const SafetensorsEntry*>& used)>;
template <class T>
void load_weights(
    State<T>& state, const std::string& folder, const LoadMore& load_more = [](auto&&...) {}) {
    const ModelConfig& config = state.layout.config();
    const SafetensorsFolder files(folder, config.family->prefix);
    std::set<const SafetensorsEntry*> used;
    for (const Parameter& p : state.layout.parameters())
        for (const Parameter::Part& part : p.parts) {
            if (grows(files, config, p, part)) {
                const SafetensorsEntry& entry = files.get(part.name, {config.grown_from, config.channels});
                used.insert(&entry);
                load_grown(state, p, entry, folder);
                continue;
            }
            const SafetensorsEntry& entry = find_part(files, config, p.field, part);
            used.insert(&entry);
            load_part(state, p, part, entry, folder);
        }
    load_more(files, used);
    if (state.layout.blocks() < config.layers)  // what other stages load is not left out
        for (const Layout whole(config); const Parameter& p : whole.parameters())
            for (const Parameter::Part& part : p.parts) used.insert(files.find(part.name));
    std::vector<std::string> others;
    for (const auto& [name, entry] : files.entries())
        if (!used.contains(entry) && !is_harmless(name)) others.push_back(name);
    if (!others.empty())
        print(stderr, "%s: \"%s\"%s: not of a %s of this config.json, and left out\n", folder,
              printable(others[0]),
              others.size() > 1 ? format(" and %zu more tensors", others.size() - 1) : "",
              config.family->name);
}

// Loads an adapter's weights from its folder. read_adapter() has checked its tensors.
template <class T>
void load_adapter(State<T>& state, const std::string& folder) {
    const SafetensorsFile file(folder + "/" + kAdapterWeightsFile);
    for (const Parameter& p : state.layout.parameters())
        for (const Parameter::Part& part : p.parts)
            load_part(state, p, part, file.get(part.name, file_shape(part.shape)), file.path());
}

// Calls use(first, count, bytes) for one chunk after another of a tensor: elements of the model, and the
// bytes that store them.
template <class Use>
void for_each_chunk(const StateBuffer& b, const SavedTensor& t, Use&& use) {
    for_each_chunk(t.elements,
                   [&](int64_t first, int64_t count) { use(t.at + first, count, b.bytes_of(count)); });
}

// Reads what stores `count` elements of the model, from element `at` on, from a buffer to the host. A run on
// several devices gathers what the ranks have (ranks_exchange.h).
using ReadBuffer = std::function<void(const StateBuffer& b, int64_t at, int64_t count, void* host)>;
inline const ReadBuffer kReadBuffer = [](const StateBuffer& b, int64_t at, int64_t count, void* host) {
    b.read(at, count, host);
};

// Calls use(bytes, count) with the bytes of one chunk after another of the buffers' tensors.
template <class Use>
void read_all(const Layout& layout, const Buffers& buffers, const ReadBuffer& read, Use&& use) {
    std::vector<char> host;
    for (const StateBuffer* b : buffers)
        for (const SavedTensor& t : saved_tensors(*b, layout))
            for_each_chunk(*b, t, [&](int64_t first, int64_t count, size_t bytes) {
                host.resize(bytes);
                read(*b, first, count, host.data());
                use(host.data(), bytes);
            });
}

// Writes the buffers' tensors as they are in memory, without their padding.
inline void write_tensors(const std::string& path, const Layout& layout, const Buffers& buffers,
                          const ReadBuffer& read = kReadBuffer) {
    SafetensorsWriter file(path);
    for (const StateBuffer* b : buffers)
        for (const SavedTensor& t : saved_tensors(*b, layout)) file.declare(t.name, file_type(*b), t.shape);
    read_all(layout, buffers, read, [&](const char* bytes, size_t count) { file.append(bytes, count); });
    file.finish();
}

// Reads what write_tensors() wrote, bit for bit. If the file is of another model, or a float in it is not
// finite, fails naming the first such tensor.
inline void read_tensors(const std::string& path, const Layout& layout, const Buffers& buffers) {
    const SafetensorsFile file(path);
    std::set<std::string> names;
    std::vector<char> host;
    for (const StateBuffer* b : buffers) {
        const std::string wanted = file_type_info(file_type(*b)).name;
        const WeightFormat* const floats = stored_floats(wanted);
        for (const SavedTensor& t : saved_tensors(*b, layout)) {
            const SafetensorsEntry& entry = file.get(t.name, t.shape);
            if (entry.dtype != wanted)
                fail("%s: tensor \"%s\" has dtype %s where %s is needed", path, entry.name, entry.dtype,
                     wanted);
            size_t start = 0;
            for_each_chunk(*b, t, [&](int64_t first, int64_t count, size_t bytes) {
                host.resize(bytes);
                entry.read(start, bytes, host.data());
                if (floats)
                    check_blocks_finite(*floats, reinterpret_cast<unsigned char*>(host.data()), bytes,
                                        entry.name, path, static_cast<int64_t>(start / b->width));
                b->write(first, count, host.data());
                start += bytes;
            });
            names.insert(entry.name);
        }
    }
    for (const SafetensorsEntry& entry : file.entries())
        if (!names.contains(entry.name))
            fail("%s: tensor \"%s\" is not in this model", path, printable(entry.name));
}

// The file of a save's weights.
inline const char* weights_file(const AdapterConfig& adapter) {
    return adapter ? kAdapterWeightsFile : "model.safetensors";
}

// The name of a type in the files of `transformers`.
template <class T>
constexpr const char* kTorchName = std::is_same_v<T, float> ? "float32" : "bfloat16";

// Writes generation_config.json: the settings that the model came with, and the tokens that stop generation
// now.
inline void write_generation(const std::string& folder, const ModelConfig& model) {
    nlohmann::json json = model.generation.is_object() ? model.generation : nlohmann::json::object();
    json.erase("_from_model_config");  // it makes transformers prefer the tokens in config.json
    if (!json.contains("bos_token_id")) json["bos_token_id"] = tokens_json(model.begin_of_text);
    json["eos_token_id"] = tokens_json(model.stops);
    if (!json.contains("pad_token_id") && !model.padding.empty())
        json["pad_token_id"] = tokens_json(model.padding);
    write_json(folder + "/generation_config.json", json);
}

// Writes a model's settings and tokenizer into the folder where its weights, of type T, will be.
// `quantization` is the entry of config.json about matrices of other types; null if there are none.
template <class T>
void write_settings(const std::string& folder, const ModelConfig& model, const TokenizerSource& tokenizer,
                    const nlohmann::json& quantization = {}) {
    auto config = config_json(model, kTorchName<T>);
    if (!quantization.is_null()) config["quantization_config"] = quantization;
    write_json(folder + "/config.json", config);
    write_generation(folder, model);
    write_tokenizer(tokenizer, folder);
}

// Writes a model's files into a folder. Those of an adapter are as PEFT writes them, with the tokenizer and
// with the tokens that stop generation, to which the training may have added.
template <class T>
void write_model(const std::string& folder, const State<T>& state, const TokenizerSource& tokenizer,
                 const AdapterConfig& adapter, const ReadBuffer& read = kReadBuffer) {
    if (adapter) {
        write_json(folder + "/" + kAdapterConfigFile, adapter.json);
        if (adapter.base) write_json(folder + "/" + kAdapterBaseFile, adapter.base->json());
        write_generation(folder, state.layout.config());
        write_tokenizer(tokenizer, folder);
    } else {
        write_settings<T>(folder, state.layout.config(), tokenizer);
    }
    write_tensors(folder + "/" + weights_file(adapter), state.layout, weight_buffers(state), read);
}

// Writes all files of a save into a folder.
template <class T>
void write_save(const std::string& folder, const State<T>& state, const Progress& progress,
                const TokenizerSource& tokenizer, bool with_training_state, const AdapterConfig& adapter,
                const ReadBuffer& read) {
    write_model(folder, state, tokenizer, adapter, read);
    if (!with_training_state) return;
    write_tensors(folder + "/trainer_state.safetensors", state.layout, training_buffers(state), read);
    Progress all = progress;
    all.precision = dtype_name<T>();
    all.formats = state.options.text();
    write_progress(folder, all);
}

// Calls write(folder) to write files into a new folder, and syncs it. A folder of an earlier try is removed,
// and so is this one if it fails. Then calls give_name(), after which the folder has another name.
template <class Write, class GiveName>
void write_new_folder(const std::string& folder, Write&& write, GiveName&& give_name) {
    remove_folder(folder);
    check_call(mkdir(folder.c_str(), 0777) == 0, folder, "make the folder");
    try {
        write(folder);
        sync_directory(folder);
        give_name();
    } catch (...) {
        std::error_code ignored;
        std::filesystem::remove_all(folder, ignored);
        throw;
    }
}

// Saves the weights (or the adapter's) as step-N in a folder of saves, with the state to resume from if
// with_training_state. Then makes the folder show this save, or the last good one if this one is not good,
// and removes all but the newest saves and that one. A save of the same step is replaced. Fails naming the
// file if something cannot be written; earlier saves are then unchanged. The disk must have space for one
// save more than are kept, and for the last good one.
template <class T>
void save_checkpoint(const SaveFolder& folder, const State<T>& state, const Progress& progress,
                     const TokenizerSource& tokenizer, bool with_training_state,
                     const AdapterConfig& adapter = {}, const ReadBuffer& read = kReadBuffer) {
    assert(progress.step >= 0 && folder.keep >= 0);
    const std::string& out = folder.path;
    make_folders(out);
    const std::string name = step_name(progress.step), path = out + "/" + name, temporary = path + ".tmp";
    // A resumed run's tokenizer may be in a save that has been removed since. The latest save has it too.
    const bool removed = !tokenizer.folder.empty() && !file_exists(tokenizer.folder);
    const TokenizerSource& from = removed ? TokenizerSource(out + "/latest") : tokenizer;
    write_new_folder(
        temporary,
        [&](const std::string& to) {
            write_save(to, state, progress, from, with_training_state, adapter, read);
        },
        [&] { replace_folder(temporary, path); });
    publish(out, folder.shown(progress.step));
    remove_old_saves(folder, progress.step);
}

// Calls write(path) to write the files of a folder that must not exist yet. The folder then appears complete,
// or not at all.
template <class Write>
void write_folder(const std::string& path, Write&& write) {
    const std::string folder = without_last_slashes(path);
    make_folders(folder_above(folder));
    const std::string temporary = unfinished_folder(folder);
    write_new_folder(temporary, write, [&] { replace_file(temporary, folder); });
}

// After an output has failed with the message `failed`: saves what was trained, by write(path), in a new
// folder, `wanted` or that name with a number. Returns its name. If that fails too, fails with both reasons;
// `what` says what was to be saved.
template <class Write>
std::string rescue(const std::string& wanted, const std::string& failed, const char* what, Write&& write) {
    std::string folder = wanted;
    for (int i = 2; file_exists(folder) || file_exists(unfinished_folder(folder)); i++)
        folder = format("%s-%d", wanted, i);
    try {
        write_folder(folder, write);
    } catch (const UserError& error) {
        fail("%s; nor can %s be saved: %s", failed, what, error.what());
    }
    return folder;
}

// The bytes of the tensors in one file, with an estimate for the name, type and shape of each.
inline size_t file_bytes(const Buffers& buffers, const Layout& layout) {
    constexpr size_t kHeader = 128;  // per tensor
    size_t bytes = 0;
    for (const StateBuffer* b : buffers)
        for (const SavedTensor& t : saved_tensors(*b, layout)) bytes += b->bytes_of(t.elements) + kHeader;
    return bytes;
}

// The disk space that a save takes.
template <class T>
WrittenFiles bytes_of_save(const State<T>& state, bool with_training_state) {
    return {file_bytes(weight_buffers(state), state.layout),
            with_training_state ? file_bytes(training_buffers(state), state.layout) : 0};
}

// Loads everything from a save with training state, bit for bit; in a folder of saves, from the save that it
// shows. Fails if it was saved with another precision or other formats, or naming the first tensor that
// another model has differently.
template <class T>
void load_training_state(State<T>& state, const std::string& folder, const AdapterConfig& adapter = {}) {
    const std::string save = resolve_save(folder), now = state.options.text();
    Progress saved = read_progress(save);
    if (saved.formats.empty()) saved.formats = StateOptions().text();
    if (saved.precision != dtype_name<T>())
        fail("%s was saved by a %s build, this one is %s: make PRECISION=%s", save, saved.precision,
             dtype_name<T>(), saved.precision);
    if (saved.formats != now)
        fail("%s: its state was kept with %s, this run has %s; a resumed run keeps the save's formats", save,
             printable(saved.formats), now);
    read_tensors(save + "/" + weights_file(adapter), state.layout, weight_buffers(state));
    read_tensors(save + "/trainer_state.safetensors", state.layout, training_buffers(state));
    if (adapter) return;
    const std::string config = save + "/config.json";  // the number of heads is not visible in any shape
    if (const ModelConfig model = parse_config(read_json(config), config); !(model == state.layout.config()))
        fail("%s has %d heads where this model has %d", config, model.heads, state.layout.config().heads);
}
