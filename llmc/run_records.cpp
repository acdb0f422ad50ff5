// run_records.cpp - prints the lines of steps, and writes JSON, CSV, TensorBoard's messages and the report's
// page.
#include "llmc/run_records.h"

#include <bit>
#include <concepts>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string_view>

// ---- the line of a step

std::optional<int> slow_rank(const std::vector<double>& waited) {
    std::vector<double> sorted = waited;
    std::ranges::sort(sorted);
    const double usual = sorted[sorted.size() / 2];
    if (usual < 0.2 || sorted[0] > usual / 4) return std::nullopt;
    return static_cast<int>(std::ranges::min_element(waited) - waited.begin());
}

void StepLines::add(const StepFigures& f, double now) {
    // The first steps are slower, because products are compiled and graphs recorded. The time left is
    // estimated from the others.
    const bool early = f.step - first_step_ < kFirst;
    const bool asked = every_ > 0 && (f.step + 1) % every_ == 0;
    seconds_per_step_ = early ? f.seconds : 0.9 * seconds_per_step_ + 0.1 * f.seconds;
    if (const double reached = a_step_.flops / f.seconds; reached > a_step_.peak_flops)
        a_step_.peak_flops = a_step_.new_peak(reached);
    smoothed_.add(f.loss);
    latest_ = f;
    now_ = now;
    if (is_terminal_)
        show_latest(asked || f.step + 1 == steps_);
    else if (early || (every_ > 0 ? asked : now >= printed_ + 1))
        print_latest();
}

void StepLines::print_latest() {
    if (!latest_ || is_terminal_) return;
    const StepFigures f = *std::exchange(latest_, std::nullopt);
    const int64_t done = f.step + 1;
    const int64_t left = seconds_left(f);
    // The device's clock measures the waiting, the host's the step; in very short steps the first may be
    // longer.
    std::string waited =
        f.waited < 0 ? "" : format(" | waited %.1f%%", 100 * std::min(f.waited / f.seconds, 1.0));
    if (f.slow_rank) waited += format(" | rank %d is slow", *f.slow_rank);
    print(stdout,
          "step %5ld/%ld %5.1f%% | loss %.6f | norm %.4f | lr %.3e | %8.2f ms | %8.0f tok/s | MFU "
          "%4.1f%%%s | %ld:%02ld left\n",
          done, steps_, 100.0 * static_cast<double>(done) / static_cast<double>(steps_), f.loss, f.norm,
          f.rate, f.seconds * 1e3, a_step_.tokens / f.seconds,
          100.0 * a_step_.flops / f.seconds / a_step_.peak_flops, waited, left / 60, left % 60);
    fflush(stdout);
    printed_ = now_;
}

// The latest step's line on a terminal, at most ten times a second unless it stays.
void StepLines::show_latest(bool stays) {
    if (!stays && now_ < printed_ + 0.1) return;
    const StepFigures& f = *latest_;
    const auto left = seconds_left(f);
    const double speed = a_step_.tokens / seconds_per_step_;
    const size_t memory = a_step_.memory;
    const std::string line = fitting_line(
        {format("step %ld/%ld", f.step + 1, steps_), format("  loss %.4f", f.loss),
         format("  smoothed %.4f", smoothed_.value),
         speed < 1e5 ? format("  %.0f tokens/s", speed) : format("  %.0fk tokens/s", speed / 1e3),
         left < 3600 ? format("  %ld:%02ld left", left / 60, left % 60)
                     : format("  %ldh%02ldm left", left / 3600, left / 60 % 60),
         f.slow_rank ? format("  rank %d is slow", *f.slow_rank) : "",
         memory < 1 << 30 ? format("  %.0f MiB", mebibytes(memory))
                          : format("  %.1f GiB", gibibytes(memory))});
    if (stays)
        print(stdout, "%s\n", line);
    else
        draw_line(line);
    printed_ = now_;
}

// ---- files of records

void AppendedFile::open(const std::string& option, const std::string& path, int flags) {
    name_ = option + " " + path;
    try {
        file_.emplace(open_output(path, flags));
    } catch (const UserError& error) {
        fail("%s %s", option, error.what());
    }
}
void AppendedFile::write(const std::string& bytes) {
    if (!file_ || write_all(file_->fd(), bytes.data(), bytes.size())) return;
    const std::string error = write_error(errno);
    file_.reset();
    throw RecoverableError(name_ + ": " + error);
}

// ---- --log

static const std::vector<std::string> kLogKeys = {
    "step", "loss", "grad_norm", "lr", "ms", "tokens_per_second", "waited_ms", "val_loss"};

