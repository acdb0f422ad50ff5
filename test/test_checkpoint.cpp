// test_checkpoint.cpp - weights initialized and loaded; saves written, kept, replaced, killed, resumed; bad
// input.

#include <sys/mount.h>
#include <sys/statvfs.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/checkpoint.h"
#include "llmc/outputs.h"
#include "test/file_helpers.h"
#include "test/gpt2_config.h"

namespace {

namespace fs = std::filesystem;

const ModelConfig kTiny = gpt2_config(131, 16, 2, 2, 24);  // its wte has 125 rows of padding

template <class E>
std::vector<E> from_device(const E* device, int64_t size) {
    std::vector<E> host(static_cast<size_t>(size));
    copy_to_host(host.data(), device, host.size() * sizeof(E), {});
    return host;
}

template <class E>
bool same_bits(const std::vector<E>& a, const std::vector<E>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(E)) == 0;
}

std::vector<char> bytes_of(const StateBuffer& b) {
    return from_device(b.memory.data(), static_cast<int64_t>(b.bytes()));
}

template <class T>
bool same_state(const State<T>& a, const State<T>& b) {
    bool same = a.buffers().size() == b.buffers().size();
    for (size_t i = 0; same && i < a.buffers().size(); i++)
        same = same_bits(bytes_of(a.buffers()[i]), bytes_of(b.buffers()[i]));
    return same;
}

// Fills every parameter with f(index of the element in the layout); the padding stays zero.
template <class E, class F>
void fill(E* device, const Layout& layout, F f) {
    for (const Parameter& p : layout.parameters()) {
        std::vector<E> host;
        for (int64_t i = 0; i < p.shape.size(); i++) host.push_back(f(p.offset + i));
        copy_to_device(device + p.offset, host.data(), host.size() * sizeof(E), {});
    }
}

// Fills what a save contains of a state with bits of every kind, subnormals among them. Floats are finite: a
// save with others is not resumed.
template <class T>
void fill_all(State<T>& state, uint64_t seed) {
    for (const StateBuffer& b : state.buffers()) {
        if (!b.prefix) continue;
        for (const Parameter& p : state.layout.parameters()) {
            std::vector<char> host(static_cast<size_t>(ceil_div(p.shape.size(), b.span)) * b.width);
            for (size_t i = 0; i < host.size(); i++)
                host[i] = static_cast<char>(random_bits(seed, static_cast<uint64_t>(b.part),
                                                        static_cast<uint64_t>(p.offset) * 4 + i));
            const bool are_floats = b.dtype == dtype_name<float>() || b.dtype == dtype_name<bf16>();
            for (size_t end = b.width; are_floats && end <= host.size(); end += b.width)
                host[end - 1] &= ~0x40;  // the highest bit of the exponent
            copy_to_device(b.at(p.offset), host.data(), host.size(), {});
        }
    }
}

template <class T>
struct Training : State<T> {
    explicit Training(const ModelConfig& config = kTiny, const StateOptions& options = {})
        : State<T>(Layout(config), options) {
        this->allocate();
    }
};
const StateOptions kOnlyWeights = {.training = false};

// The fp32 buffers of a state in the default formats.
std::vector<float*> fp32_buffers(const State<float>& state) {
    return {state.weights(), state.data<float>(StatePart::M), state.data<float>(StatePart::V)};
}

Progress at_step(int64_t step) {
    return {.step = step, .sequences = 8 * step, .options = {{"lr", 0.1}, {"step", step}}};
}

// The step of the save that `folder` shows, after checking that all of its files belong to that step: in the
// kill test the weights, m and v are all equal to it.
int64_t whole_step(const std::string& folder) {
    const Progress progress = read_progress(folder);
    Training<float> state;
    load_training_state(state, folder);
    const auto value = static_cast<float>(progress.step);
    for (const float* buffer : fp32_buffers(state)) {
        const auto host = from_device(buffer, state.layout.size());
        for (const Parameter& p : state.layout.parameters())
            for (int64_t i = 0; i < p.shape.size(); i++)
                if (host[static_cast<size_t>(p.offset + i)] != value) return -1;
    }
    Training<float> by_folder(kTiny, kOnlyWeights);
    load_weights(by_folder, folder);
    EXPECT_EQ(from_device(by_folder.weights(), 1)[0], value);
    EXPECT_EQ(read_model_config(folder, "--model"), kTiny);
    return progress.options["step"] == progress.step ? progress.step : -1;
}

void fill_with_step(State<float>& state, int64_t step) {
    for (float* buffer : fp32_buffers(state))
        fill(buffer, state.layout, [&](int64_t) { return static_cast<float>(step); });
}

