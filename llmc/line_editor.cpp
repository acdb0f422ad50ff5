// line_editor.cpp - a line that is edited on a terminal: its keys, and how it is drawn.
#include "llmc/line_editor.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "llmc/signals.h"
#include "llmc/utf8.h"

namespace {
// While this lives, the terminal gives every key as it is pressed, and marks what is pasted.
class RawTerminal {
  public:
    RawTerminal() {
        tcgetattr(STDIN_FILENO, &before_);
        termios raw = before_;
        raw.c_iflag &= ~static_cast<tcflag_t>(ICRNL | IXON);
        raw.c_lflag &= ~static_cast<tcflag_t>(ECHO | ICANON | IEXTEN | ISIG);
        raw.c_cc[VMIN] = 1, raw.c_cc[VTIME] = 0;
        tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
        fputs("\033[?2004h", stdout);
    }
    ~RawTerminal() {
        fputs("\033[?2004l", stdout);
        fflush(stdout);
        tcsetattr(STDIN_FILENO, TCSADRAIN, &before_);
    }
    RawTerminal(const RawTerminal&) = delete;

  private:
    termios before_ = {};
};

// A line that is being edited. Positions are in bytes, always between whole characters.
class EditedLine {
  public:
    const std::string& text() const { return text_; }
    void set(std::string text) { text_ = std::move(text), at_ = text_.size(); }
    void insert(std::string_view characters) {
        text_.insert(at_, characters);
        at_ += characters.size();
    }
    void left() { at_ = before(at_); }
    void right() { at_ = after(at_); }
    void home() { at_ = 0; }
    void end() { at_ = text_.size(); }
    void erase_left() { erase(before(at_), at_); }
    void erase_right() { erase(at_, after(at_)); }
    void erase_to_begin() { erase(0, at_); }
    void erase_to_end() { erase(at_, text_.size()); }
    void erase_word() {
        size_t from = at_;
        while (from > 0 && text_[from - 1] == ' ') from--;
        while (from > 0 && text_[from - 1] != ' ') from--;
        erase(from, at_);
    }
    // The text that redraws the prompt and the line on a terminal with this many columns. If the line is too
    // long, it shows the part around the cursor. Line ends are shown as arrows.
    std::string drawn(const std::string& prompt, int columns) const {
        const int room = std::max(8, columns - static_cast<int>(prompt.size()) - 1);
        size_t from = at_;
        int to_cursor = 0;
        while (from > 0 && to_cursor + width(before(from)) < room)
            from = before(from), to_cursor += width(from);
        std::string shown;
        int used = 0;
        for (size_t i = from; i < text_.size() && used + width(i) <= room; i = after(i)) {
            used += width(i);
            shown += text_[i] == '\n' ? "\u21b5" : text_[i] == '\t' ? " " : text_.substr(i, after(i) - i);
        }
        return "\r" + prompt + shown + "\033[K\r\033[" +
               std::to_string(static_cast<int>(prompt.size()) + to_cursor) + "C";
    }

  private:
    size_t before(size_t at) const {
        return at == 0 ? 0 : last_character_start(std::string_view(text_).substr(0, at));
    }
    size_t after(size_t at) const {
        return at == text_.size() ? at : at + first_character(std::string_view(text_).substr(at)).length;
    }
    int width(size_t at) const {
        const int32_t code = first_character(std::string_view(text_).substr(at)).code;
        return code == '\n' || code == '\t' ? 1 : utf8proc_charwidth(code);
    }
    void erase(size_t from, size_t to) { text_.erase(from, to - from), at_ = from; }

    std::string text_;
    size_t at_ = 0;  // of the cursor
};

enum Key { kUp = 256, kDown, kLeft, kRight, kHome, kEnd, kDelete, kPaste, kPasted, kEndOfInput, kUnknown };
constexpr int control(char letter) { return letter - '@'; }

// Changes the line as a key asks; false if the key is none of these.
bool obey(EditedLine& line, int key) {
    using Line = EditedLine;
    static constexpr std::pair<int, void (Line::*)()> kActions[] = {
        {kLeft, &Line::left},
        {control('B'), &Line::left},
        {kRight, &Line::right},
        {control('F'), &Line::right},
        {kHome, &Line::home},
        {control('A'), &Line::home},
        {kEnd, &Line::end},
        {control('E'), &Line::end},
        {control('H'), &Line::erase_left},
        {127, &Line::erase_left},
        {kDelete, &Line::erase_right},
        {control('D'), &Line::erase_right},
        {control('K'), &Line::erase_to_end},
        {control('U'), &Line::erase_to_begin},
        {control('W'), &Line::erase_word},
    };
    const auto action = std::ranges::find(kActions, key, &std::pair<int, void (Line::*)()>::first);
    if (action == std::end(kActions)) return false;
    (line.*action->second)();
    return true;
}

bool terminal_can_edit() {
    const char* const kind = getenv("TERM");
    return kind && *kind && std::string_view(kind) != "dumb" && isatty(STDOUT_FILENO) == 1;
}
}  // namespace

