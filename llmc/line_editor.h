// line_editor.h - reads lines from the terminal, where they can be edited, or from a pipe. The keys are those
// of a shell: arrows, Home, End, Ctrl-A, -E, -B, -F, -K, -U, -W, -L, and up and down for earlier lines. A
// text that is pasted may have several lines.
#pragma once

#include <unistd.h>

#include <optional>
#include <string>
#include <vector>

class LineReader {
  public:
    // Drops what a line has beyond `longest` bytes.
    explicit LineReader(size_t longest);
    bool is_terminal() const { return terminal_; }
    // The next line without its end; nothing at the end of the input, or when a signal asks to stop.
    std::optional<std::string> read(const char* prompt);

  private:
    std::optional<std::string> read_plain(const char* prompt);
    int read_byte();

    // The next key: a byte or, if the terminal writes it as several, its name.
    int read_key();
    // The character that begins with this byte; empty if it is none, or no text.
    std::string read_character(int first);

    std::optional<std::string> edit(const std::string& prompt);
    const bool terminal_ = isatty(STDIN_FILENO) == 1;
    const size_t longest_;
    const bool edits_;  // or the line is read as it is
    std::string held_;  // what was read
    size_t next_ = 0;   // the first byte of it that is not used
    std::vector<std::string> history_;
};