std::vector<std::string> sorted_names(const std::string& folder) {
    std::vector<std::string> names = list_folder(folder);
    std::sort(names.begin(), names.end());
    return names;
}

std::vector<std::string> steps_in(const std::string& folder) {
    std::vector<std::string> names;
    for (const std::string& name : sorted_names(folder))
        if (name.starts_with("step-")) names.push_back(name);
    return names;
}

template <class T>
class Checkpoint : public testing::Test {};
using Precisions = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Checkpoint, Precisions);

TYPED_TEST(Checkpoint, ResumesWithTheSameBits) {
    const TempFolder folder;
    const std::string out = folder / "made/on/the/way";
    Training<TypeParam> saved;
    fill_all(saved, 1);
    save_checkpoint({out, 1}, saved, at_step(7), "", true);
    for (const std::string& from : {out, out + "/step-00000007", out + "/latest"}) {
        Training<TypeParam> loaded;
        load_training_state(loaded, from);
        EXPECT_TRUE(same_state(saved, loaded)) << from;
        const Progress progress = read_progress(from);
        EXPECT_EQ(progress.step, 7);
        EXPECT_EQ(progress.sequences, 56);
        EXPECT_EQ(progress.precision, dtype_name<TypeParam>());
        EXPECT_EQ(progress.options, (nlohmann::json{{"lr", 0.1}, {"step", 7}}));
        EXPECT_EQ(read_model_config(from, "--model"), kTiny);
    }
}

// Every format of every part, not every combination.
const StateOptions kFormats[] = {
    {},
    {.m = Moment::Bits8, .v = Moment::Bf16},
    {.master = Master::Split, .m = Moment::Bf16, .v = Moment::Bits8},
    {.master = Master::None, .m = Moment::Bits8, .v = Moment::Bits8},
    {.optimizer = Optimizer::Sgd},
    {.gradients = false, .optimizer = Optimizer::Sgd, .master = Master::None},
};

TYPED_TEST(Checkpoint, EveryFormatComesBackAndNoOther) {
    for (const StateOptions& options : kFormats) {
        if (std::is_same_v<TypeParam, float> && options.master != Master::Fp32) continue;
        SCOPED_TRACE(options.text());
        const TempFolder folder;
        Training<TypeParam> saved(kTiny, options), loaded(kTiny, options);
        fill_all(saved, 1);
        save_checkpoint({folder.path(), 1}, saved, at_step(1), "", true);
        load_training_state(loaded, folder.path());
        EXPECT_TRUE(same_state(saved, loaded));
        Training<TypeParam> other(kTiny, {.master = options.master, .m = Moment::Fp32, .v = Moment::Bits8});
        if (other.options.text() == options.text()) continue;
        expect_user_error([&] { load_training_state(other, folder.path()); },
                          {folder.path(), options.text(), other.options.text()});
        initialize_weights(saved, 2);
        save_checkpoint({folder.path(), 1}, saved, at_step(1), "", true);
        Training<TypeParam> weights(kTiny, kOnlyWeights);
        load_weights(weights, folder.path());
        EXPECT_TRUE(same_bits(bytes_of(weights.buffers()[0]), bytes_of(saved.buffers()[0])));
    }
}

TEST(CheckpointFormats, AreTensorsOfTheirOwnTypes) {
    const TempFolder folder;
    Training<bf16> saved(kTiny, {.master = Master::Split, .m = Moment::Bits8, .v = Moment::Bf16});
    save_checkpoint({folder.path(), 1}, saved, at_step(1), "", true);
    const SafetensorsFile file(folder / "trainer_state.safetensors");
    std::map<std::string, int> count;
    for (const SafetensorsEntry& e : file.entries()) {
        count[e.name.substr(0, e.name.find('.')) + " " + e.dtype]++;
        const auto width = find_file_type(e.dtype)->bytes;
        EXPECT_EQ((e.offset - file.entries()[0].offset) % width, 0u) << e.name;
    }
    const int tensors = static_cast<int>(saved.layout.parameters().size());
    EXPECT_EQ(
        count,
        (std::map<std::string, int>{
            {"m U8", tensors}, {"m_scale F32", tensors}, {"v BF16", tensors}, {"master_low I16", tensors}}));
    EXPECT_EQ(file.find("m_scale.wte.weight")->shape, (std::vector<int64_t>{(131 * 24 + 255) / 256}));
}

