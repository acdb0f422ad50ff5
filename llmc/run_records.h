// run_records.h - shows the figures of a run's steps in the terminal, and writes them and its validations to
// the file of --log, to TensorBoard's event files and to the page of --report. A record has the number of a
// step, counted from 1, and either the step's figures or the loss of a validation after it.
#pragma once

#include <algorithm>
#include <ctime>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/file.h"
#include "llmc/terminal_line.h"

using Record = nlohmann::ordered_json;

// An exponential moving average of losses. The latest one has a weight of 1/20, and more among the first
// ones.
struct SmoothedLoss {
    double value = 0, count = 0;
    double add(double loss) { return value += (loss - value) * std::max(2 / (++count + 1), 0.05); }
};

// ---- the line of a step

struct StepFigures {
    int64_t step;  // from 0
    double loss, norm, rate, seconds;
    double waited = -1;  // of these, seconds waiting for streamed data or other ranks; negative: no such
    std::optional<int> slow_rank = {};
};

// The rank that the others wait for, given which share of a step each rank waited for others: at least half
// of the ranks waited a fifth of the step or more, and this one a quarter of that or less.
std::optional<int> slow_rank(const std::vector<double>& waited);

// Prints a line for each of the first steps, then one line per second or, if `every` is not 0, one for every
// `every`-th step. A terminal shows one short line instead, which is drawn anew as steps are done; the lines
// that `every` asks for, and that of the last step, stay there. Printed steps are counted from 1 to `steps`.
class StepLines {
  public:
    // A step's tokens and FLOPs. Utilization is relative to peak_flops per second. When a step reaches more,
    // new_peak() prints and returns what it is relative to from then on. `memory`: the bytes that the run
    // takes.
    struct Amounts {
        double tokens, flops, peak_flops;
        size_t memory;
        std::function<double(double reached)> new_peak = [](double reached) { return reached; };
    };
    StepLines(int64_t first_step, int64_t steps, int64_t every, Amounts a_step)
        : first_step_(first_step), steps_(steps), every_(every), a_step_(a_step) {}

    // Tokens of a step.
    double tokens() const { return a_step_.tokens; }
    // A step is done; `now` is the time in seconds on any clock.
    void add(const StepFigures& f, double now);
    // Prints the line of the latest step if it was not printed: before other output, and at the end.
    void print_latest();

  private:
    static constexpr int64_t kFirst = 3;

    int64_t seconds_left(const StepFigures& f) const {
        return static_cast<int64_t>(seconds_per_step_ * static_cast<double>(steps_ - f.step - 1));
    }
    void show_latest(bool stays);

    bool is_terminal_ = is_terminal(STDOUT_FILENO);
    int64_t first_step_, steps_, every_;
    Amounts a_step_;
    double seconds_per_step_ = 0;
    SmoothedLoss smoothed_;
    std::optional<StepFigures> latest_;  // the latest step, if its line was not printed
    double now_ = 0, printed_ = 0;       // when the latest step was done, and the one printed last
};

// ---- files of records

// A file to which records are appended. If none was opened, nothing is written.
class AppendedFile {
  public:
    void open(const std::string& option, const std::string& path, int flags);
    void write(const std::string& bytes);

  private:
    std::string name_;
    std::optional<OpenFile> file_;
};

// ---- --log: a JSON line for each record, or one of CSV

inline bool is_csv(const std::string& path) { return path.ends_with(".csv"); }

// Calls use(record, where its line begins and ends) for the records of a log until it returns false. A last
// line that is incomplete is left out. Records count steps from 1. Returns true if the log counts them from
// 0, as older versions did.
using UseRecord = std::function<bool(const Record& record, size_t begin, size_t end)>;
bool read_log(const std::string& path, const UseRecord& use);

class LogFile {
  public:
    // Continues the log of a run that resumes after `done` steps: cuts off later records, because those steps
    // are made again. Without `done`, begins a new one.
    void open(const std::string& option, const std::string& path, std::optional<int64_t> done);
    void write(Record record);

  private:
    void cut(int64_t done);

    std::string path_;
    bool csv_ = false, from_0_ = false;
    std::optional<std::pair<int64_t, size_t>> validated_;  // step and position of the last line, a validation
    AppendedFile file_;
};

// ---- --tensorboard

class TensorBoard {
  public:
    // Begins a new file in a folder. TensorBoard then hides what other files there have after `done` steps.
    void open(const std::string& folder, int64_t done);
    // The tags are those of transformers' Trainer.
    void write(const Record& record);

  private:
    void write_event(const std::string& fields);
    AppendedFile file_;
};

// ---- --report: a page that shows the run, and needs nothing else

// The text that each page begins with.
inline constexpr const char* kReportBegins = "<!DOCTYPE html>\n<!-- A report of ./train.";

class Report {
  public:
    Report();
    ~Report();  // if the run has not ended the page, an error has

    // `page` is what the page says beside the runs. The first run is this one.
    void open(const std::string& path, Record page);
    // Adds the records of a log to the latest run, or as another run.
    void add_log(const std::string& path);
    void add_run(const std::string& log);
    void write(const Record& record);
    void add_sample(int64_t step, const std::string& text);
    // Writes the page, atomically. If that fails, `error` says why.
    void save();
    // Writes the page for the last time.
    void end(const char* state);
    std::string error = "";

  private:
    struct Run;
    std::string path_;
    Record page_;
    std::vector<Run> runs_;
    std::time_t next_ = 0;  // when the page is written next
};

// ---- all of them

struct RunRecords {
    LogFile log;
    TensorBoard board;
    Report report;
    std::string error = "";

    // Opens the files. A run that goes on after `done` steps goes on with the log that is there.
    void open(const std::string& log_path, const std::string& folder, std::optional<int64_t> done) {
        log.open("--log", log_path, done);
        board.open(folder, done.value_or(0));
    }
    // check() reports an error, at a point where the training can be saved.
    void write(const Record& record) try {
        log.write(record);
        board.write(record);
        report.write(record);
    } catch (const UserError& e) {
        error = e.what();
    }
    void end(bool interrupted) {
        report.end(interrupted ? "interrupted" : "done");
        check();
    }
    void check() const {
        for (const std::string& what : {error, report.error})
            if (!what.empty()) throw RecoverableError(what);
    }
};
