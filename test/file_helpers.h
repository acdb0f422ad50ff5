// file_helpers.h - temporary folders and expected user errors, for the tests of file formats.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>

#include <gtest/gtest.h>

#include "llmc/error.h"

// A folder that is removed at the end of its scope.
class TempFolder {
  public:
    TempFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "llmc-XXXXXX").string();
        if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp failed");
        path_ = name;
    }
    TempFolder(const TempFolder&) = delete;
    ~TempFolder() { std::filesystem::remove_all(path_); }

    std::string operator/(const std::string& name) const { return path_ + "/" + name; }
    const std::string& path() const { return path_; }

    // Writes a file into the folder and returns its path.
    std::string write(const std::string& name, const std::string& content) const {
        std::ofstream(*this / name, std::ios::binary) << content;
        return *this / name;
    }

  private:
    std::string path_;
};

// Expects an error of this type whose message is one line and mentions all parts.
template <class Error, class F>
void expect_error(F action, std::initializer_list<std::string> parts) {
    try {
        action();
        ADD_FAILURE() << "no error where one should mention " << *parts.begin();
    } catch (const Error& error) {
        const std::string message = error.what();
        EXPECT_EQ(message.find('\n'), std::string::npos) << message;
        for (const std::string& part : parts)
            EXPECT_NE(message.find(part), std::string::npos)
                << "\"" << message << "\" lacks \"" << part << "\"";
    }
}
template <class F>
void expect_user_error(F action, std::initializer_list<std::string> parts) {
    expect_error<UserError>(action, parts);
}
template <class F>
void expect_bug(F action, std::initializer_list<std::string> parts) {
    expect_error<std::logic_error>(action, parts);
}