TEST(CheckpointFormats, WeightsAndMasterBeginAsOneValue) {
    Training<bf16> whole, split(kTiny, {.master = Master::Split}), none(kTiny, {.master = Master::None});
    for (Training<bf16>* state : {&whole, &split, &none}) initialize_weights(*state, 7);
    const int64_t n = whole.layout.size();
    const auto weights = from_device(whole.weights(), n);
    EXPECT_TRUE(same_bits(weights, from_device(split.weights(), n)));
    EXPECT_TRUE(same_bits(weights, from_device(none.weights(), n)));
    const auto master = from_device(whole.data<float>(StatePart::Master), n);
    const auto low = from_device(split.data<int16_t>(StatePart::Master), n);
    std::vector<float> joined;
    for (size_t i = 0; i < low.size(); i++) joined.push_back(join<16>(weights[i], low[i]));
    EXPECT_TRUE(same_bits(master, joined));
}

TYPED_TEST(Checkpoint, InitializesEveryWeightAndNoPadding) {
    // wte has more than one chunk.
    const ModelConfig config = gpt2_config(50257, 8, 1, 2, 96);
    Training<TypeParam> state(config);
    initialize_weights(state, 42);
    const auto weights = from_device(state.weights(), state.layout.size());
    ASSERT_GT(state.layout.parameters()[0].shape.size(), kChunkElements);
    std::vector<float> master;
    if (const float* copy = state.template data<float>(StatePart::Master))
        master = from_device(copy, state.layout.size());
    int64_t next = 0, wrong = 0, padding = 0;
    for (const Parameter& p : state.layout.parameters()) {
        for (; next < p.offset; next++) padding += to_float(weights[static_cast<size_t>(next)]) != 0;
        for (int64_t i = 0; i < p.shape.size(); i++) {
            float value;  // computed alone, without pieces and threads
            initial_values(p, i, config.layers, 42, {&value, 1});
            const auto at = static_cast<size_t>(p.offset + i);
            wrong += to_float(weights[at]) != to_float(narrow_master<TypeParam>(value));
            wrong += !master.empty() && master[at] != value;
        }
        next = p.offset + p.shape.size();
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(padding, 0);
}

// Writes a model file in which element i of each tensor has the bits f(element in the layout).
template <class Bits, class F>
void write_model(const std::string& path, const std::string& prefix, FileType type, F f) {
    const Layout layout(kTiny);
    SafetensorsWriter file(path);
    // In another order than the layout's, and with tensors that older versions of transformers wrote too.
    auto parameters = layout.parameters();
    std::reverse(parameters.begin(), parameters.end());
    file.declare(prefix + "h.0.attn.bias", FileType::F32, {1});
    file.declare(prefix + "h.0.attn.masked_bias", FileType::F32, {1});
    for (const Parameter& p : parameters) file.declare(prefix + p.name, type, file_shape(p.shape));
    file.append("12345678", 8);
    for (const Parameter& p : parameters) {
        std::vector<Bits> host;
        for (int64_t i = 0; i < p.shape.size(); i++) host.push_back(f(p.offset + i));
        file.append(host.data(), host.size() * sizeof(Bits));
    }
    file.finish();
}

TYPED_TEST(Checkpoint, LoadsWeightsOfEveryKind) {
    const auto half = [](int64_t i) { return static_cast<uint16_t>(0x3000 + i % 1000); };  // from 0.125 on
    const auto brain = [](int64_t i) { return static_cast<uint16_t>(0x3f00 + i % 200); };  // from 0.5 on
    const auto whole = [](int64_t i) { return 1 + static_cast<float>(i % 10007) * 0x1p-20f; };
    const auto whole_bits = [&](int64_t i) { return std::bit_cast<uint32_t>(whole(i)); };
    for (const std::string prefix : {"", "transformer."}) {
        for (const FileType type : {FileType::F16, FileType::BF16, FileType::F32}) {
            const TempFolder folder;
            const std::string path = folder / "model.safetensors";
            if (type == FileType::F16) write_model<uint16_t>(path, prefix, type, half);
            if (type == FileType::BF16) write_model<uint16_t>(path, prefix, type, brain);
            if (type == FileType::F32) write_model<uint32_t>(path, prefix, type, whole_bits);
            Training<TypeParam> loaded, expected;
            load_weights(loaded, folder.path());
            const auto value = [&](int64_t i) {
                if (type == FileType::F16) return half_to_float(half(i));
                if (type == FileType::BF16) return std::bit_cast<float>(uint32_t{brain(i)} << 16);
                return whole(i);
            };
            fill(expected.weights(), expected.layout,
                 [&](int64_t i) { return narrow_master<TypeParam>(value(i)); });
            if (float* master = expected.template data<float>(StatePart::Master))
                fill(master, expected.layout, value);
            EXPECT_TRUE(same_state(loaded, expected)) << prefix << file_type_info(type).name;
        }
    }
}

TYPED_TEST(Checkpoint, SavesWithoutTrainingState) {
    const TempFolder folder;
    const Training<TypeParam> state(kTiny, kOnlyWeights);
    fill(state.weights(), state.layout,
         [](int64_t i) { return from_float<TypeParam>(static_cast<float>(i)); });
    save_checkpoint({folder.path(), 0}, state, at_step(1), "", false);
    EXPECT_EQ(sorted_names(folder.path()),
              (std::vector<std::string>{"config.json", "generation_config.json", "latest",
                                        "model.safetensors", "step-00000001"}));
    Training<TypeParam> loaded(kTiny, kOnlyWeights);
    load_weights(loaded, folder.path());
    EXPECT_TRUE(same_bits(from_device(state.weights(), state.layout.size()),
                          from_device(loaded.weights(), state.layout.size())));
    expect_user_error([&] { read_progress(folder.path()); }, {folder.path(), "no training to resume"});

    // A later save with state adds its links, and one without removes them.
    Training<TypeParam> whole;
    save_checkpoint({folder.path(), 0}, whole, at_step(2), "", true);
    EXPECT_EQ(link_target(folder / "trainer_state.json"), "latest/trainer_state.json");
    EXPECT_EQ(read_progress(folder.path()).step, 2);
    save_checkpoint({folder.path(), 0}, state, at_step(3), "", false);
    EXPECT_EQ(link_target(folder / "trainer_state.json"), "");
    EXPECT_EQ(link_target(folder / "trainer_state.safetensors"), "");
    EXPECT_EQ(read_progress(folder / "step-00000002").step, 2);
}

TEST(Save, KeepsTheNewest) {
    const TempFolder folder;
    const Training<float> state;
    const auto save = [&](int64_t step, int keep) {
        save_checkpoint({folder.path(), keep}, state, at_step(step), "", true);
        EXPECT_EQ(link_target(folder / "latest"), step_name(step));
        EXPECT_EQ(read_progress(folder.path()).step, step);
    };
    using Names = std::vector<std::string>;
    for (const int64_t step : {9, 10, 100}) save(step, 0);
    EXPECT_EQ(steps_in(folder.path()), (Names{"step-00000009", "step-00000010", "step-00000100"}));
    // Folders that killed saves leave, and others that are none of ours.
    for (const char* name : {"step-00000005.tmp", "step-00000006.old", "step-5", "step-00000100.backup"})
        fs::create_directory(folder / name);
    save(123456789, 3);
    EXPECT_EQ(steps_in(folder.path()),
              (Names{"step-00000010", "step-00000100", "step-00000100.backup", "step-123456789", "step-5"}));
    // Resumed from step 10: the later saves are removed first, and never the one that was just made.
    save(11, 2);
    EXPECT_EQ(steps_in(folder.path()),
              (Names{"step-00000010", "step-00000011", "step-00000100.backup", "step-5"}));
    save(1, 1);
    EXPECT_EQ(steps_in(folder.path()), (Names{"step-00000001", "step-00000100.backup", "step-5"}));
}

TEST(Save, ShowsTheLastGood) {
    const TempFolder folder;
    const std::string out = folder / "out";
    const Training<float> state;
    const auto save = [&](int64_t step, int64_t shown, std::optional<int64_t> good) {
        Progress progress = at_step(step);
        progress.last_good = good;
        save_checkpoint({.path = out, .keep = 1, .good = good}, state, progress, "", true);
        EXPECT_EQ(link_target(out + "/latest"), step_name(shown));
        EXPECT_EQ(read_progress(out).step, shown);
    };
    using Names = std::vector<std::string>;
    for (const int64_t step : {1, 2}) save(step, step, {});  // none is good yet
    EXPECT_EQ(newest_bad_save(out, 1), -1);
    save(3, 3, 3);
    for (const int64_t step : {4, 5}) save(step, 3, 3);
    EXPECT_EQ(steps_in(out), (Names{"step-00000003", "step-00000005"}));
    EXPECT_EQ(newest_bad_save(out, 3), 5);
    save(5, 3, 3);  // as when it is saved again
    save(6, 6, 6);
    EXPECT_EQ(steps_in(out), (Names{"step-00000006"}));
    EXPECT_EQ(newest_bad_save(out, 6), -1);
    fs::remove_all(out + "/step-00000006");  // somebody has removed the last good one
    save(7, 7, 6);
    // The one before the last good one stays as long as the folder says so.
    save(10, 10, 10);
    SaveFolder doubtful = {.path = out, .keep = 1, .good = 11, .fallback = 10};
    save_checkpoint(doubtful, state, at_step(11), "", true);
    EXPECT_EQ(link_target(out + "/latest"), "step-00000011");
    EXPECT_EQ(steps_in(out), (Names{"step-00000010", "step-00000011"}));
    doubtful.fallback.reset();
    remove_old_saves(doubtful, 11);
    EXPECT_EQ(steps_in(out), (Names{"step-00000011"}));
    Progress changed = read_progress(out + "/step-00000011");
    changed.last_good = 10;
    write_progress(out + "/step-00000011", changed);
    EXPECT_EQ(read_progress(out).last_good, 10);
    EXPECT_EQ(read_progress(out).step, 11);
    fs::remove_all(out);
    // A damaged save says nothing.
    save(8, 8, 8);
    save(9, 8, 8);
    std::ofstream(out + "/step-00000009/trainer_state.json") << "{";
    EXPECT_EQ(newest_bad_save(out, 8), -1);
}

TEST(Save, LeavesWhatIsBeingRead) {
    const TempFolder folder;
    const std::string out = folder / "out";
    Training<float> state;
    const auto save = [&](int64_t step) {
        fill_with_step(state, step);
        save_checkpoint({out, 1}, state, at_step(step), "", true);
    };
    save(1);
    std::optional<HeldSave> held(out), same(out + "/step-00000001");
    EXPECT_EQ(held->path(), out + "/step-00000001");
    for (const int64_t step : {2, 3}) save(step);
    EXPECT_EQ(steps_in(out), (std::vector<std::string>{"step-00000001", "step-00000003"}));
    EXPECT_EQ(whole_step(held->path()), 1);
    held.reset();
    save(4);
    EXPECT_EQ(steps_in(out).front(), "step-00000001");
    same.reset();
    save(5);
    EXPECT_EQ(steps_in(out), (std::vector<std::string>{"step-00000005"}));
    // A path that is no folder of saves stands for itself, even if there is nothing.
    for (const std::string& other : {folder.path(), folder / "nowhere"})
        EXPECT_EQ(HeldSave(other).path(), other);
}

TEST(Save, ReplacesTheSameStep) {
    const TempFolder folder;
    Training<float> first, second, loaded;
    fill_all(first, 1);
    fill_all(second, 2);
    save_checkpoint({folder.path(), 2}, first, at_step(5), "", true);
    save_checkpoint({folder.path(), 2}, second, at_step(5), "", true);
    EXPECT_EQ(steps_in(folder.path()), (std::vector<std::string>{"step-00000005"}));
    load_training_state(loaded, folder.path());
    EXPECT_TRUE(same_state(second, loaded));
}

TEST(Save, CopiesTheTokenizer) {
    const TempFolder folder, model;
    model.write("vocab.json", "{}");
    model.write("merges.txt", "#version: 0.2\n");
    const std::string bytes("\0\xff\r\n", 4);
    for (const char* name : {"tokenizer.model", "added_tokens.json", "chat_template.jinja"})
        model.write(name, bytes);
    model.write("unrelated.txt", "x");
    const std::string out = folder / "out";
    const Training<float> state;
    save_checkpoint({out, 1}, state, at_step(1), model.path(), true);
    EXPECT_EQ(read_text(out + "/merges.txt"), "#version: 0.2\n");
    EXPECT_EQ(read_text(out + "/step-00000001/vocab.json"), "{}");
    for (const char* name : {"tokenizer.model", "added_tokens.json", "chat_template.jinja"})
        EXPECT_EQ(read_text(out + "/" + name), bytes);
    EXPECT_FALSE(file_exists(out + "/unrelated.txt"));
    // Resumed from a save that `keep` then removes.
    for (const int64_t step : {2, 3, 4})
        save_checkpoint({out, 1}, state, at_step(step), out + "/step-00000001", true);
    EXPECT_EQ(read_text(out + "/merges.txt"), "#version: 0.2\n");
    EXPECT_EQ(read_text(out + "/step-00000004/vocab.json"), "{}");
}

// A file system of 1 MiB, unmounted at the end of its scope; mounted() is false if that is not permitted.
class SmallDisk {
  public:
    SmallDisk() { mounted_ = mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, "size=1m") == 0; }
    ~SmallDisk() {
        if (mounted_) umount2(folder_.path().c_str(), MNT_DETACH);
    }
    bool mounted() const { return mounted_; }
    bool make_read_only() {
        return mount("tmpfs", folder_.path().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr) == 0;
    }
    const std::string& path() const { return folder_.path(); }

  private:
    TempFolder folder_;
    bool mounted_ = false;
};

