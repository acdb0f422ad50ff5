// fuzz.h - shared code of the fuzz targets: the input as a file, and which exceptions are correct answers.
//
// A target is built with clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -I. and run on a
// corpus that test/fuzz_seeds.py writes.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

#include <unistd.h>

#include "llmc/error.h"

// Writes the bytes into a file in memory, always the same one, and returns its path.
inline std::string fuzz_file(std::string_view content, const std::string& ending) {
    struct File {
        std::string path;
        ~File() { unlink(path.c_str()); }
    };
    static const File file{"/dev/shm/llmc-fuzz-" + std::to_string(getpid()) + ending};
    std::ofstream(file.path, std::ios::binary)
        .write(content.data(), static_cast<std::streamsize>(content.size()));
    return file.path;
}

// Runs a parser. A UserError of one line is a correct answer to bad input. Any other exception ends the run,
// and so does a message of several lines.
template <class F>
void parse_or_refuse(F parser) {
    try {
        parser();
    } catch (const UserError& error) {
        if (std::string_view(error.what()).find('\n') != std::string_view::npos) __builtin_trap();
    }
}
