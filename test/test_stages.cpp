// test_stages.cpp - a Step over a range of blocks: a model in three stages, each in a process of its own, is
// trained to the bits of the whole model. Each stage has only its own weights, and takes the memory
// that it planned, which Step::start() checks to the byte.

#include <sys/socket.h>
#include <sys/wait.h>

#include <gtest/gtest.h>

#define main train_main
#include "train_gpt.cu"
#undef main

#include "test/file_helpers.h"

namespace {

// Neighbors are processes of this machine, each connected by a socket.
class Sockets : public StageLinks {
  public:
    Sockets(int previous, int next) : previous_(previous), next_(next) {}
    void send(Neighbor to, const TensorX& rows, Stream) override {
        const char* from = reinterpret_cast<const char*>(rows.data());
        for (size_t left = bytes_of(rows); left > 0;) {
            const ssize_t n = ::send(socket(to), from, left, MSG_NOSIGNAL);
            if (n <= 0) fail("a neighbor has gone");
            from += n, left -= static_cast<size_t>(n);
        }
    }
    void receive(Neighbor from, TensorX& rows, Stream) override {
        char* to = reinterpret_cast<char*>(rows.data());
        for (size_t left = bytes_of(rows); left > 0;) {
            const ssize_t n = read(socket(from), to, left);
            if (n <= 0) fail("a neighbor has gone");
            to += n, left -= static_cast<size_t>(n);
        }
    }

