// run_records.h - writes the figures of a run's steps and validations to the file of --log, to TensorBoard's
// event files and to the page of --report. A record has the number of a step, counted from 1, and either the
// step's figures or the loss of a validation after it.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/file.h"

using Record = nlohmann::ordered_json;

// A file to which records are appended. If none was opened, nothing is written.
class AppendedFile {
  public:
    void open(const std::string& option, const std::string& path, int flags) {
        name_ = option + " " + path;
        try {
            file_.emplace(open_output(path, flags));
        } catch (const UserError& error) {
            fail("%s %s", option.c_str(), error.what());
        }
    }
    void write(const std::string& bytes) {
        if (!file_ || write_all(file_->fd(), bytes.data(), bytes.size())) return;
        const std::string error = write_error(errno);
        file_.reset();
        throw RecoverableError(name_ + ": " + error);
    }

  private:
    std::string name_;
    std::optional<OpenFile> file_;
};

// ---- --log: a JSON line for each record, or one of CSV

inline const std::vector<std::string> kLogKeys = {
    "step", "loss", "grad_norm", "lr", "ms", "tokens_per_second", "waited_ms", "val_loss"};
inline bool is_csv(const std::string& path) { return path.ends_with(".csv"); }

// Calls use(record, where its line begins and ends) for the records of a log until it returns false. A last
// line that is incomplete is left out. Records count steps from 1. Returns true if the log counts them from
// 0, as older versions did.
template <class Use>
bool read_log(const std::string& path, Use&& use) {
    std::ifstream file(path);
    if (!file || std::filesystem::is_directory(path)) fail("%s: cannot be read", path.c_str());
    bool from_0 = false;
    size_t begin = 0, end = 0;
    for (std::string line; std::getline(file, line) && !file.eof(); begin = end) {
        end = begin + line.size() + 1;
        Record record = line.starts_with('{') ? Record::parse(line, nullptr, false) : Record::object();
        std::istringstream values(line.starts_with('{') ? "" : line);  // of a line of CSV
        std::string value;
        for (auto key = kLogKeys.begin(); key != kLogKeys.end() && std::getline(values, value, ','); key++)
            if (!value.empty()) record[*key] = Record::parse(value, nullptr, false);
        if (!record.contains("step") || !record["step"].is_number_integer()) continue;
        from_0 |= record.contains("loss") && record["step"] == 0;
        if (from_0 && record.contains("loss")) record["step"] = record["step"].get<int64_t>() + 1;
        if (!use(record, begin, end)) break;
    }
    return from_0;
}

class LogFile {
  public:
    // Continues the log of a run that resumes after `done` steps: cuts off later records, because those steps
    // are made again. Without `done`, begins a new one.
    void open(const std::string& option, const std::string& path, std::optional<int64_t> done) {
        if (path.empty()) return;
        path_ = path, csv_ = is_csv(path) && option == "--log";
        if (done && std::filesystem::is_regular_file(path)) cut(*done);
        file_.open(option, path, done ? O_APPEND : O_TRUNC);
        std::error_code is_no_file;
        const bool is_new = std::filesystem::file_size(path, is_no_file) == 0 || is_no_file;
        if (csv_ && is_new) file_.write(joined(kLogKeys, ",") + "\n");
    }
    void write(Record record) {
        if (validated_ && record.contains("val_loss") && record["step"] == validated_->first)
            std::filesystem::resize_file(path_, validated_->second);  // this record replaces it
        validated_.reset();
        if (from_0_ && record.contains("loss")) record["step"] = record["step"].get<int64_t>() - 1;
        const auto value = [&](const std::string& key) {
            return record.contains(key) ? record[key].dump() : "";
        };
        file_.write((csv_ ? joined(kLogKeys, ",", value) : record.dump()) + "\n");
    }

