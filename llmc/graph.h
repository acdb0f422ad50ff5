// graph.h - records work that is enqueued the same way every time as CUDA graphs, and replays it.
//
// A step is hundreds of launches, and each costs the host microseconds and the device a gap; a graph is one
// launch. A recording contains the addresses and numbers that the work was enqueued with, so whatever changes
// from run to run must be in the device's memory.
//
// A graph cannot contain what the host does in a step: read from a disk, wait for that, copy on other
// streams. At such a place one graph ends and the next begins, and on every replay the host does its part
// between them.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "llmc/simt.h"

#if defined(SIMT_GPU)
// A recording of one stream's work: graphs, and what the host does between them.
class Recording {
  public:
    Recording() = default;
    Recording(const Recording&) = delete;
    ~Recording() {
        for (const Piece& p : pieces_)
            if (p.graph) cudaGraphExecDestroy(p.graph);
    }

    // Records what `enqueue` enqueues on the stream, and runs it, each graph as soon as it is ready.
    template <class Enqueue>
    void record(Stream stream, Enqueue&& enqueue) {
        stream_ = stream;
        begin();
        try {
            enqueue();
        } catch (...) {
            cudaGraph_t graph = nullptr;
            if (now && cudaStreamEndCapture(stream_, &graph) == cudaSuccess) cudaGraphDestroy(graph);
            cudaGetLastError();  // the error has been reported already: clears it
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
    // Adds what the host does at this place of the recording, and does it.
    void between(std::function<void()> act) {
        end(std::move(act));
        pieces_.back().act();
        begin();
    }

    inline static Recording* now = nullptr;  // the one that is being made, or null

  private:
    struct Piece {
        cudaGraphExec_t graph;      // null if nothing was enqueued
        std::function<void()> act;  // after the graph; may be empty
    };
    void begin() {
        // Captures this thread alone: what other threads do meanwhile is not recorded.
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

// Does what only the host can do in a step: now, and again at this place whenever the step is replayed. It
// may enqueue on any stream. When it is replayed, what it uses must be at the same addresses, and it must
// hold no reference to anything that is gone.
template <class Act>
void host_act(Act act) {
#if defined(SIMT_GPU)
    if (Recording::now) {
        // A std::function must be copyable, and an act need not be.
        const auto kept = std::make_shared<Act>(std::move(act));
        return Recording::now->between([kept] { (*kept)(); });
    }
#endif
    act();
}

// Which graph: a plan's, and whether ranks exchange gradients in it.
struct GraphKey {
    const void* plan;
    bool exchanges;
    auto operator<=>(const GraphKey&) const = default;
};

class StepGraphs {
  public:
    // Whether steps are replayed; on a CPU work is done where it is enqueued.
#if defined(SIMT_GPU)
    static constexpr bool kReplays = true;
#else
    static constexpr bool kReplays = false;
#endif

    // Does what `enqueue` enqueues on the stream, which must not be the default one. For each key `enqueue`
    // is called twice: first without recording, because kernels are loaded and libraries get ready then,
    // which cannot be recorded; then to be recorded. After that the recording is replayed, so the host's own
    // work must have been passed to host_act().
    template <class Enqueue>
    void run([[maybe_unused]] GraphKey key, [[maybe_unused]] Stream stream, Enqueue&& enqueue) {
#if defined(SIMT_GPU)
        const auto [it, first] = recordings_.try_emplace(key, nullptr);
        if (first) return enqueue();
        if (it->second) return it->second->replay();
        auto recording = std::make_unique<Recording>();
        recording->record(stream, enqueue);  // if that fails, the next call tries again
        it->second = std::move(recording);
#else
        enqueue();
#endif
    }

#if defined(SIMT_GPU)
  private:
    std::map<GraphKey, std::unique_ptr<Recording>> recordings_;  // null: ran once, not recorded yet
#endif
};