LineReader::LineReader(size_t longest) : longest_(longest), edits_(terminal_ && terminal_can_edit()) {}

std::optional<std::string> LineReader::read(const char* prompt) {
    if (!edits_) return read_plain(prompt);
    std::optional<std::string> line;
    {
        const RawTerminal raw;
        line = edit(prompt);
    }
    fputs("\n", stdout);
    if (line && !line->empty()) history_.push_back(*line);
    return line;
}

std::optional<std::string> LineReader::read_plain(const char* prompt) {
    if (terminal_) fputs(prompt, stderr);
    std::string line;
    for (int byte; (byte = read_byte()) != '\n';) {
        if (byte == kEndOfInput) return line.empty() || interrupted ? std::nullopt : std::optional(line);
        if (line.size() <= longest_) line += static_cast<char>(byte);
    }
    if (line.ends_with('\r')) line.pop_back();  // as files of Windows have
    return line;
}

int LineReader::read_byte() {
    if (next_ == held_.size()) {
        char bytes[4096];
        if (!wait_for_input()) return kEndOfInput;
        const ssize_t count = ::read(STDIN_FILENO, bytes, sizeof bytes);
        if (count <= 0) return kEndOfInput;
        held_.assign(bytes, static_cast<size_t>(count));
        next_ = 0;
    }
    return static_cast<unsigned char>(held_[next_++]);
}

int LineReader::read_key() {
    const int byte = read_byte();
    if (byte != '\033') return byte;
    if (next_ == held_.size()) {  // the key Esc alone: a terminal writes a sequence at once
        pollfd input = {STDIN_FILENO, POLLIN, 0};
        if (poll(&input, 1, 50) == 0) return kUnknown;
    }
    const int kind = read_byte();
    if (kind != '[' && kind != 'O') return kUnknown;
    std::string sequence;
    do {
        const int next = read_byte();
        if (next == kEndOfInput) return next;
        sequence += static_cast<char>(next);
    } while (sequence.back() < '@' || sequence.back() > '~');
    constexpr std::pair<std::string_view, Key> kSequences[] = {
        {"A", kUp},      {"B", kDown},     {"C", kRight},    {"D", kLeft}, {"H", kHome},
        {"F", kEnd},     {"1~", kHome},    {"7~", kHome},    {"4~", kEnd}, {"8~", kEnd},
        {"3~", kDelete}, {"200~", kPaste}, {"201~", kPasted}};
    for (const auto& [written, key] : kSequences)
        if (sequence == written) return key;
    return kUnknown;
}

std::string LineReader::read_character(int first) {
    std::string text(1, static_cast<char>(first));
    while (whole_character(text) == 0) {
        const int byte = read_byte();
        if (byte > 255) return "";
        if ((byte & 0xc0) != 0x80) {  // does not continue the character: it is the next key
            next_--;
            return "";
        }
        text += static_cast<char>(byte);
    }
    const int32_t code = first_character(text).code;
    const bool is_text = code >= ' ' && code != 127 && !(code >= 0x80 && code < 0xa0);
    return is_text || code == '\t' ? text : "";
}

std::optional<std::string> LineReader::edit(const std::string& prompt) {
    EditedLine line;
    size_t shown = history_.size();  // the line of the history that is shown; its end: a new line
    bool pastes = false;
    std::string unfinished;  // the new line, while an earlier one is shown
    const auto show = [&](size_t number) {
        if (number > history_.size()) return;
        if (shown == history_.size()) unfinished = line.text();
        shown = number;
        line.set(shown == history_.size() ? unfinished : history_[shown]);
    };
    for (;;) {
        winsize size = {};
        ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
        fputs(line.drawn(prompt, size.ws_col > 0 ? size.ws_col : 80).c_str(), stdout);
        fflush(stdout);
        const int key = read_key();
        if (key == kPaste || key == kPasted) {
            pastes = key == kPaste;
        } else if (key == '\r' || key == '\n') {
            if (!pastes) return line.text();
            if (line.text().size() <= longest_) line.insert("\n");
        } else if (key == control('C')) {
            interrupted = SIGINT;
            return std::nullopt;
        } else if (key == kEndOfInput || (key == control('D') && line.text().empty())) {
            return std::nullopt;
        } else if (key == kUp || key == control('P')) {
            show(shown - 1);
        } else if (key == kDown || key == control('N')) {
            show(shown + 1);
        } else if (key == control('L')) {
            fputs("\033[H\033[2J", stdout);
        } else if (!obey(line, key) && key < 256 && line.text().size() <= longest_) {
            line.insert(read_character(key));
        }
    }
}
