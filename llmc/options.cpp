// options.cpp - the command line of a process, read once and again: when a run that resumes has the lock of
// its folder.
#include "llmc/options.h"

#include "llmc/options_parse.h"

void RunOptions::begin(RankEngine* engine) {
    complete_rank(engine);
    if (asked.plan && !asked.out.empty()) check_writable(asked.out);
    if (asked.saves() && asked.rank.is_first()) lock_.emplace(asked.out);
    if (engine) engine->wait_for_all(asked.rank);
    if (!asked.saves() || !asked.has("--resume")) return;
    parse();  // the run that held the folder may have saved since
    complete_rank(engine);
}

void RunOptions::parse() {
    resumed.reset();
    asked = parse_options(argc_, argv_, [this](const std::string& folder) {
        return saved_options(resumed.emplace(folder).path());
    });
}

// Sets what only the engine knows of this rank. Only the first rank writes files, so on the others the names
// of files are cleared: but for those of --out, --merge and --export, to which they contribute, and that of
// --advanced algorithms, which each reads and completes.
void RunOptions::complete_rank(const RankEngine* engine) {
    if (engine) asked.rank = engine->rank();
    if (asked.rank.is_first()) return;
    for (std::string* path : {&asked.log, &asked.loss_by_position, &asked.save_base, &asked.timeline,
                              &asked.report, &asked.tensorboard})
        path->clear();
}

std::string version_text() {
    return format("train %s, commit %s, device %s, precision %s, %s", kVersion,
                  llmc_commit ? llmc_commit : "unknown", kBuild.host_is_device ? "cpu" : "cuda",
                  kBuild.is_bf16 ? "bf16" : "fp32",
                  library_version ? library_version() : "no library of products");
}
