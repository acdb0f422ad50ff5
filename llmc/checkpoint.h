// checkpoint.h - the model and the training on disk: loaded, begun, saved and resumed.
//
// A folder OUT of saves opens as a Hugging Face model, and so does each save in it:
//
//   OUT/step-00000200/       config.json, generation_config.json, model.safetensors, the tokenizer's files;
//                            to resume from: trainer_state.json, trainer_state.safetensors
//   OUT/latest            -> step-00000200
//   OUT/model.safetensors -> latest/model.safetensors, and the same for each other file
//   OUT/.lock                while a run saves there (outputs.h)
//
// A save is written as step-*.tmp, synced, and renamed; then `latest` is renamed over, which switches every
// file of OUT at once. A process killed or a machine stopped at any moment leaves the last save whole, and
// OUT pointing at it. Which tensors there are, and their names and shapes, the Layout says (model.h).
//
// Copies to and from the device use the default stream: kernels on other streams must be done by then.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <sys/statvfs.h>

#include "llmc/file.h"
#include "llmc/file_lock.h"
#include "llmc/safetensors.h"
#include "llmc/state.h"

// What a run needs to go on, beside the tensors.
struct Progress {
    int64_t step = 0;       // optimizer steps done
    int64_t sequences = 0;  // sequences of the training data read
    std::string precision;  // of the build that saved: "fp32" or "bf16"
    bool evaluated = true;  // the validation and the sample that are due at this step were made
    nlohmann::json options = nlohmann::json::object();  // the run's, which hold for a resumed run too
    std::string formats = {};       // StateOptions::text() of what was saved; save_checkpoint() fills it in
    std::set<int64_t> others = {};  // another run's saves in the same folder, by step
    std::string directory = {};     // from where the options' relative names count; empty in older saves
    std::map<std::string, std::string> data = {};  // data_facts() of what each option named (resume.h)
};

// Host copies of device memory hold at most this many elements.
constexpr int64_t kChunkElements = int64_t{1} << 19;

// Calls f(first, count) for one chunk after another of n elements.
template <class F>
void for_each_chunk(int64_t n, F f) {
    for (int64_t first = 0; first < n; first += kChunkElements) f(first, std::min(kChunkElements, n - first));
}

// A shape as safetensors.h wants it.
inline std::vector<int64_t> file_shape(const Shape& shape) { return {shape.dims, shape.dims + shape.count}; }

// A tensor of a buffer as a save has it: so many elements of the buffer from `at` on.
struct SavedTensor {
    std::string name;
    std::vector<int64_t> shape;
    char* at;
    int64_t elements;
};