TEST(Save, LeavesTheEarlierSavesWhenTheDiskIsFull) {
    const SmallDisk disk;
    if (!disk.mounted()) GTEST_SKIP() << "needs permission to mount a tmpfs";
    const std::string out = disk.path() + "/out";
    Training<float> state;
    fill_with_step(state, 1);
    save_checkpoint({out, 1}, state, at_step(1), "", true);
    const auto before = sorted_names(out);
    fill_with_step(state, 2);
    // From a disk without a free page to one on which the save, some 60 pages, almost fits.
    for (int free_pages = 0; free_pages <= 56; free_pages += 7) {
        struct statvfs info;
        ASSERT_EQ(statvfs(disk.path().c_str(), &info), 0);
        const size_t size = (info.f_bavail - static_cast<size_t>(free_pages)) * info.f_bsize;
        std::ofstream(disk.path() + "/filler") << std::string(size, 'x');
        for (const int64_t step : {1, 2})
            expect_user_error(
                [&] {
                    save_checkpoint({out, 1}, state, at_step(step), "", true);
                },
                {out + "/step-", "No space left on device"});
        EXPECT_EQ(sorted_names(out), before) << free_pages;
        EXPECT_EQ(whole_step(out), 1);
        fs::remove(disk.path() + "/filler");
    }
    save_checkpoint({out, 1}, state, at_step(2), "", true);
    EXPECT_EQ(whole_step(out), 2);
}

