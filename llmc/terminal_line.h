// terminal_line.h - the line at the bottom of a terminal that shows how a run goes. It is drawn again and
// again in place; whatever else is printed erases it first and stays above it.
#pragma once

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "llmc/file.h"

class TerminalLine {
  public:
    // True if the file descriptor is a terminal that can erase a line.
    static bool is_terminal(int fd) {
        const std::string name = getenv("TERM") ? getenv("TERM") : "dumb";
        return isatty(fd) && !name.empty() && name != "dumb";
    }
    // From here on, all that this process prints on stdout and stderr erases the line.
    static void begin() {
        for (FILE** stream : {&stdout, &stderr}) {
            const intptr_t fd = fileno(*stream);
            if (!is_terminal(static_cast<int>(fd))) continue;
            FILE* const ours =
                fopencookie(reinterpret_cast<void*>(fd), "w", {nullptr, write, nullptr, nullptr});
            if (!ours) continue;
            fflush(*stream);
            *stream = ours;
            setvbuf(*stream, nullptr, _IOLBF, BUFSIZ);
        }
    }
    // Draws the parts that fit the terminal as it is now, unless another line is incomplete.
    static void draw(const std::vector<std::string>& parts) {
        const std::string line = kErase + fitting(parts);
        if (is_at_start_) is_drawn_ = write_all(STDOUT_FILENO, line.data(), line.size());
    }
    // The line with as many of its parts as fit the terminal, and at most 80 columns. The last column stays
    // free: some terminals begin a new line when it is written.
    static std::string fitting(const std::vector<std::string>& parts) {
        winsize size{};
        const bool is_known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
        const size_t most = std::min<size_t>(is_known ? size.ws_col : 80, 80) - 1;
        std::string line;
        for (const std::string& part : parts)
            if (line.size() + part.size() <= most) line += part;
        return line;
    }
    // Erases a line that another process has drawn on the terminal to which a stream leads.
    static void erase(FILE* stream) {
        if (is_terminal(fileno(stream))) fputs(kErase, stream);
    }

  private:
    static constexpr const char* kErase = "\r\033[K";
    static ssize_t write(void* fd, const char* data, size_t bytes) {
        if (std::exchange(is_drawn_, false)) write_all(STDOUT_FILENO, kErase, 4);
        if (bytes > 0) is_at_start_ = data[bytes - 1] == '\n';
        const bool done = write_all(static_cast<int>(reinterpret_cast<intptr_t>(fd)), data, bytes);
        return done ? static_cast<ssize_t>(bytes) : 0;
    }
    static inline bool is_drawn_ = false, is_at_start_ = true;
};
