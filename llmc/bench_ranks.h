// bench_ranks.h - where the time of each of several ranks goes in a step (--bench): computing, exchanges that
// are hidden behind that, exchanges that are not, and waiting for other ranks.
//
// An exchange is over when all ranks have taken part in it, so the rank that comes last waits for nobody: the
// shortest time that any rank has for an exchange is what it takes. Of the time that another rank waits for
// it, that much is the exchange's, and the rest is waiting for others. No clocks are compared.
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "llmc/exchange.h"
#include "llmc/ranks.h"

// The seconds of an exchange on a rank, from its start to its end, and those that the rank waits for it.
struct ExchangeTime {
    double took, waited;
};

// Passes everything on to another engine, and measures it.
class MeasuredEngine : public RankEngine {
  public:
    explicit MeasuredEngine(RankEngine& engine) : engine_(engine) { now_measured = this; }
    MeasuredEngine(const MeasuredEngine&) = delete;
    ~MeasuredEngine() override { now_measured = nullptr; }

    void exchange(std::span<const Part> send, std::span<const Part> receive) override {
        const double began = now();
        engine_.exchange(send, receive);
        times_.push_back({now() - began, now() - began});
    }
    void start(std::span<const Part> send, std::span<const Part> receive) override {
        began_ = now();
        engine_.start(send, receive);
    }
    void finish() override {
        const double asked = now();
        engine_.finish();
        const double took = engine_.latest_seconds();
        times_.push_back({took < 0 ? now() - began_ : took, now() - asked});
    }
    double latest_seconds() const override { return engine_.latest_seconds(); }
    void end_all(int code) override { engine_.end_all(code); }
    int on_this_machine() const override { return engine_.on_this_machine(); }

    // Those since the last call, in order.
    std::vector<ExchangeTime> take() { return std::exchange(times_, {}); }

    static inline MeasuredEngine* now_measured = nullptr;  // the one that there is, if any

  private:
    static double now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
    RankEngine& engine_;
    std::vector<ExchangeTime> times_;
    double began_ = 0;
};

// Seconds of a step of one rank, the mean of several.
struct RankTimes {
    double computing = 0, hidden = 0, not_hidden = 0, waiting = 0;
};

// The times of all ranks, from what each of them has measured: `all` has for one rank after another, and for
// each step, the step's seconds and then those of its exchanges, of which there are exchanges[step].
inline std::vector<RankTimes> rank_times(const std::vector<double>& all, size_t count,
                                         const std::vector<size_t>& exchanges) {
    std::vector<RankTimes> ranks(count);
    const size_t row = all.size() / count;
    size_t at = 0;
    for (const size_t of_step : exchanges) {
        for (size_t r = 0; r < count; r++) ranks[r].computing += all[r * row + at];
        at++;
        for (size_t e = 0; e < of_step; e++, at += 2) {
            double shortest = all[at];
            for (size_t r = 1; r < count; r++) shortest = std::min(shortest, all[r * row + at]);
            for (size_t r = 0; r < count; r++) {
                const double waited = all[r * row + at + 1], not_hidden = std::min(waited, shortest);
                ranks[r].computing -= waited;
                ranks[r].hidden += shortest - not_hidden;
                ranks[r].not_hidden += not_hidden;
                ranks[r].waiting += waited - not_hidden;
            }
        }
    }
    for (RankTimes& r : ranks)
        for (double* seconds : {&r.computing, &r.hidden, &r.not_hidden, &r.waiting})
            *seconds /= static_cast<double>(exchanges.size());
    return ranks;
}

// The same, from the seconds of this rank's steps and the exchanges in each of them. All ranks must call it,
// for as many steps.
inline std::vector<RankTimes> gather_rank_times(Exchange& exchange, const std::vector<double>& steps,
                                                const std::vector<std::vector<ExchangeTime>>& exchanges) {
    std::vector<double> own;
    std::vector<size_t> counts;
    for (size_t s = 0; s < steps.size(); s++) {
        own.push_back(steps[s]);
        for (const ExchangeTime& e : exchanges[s]) own.insert(own.end(), {e.took, e.waited});
        counts.push_back(exchanges[s].size());
    }
    const std::vector<double> all = exchange.gather(own);
    return rank_times(all, all.size() / own.size(), counts);
}