TEST(Save, FailsOnAReadOnlyFileSystem) {
    SmallDisk disk;
    if (!disk.mounted() || !disk.make_read_only()) GTEST_SKIP() << "needs permission to mount a tmpfs";
    const Training<float> state;
    for (const std::string& out : {disk.path(), disk.path() + "/a/b"}) {
        expect_user_error([&] { check_writable(out); },
                          {"--out " + out, disk.path(), "Read-only file system"});
        expect_user_error(
            [&] {
                save_checkpoint({out, 1}, state, at_step(1), "", true);
            },
            {disk.path(), "Read-only file system"});
    }
}

#if !defined(SIMT_GPU)  // a forked process cannot use the GPU
// Continues with ever later steps, saves every other one twice, and never returns. Saves of multiples of
// `good_every` are good; out shows one of these.
[[noreturn]] void save_forever(const std::string& out, int64_t good_every) {
    Training<float> state;
    int64_t good = read_progress(out).step;
    for (int64_t step = good + 1;; step++) {
        fill_with_step(state, step);
        if (step % good_every == 0) good = step;
        for (int i = 0; i < 1 + (step % 2); i++)
            save_checkpoint({.path = out, .keep = 2, .good = good}, state, at_step(step), "", true);
    }
}

class KilledSave : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(GoodEvery, KilledSave, testing::Values(1, 3));

