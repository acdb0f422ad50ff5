// options.h - what the command line, a config file and a resumed save ask for. These headers make it:
//   options_words.h      reads command lines and config files: names, aliases, hints about mistyped names
//   options_declare.h    declares the options: help, ranges, defaults
//   options_placement.h  the table of what can be placed outside the device (--offload)
//   options_help.h       --help and --version
//   resume.h             which options of a save hold in a run that resumes from it
//   options_check.h      which options may not be combined
//   options_parse.h      parse_options(), which puts these together
#pragma once

#include <map>
#include <optional>
#include <string>

#include "llmc/build.h"
#include "llmc/ranks.h"
#include "llmc/run_config.h"
#include "llmc/save_folder.h"

// True if the library for matrix products lets us choose its algorithms; and if it has TF32 for this build's
// operands.
inline bool searches_algorithms() { return !kBuild.host_is_device; }
inline bool has_tf32() { return !kBuild.host_is_device && !kBuild.is_bf16; }

// The options as they were asked for: their values, and which of them were given, and where. It does not
// change after RunOptions::begin(). The run's configuration (run_config.h) begins with its values.
struct Asked : RunConfig {
    bool has(const std::string& name) const { return settings.contains(name); }
    // True if it was given for this run, and not by the save.
    bool has_here(const std::string& name) const { return has(name) && !of_save.contains(name); }
    const char* first(const std::string& name) const { return settings.at(name).at(0).c_str(); }
    // A setting that was given, as on a command line: "--lr 3", "--offload weights=disk".
    std::string spelled(const std::string& name) const { return spelled_setting(name, first(name)); }
};

// What --version prints.
std::string version_text();
// The library for matrix products and its version. train_gpt.cu, which is compiled with it, defines this;
// tests need not.
[[gnu::weak]] std::string library_version();

class RunOptions {
  public:
    Asked asked;
    std::optional<HeldSave> resumed;  // the save of --resume, held until it is loaded

    // Reads the command line; prints the help and exits if asked to. `argv` must outlive this.
    RunOptions(int argc, char** argv) : argc_(argc), argv_(argv) { parse(); }
    RunOptions(const RunOptions&) = delete;

    // True if this process trains nothing itself, but starts the ranks of --devices.
    bool starts_ranks() const { return asked.devices > 1 && asked.rank.is_alone() && !asked.plan; }

    // Completes the options of a process that trains; `engine` connects it to other ranks, or is null. All
    // ranks must call it: the first rank of a run that saves takes the lock of --out, or fails if another run
    // holds it.
    void begin(RankEngine* engine);

  private:
    void parse();
    void complete_rank(const RankEngine* engine);

    const int argc_;
    char** const argv_;
    std::optional<HeldFolder> lock_;  // of --out
};
