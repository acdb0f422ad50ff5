// bench_ranks.h - where the time of each of several ranks goes in a step (--bench): computing, exchanges that
// are hidden behind that, exchanges that are not, and waiting for other ranks.
//
// An exchange is complete only when the last rank has started it. Until then, a rank that waits for it waits
// for others. The clocks of machines differ, so they are compared once: all ranks look at theirs when they
// leave a barrier.
#pragma once

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "llmc/ranks_exchange.h"
#include "llmc/ranks.h"

// Passes everything on to another engine, and measures it. Exchanges between GPUs, which no engine makes, are
// measured too.
class MeasuredEngine : public RankEngine {
  public:
    explicit MeasuredEngine(RankEngine& engine) : engine_(engine) { now_measured = this; }
    MeasuredEngine(const MeasuredEngine&) = delete;
    ~MeasuredEngine() override { now_measured = nullptr; }

    void exchange(std::span<const Part> send, std::span<const Part> receive) override {
        const double began = exchange_clock();
        engine_.exchange(send, receive);
        const double took = exchange_clock() - began;
        times_.push_back({began, began, took, took});
    }
    void set_patience(double seconds) override { engine_.set_patience(seconds); }
    void set_where(const std::string& where) override { engine_.set_where(where); }
    std::string where() const override { return engine_.where(); }
    void watch(std::function<std::string()> fault) override { engine_.watch(std::move(fault)); }
    void start(std::vector<ExchangeRound> rounds) override {
        began_.push_back(exchange_clock());
        engine_.start(std::move(rounds));
    }
    void finish(size_t number) override {
        const double asked = exchange_clock();
        engine_.finish(number);
        const double ended = exchange_clock();
        for (; finished_ <= number; finished_++) {  // the wait is for the last of these
            const double began = began_.front(), took = engine_.seconds_of(finished_);
            began_.pop_front();
            times_.push_back(
                {began, asked, took < 0 ? ended - began : took, finished_ == number ? ended - asked : 0});
        }
    }
    double seconds_of(size_t number) const override { return engine_.seconds_of(number); }
    void end_all(int code) override { engine_.end_all(code); }
    Rank rank() const override { return engine_.rank(); }

    // Returns the exchanges that were measured since the last call, in order.
    std::vector<ExchangeTime> take() {
        std::vector<ExchangeTime> times = std::exchange(times_, {});
        const std::vector<ExchangeTime> of_gpu = timer_.take();
        times.insert(times.end(), of_gpu.begin(), of_gpu.end());
        return times;
    }

    static inline MeasuredEngine* now_measured = nullptr;  // the one that there is, if any

  private:
    RankEngine& engine_;
    std::vector<ExchangeTime> times_;
    ExchangeTimer timer_;       // of exchanges between GPUs
    std::deque<double> began_;  // of exchanges that are under way
    size_t finished_ = 0;       // how many are not
};

// Seconds of a step of one rank, the mean of several.
struct RankTimes {
    double computing = 0, hidden = 0, not_hidden = 0, waiting = 0;
};

constexpr size_t kBarriers = 9;

// The times of `count` ranks from what each of them has measured. `all` has what gather_rank_times()
// collects, one rank after another: the rank's clock at each barrier; then, for each step, the step's seconds
// and the four numbers of each of its exchanges[step] exchanges.
inline std::vector<RankTimes> rank_times(const std::vector<double>& all, size_t count,
                                         const std::vector<size_t>& exchanges) {
    const size_t row = all.size() / count;
    std::vector<double> ahead(count);  // by how much each clock is ahead of the first rank's
    for (size_t r = 0; r < count; r++) {
        std::vector<double> differences;
        for (size_t b = 0; b < kBarriers; b++) differences.push_back(all[r * row + b] - all[b]);
        std::nth_element(differences.begin(), differences.begin() + kBarriers / 2, differences.end());
        ahead[r] = differences[kBarriers / 2];
    }
    std::vector<RankTimes> ranks(count);
    std::vector<double> ended(count);  // when a rank's exchanges so far were complete, by its clock
    size_t at = kBarriers;
    for (const size_t of_step : exchanges) {
        for (size_t r = 0; r < count; r++) ranks[r].computing += all[r * row + at];
        at++;
        for (size_t e = 0; e < of_step; e++, at += 4) {
            double last = all[at];  // when the last rank started it
            for (size_t r = 1; r < count; r++) last = std::max(last, all[r * row + at] - ahead[r]);
            for (size_t r = 0; r < count; r++) {
                const double* const t = &all[r * row + at];
                const double began = t[0] - ahead[r], asked = t[1] - ahead[r], took = t[2], waited = t[3];
                const double waiting = std::clamp(last - asked, 0.0, waited);
                ranks[r].computing -= waited;
                ranks[r].waiting += waiting;
                ranks[r].not_hidden += waited - waiting;
                // It began when the last rank had started it, and those before it were complete. Control
                // messages do not wait for those.
                const bool is_control = waited == took && asked == began;
                const double end = began + took, first = is_control ? last : std::max(last, ended[r]);
                ranks[r].hidden += std::max(0.0, end - first) - (waited - waiting);
                if (!is_control) ended[r] = std::max(ended[r], end);
            }
        }
    }
    for (RankTimes& r : ranks) {
        r.hidden = std::max(0.0, r.hidden);
        for (double* seconds : {&r.computing, &r.hidden, &r.not_hidden, &r.waiting})
            *seconds /= static_cast<double>(exchanges.size());
    }
    return ranks;
}

// The same, from the seconds of this rank's steps and the exchanges in each of them. All ranks must call it,
// for as many steps.
inline std::vector<RankTimes> gather_rank_times(Exchange& exchange, const std::vector<double>& steps,
                                                const std::vector<std::vector<ExchangeTime>>& exchanges) {
    std::vector<double> own;
    std::vector<size_t> counts;
    for (size_t b = 0; b < kBarriers; b++) {
        exchange.largest(0);
        own.push_back(exchange_clock());
    }
    for (size_t s = 0; s < steps.size(); s++) {
        own.push_back(steps[s]);
        for (const ExchangeTime& e : exchanges[s])
            own.insert(own.end(), {e.began, e.asked, e.took, e.waited});
        counts.push_back(exchanges[s].size());
    }
    const std::vector<double> all = exchange.gather(own);
    return rank_times(all, all.size() / own.size(), counts);
}
