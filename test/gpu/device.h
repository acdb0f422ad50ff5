// device.h - the emulated device: its memory, its streams, the work that is queued in them and when that
// runs.
//
// Work runs as late as its results can wait, or as early as possible, as a seed decides:
// GPU_ORDER=late|early|random.
#pragma once

#include <algorithm>
#include <deque>
#include <ctime>
#include <functional>
#include <mutex>
#include <random>

#include "test/gpu/block.h"
#include "test/gpu/chips.h"

namespace gpu {

inline std::string environment(const char* name, const char* otherwise) {
    const char* v = getenv(name);
    return v ? v : otherwise;
}

// A piece of work that waits to run. Its place among the others is fixed when it is queued.
struct Task {
    std::string name;
    std::function<void(const Work&)> run;
    std::function<void(const Work&)> queued = nullptr;  // called when it is queued, not when it runs
    // Whether it can run without waiting for what the host of another device has yet to do. Null: it can.
    std::function<bool()> ready = nullptr;
};
struct QueuedTask {
    Work work;
    std::function<void(const Work&)> run;
    std::function<bool()> ready;
};
struct Recording {
    std::vector<Task> tasks;
};
struct Stream {
    int index = 0;
    uint32_t queued = 0, done = 0;
    StreamClock clock{};  // of the work that was queued last
    std::deque<QueuedTask> tasks;
    Recording* recording = nullptr;
};
struct Event {
    bool recorded = false;
    StreamClock clock{};
    double milliseconds = 0;
};

class Device {
  public:
    Device()
        : memory(chip_memory()),
          order_(environment("GPU_ORDER", "random")),
          seed_(strtoull(environment("GPU_SEED", "1").c_str(), nullptr, 10)),
          random_(seed_) {
        streams_.push_back(&default_stream_);
    }

    DeviceMemory memory;
    bool check_races = environment("GPU_CHECK", "races") == "races";

    Stream* create_stream() {
        if (!unused_.empty()) {
            Stream* s = unused_.back();
            unused_.pop_back();
            return s;
        }
        if (streams_.size() >= kMostStreams) throw Fault("more streams than the emulator knows");
        Stream* s = new Stream;
        s->index = static_cast<int>(streams_.size());
        streams_.push_back(s);
        return s;
    }
    void destroy_stream(Stream* s) {
        wait(s);
        unused_.push_back(s);
    }
    Stream* default_stream() { return &default_stream_; }
    uint64_t next_seed() { return seed_ * 7919 + ++launches_; }

    bool recording() const {
        return std::any_of(streams_.begin(), streams_.end(), [](const Stream* s) { return s->recording; });
    }
    // For a call that CUDA refuses while a stream is recorded.
    void not_while_recording(const char* call) const {
        if (recording()) throw Fault(std::string(call) + " while a stream is captured");
    }

    // Counts graphs, and work that was queued by itself; waits of streams for events.
    uint64_t enqueued() const { return enqueued_; }

    void queue(Stream* s, Task task) {
        if (!s->recording) enqueued_++;
        enqueue(s, std::move(task));
    }
    void launch(const Recording& recording, Stream* s) {
        enqueued_++;
        for (const Task& t : recording.tasks) enqueue(s, t);
    }
    void record(Event* e, Stream* s) {
        if (s->recording) throw Fault("an event is recorded in a stream that is captured");
        queue(s, {"event", [this, e](const Work&) { e->milliseconds = now(); }});
        e->recorded = true;
        e->clock = s->clock;
    }
    void wait(Stream* s, const Event* e) {
        if (s->recording) throw Fault("a stream that is captured waits for an event from outside");
        enqueued_++;
        if (e->recorded) join(s->clock, e->clock);
    }
    // The host waits.
    void wait(const Event* e) {
        not_while_recording("cudaEventSynchronize");
        for (Stream* s : streams_) finish(s, e->clock[static_cast<size_t>(s->index)]);
        host_knows(e->clock);
    }
    // The host asks whether the event has happened; if so, it knows that from then on.
    bool has_happened(const Event* e) {
        not_while_recording("cudaEventQuery");
        for (const Stream* s : streams_)
            if (s->done < e->clock[static_cast<size_t>(s->index)]) return false;
        host_knows(e->clock);
        return true;
    }
    void wait(Stream* s) {
        not_while_recording("cudaStreamSynchronize");
        finish(s);
        host_knows(s->clock);
    }
    void wait() {
        not_while_recording("cudaDeviceSynchronize");
        for (Stream* s : streams_) wait(s);
    }
    // Without the host: runs a stream's work up to this piece, unless that would have to wait for the host of
    // another device.
    void run_if_ready(Stream* s, uint32_t number) {
        if (is_ready(s, number)) finish(s, number);
    }

    // What a copy or a product reads and writes.
    void reads(const Work& work, const void* p, size_t bytes) { memory.reads(accessor(work), p, bytes); }
    void writes(const Work& work, const void* p, size_t bytes) { memory.writes(accessor(work), p, bytes); }

    // Runs a check at the moment when the host knows that the work is done.
    void check_when_known(const Work& work, std::function<void()> check) {
        checks_.push_back({work.stream, work.number, std::move(check)});
    }