TEST_P(KilledSave, IsSurvived) {
    const int64_t good_every = GetParam();
    const TempFolder folder;
    const std::string out = folder / "out";
    Training<float> state;
    fill_with_step(state, 0);
    const auto start = std::chrono::steady_clock::now();
    save_checkpoint({out, 2}, state, at_step(0), "", true);
    const std::chrono::duration<double, std::micro> save_time = std::chrono::steady_clock::now() - start;
    std::mt19937 random(1);
    int64_t last = 0;
    for (int round = 0; round < 25; round++) {
        const pid_t child = fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            try {
                save_forever(out, good_every);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "%s\n", error.what());
                _exit(1);
            }
        }
        // Every other round the child first completes a save, however slow the disk is.
        const std::string before = link_target(out + "/latest");
        for (int ms = 0; round % 2 && ms < 10000 && link_target(out + "/latest") == before; ms++)
            usleep(1000);
        usleep(static_cast<useconds_t>(random() % 1000 * 0.003 * save_time.count()));  // up to 3 saves
        kill(child, SIGKILL);
        int status = 0;
        waitpid(child, &status, 0);
        ASSERT_TRUE(WIFSIGNALED(status)) << "the saving process failed by itself";
        const int64_t step = whole_step(out);
        EXPECT_GE(step, last);
        EXPECT_EQ(step % good_every, 0);
        last = std::max(step, last);
        for (const std::string& name : steps_in(out)) {
            if (step_of(name) < 0) continue;  // left unfinished by the kill
            EXPECT_EQ(whole_step(out + "/" + name), step_of(name));
        }
    }
    EXPECT_GE(last, 12);  // one for each of those rounds
    save_checkpoint({out, 2}, state, at_step(last), "", true);
    for (const std::string& name : steps_in(out)) EXPECT_GE(step_of(name), 0) << name << " was left behind";
}
#endif