  private:
    static size_t bytes_of(const TensorX& rows) { return static_cast<size_t>(rows.size()) * sizeof(floatX); }
    int socket(Neighbor n) const { return n == Neighbor::Previous ? previous_ : next_; }
    const int previous_, next_;
};

constexpr int kSteps = 3;

// Trains a stage, validates it, and writes its losses and the weights that it has trained, by name, to a
// file.
void run_stage(std::vector<std::string> words, Stage stage, StageLinks& links, const std::string& to) {
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    RunOptions command(static_cast<int>(argv.size()), argv.data());
    command.begin(nullptr);
    start_threads(command.asked.threads, command.asked.rank);
    Resolved resolved(command.asked, nullptr, std::nullopt);
    Arena arena;
    const Stream stream = nullptr;
    RunModel model(resolved.run, resolved.inputs, stage);
    Plans plans;
    Step step(resolved.run, resolved.inputs, arena, stream, model, plans);
    const MemoryReport report = step.rehearse({}, rates_of<floatX>(resolved.run));
    step.connect(links);
    step.start(report);
    step.batches().open();
    step.load();
    nlohmann::json result = {{"losses", nlohmann::json::array()}};
    const auto keep_loss = [&] { result["losses"].push_back(*step.metrics().loss().data()); };
    for (int number = 0; number < kSteps; number++) {
        step.train(number, 1e-3, [] { return false; });
        keep_loss();
    }
    step.finish();
    fill_zero(step.metrics().loss(), stream);
    step.evaluate(0, 1);
    keep_loss();
    const State<floatX>& trained = model.trained();
    for (const Parameter& p : trained.layout.parameters()) {
        std::vector<uint8_t> bytes(static_cast<size_t>(p.memory.size()) * sizeof(floatX));
        trained.find(StatePart::Weights)->read(p.offset, p.memory.size(), bytes.data());
        result["weights"][p.name] = nlohmann::json::binary(std::move(bytes));
    }
    std::ofstream(to, std::ios::binary) << [&] {
        const auto bytes = nlohmann::json::to_cbor(result);
        return std::string(bytes.begin(), bytes.end());
    }();
}

nlohmann::json run_stages(const TempFolder& folder, const std::string& options,
                          const std::vector<int>& cuts) {
    std::vector<std::string> words = {"train"};
    std::istringstream text(options);
    for (std::string word; text >> word;) words.push_back(word);
    std::vector<pid_t> stages;
    int previous = -1;
    for (size_t i = 0; i + 1 < cuts.size(); i++) {
        int ends[2] = {-1, -1};
        if (i + 2 < cuts.size() && socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) bug("no sockets");
        const pid_t child = fork();
        if (child == 0) {
            if (ends[1] >= 0) close(ends[1]);
            Sockets links(previous, ends[0]);
            try {
                run_stage(words, {cuts[i], cuts[i + 1]}, links, folder / ("stage" + std::to_string(i)));
            } catch (const std::exception& e) {
                fprintf(stderr, "stage %zu: %s\n", i, e.what());
                _exit(1);
            }
            _exit(0);
        }
        if (previous >= 0) close(previous);
        if (ends[0] >= 0) close(ends[0]);
        previous = ends[1];
        stages.push_back(child);
    }
    nlohmann::json all;
    for (size_t i = 0; i < stages.size(); i++) {
        int status = -1;
        waitpid(stages[i], &status, 0);
        EXPECT_EQ(status, 0) << "stage " << i;
        if (status != 0) continue;
        std::ifstream file(folder / ("stage" + std::to_string(i)), std::ios::binary);
        const nlohmann::json one = nlohmann::json::from_cbor(file);
        all["losses"] = one["losses"];  // those of the last stage
        for (const auto& [name, bytes] : one["weights"].items()) {
            EXPECT_FALSE(all["weights"].contains(name)) << name << " is in two stages";
            all["weights"][name] = bytes;
        }
    }
    return all;
}

// A model of four layers whose head is a matrix of its own (a tied one would be in two stages), and its data.
void write_model(const TempFolder& folder) {
    ModelConfig config = new_config({&kLlama, 4}, 300, 64);
    config.tied = false;
    State<floatX> state(Layout(config), {.training = false});
    state.allocate();
    initialize_weights(state, 7);
    mkdir((folder / "model").c_str(), 0777);
    write_json(folder / "model/config.json", config_json(config, kTorchName<floatX>));
    write_tensors(folder / "model/model.safetensors", state.layout, weight_buffers(state));
    std::vector<int> header(256);
    header[0] = 20240520, header[1] = 1, header[2] = 2000;
    std::string shard(reinterpret_cast<char*>(header.data()), 1024);
    for (uint64_t i = 0; i < 2000; i++) {
        const auto token = static_cast<uint16_t>(random_bits(3, i, 0) % 300);
        shard.append(reinterpret_cast<const char*>(&token), 2);
    }
    folder.write("data.bin", shard);
}

TEST(Stages, TrainAsTheWholeModel) {
    const TempFolder folder;
    const pid_t writer = fork();  // so that this process has no threads when it forks the stages
    if (writer == 0) {
        try {
            write_model(folder);
        } catch (const std::exception& e) {
            fprintf(stderr, "%s\n", e.what());
            _exit(1);
        }
        _exit(0);
    }
    int status = -1;
    waitpid(writer, &status, 0);
    ASSERT_EQ(status, 0);
    const std::string all = "--model " + folder / "model" + " --data " + folder / "data.bin" +
                            " --val-data " + folder / "data.bin" +
                            " --batch 2 --seq-len 24 --clip 0 --threads 1 --steps 3 --eval-every 0 ";
    const char* const ways[] = {"",
                                "--recompute block:3,gelu:1 --grad-accum 2",
                                "--update-in-backward --by-block --grad-accum 2",
                                "--offload weights=disk,gradients=disk,state=disk",
                                "--offload inputs=auto --recompute block",
                                "--train lora --lora-rank 3",
                                "--train lora --lora-rank 3 --base nf4",
                                "--train lora --lora-rank 3 --offload weights=disk"};
    for (const std::string way : ways) {
        SCOPED_TRACE(way);
        const nlohmann::json whole = run_stages(folder, all + way, {0, 4});
        EXPECT_NE(whole["losses"][0], whole["losses"][2]);
        const nlohmann::json stages = run_stages(folder, all + way, {0, 2, 3, 4});
        EXPECT_EQ(stages["losses"], whole["losses"]);
        ASSERT_EQ(stages["weights"].size(), whole["weights"].size());
        for (const auto& [name, bytes] : whole["weights"].items())
            EXPECT_EQ(stages["weights"].at(name), bytes) << name;
    }
}

}  // namespace