    // Copies from the host's memory that were requested and have not run.
    void host_read_is_queued(const void* p, size_t bytes) { host_reads_.push_back({p, bytes, 0}); }
    void host_read_runs(const void* p, size_t bytes) {
        const auto same = [&](const HostCopy& r) { return r.at == p && r.bytes == bytes; };
        const auto found = std::find_if(host_reads_.begin(), host_reads_.end(), same);
        if (found != host_reads_.end()) host_reads_.erase(found);
    }
    bool is_being_read(const void* p, size_t bytes) const {
        return any_of(host_reads_, p, bytes, [](const HostCopy&) { return true; });
    }
    // Copies to the host's memory: those that were requested and have not run, and when others ran.
    void host_write_is_queued(const void* p, size_t bytes) { host_writes_.push_back({p, bytes, 0}); }
    void host_write_runs(const void* p, size_t bytes) {
        for (HostCopy& w : host_writes_)
            if (w.ran == 0 && w.at == p && w.bytes == bytes) {
                w.ran = ++moment_;
                return;
            }
    }
    bool is_being_written(const void* p, size_t bytes) const {
        return any_of(host_writes_, p, bytes, [](const HostCopy& w) { return w.ran == 0; });
    }
    // Also if a write is still to come.
    bool was_written_since(uint64_t moment, const void* p, size_t bytes) const {
        return any_of(host_writes_, p, bytes,
                      [=](const HostCopy& w) { return w.ran == 0 || w.ran > moment; });
    }
    uint64_t moment() { return ++moment_; }

    static double now() {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
    }

  private:
    void enqueue(Stream* s, Task task) {
        if (s == &default_stream_ && recording())
            throw Fault(task.name + " on the default stream while another is captured");
        if (s->recording) {
            s->recording->tasks.push_back(std::move(task));
            return;
        }
        // The default stream comes after everything that was queued before, and before everything that is
        // queued later.
        if (s == &default_stream_)
            for (const Stream* other : streams_) join(s->clock, other->clock);
        else
            join(s->clock, default_stream_.clock);
        join(s->clock, host_);
        Work work;
        work.stream = s->index;
        work.number = ++s->queued;
        work.after = s->clock;
        work.name = task.name;
        if (task.queued) task.queued(work);
        s->clock[static_cast<size_t>(s->index)] = work.number;
        if (task.ready) need_others_++;
        s->tasks.push_back({std::move(work), std::move(task.run), std::move(task.ready)});
        const auto first_is_ready = [&](const Stream* of) {
            return !of->tasks.empty() && is_ready(of, of->tasks.front().work.number);
        };
        if (order_ == "early")
            while (first_is_ready(s)) step(s);
        if (order_ == "random")
            for (uint64_t n = random_() % 4; n > 0; n--) {
                Stream* any = streams_[random_() % streams_.size()];
                if (first_is_ready(any)) step(any);
            }
    }
    // Whether a stream's work up to this piece, and all that comes before it, can run now.
    bool is_ready(const Stream* s, uint32_t number) const {
        if (!need_others_) return true;
        for (const QueuedTask& task : s->tasks) {
            if (task.work.number > number) break;
            if (task.ready && !task.ready()) return false;
            for (const Stream* other : streams_)
                if (other != s && !is_ready(other, task.work.after[static_cast<size_t>(other->index)]))
                    return false;
        }
        return true;
    }
    struct HostCopy {
        const void* at;
        size_t bytes;
        uint64_t ran;  // 0: not yet
    };
    template <class Which>
    static bool any_of(const std::vector<HostCopy>& copies, const void* p, size_t bytes, Which which) {
        const auto from = reinterpret_cast<uintptr_t>(p);
        return std::any_of(copies.begin(), copies.end(), [&](const HostCopy& c) {
            const auto at = reinterpret_cast<uintptr_t>(c.at);
            return at < from + bytes && from < at + c.bytes && which(c);
        });
    }
    Accessor accessor(const Work& work) const { return {&work, kNoBlock, 0, 0, 0, 0, &nobody_}; }
    void host_knows(const StreamClock& clock) {
        join(host_, clock);
        if (checks_.empty()) std::erase_if(host_writes_, [](const HostCopy& w) { return w.ran != 0; });
        std::erase_if(checks_, [&](const Check& c) {
            if (host_[static_cast<size_t>(c.stream)] < c.number) return false;
            c.run();
            return true;
        });
    }
    void step(Stream* s) {
        const QueuedTask task = std::move(s->tasks.front());
        s->tasks.pop_front();
        for (Stream* other : streams_)
            if (other != s) finish(other, task.work.after[static_cast<size_t>(other->index)]);
        task.run(task.work);
        if (task.ready) need_others_--;
        s->done = task.work.number;
    }
    void finish(Stream* s, uint32_t number = ~0u) {
        while (!s->tasks.empty() && s->tasks.front().work.number <= number) step(s);
    }

    std::string order_;
    uint64_t seed_, launches_ = 0, enqueued_ = 0;
    int need_others_ = 0;  // queued work that needs other devices
    std::mt19937_64 random_;
    Stream default_stream_;
    std::vector<Stream*> streams_, unused_;  // of these, those that were destroyed
    StreamClock host_{};                     // what the host knows is done
    struct Check {
        int stream;
        uint32_t number;
        std::function<void()> run;
    };
    std::vector<Check> checks_;
    std::vector<HostCopy> host_writes_, host_reads_;
    uint64_t moment_ = 0;
    WarpClock nobody_{};
};

Device& device();

// Held during each call of the program. Beside these, only the thread that answers other devices (nccl.cpp)
// uses the device.
inline std::recursive_mutex& device_mutex() {
    static auto& mutex = *new std::recursive_mutex;
    return mutex;
}

}  // namespace gpu
