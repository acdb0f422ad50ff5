// run_options.h - the options that a run holds to: those of the command line, completed by the save that it
// resumes and by the rank that this process is; and the lock of the folder to which it saves.
#pragma once

#include <optional>
#include <string>

#include "llmc/options.h"
#include "llmc/options_parse.h"
#include "llmc/ranks.h"
#include "llmc/save_folder.h"
#include "llmc/save_resume.h"

class RunOptions {
  public:
    Options options;
    std::optional<HeldSave> resumed;  // the save of --resume, held until it is loaded

    // Reads the command line; prints the help and exits if asked to. `argv` must outlive this.
    RunOptions(int argc, char** argv) : argc_(argc), argv_(argv) { parse(); }
    RunOptions(const RunOptions&) = delete;

    // True if this process trains nothing itself, but starts the ranks of --devices.
    bool starts_ranks() const { return options.devices > 1 && options.rank.is_alone() && !options.plan; }

    // Completes the options of a process that trains; `engine` connects it to other ranks, or is null. All
    // ranks must call it: the first rank of a run that saves takes the lock of --out, or fails if another run
    // holds it.
    void begin(RankEngine* engine) {
        complete_rank(engine);
        if (options.plan && !options.out.empty()) check_writable(options.out);
        if (options.saves() && options.rank.is_first()) lock_.emplace(options.out);
        if (engine) engine->wait_for_all(options.rank);
        if (!options.saves() || !options.has("--resume")) return;
        parse();  // the run that held the folder may have saved since
        complete_rank(engine);
    }

  private:
    void parse() {
        resumed.reset();
        options = parse_options(argc_, argv_, [this](const std::string& folder) {
            return saved_options(resumed.emplace(folder).path());
        });
    }
    // Sets what only the engine knows of this rank. Only the first rank writes files, so on the others the
    // names of files are cleared: but for those of --out, --merge and --export, to which they contribute, and
    // that of --advanced algorithms, which each reads and completes.
    void complete_rank(const RankEngine* engine) {
        if (engine) options.rank = engine->rank();
        if (options.rank.is_first()) return;
        for (std::string* path :
             {&options.log, &options.loss_by_position, &options.save_base, &options.timeline})
            path->clear();
    }

    const int argc_;
    char** const argv_;
    std::optional<HeldFolder> lock_;  // of --out
};
