// terminal_line.h - the line at the bottom of a terminal that shows how a run goes. It is drawn again and
// again in place; print() erases it first, so that whatever is printed stays above it.
#pragma once

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "llmc/file.h"

// True if the file descriptor is a terminal that can erase a line.
inline bool is_terminal(int fd) {
    const std::string name = getenv("TERM") ? getenv("TERM") : "dumb";
    return isatty(fd) && !name.empty() && name != "dumb";
}

// As many of the parts as fit into a line of the terminal, and into 80 columns. The last column stays free:
// some terminals begin a new line when it is written.
inline std::string fitting_line(const std::vector<std::string>& parts) {
    winsize size{};
    const bool is_known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    const size_t most = std::min<size_t>(is_known ? size.ws_col : 80, 80) - 1;
    std::string line;
    for (const std::string& part : parts)
        if (line.size() + part.size() <= most) line += part;
    return line;
}

// Draws the line in place of the one before. The next print() erases it.
inline constexpr const char* kEraseLine = "\r\033[K";
inline void draw_line(const std::string& line) {
    const std::string drawn = kEraseLine + line;
    write_all(STDOUT_FILENO, drawn.data(), drawn.size());
    before_print = [] {
        write_all(STDOUT_FILENO, kEraseLine, strlen(kEraseLine));
        before_print = nullptr;
    };
}