  private:
    void cut(int64_t done) {
        size_t length = 0;
        from_0_ = read_log(path_, [&](const Record& record, size_t begin, size_t end) {
            if (record["step"] > done) return false;
            validated_.reset();
            if (record.contains("val_loss")) validated_ = {record["step"], begin};
            return length = end, true;
        });
        std::filesystem::resize_file(path_, length);
    }

    std::string path_;
    bool csv_ = false, from_0_ = false;
    std::optional<std::pair<int64_t, size_t>> validated_;  // step and position of the last line, a validation
    AppendedFile file_;
};

// ---- --tensorboard: events, which are messages of protobuf between their length and checksums (TFRecord)

template <class T>
std::string raw_bytes(T number) {
    return {reinterpret_cast<const char*>(&number), sizeof number};
}
// The checksum CRC-32C, masked as in TFRecord files.
inline std::string masked_crc(const std::string& bytes) {
    uint32_t crc = ~0u;
    for (const char c : bytes) {
        crc ^= static_cast<unsigned char>(c);
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return raw_bytes(std::rotr(~crc, 15) + 0xa282ead8u);
}
// A field of a message: a whole number; a text or a message; a number of 4 or 8 bytes.
inline std::string proto(int field, uint64_t value, int type = 0) {
    std::string text(1, static_cast<char>(field << 3 | type));
    for (; value > 127; value >>= 7) text += static_cast<char>(value | 128);
    return text += static_cast<char>(value);
}
inline std::string proto(int field, const std::string& text) { return proto(field, text.size(), 2) + text; }
template <std::floating_point Float>
std::string proto(int field, Float value) {
    return std::string(1, static_cast<char>(field << 3 | (sizeof value == 8 ? 1 : 5))) + raw_bytes(value);
}

class TensorBoard {
  public:
    // Begins a new file in a folder. TensorBoard then hides what other files there have after `done` steps.
    void open(const std::string& folder, int64_t done) {
        if (folder.empty()) return;
        std::error_code error;
        std::filesystem::create_directories(folder, error);
        if (error) fail("--tensorboard %s: %s", folder.c_str(), error.message().c_str());
        const long long now = std::time(nullptr);
        const std::string path = format("%s/events.out.tfevents.%lld.%07d", folder.c_str(), now, getpid());
        file_.open("--tensorboard", path, O_TRUNC);
        write_event(proto(3, std::string("brain.Event:2")));
        write_event(proto(2, static_cast<uint64_t>(done) + 1) + proto(7, proto(1, uint64_t{1})));
    }
    // The tags are those of transformers' Trainer.
    void write(const Record& record) {
        std::string values;
        for (const auto& [key, value] : record.items()) {
            const std::string tag =
                key == "val_loss" ? "eval/loss" : "train/" + (key == "lr" ? "learning_rate" : key);
            if (key != "step") values += proto(1, proto(1, tag) + proto(2, value.get<float>()));
        }
        write_event(proto(2, record["step"].get<uint64_t>()) + proto(5, values));
    }

  private:
    void write_event(const std::string& fields) {
        const std::string event = proto(1, static_cast<double>(std::time(nullptr))) + fields,
                          length = raw_bytes(uint64_t{event.size()});
        file_.write(length + masked_crc(length) + event + masked_crc(event));
    }
    AppendedFile file_;
};

// ---- --report: a page that shows the run, and needs nothing else

// The text of report_page.html, in which @DATA@ stands for the data, and the text that each page begins with.
std::string_view report_page();
inline constexpr const char* kReportBegins = "<!DOCTYPE html>\n<!-- A report of ./train.";

// An exponential moving average of losses. The latest one has a weight of 1/20, and more among the first
// ones.
struct SmoothedLoss {
    double value = 0, count = 0;
    double add(double loss) { return value += (loss - value) * std::max(2 / (++count + 1), 0.05); }
};

// A curve of at most 2,000 points. A longer run has several steps in each point: their mean and, so that no
// spike is lost, their least and most value.
struct Curve {
    struct Point {
        int64_t step;  // the last one
        double count, sum, least, most;
    };
    std::vector<Point> points;
    double width = 1;  // steps of a point

    void add(int64_t step, double value) {
        add({step, 1, value, value, value});
        if (points.size() <= 2000) return;
        width *= 2;
        for (const Point& p : std::exchange(points, {})) add(p);
    }
    void add(const Point& next) {
        if (points.empty() || points.back().count + next.count > width) return points.push_back(next);
        Point& p = points.back();
        p = {next.step, p.count + next.count, p.sum + next.sum, std::min(p.least, next.least),
             std::max(p.most, next.most)};
    }
    Record json() const {
        Record all = {{"width", width}};
        const auto rounded = [](double v) { return strtod(format("%.6g", v).c_str(), nullptr); };
        for (const Point& p : points) {
            all["x"].push_back(p.step);
            all["mean"].push_back(rounded(p.sum / p.count));
            all["min"].push_back(rounded(p.least));
            all["max"].push_back(rounded(p.most));
        }
        return all;
    }
};

// What the page shows of a run.
struct ReportedRun {
    std::string name;
    std::map<std::string, Curve> curves = {};  // by the keys of records, and "smoothed"
    Record samples = Record::array();
    SmoothedLoss smoothed = {};

    void add(const Record& record) {
        for (const auto& [key, value] : record.items()) {
            if (!value.is_number() || key == "step") continue;
            curves[key].add(record["step"], value);
            if (key == "loss") curves["smoothed"].add(record["step"], smoothed.add(value));
        }
    }
    Record json() const {
        Record all = {{"name", name}, {"samples", samples}, {"curves", Record::object()}};
        for (const auto& [key, curve] : curves) all["curves"][key] = curve.json();
        return all;
    }
};

class Report {
  public:
    ~Report() { end("ended by an error"); }

    // `page` is what the page says beside the runs. The first run is this one.
    void open(const std::string& path, Record page) {
        path_ = path, page_ = std::move(page), runs_ = {{"this run"}};
    }
    // Adds the records of a log to the latest run.
    void add_log(const std::string& path) {
        read_log(path, [&](const Record& r, size_t, size_t) { return runs_.back().add(r), true; });
    }
    void add_run(const std::string& log) {
        runs_.push_back({log});
        add_log(log);
    }
    void write(const Record& record) {
        if (path_.empty()) return;
        runs_[0].add(record);
        if (std::time(nullptr) >= next_) save();
    }
    void add_sample(int64_t step, const std::string& text) {
        if (path_.empty() || text.empty()) return;
        Record& samples = runs_[0].samples;
        if (samples.size() == 20) samples.erase(1);  // the first one stays
        samples.push_back({{"step", step}, {"text", text.substr(0, 4000)}});
    }
    // Writes the page, atomically. If that fails, `error` says why.
    void save() try {
        if (path_.empty()) return;
        const std::time_t begin = std::time(nullptr);
        page_["written"] = begin;
        page_["runs"] = Record::array();
        for (const ReportedRun& run : runs_) page_["runs"].push_back(run.json());
        std::string data = page_.dump(-1, ' ', false, Record::error_handler_t::replace), text(report_page());
        for (size_t at = 0; (at = data.find('<', at)) != data.npos;) data.replace(at, 1, "\\u003c");
        text.replace(text.find("@DATA@"), 6, data);
        write_text(path_ + ".tmp", text);
        replace_file(path_ + ".tmp", path_);
        const std::time_t end = std::time(nullptr);
        next_ = end + 10 + 100 * (end - begin);  // so that writing takes at most 1% of the time
    } catch (const UserError& e) {
        error = format("--report %s", e.what());
    }
    // Writes the page for the last time.
    void end(const char* state) {
        page_["state"] = state;
        save();
        path_.clear();
    }
    std::string error = "";

  private:
    std::string path_;
    Record page_;
    std::vector<ReportedRun> runs_;
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