bool read_log(const std::string& path, const UseRecord& use) {
    std::ifstream file(path);
    if (!file || std::filesystem::is_directory(path)) fail("%s: cannot be read", path);
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

void LogFile::open(const std::string& option, const std::string& path, std::optional<int64_t> done) {
    if (path.empty()) return;
    path_ = path, csv_ = is_csv(path) && option == "--log";
    if (done && std::filesystem::is_regular_file(path)) cut(*done);
    file_.open(option, path, done ? O_APPEND : O_TRUNC);
    std::error_code is_no_file;
    const bool is_new = std::filesystem::file_size(path, is_no_file) == 0 || is_no_file;
    if (csv_ && is_new) file_.write(joined(kLogKeys, ",") + "\n");
}
void LogFile::write(Record record) {
    if (validated_ && record.contains("val_loss") && record["step"] == validated_->first)
        std::filesystem::resize_file(path_, validated_->second);  // this record replaces it
    validated_.reset();
    if (from_0_ && record.contains("loss")) record["step"] = record["step"].get<int64_t>() - 1;
    const auto value = [&](const std::string& key) { return record.contains(key) ? record[key].dump() : ""; };
    file_.write((csv_ ? joined(kLogKeys, ",", value) : record.dump()) + "\n");
}
void LogFile::cut(int64_t done) {
    size_t length = 0;
    from_0_ = read_log(path_, [&](const Record& record, size_t begin, size_t end) {
        if (record["step"] > done) return false;
        validated_.reset();
        if (record.contains("val_loss")) validated_ = {record["step"], begin};
        return length = end, true;
    });
    std::filesystem::resize_file(path_, length);
}

// ---- --tensorboard: events, which are messages of protobuf between their length and checksums (TFRecord)

template <class T>
std::string raw_bytes(T number) {
    return {reinterpret_cast<const char*>(&number), sizeof number};
}
// The checksum CRC-32C, masked as in TFRecord files.
static std::string masked_crc(const std::string& bytes) {
    uint32_t crc = ~0u;
    for (const char c : bytes) {
        crc ^= static_cast<unsigned char>(c);
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return raw_bytes(std::rotr(~crc, 15) + 0xa282ead8u);
}
// A field of a message: a whole number; a text or a message; a number of 4 or 8 bytes.
static std::string proto(int field, uint64_t value, int type = 0) {
    std::string text(1, static_cast<char>(field << 3 | type));
    for (; value > 127; value >>= 7) text += static_cast<char>(value | 128);
    return text += static_cast<char>(value);
}
static std::string proto(int field, const std::string& text) { return proto(field, text.size(), 2) + text; }
template <std::floating_point Float>
std::string proto(int field, Float value) {
    return std::string(1, static_cast<char>(field << 3 | (sizeof value == 8 ? 1 : 5))) + raw_bytes(value);
}

void TensorBoard::open(const std::string& folder, int64_t done) {
    if (folder.empty()) return;
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) fail("--tensorboard %s: %s", folder, error.message());
    const std::time_t now = std::time(nullptr);
    const std::string path = format("%s/events.out.tfevents.%ld.%07d", folder, now, getpid());
    file_.open("--tensorboard", path, O_TRUNC);
    write_event(proto(3, std::string("brain.Event:2")));
    write_event(proto(2, static_cast<uint64_t>(done) + 1) + proto(7, proto(1, uint64_t{1})));
}
void TensorBoard::write(const Record& record) {
    std::string values;
    for (const auto& [key, value] : record.items()) {
        const std::string tag =
            key == "val_loss" ? "eval/loss" : "train/" + (key == "lr" ? "learning_rate" : key);
        if (key != "step") values += proto(1, proto(1, tag) + proto(2, value.get<float>()));
    }
    write_event(proto(2, record["step"].get<uint64_t>()) + proto(5, values));
}
void TensorBoard::write_event(const std::string& fields) {
    const std::string event = proto(1, static_cast<double>(std::time(nullptr))) + fields,
                      length = raw_bytes(uint64_t{event.size()});
    file_.write(length + masked_crc(length) + event + masked_crc(event));
}

// ---- --report

// The text of report_page.html, in which @DATA@ stands for the data.
extern "C" const char llmc_report_page[], llmc_report_page_end[];
asm(".section .rodata\n"
    "llmc_report_page: .incbin \"llmc/report_page.html\"\n"
    "llmc_report_page_end: .byte 0\n"
    ".previous\n");

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
struct Report::Run {
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

Report::Report() = default;
Report::~Report() { end("ended by an error"); }

void Report::open(const std::string& path, Record page) {
    path_ = path, page_ = std::move(page), runs_ = {{"this run"}};
}
void Report::add_log(const std::string& path) {
    read_log(path, [&](const Record& r, size_t, size_t) { return runs_.back().add(r), true; });
}
void Report::add_run(const std::string& log) {
    runs_.push_back({log});
    add_log(log);
}
void Report::write(const Record& record) {
    if (path_.empty()) return;
    runs_[0].add(record);
    if (std::time(nullptr) >= next_) save();
}
void Report::add_sample(int64_t step, const std::string& text) {
    if (path_.empty() || text.empty()) return;
    Record& samples = runs_[0].samples;
    if (samples.size() == 20) samples.erase(1);  // the first one stays
    samples.push_back({{"step", step}, {"text", text.substr(0, 4000)}});
}
void Report::save() try {
    if (path_.empty()) return;
    const std::time_t begin = std::time(nullptr);
    page_["written"] = begin;
    page_["runs"] = Record::array();
    for (const Run& run : runs_) page_["runs"].push_back(run.json());
    std::string data = page_.dump(-1, ' ', false, Record::error_handler_t::replace),
                text(llmc_report_page, llmc_report_page_end);
    for (size_t at = 0; (at = data.find('<', at)) != data.npos;) data.replace(at, 1, "\\u003c");
    text.replace(text.find("@DATA@"), 6, data);
    write_text(path_ + ".tmp", text);
    replace_file(path_ + ".tmp", path_);
    const std::time_t end = std::time(nullptr);
    next_ = end + 10 + 100 * (end - begin);  // so that writing takes at most 1% of the time
} catch (const UserError& e) {
    error = format("--report %s", e.what());
}
void Report::end(const char* state) {
    page_["state"] = state;
    save();
    path_.clear();
}