TEST(HeldFolder, IsOneRunsAlone) {
    const TempFolder folder;
    const std::string out = folder / "made/on/the/way";
    {
        const HeldFolder held(out);
        expect_user_error([&] { HeldFolder(out, 0); },
                          {"--out " + out, "another run saves there",
                           format("process %d on ", static_cast<int>(getpid()))});
        expect_user_error([&] { HeldFolder(out + "/../way", 0.1); }, {"another run saves there"});
        EXPECT_TRUE(file_exists(out + "/.lock"));
    }
    EXPECT_TRUE(list_folder(folder.path()).empty());  // nothing was saved
    make_folders(out);
    { const HeldFolder held(out, 0); }
    EXPECT_TRUE(list_folder(out).empty());
    const Training<float> state;
    {
        const HeldFolder held(folder / "new", 0);
        save_checkpoint({folder / "new", 1}, state, at_step(1), "", true);
    }
    EXPECT_EQ(read_progress(folder / "new").step, 1);
    EXPECT_FALSE(file_exists(folder / "new/.lock"));
}

#if !defined(SIMT_GPU)
TEST(HeldFolder, IsFreeWhenItsRunIsKilled) {
    const TempFolder folder;
    const std::string out = folder / "out";
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        const HeldFolder held(out);
        for (;;) pause();
    }
    while (!file_exists(out + "/.lock") || read_text(out + "/.lock").empty()) usleep(1000);
    expect_user_error([&] { HeldFolder(out, 0); }, {format("process %d on ", static_cast<int>(child))});
    kill(child, SIGKILL);
    const HeldFolder held(out);  // without waiting: the killed process may still exist
    waitpid(child, nullptr, 0);
    EXPECT_EQ(read_text(out + "/.lock").find(format("process %d on ", static_cast<int>(getpid()))), 0u);
}
#endif

TEST(CheckWritable, TellsBeforeTheTraining) {
    const TempFolder folder;
    EXPECT_NO_THROW(check_writable(folder.path()));
    EXPECT_NO_THROW(check_writable(folder / "new/and/deep/"));
    EXPECT_EQ(list_folder(folder.path()).size(), 0u);
    const std::string file = folder.write("file", "");
    fs::create_symlink("nowhere", folder / "dangling");
    expect_user_error([&] { check_writable(""); }, {"--out", "empty"});
    expect_user_error([&] { check_writable(file); }, {"--out " + file, "is not a folder"});
    expect_user_error([&] { check_writable(file + "/sub"); }, {file + "/sub", file + " is not a folder"});
    expect_user_error([&] { check_writable(folder / "dangling"); }, {"dangling is not a folder"});
    expect_user_error([&] { check_writable(folder / std::string(300, 'x')); }, {"File name too long"});
    EXPECT_EQ(list_folder(folder.path()).size(), 2u);

    // A folder of saves is as good as an empty one; somebody's model is not.
    const Training<float> state;
    save_checkpoint({folder / "saves", 1}, state, at_step(1), "", true);
    EXPECT_NO_THROW(check_writable(folder / "saves"));
    expect_user_error([&] { check_writable(folder / "saves/step-00000001"); }, {"has a config.json"});
}

TEST(LoadWeights, NamesWhatIsWrong) {
    const TempFolder folder;
    Training<float> state(kTiny, kOnlyWeights);
    expect_user_error([&] { read_model_config(folder / "absent", "--model"); },
                      {"--model " + (folder / "absent"), "config.json"});
    expect_user_error([&] { read_model_config(folder.path(), "--model"); }, {folder.path(), "config.json"});
    expect_user_error([&] { read_model_config(folder.write("file", ""), "--model"); },
                      {"file", "config.json"});
    folder.write("config.json", "{");
    expect_user_error([&] { read_model_config(folder.path(), "--model"); }, {"config.json: broken JSON"});
    expect_user_error([&] { load_weights(state, folder.path()); }, {folder.path(), "model.safetensors"});

    // Writes a file of zeros in which one tensor has another dtype and shape, or is missing if its shape is
    // empty.
    const auto write = [&](const std::string& odd, FileType odd_type, const std::vector<int64_t>& odd_shape) {
        SafetensorsWriter file(folder / "model.safetensors");
        size_t bytes = 0;
        for (const Parameter& p : state.layout.parameters()) {
            std::vector<int64_t> shape = file_shape(p.shape);
            FileType type = FileType::F32;
            if (p.name == odd) type = odd_type, shape = odd_shape;
            if (shape.empty()) continue;
            file.declare(p.name, type, shape);
            size_t size = file_type_info(type).bytes;
            for (const int64_t dim : shape) size *= static_cast<size_t>(dim);
            bytes += size;
        }
        const std::string zeros(bytes, '\0');
        file.append(zeros.data(), zeros.size());
        file.finish();
    };
    const auto load = [&] { load_weights(state, folder.path()); };
    write("", FileType::F32, {});
    EXPECT_NO_THROW(load());
    write("h.1.ln_2.bias", FileType::F32, {});
    expect_user_error(load, {folder.path(), "\"transformer.h.1.ln_2.bias\" is missing"});
    write("wpe.weight", FileType::F32, {17, 24});
    expect_user_error(load, {"\"wpe.weight\"", "[17, 24]", "[16, 24]"});
    write("h.0.mlp.c_fc.weight", FileType::F32, {96, 24});
    expect_user_error(load, {"\"h.0.mlp.c_fc.weight\"", "[96, 24]", "[24, 96]"});
    write("ln_f.bias", FileType::F64, {24});
    expect_user_error(load, {"\"ln_f.bias\"", "F64"});
}

