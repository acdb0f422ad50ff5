// graph.h - work that is enqueued the same way every time is recorded once as CUDA graphs, and replayed.
//
// A step is hundreds of launches, each of which costs the host microseconds and the device a gap; a graph is
// one. What is recorded holds the addresses and numbers that it was enqueued with: whatever changes from run
// to run must lie in the device's memory.
//
// A graph has no place for what the host does in a step: ask a disk, wait for it, copy on other streams.
// There one graph ends and the next begins, and the host does it again each time that the step is replayed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "llmc/simt.h"

#if defined(SIMT_GPU)
// Work of one stream: graphs, and what the host does between them.
class Recording {
  public:
    Recording() = default;
    Recording(const Recording&) = delete;
    ~Recording() {
        for (const Piece& p : pieces_)
            if (p.graph) cudaGraphExecDestroy(p.graph);
    }

    // Records what `enqueue` enqueues on the stream, and runs it, graph by graph as they are ready.
    template <class Enqueue>
    void record(Stream stream, Enqueue&& enqueue) {
        stream_ = stream;
        begin();
        try {
            enqueue();
        } catch (...) {
            cudaGraph_t graph = nullptr;
            if (now && cudaStreamEndCapture(stream_, &graph) == cudaSuccess) cudaGraphDestroy(graph);
            cudaGetLastError();  // that the recording is broken is told already
            now = nullptr;
            throw;
        }
        end({});
    }
    void replay() const {
        for (const Piece& p : pieces_) {
            if (p.graph) CUDA_CHECK(cudaGraphLaunch(p.graph, stream_));
            if (p.act) p.act();
        }
    }
    // What the host does at this place of what is being recorded.
    void between(std::function<void()> act) {
        end(std::move(act));
        pieces_.back().act();
        begin();
    }

    inline static Recording* now = nullptr;  // that is being made

  private:
    struct Piece {
        cudaGraphExec_t graph;      // null where nothing was enqueued
        std::function<void()> act;  // behind it; may be empty
    };
    void begin() {
        // Of this thread alone: what others do meanwhile is theirs.
        CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
        now = this;
    }
    void end(std::function<void()> act) {
        now = nullptr;
        cudaGraph_t graph = nullptr;
        CUDA_CHECK(cudaStreamEndCapture(stream_, &graph));
        size_t nodes = 0;
        cudaGraphExec_t ready = nullptr;
        cudaError_t status = cudaGraphGetNodes(graph, nullptr, &nodes);
        if (status == cudaSuccess && nodes > 0) status = cudaGraphInstantiateWithFlags(&ready, graph, 0);
        cudaGraphDestroy(graph);
        cuda_check(status, "cudaGraphInstantiateWithFlags");
        pieces_.push_back({ready, std::move(act)});
        if (ready) CUDA_CHECK(cudaGraphLaunch(ready, stream_));
    }

    Stream stream_ = nullptr;
    std::vector<Piece> pieces_;
};
#endif

// Does what only the host can do in a step, now, and again at this place of it whenever that is replayed. It
// may enqueue on any stream; it must find what it uses at the same addresses then, and no reference to what
// is gone.
template <class Act>
void host_act(Act act) {
#if defined(SIMT_GPU)
    if (Recording::now) {
        const auto kept = std::make_shared<Act>(std::move(act));  // a function is copied, an act may not be
        return Recording::now->between([kept] { (*kept)(); });
    }
#endif
    act();
}

class StepGraphs {
  public:
    // Whether there are graphs here: on a CPU work is done where it is enqueued.
#if defined(SIMT_GPU)
    static constexpr bool kReplays = true;
#else
    static constexpr bool kReplays = false;
#endif

    // Does what `enqueue` enqueues on the stream, which must not be the default one. For each key it is
    // called twice: at first as ever, as kernels are loaded and libraries get ready then, which cannot be
    // recorded; then to be recorded. From there on the record runs, in which it must have left to the host
    // only what host_act() was given.
    template <class Enqueue>
    void run(const void* key, [[maybe_unused]] Stream stream, Enqueue&& enqueue) {
#if defined(SIMT_GPU)
        const auto [it, first] = recordings_.try_emplace(key, nullptr);
        if (first) return enqueue();
        if (it->second) return it->second->replay();
        auto recording = std::make_unique<Recording>();
        recording->record(stream, enqueue);  // where that fails, the next call tries it again
        it->second = std::move(recording);
#else
        static_cast<void>(key);
        enqueue();
#endif
    }

#if defined(SIMT_GPU)
  private:
    std::map<const void*, std::unique_ptr<Recording>> recordings_;  // null: ran once, not recorded yet
#endif
};