// What a save has of a buffer: the weights under the names of the model's files, all else under our own.
inline std::vector<SavedTensor> saved_tensors(const StateBuffer& b, const Layout& layout) {
    std::vector<SavedTensor> all;
    for (const Parameter& p : layout.parameters()) {
        if (b.part == StatePart::Weights) {
            for (const Parameter::Part& part : p.parts)
                all.push_back(
                    {part.name, file_shape(part.shape), b.at(p.offset + part.offset), part.shape.size()});
        } else {
            const int64_t elements = ceil_div(p.shape.size(), b.span);
            const Shape shape = b.span == 1 ? p.shape : Shape{elements};
            all.push_back({b.prefix + p.name, file_shape(shape), b.at(p.offset), elements});
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

// The buffers that one file holds, the widest elements first, so that all tensors in it are aligned.
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
    std::stable_sort(buffers.begin(), buffers.end(),
                     [](const StateBuffer* a, const StateBuffer* b) { return a->width > b->width; });
    return buffers;
}

// Sets the weights from element `at` on to fp32 values: rounded in the weights as an update rounds what its
// master holds, and what rounding drops in the master.
template <class T>
void put_weights(State<T>& state, int64_t at, const std::vector<float>& values) {
    const auto put = [&](auto element, void* device) {
        std::vector<decltype(element(0.f))> host(values.size());
        for (size_t i = 0; i < values.size(); i++) host[i] = element(values[i]);
        copy_to_device(device, host.data(), host.size() * sizeof host[0], {});
    };
    put([](float x) { return narrow_master<T>(x); }, state.template data<void>(StatePart::Weights, at));
    void* master = state.template data<void>(StatePart::Master, at);
    if (master && state.options.master == Master::Fp32) put([](float x) { return x; }, master);
    if (master && state.options.master == Master::Split)
        put([](float x) { return static_cast<int16_t>(split<16>(x).low); }, master);
}

// The sizes of the model in a folder, which `option` named. Fails when there is no folder or no config.json
// in it, or when that is damaged or describes a model that is not computed here.
inline ModelConfig read_model_config(const std::string& folder, const char* option) {
    const std::string file = folder + "/config.json";
    if (!file_exists(file)) fail("%s %s: is not a folder with config.json", option, folder.c_str());
    ModelConfig config = parse_config(read_json(file), file);
    // What generating stops at is that file's where there is one, and else the config's.
    const std::string generation = folder + "/generation_config.json";
    if (file_exists(generation)) {
        const nlohmann::json json = read_json(generation);
        config.stops = ConfigReader(json, generation).tokens("eos_token_id", config.vocabulary);
    }
    return config;
}

// Gives every weight its initial value (model.h). The padding stays as it is: zero.
template <class T>
void initialize_weights(State<T>& state, uint64_t seed) {
    const int layers = state.layout.config().layers;
    std::vector<float> values;
    for (const Parameter& p : state.layout.parameters())
        for_each_chunk(p.shape.size(), [&](int64_t first, int64_t count) {
            values.resize(static_cast<size_t>(count));
            constexpr int64_t kPiece = 1 << 14;  // of a thread
#pragma omp parallel for schedule(static)
            for (int64_t at = 0; at < count; at += kPiece)
                initial_values(p, first + at, layers, seed,
                               {values.data() + at, static_cast<size_t>(std::min(kPiece, count - at))});
            put_weights(state, p.offset + first, values);
        });
}

// Loads every weight from a folder's safetensors: F32, F16 or BF16, names with or without the family's
// prefix. Other tensors in there are left alone, the lm_head.weight of a tied head among them. Fails naming
// the tensor that is missing, or has another shape or dtype. The padding stays as it is: zero.
template <class T>
void load_weights(State<T>& state, const std::string& folder) {
    const SafetensorsFolder files(folder, state.layout.config().family->prefix);
    std::vector<float> values;
    for (const Parameter& p : state.layout.parameters()) {
        for (const Parameter::Part& part : p.parts) {
            const SafetensorsEntry& entry = files.get(part.name, file_shape(part.shape));
            for_each_chunk(part.shape.size(), [&](int64_t first, int64_t count) {
                values.resize(static_cast<size_t>(count));
                try {
                    read_as_float(entry, values.data(), static_cast<size_t>(first), values.size());
                } catch (const UserError& e) {
                    fail("%s: %s", folder.c_str(), e.what());
                }
                put_weights(state, p.offset + part.offset + first, values);
            });
        }
    }
}

// Fails naming the file when a call of the system did.
inline void check_call(bool good, const std::string& path, const char* action) {
    if (!good) fail("%s: cannot %s: %s", path.c_str(), action, std::strerror(errno));
}

inline std::string folder_above(const std::string& path) {
    const std::string above = std::filesystem::path(path).parent_path().string();
    return above.empty() ? "." : above;
}

// Makes a folder and those above it that are missing, durably.
inline void make_folders(const std::string& path) {
    if (file_exists(path)) return;
    make_folders(folder_above(path));
    check_call(mkdir(path.c_str(), 0777) == 0 || errno == EEXIST, path, "make the folder");
    sync_directory(folder_above(path));
}

// Removes a folder with all in it, if it is there.
inline void remove_folder(const std::string& path) {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) fail("%s: cannot remove: %s", path.c_str(), error.message().c_str());
}

// Gives a finished folder its final name, durably. One that had the name trades places with it in one step,
// so that no moment is without. Where the file system cannot do that (NFS), it is `path`.old for a moment.
inline void replace_folder(const std::string& finished, const std::string& path) {
    if (renameat2(AT_FDCWD, finished.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0)
        return sync_directory(folder_above(path));
    if (errno != ENOENT && file_exists(path)) {
        remove_folder(path + ".old");
        check_call(std::rename(path.c_str(), (path + ".old").c_str()) == 0, path, "rename");
    }
    replace_file(finished, path);
}

// Makes `path` a symbolic link, in place of the one it may have been, durably.
inline void replace_link(const std::string& target, const std::string& path) {
    const std::string temporary = path + ".tmp";
    check_call(unlink(temporary.c_str()) == 0 || errno == ENOENT, temporary, "remove");
    check_call(symlink(target.c_str(), temporary.c_str()) == 0, temporary, "make the link");
    replace_file(temporary, path);
}

inline void write_text(const std::string& path, const std::string& text) {
    FileWriter file(path);
    file.write(text);
    file.finish();
}
inline void write_json(const std::string& path, const nlohmann::json& json) {
    write_text(path, json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

// A text for a file of JSON. Of bytes that are not UTF-8, as JSON's texts must be, {"percent": "caf%E9"}.
inline nlohmann::json escape_bytes(const nlohmann::json& text) {
    try {
        static_cast<void>(text.dump());
        return text;
    } catch (const nlohmann::json::type_error&) {
        std::string escaped;
        for (const char c : text.get<std::string>()) {
            const bool plain = c > 0x20 && c < 0x7f && c != '%';
            escaped += plain ? std::string(1, c) : format("%%%02X", static_cast<unsigned>(c) & 0xff);
        }
        return {{"percent", escaped}};
    }
}
// And back. What escape_bytes() has not written stays what it is.
inline nlohmann::json unescape_bytes(const nlohmann::json& json) {
    if (!json.is_object() || json.size() != 1 || !json.contains("percent") || !json["percent"].is_string())
        return json;
    std::string bytes, escaped = json["percent"];
    for (size_t i = 0; i < escaped.size(); i++) {
        unsigned byte = 0;
        if (escaped[i] != '%')
            bytes += escaped[i];
        else if (std::sscanf(escaped.c_str() + i, "%%%2x", &byte) == 1)
            bytes += static_cast<char>(byte), i += 2;
        else
            return json;
    }
    return bytes;
}

// The same for options: lists of texts, by name.
inline nlohmann::json convert_options(nlohmann::json options,
                                      nlohmann::json (*convert)(const nlohmann::json&)) {
    for (nlohmann::json& values : options)
        if (values.is_array())
            for (nlohmann::json& value : values) value = convert(value);
    return options;
}

inline constexpr const char* kTokenizerFiles[] = {
    "tokenizer.json",        "vocab.json",              "merges.txt",        "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"};

// "step-00000123", and back; -1 if a name is none.
inline std::string step_name(int64_t step) { return format("step-%08lld", static_cast<long long>(step)); }
inline int64_t step_of(const std::string& name) {
    long long step = -1;
    return std::sscanf(name.c_str(), "step-%18lld", &step) == 1 && step_name(step) == name ? step : -1;
}

// Writes the buffers' tensors, without their padding, as they are in memory.
inline void write_tensors(const std::string& path, const Layout& layout, const Buffers& buffers) {
    SafetensorsWriter file(path);
    for (const StateBuffer* b : buffers)
        for (const SavedTensor& t : saved_tensors(*b, layout)) file.declare(t.name, file_type(*b), t.shape);
    std::vector<char> host;
    for (const StateBuffer* b : buffers) {
        for (const SavedTensor& t : saved_tensors(*b, layout)) {
            for_each_chunk(t.elements, [&](int64_t first, int64_t count) {
                host.resize(static_cast<size_t>(count) * b->width);
                copy_to_host(host.data(), t.at + static_cast<size_t>(first) * b->width, host.size(), {});
                file.append(host.data(), host.size());
            });
        }
    }
    file.finish();
}

// Reads what write_tensors() wrote, bit for bit. Fails naming the first tensor that a file of another model
// has otherwise.
inline void read_tensors(const std::string& path, const Layout& layout, const Buffers& buffers) {
    const SafetensorsFile file(path);
    std::set<std::string> names;
    std::vector<char> host;
    for (const StateBuffer* b : buffers) {
        const std::string wanted = file_type_info(file_type(*b)).name;
        for (const SavedTensor& t : saved_tensors(*b, layout)) {
            const SafetensorsEntry& entry = file.get(t.name, t.shape);
            if (entry.dtype != wanted)
                fail("%s: tensor \"%s\" has dtype %s where %s is needed", path.c_str(), entry.name.c_str(),
                     entry.dtype.c_str(), wanted.c_str());
            for_each_chunk(t.elements, [&](int64_t first, int64_t count) {
                const size_t start = static_cast<size_t>(first) * b->width;
                host.resize(static_cast<size_t>(count) * b->width);
                entry.read(start, host.size(), host.data());
                copy_to_device(t.at + start, host.data(), host.size(), {});
            });
            names.insert(entry.name);
        }
    }
    for (const SafetensorsEntry& entry : file.entries())
        if (!names.contains(entry.name))
            fail("%s: tensor \"%s\" is not in this model", path.c_str(), printable(entry.name).c_str());
}

// The names of what is in a folder.
inline std::vector<std::string> list_folder(const std::string& path) {
    std::vector<std::string> names;
    std::error_code error;
    for (std::filesystem::directory_iterator at(path, error), end; !error && at != end; at.increment(error))
        names.push_back(at->path().filename().string());
    if (error) fail("%s: cannot list: %s", path.c_str(), error.message().c_str());
    return names;
}

// Where a symbolic link leads, or "" if it is none.
inline std::string link_target(const std::string& path) {
    std::error_code none;
    return std::filesystem::read_symlink(path, none).string();
}

// The save that a folder of saves shows now; any other folder is meant itself. Files that belong together are
// to be read from there: `latest` may switch between them.
inline std::string resolve_save(const std::string& folder) {
    const std::string latest = link_target(folder + "/latest");
    return latest.empty() ? folder : (std::filesystem::path(folder) / latest).string();
}

// A save that is being read. As long as it is held, the run that made it does not remove it
// (remove_old_saves()).
class HeldSave {
  public:
    // Of a folder of saves, holds the one that it shows; any other folder is meant itself. Where there is
    // none, whoever reads it says so.
    explicit HeldSave(const std::string& folder) {
        for (int tries = 0; tries < 100; tries++) {
            path_ = resolve_save(folder);
            lock_.emplace(path_, O_RDONLY | O_DIRECTORY, FileLock::Shared);
            if (lock_->good()) return;
            if (lock_->outcome() == FileLock::Busy)
                usleep(1000);  // it is just being removed
            else if (resolve_save(folder) == path_)
                return;
        }
    }
    const std::string& path() const { return path_; }
    void let_go() { lock_.reset(); }

  private:
    std::string path_;
    std::optional<FileLock> lock_;
};

// What trainer_state.json holds, in a save or a folder of saves. Fails when there is none or it is damaged.
inline Progress read_progress(const std::string& folder) {
    const std::string file = resolve_save(folder) + "/trainer_state.json";
    if (!file_exists(file)) fail("%s: holds no training to resume: no trainer_state.json", folder.c_str());
    const nlohmann::json json = read_json(file);
    const auto get = [&](const char* name, auto good, const char* wanted) -> const nlohmann::json& {
        if (!json.is_object() || !json.contains(name)) fail("%s: \"%s\" is missing", file.c_str(), name);
        if (!good(json[name])) fail("%s: \"%s\" is not %s", file.c_str(), name, wanted);
        return json[name];
    };
    const auto is_count = [](const nlohmann::json& j) {
        return j.is_number_unsigned() && j.get<uint64_t>() <= INT64_MAX;
    };
    const auto is_precision = [](const nlohmann::json& j) { return j == "fp32" || j == "bf16"; };
    const auto is_object = [](const nlohmann::json& j) { return j.is_object(); };
    const auto is_text = [](const nlohmann::json& j) { return j.is_string(); };
    const auto are_texts = [&](const nlohmann::json& j) {
        return j.is_object() && std::all_of(j.begin(), j.end(), is_text);
    };
    const auto is_name = [&](const nlohmann::json& j) { return unescape_bytes(j).is_string(); };
    const auto is_truth = [](const nlohmann::json& j) { return j.is_boolean(); };
    const auto are_counts = [&](const nlohmann::json& j) {
        return j.is_array() && std::all_of(j.begin(), j.end(), is_count);
    };
    Progress p = {.step = get("step", is_count, "a count").get<int64_t>(),
                  .sequences = get("sequences", is_count, "a count").get<int64_t>(),
                  .precision = get("precision", is_precision, "\"fp32\" or \"bf16\"").get<std::string>(),
                  .options = convert_options(get("options", is_object, "an object"), unescape_bytes),
                  .formats = StateOptions().text()};
    if (json.contains("evaluated")) p.evaluated = get("evaluated", is_truth, "true or false").get<bool>();
    if (json.contains("formats")) p.formats = get("formats", is_text, "a text").get<std::string>();
    if (json.contains("others")) p.others = get("others", are_counts, "counts").get<std::set<int64_t>>();
    if (json.contains("directory")) p.directory = unescape_bytes(get("directory", is_name, "a text"));
    if (json.contains("data"))
        p.data = get("data", are_texts, "texts by name").get<std::map<std::string, std::string>>();
    return p;
}

// Makes OUT show the save `name`. Links for new files come first, leading nowhere until `latest` switches, so
// that all appear at once; links of files that this save lacks go last.
inline void publish(const std::string& out, const std::string& name) {
    for (const std::string& file : list_folder(out + "/" + name)) {
        const std::string link = out + "/" + file;
        if (link_target(link).empty() && !file_exists(link)) replace_link("latest/" + file, link);
    }
    replace_link(name, out + "/latest");
    for (const std::string& file : list_folder(out)) {
        const std::string link = out + "/" + file;
        if (link_target(link) == "latest/" + file && !file_exists(link))
            check_call(unlink(link.c_str()) == 0, link, "remove");
    }
}

// Where a run saves: a folder, how many saves it keeps there (0: all), and the steps whose saves it does not
// remove, as they are another run's.
struct SaveFolder {
    std::string path;
    int keep = 0;
    std::set<int64_t> others = {};
};

// The folder OUT for a run that goes on from the save `resumed`, or begins if that is empty. What is there
// now is its own only when it goes on from there, and then what that run has found there still is not.
inline SaveFolder open_save_folder(const std::string& out, int keep, const std::string& resumed) {
    SaveFolder folder = {out, keep};
    std::error_code none;
    const auto canonical = [&](const std::string& path) {
        return std::filesystem::weakly_canonical(path, none);
    };
    if (!file_exists(out)) return folder;
    const bool goes_on = !resumed.empty() && canonical(resumed).parent_path() == canonical(out);
    if (goes_on && file_exists(resumed + "/trainer_state.json")) {
        folder.others = read_progress(resumed).others;
    } else if (!goes_on) {
        for (const std::string& name : list_folder(out))
            if (step_of(name) >= 0) folder.others.insert(step_of(name));
    }
    return folder;
}

// Removes the saves that were not finished. Only for a run that holds OUT alone.
inline void remove_unfinished(const std::string& out) {
    for (const std::string& name : list_folder(out))
        if (name.ends_with(".tmp") && step_of(name.substr(0, name.size() - 4)) >= 0)
            remove_folder(out + "/" + name);
}

// Removes what killed saves left behind and all but `keep` of the run's saves: that of `step`, and of the
// others the latest before it, then the latest after it, which a run resumed from an earlier step has left
// behind. One that somebody reads (HeldSave) stays until the next time.
inline void remove_old_saves(const SaveFolder& folder, int64_t step) {
    const std::string& out = folder.path;
    std::vector<std::pair<bool, int64_t>> saves;  // (not after `step`, step)
    for (const std::string& name : list_folder(out)) {
        const int64_t s = step_of(name);
        if (s >= 0 && !folder.others.contains(s)) saves.emplace_back(s <= step, s);
        const bool leftover = name.ends_with(".tmp") || name.ends_with(".old");
        if (leftover && step_of(name.substr(0, name.size() - 4)) >= 0) remove_folder(out + "/" + name);
    }
    std::sort(saves.rbegin(), saves.rend());
    for (size_t i = static_cast<size_t>(folder.keep); folder.keep > 0 && i < saves.size(); i++) {
        // Renamed first: what has the name of a save is always whole.
        const std::string path = out + "/" + step_name(saves[i].second);
        const FileLock lock(path, O_RDONLY | O_DIRECTORY, FileLock::Exclusive);
        if (lock.outcome() == FileLock::Busy) continue;
        check_call(std::rename(path.c_str(), (path + ".tmp").c_str()) == 0, path, "rename");
        remove_folder(path + ".tmp");
    }
}

// Writes and syncs all files of a save into a new folder.
template <class T>
void write_save(const std::string& folder, const State<T>& state, const Progress& progress,
                const std::string& tokenizer_folder, bool with_training_state) {
    check_call(mkdir(folder.c_str(), 0777) == 0, folder, "make the folder");
    const ModelConfig& model = state.layout.config();
    const auto config = config_json(model, std::is_same_v<T, float> ? "float32" : "bfloat16");
    write_json(folder + "/config.json", config);
    write_json(folder + "/generation_config.json",
               {{"bos_token_id", config["bos_token_id"]}, {"eos_token_id", tokens_json(model.stops)}});
    for (const std::string name : kTokenizerFiles) {
        if (tokenizer_folder.empty() || !file_exists(tokenizer_folder + "/" + name)) continue;
        write_text(folder + "/" + name, read_text(tokenizer_folder + "/" + name));
    }
    write_tensors(folder + "/model.safetensors", state.layout, weight_buffers(state));
    if (with_training_state) {
        write_tensors(folder + "/trainer_state.safetensors", state.layout, training_buffers(state));
        write_json(folder + "/trainer_state.json",
                   {{"step", progress.step},
                    {"sequences", progress.sequences},
                    {"evaluated", progress.evaluated},
                    {"others", progress.others},
                    {"precision", dtype_name<T>()},
                    {"formats", state.options.text()},
                    {"options", convert_options(progress.options, escape_bytes)},
                    {"directory", escape_bytes(progress.directory)},
                    {"data", progress.data}});
    }
    sync_directory(folder);
}

// Saves the weights, and with_training_state what resuming takes, as step-N in a folder, makes the folder
// show it, and removes all but the newest saves that it keeps. A save of the same step is replaced. The
// tokenizer's files come from a folder, or from nowhere if that is empty. Fails naming the file when
// something cannot be written; what was saved before is then as it was. Needs room for one save more than are
// kept.
template <class T>
void save_checkpoint(const SaveFolder& folder, const State<T>& state, const Progress& progress,
                     const std::string& tokenizer_folder, bool with_training_state) {
    assert(progress.step >= 0 && folder.keep >= 0);
    const std::string& out = folder.path;
    make_folders(out);
    const std::string name = step_name(progress.step), path = out + "/" + name, temporary = path + ".tmp";
    // A resumed run's tokenizer may lie in a save that has been removed since; later saves have it too.
    const bool removed = !tokenizer_folder.empty() && !file_exists(tokenizer_folder);
    remove_folder(temporary);
    try {
        write_save(temporary, state, progress, removed ? out + "/latest" : tokenizer_folder,
                   with_training_state);
        replace_folder(temporary, path);
    } catch (...) {
        std::error_code ignored;
        std::filesystem::remove_all(temporary, ignored);
        throw;
    }
    publish(out, name);
    remove_old_saves(folder, progress.step);
}

// Fails unless OUT, which need not exist, can be made, written and linked in, and holds no files that a
// save's links would have to replace. Leaves nothing behind.
inline void check_writable(const std::string& out) {
    if (out.empty()) fail("--out is empty where the name of a folder is needed");
    struct stat info;
    std::string nearest = out;  // to OUT of what exists
    while (lstat(nearest.c_str(), &info) != 0) {
        if (errno != ENOENT && errno != ENOTDIR) fail("--out %s: %s", out.c_str(), std::strerror(errno));
        nearest = folder_above(nearest);
    }
    if (stat(nearest.c_str(), &info) != 0 || !S_ISDIR(info.st_mode))
        fail("--out %s: %s is not a folder", out.c_str(), nearest.c_str());
    for (const char* name : {"latest", "config.json", "model.safetensors"}) {
        const std::string path = out + "/" + name;
        if (lstat(path.c_str(), &info) == 0 && !S_ISLNK(info.st_mode))
            fail("--out %s: has a %s that no save has linked there; choose another folder", out.c_str(),
                 name);
    }
    std::string probe = nearest + "/.probe-XXXXXX";
    bool good = mkdtemp(probe.data()) != nullptr;
    int reason = errno;
    if (good) {
        const std::string link = probe + "/link";
        good = symlink("nowhere", link.c_str()) == 0;
        reason = errno;
        unlink(link.c_str());
        rmdir(probe.c_str());
    }
    if (!good) fail("--out %s: cannot write in %s: %s", out.c_str(), nearest.c_str(), std::strerror(reason));
}

// Fails unless there is room in OUT for a save, as far as the file system says.
template <class T>
void check_room(const std::string& out, const State<T>& state, bool with_training_state) {
    size_t bytes = 0;
    for (const Buffers& buffers :
         {weight_buffers(state), with_training_state ? training_buffers(state) : Buffers()})
        for (const StateBuffer* b : buffers)
            for (const SavedTensor& t : saved_tensors(*b, state.layout))
                bytes += static_cast<size_t>(t.elements) * b->width;
    struct statvfs info;
    if (statvfs(out.c_str(), &info) != 0 || info.f_blocks == 0) return;
    const double room = static_cast<double>(info.f_bavail) * static_cast<double>(info.f_frsize);
    if (static_cast<double>(bytes) > room)
        fail("--out %s: a save takes %.1f MiB, and %.1f are free there", out.c_str(),
             static_cast<double>(bytes) / 1048576, room / 1048576);
}

// Loads all that a save with training state has, bit for bit; of a folder of saves, the one it shows. Fails
// when it was saved in another precision or other formats, or naming the first tensor that another model has
// otherwise.
template <class T>
void load_training_state(State<T>& state, const std::string& folder) {
    const std::string save = resolve_save(folder), now = state.options.text();
    const Progress saved = read_progress(save);
    if (saved.precision != dtype_name<T>())
        fail("%s: was saved by a %s build, this one is %s: make PRECISION=%s", save.c_str(),
             saved.precision.c_str(), dtype_name<T>(), saved.precision.c_str());
    if (saved.formats != now)
        fail("%s: its state was kept with %s, this run has %s; a resumed run keeps the save's formats",
             save.c_str(), printable(saved.formats).c_str(), now.c_str());
    read_tensors(save + "/model.safetensors", state.layout, weight_buffers(state));
    read_tensors(save + "/trainer_state.safetensors", state.layout, training_buffers(state));
    const std::string config = save + "/config.json";  // the number of heads shows in no shape
    if (const ModelConfig model = parse_config(read_json(config), config); !(model == state.layout.config()))
        fail("%s: has %d heads where this model has %d", config.c_str(), model.heads,
             state.layout.config().heads);
}