TEST(Resume, NamesWhatIsWrong) {
    const TempFolder folder;
    const std::string out = folder / "out", step = out + "/step-00000003";
    const Training<bf16> saved;
    save_checkpoint({out, 1}, saved, at_step(3), "", true);
    const auto resume = [&](const ModelConfig& config) {
        Training<bf16> state(config);
        load_training_state(state, out);
    };
    EXPECT_NO_THROW(resume(kTiny));
    Training<float> fp32;
    expect_user_error([&] { load_training_state(fp32, out); },
                      {"saved by a bf16 build, this one is fp32: make PRECISION=bf16"});
    // vocabulary, positions, layers, heads, channels
    expect_user_error([&] { resume(gpt2_config(130, 16, 2, 2, 24)); },
                      {"transformer.wte.weight", "[131, 24]", "[130, 24]"});
    expect_user_error([&] { resume(gpt2_config(131, 17, 2, 2, 24)); },
                      {"transformer.wpe.weight", "[16, 24]", "[17, 24]"});
    expect_user_error([&] { resume(gpt2_config(131, 16, 3, 2, 24)); },
                      {"transformer.h.2.attn.c_attn.weight", "missing"});
    expect_user_error([&] { resume(gpt2_config(131, 16, 1, 2, 24)); },
                      {"transformer.h.1.", "is not in this model"});
    expect_user_error([&] { resume(gpt2_config(131, 16, 2, 3, 24)); }, {"2 heads", "3"});

    const std::string good = read_text(step + "/trainer_state.json");
    const auto with = [&](const std::string& key, const nlohmann::json& value) {
        nlohmann::json json = nlohmann::json::parse(good);
        json[key] = value;
        return json.dump();
    };
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"", "broken JSON"},
        {good.substr(0, good.size() / 2), "broken JSON"},
        {"[]", "\"step\" is missing"},
        {"{\"step\": 1}", "\"sequences\" is missing"},
        {with("step", -1), "\"step\" is not a count"},
        {with("step", 1.5), "\"step\" is not a count"},
        {with("step", "3"), "\"step\" is not a count"},
        {with("step", uint64_t{1} << 63), "\"step\" is not a count"},
        {with("sequences", nullptr), "\"sequences\" is not a count"},
        {with("precision", "fp8"), "\"precision\" is not \"fp32\" or \"bf16\""},
        {with("options", 1), "\"options\" is not an object"},
        {with("formats", 1), "\"formats\" is not a text"},
    };
    for (const auto& [text, part] : cases) {
        std::ofstream(step + "/trainer_state.json") << text;
        expect_user_error([&] { read_progress(out); }, {step + "/trainer_state.json", part});
    }
    std::ofstream(step + "/trainer_state.json") << good;
    EXPECT_EQ(read_progress(out).step, 3);

    // Weights of another precision, a file that is cut short, a file that is missing.
    const Layout layout(kTiny);
    write_tensors(step + "/model.safetensors", layout, weight_buffers(fp32));
    expect_user_error([&] { resume(kTiny); }, {"transformer.wte.weight", "F32", "BF16"});
    write_tensors(step + "/model.safetensors", layout, weight_buffers(saved));
    const std::string rest = step + "/trainer_state.safetensors";
    fs::resize_file(rest, fs::file_size(rest) - 1);
    expect_user_error([&] { resume(kTiny); }, {rest, "cut short"});
    fs::remove(rest);
    expect_user_error([&] { resume(kTiny); }, {rest, "No such file"});
    fs::remove(step + "/trainer_state.json");
    expect_user_error([&] { read_progress(out); }, {out, "no training to resume"});
    expect_user_error([&] { read_progress(folder / "absent"); }, {"absent", "there is no such folder"});
}

}  // namespace
