// graph.h - work that is enqueued the same way every time is recorded once as a CUDA graph, and replayed.
//
// A step is hundreds of launches, each of which costs the host microseconds and the device a gap; a graph is
// one. What is recorded holds the addresses and numbers that it was enqueued with: whatever changes from run
// to run must lie in the device's memory.
#pragma once

#include <map>

#include "llmc/simt.h"

class StepGraphs {
  public:
    // Whether there are graphs here: on a CPU work is done where it is enqueued.
#if defined(SIMT_GPU)
    static constexpr bool kReplays = true;
#else
    static constexpr bool kReplays = false;
#endif

    StepGraphs() = default;
    StepGraphs(const StepGraphs&) = delete;

    // Does what `enqueue` enqueues on the stream, which must not be the default one. For each key it is
    // called twice: at first as ever, as kernels are loaded and libraries get ready then, which cannot be
    // recorded; then to be recorded. From there on the record runs, in which it must have left nothing to the
    // host.
    template <class Enqueue>
    void run(const void* key, [[maybe_unused]] Stream stream, Enqueue&& enqueue) {
#if defined(SIMT_GPU)
        const auto [it, first] = graphs_.try_emplace(key, nullptr);
        if (first) return enqueue();
        if (!it->second) it->second = recorded(stream, enqueue);
        CUDA_CHECK(cudaGraphLaunch(it->second, stream));
#else
        static_cast<void>(key);
        enqueue();
#endif
    }

#if defined(SIMT_GPU)
    ~StepGraphs() {
        for (const auto& [key, graph] : graphs_)
            if (graph) cudaGraphExecDestroy(graph);
    }

  private:
    template <class Enqueue>
    static cudaGraphExec_t recorded(Stream stream, Enqueue& enqueue) {
        cudaGraph_t graph = nullptr;
        // Of this thread alone: what others do meanwhile is theirs.
        CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        try {
            enqueue();
        } catch (...) {
            if (cudaStreamEndCapture(stream, &graph) == cudaSuccess) cudaGraphDestroy(graph);
            cudaGetLastError();  // that the recording is broken is told already
            throw;
        }
        CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
        cudaGraphExec_t ready = nullptr;
        const cudaError_t status = cudaGraphInstantiateWithFlags(&ready, graph, 0);
        cudaGraphDestroy(graph);
        cuda_check(status, "cudaGraphInstantiateWithFlags");
        return ready;
    }

    std::map<const void*, cudaGraphExec_t> graphs_;  // null: ran once, not recorded yet
#endif
};
