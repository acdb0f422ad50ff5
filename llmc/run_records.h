// run_records.h - where the figures of a run's steps and validations go: the file of --log, TensorBoard's
// event files and the page of --report. A record has the figures of a step, which count from 1, or the loss
// of a validation after so many steps.
#pragma once

#include <bit>
#include <concepts>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "llmc/file.h"

using Record = nlohmann::ordered_json;

// A file that grows by a record at a time. Without one, nothing is written.
class AppendedFile {
  public:
    void open(const char* option, const std::string& path, int flags) {
        name_ = format("%s %s", option, path.c_str());
        naming(option, [&] { file_.emplace(open_output(path, flags)); });
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
// line that was not completed is none. Returns true if the log is of a version that counted steps from 0; the
// records count from 1 nevertheless.
template <class Use>
bool read_log(const std::string& path, Use&& use) {
    std::ifstream file(path);
    if (!file || std::filesystem::is_directory(path)) fail("%s: cannot be read", path.c_str());
    bool from_0 = false;
    size_t begin = 0, end = 0;
    for (std::string line; std::getline(file, line) && !file.eof(); begin = end) {
        end = begin + line.size() + 1;
        Record record = is_csv(path) ? nullptr : Record::parse(line, nullptr, false);
        std::istringstream values(is_csv(path) ? line : "");
        std::string value;
        for (auto key = kLogKeys.begin(); key != kLogKeys.end() && std::getline(values, value, ','); key++)
            if (!value.empty()) record[*key] = Record::parse(value, nullptr, false);
        if (!record.is_object() || !record.contains("step") || !record["step"].is_number_integer()) continue;
        from_0 |= record.contains("loss") && record["step"] == 0;
        if (from_0 && record.contains("loss")) record["step"] = record["step"].get<int64_t>() + 1;
        if (!use(record, begin, end)) break;
    }
    return from_0;
}

class LogFile {
  public:
    // With `done`, goes on after that many steps: records of later ones, which are made again, are cut off.
    void open(const std::string& path, std::optional<int64_t> done, const char* option = "--log") {
        if (path.empty()) return;
        path_ = path, csv_ = is_csv(path) && option == std::string("--log");
        if (done && std::filesystem::is_regular_file(path)) cut(*done);
        file_.open(option, path, done ? O_APPEND : O_TRUNC);
        std::error_code is_no_file;
        const bool is_new = std::filesystem::file_size(path, is_no_file) == 0 || is_no_file;
        if (csv_ && is_new) file_.write(joined(kLogKeys, ",") + "\n");
    }
    void write(Record record) {
        if (validated_ && record.contains("val_loss") && record["step"] == validated_->first)
            std::filesystem::resize_file(path_, validated_->second);  // it was made again
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
    std::optional<std::pair<int64_t, size_t>> validated_;  // step and place of a validation at the end
    AppendedFile file_;
};

// ---- --tensorboard: events, which are messages of protobuf between their length and checksums (TFRecord)

template <class T>
std::string bytes_of(T number) {
    return {reinterpret_cast<const char*>(&number), sizeof number};
}
// The checksum CRC-32C, masked as in TFRecord files.
inline std::string masked_crc(const std::string& bytes) {
    uint32_t crc = ~0u;
    for (const char c : bytes) {
        crc ^= static_cast<unsigned char>(c);
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return bytes_of(std::rotr(~crc, 15) + 0xa282ead8u);
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
    return std::string(1, static_cast<char>(field << 3 | (sizeof value == 8 ? 1 : 5))) + bytes_of(value);
}

class TensorBoard {
  public:
    // Begins a new file in a folder. Of other files there, TensorBoard then shows nothing after `done` steps.
    void open(const std::string& folder, int64_t done) {
        if (folder.empty()) return;
        std::error_code error;
        std::filesystem::create_directories(folder, error);
        if (error) fail("--tensorboard %s: %s", folder.c_str(), error.message().c_str());
        const long long now = std::time(nullptr);
        const std::string path = format("%s/events.out.tfevents.%lld.%07d", folder.c_str(), now, getpid());
        file_.open("--tensorboard", path, O_TRUNC);
        write_event(proto(3, std::string("brain.Event:2")));
        write_event(proto(2, static_cast<uint64_t>(done + 1)) + proto(7, proto(1, uint64_t{1})));
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
                          length = bytes_of(uint64_t{event.size()});
        file_.write(length + masked_crc(length) + event + masked_crc(event));
    }
    AppendedFile file_;
};

// ---- --report: a page that shows the run, and needs nothing else

// The text of report_page.html, in which @DATA@ stands for the data; and how each page begins.
std::string_view report_page();
inline constexpr const char* kReportBegins = "<!DOCTYPE html>\n<!-- A report of ./train.";

// An exponential moving average of losses: the latest counts a twentieth, and more among the first ones.
struct SmoothedLoss {
    double value = 0, count = 0;
    double add(double loss) { return value += (loss - value) * std::max(2 / (++count + 1), 0.05); }
};

// A curve of at most 2,000 points, however many steps a run has: when there are more, neighbours become one
// point with their mean, least and most value, so that no spike is lost.
struct Curve {
    struct Point {
        int64_t last, count;  // step; of steps
        double sum, least, most;
    };
    std::vector<Point> points;
    int64_t width = 1;  // steps of a point

    void add(const Point& next) {
        if (points.empty() || points.back().count + next.count > width) {
            points.push_back(next);
        } else {
            const Point p = points.back();
            points.back() = {next.last, p.count + next.count, p.sum + next.sum, std::min(p.least, next.least),
                             std::max(p.most, next.most)};
        }
        if (points.size() <= 2000) return;
        width *= 2;
        for (const Point& p : std::exchange(points, {})) add(p);
    }
    Record json() const {
        Record all = {{"width", width}};
        const auto rounded = [](double v) { return strtod(format("%.6g", v).c_str(), nullptr); };
        for (const Point& p : points) {
            all["x"].push_back(p.last);
            all["mean"].push_back(rounded(p.sum / static_cast<double>(p.count)));
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
        const auto add = [&](const std::string& key, double value) {
            curves[key].add({record["step"], 1, value, value, value});
        };
        for (const std::string& key : kLogKeys) {
            if (key == "step" || !record.contains(key) || !record[key].is_number()) continue;
            add(key, record[key]);
            if (key == "loss") add("smoothed", smoothed.add(record[key]));
        }
    }
};

class Report {
  public:
    ~Report() { end("ended by an error"); }

    // `page` is what the page says beside the runs, the first of which is this one.
    void open(const std::string& path, Record page, std::vector<ReportedRun> runs) {
        path_ = path, page_ = std::move(page), runs_ = std::move(runs);
        save();
    }
    void write(const Record& record) {
        if (path_.empty()) return;
        runs_[0].add(record);
        if (std::time(nullptr) >= next_) save();
    }
    void add_sample(int64_t step, const std::string& text) {
        if (path_.empty() || text.empty()) return;
        if (runs_[0].samples.size() == 20) runs_[0].samples.erase(1);  // the first one stays
        runs_[0].samples.push_back({{"step", step}, {"text", text.substr(0, 4000)}});
    }
    // Writes the page, atomically. Where that fails, `error` says why.
    void save() try {
        if (path_.empty()) return;
        const std::time_t begin = std::time(nullptr);
        page_["written"] = begin;
        page_["runs"] = Record::array();
        for (const ReportedRun& run : runs_) {
            page_["runs"].push_back(
                {{"name", run.name}, {"samples", run.samples}, {"curves", Record::object()}});
            for (const auto& [key, curve] : run.curves) page_["runs"].back()["curves"][key] = curve.json();
        }
        std::string data = page_.dump(-1, ' ', false, Record::error_handler_t::replace), text(report_page());
        for (size_t at = 0; (at = data.find('<', at)) != data.npos;) data.replace(at, 1, "\\u003c");
        text.replace(text.find("@DATA@"), 6, data);
        write_text(path_ + ".tmp", text);
        replace_file(path_ + ".tmp", path_);
        const std::time_t end = std::time(nullptr);
        next_ = end + 10 + 100 * (end - begin);  // so that this takes little of the time
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

    // check() reports an error, at a point where the training can be saved.
    void write(const Record& record) try {
        log.write(record);
        board.write(record);
        report.write(record);
    } catch (const UserError& e) {
        error = e.what();
    }
    void check() const {
        for (const std::string& what : {error, report.error})
            if (!what.empty()) throw RecoverableError(what);
    }
};
