// save_progress.h - the progress of a training run: what a run needs besides the tensors to be resumed. Each
// save has it as trainer_state.json.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "llmc/save_folder.h"

// The lowest loss of a run's validations.
struct BestValidation {
    double loss = 0;
    int64_t step = 0;
    int64_t worse_since = 0;  // validations after it, none of which was better
};

// What a run needs besides the tensors to be resumed.
struct Progress {
    int64_t step = 0;            // optimizer steps done
    int64_t sequences = 0;       // sequences of the training data read
    std::string precision = {};  // "fp32" or "bf16", of the build that saved; write_save() sets it
    bool evaluated = true;       // the validation and the sample due at this step are done
    bool validated = false;      // the validation is done, whose sample was interrupted
    nlohmann::json options = nlohmann::json::object();  // the run's options; a resumed run takes them over
    std::string formats =
        {};  // StateOptions::text() of the saved state; write_save() sets it; empty in older saves
    std::set<int64_t> others = {};  // steps of another run's saves in the same folder
    std::string directory = {};     // the options' relative names count from here; empty in older saves
    std::optional<double> first_loss = {};  // the loss of the run's first step
    std::optional<double> rate = {};        // the learning rate of the last step
    std::optional<int64_t> last_good = {};  // the step of the last good save (save_folder.h)
    std::optional<BestValidation> best = {};
    std::map<std::string, std::string> data = {};  // by option: data_facts() of its data (resume.h)
};

// Reads trainer_state.json of a save or of a folder of saves. Fails if it is missing or damaged.
Progress read_progress(const std::string& folder);
// Writes trainer_state.json of a save, in place of one that may be there.
void write_progress(const std::string& save, const Progress& progress);

// The step of the newest save in a folder that was not good, and whose run had its last good save at step
// `good`; -1 if there is none.
int64_t newest_bad_save(const std::string& out, int64_t good);

// Says so if a folder of saves, which an option names, shows the last good one of them instead of the newest.
// `save` is the save that it shows.
void remark_newer_bad_save(const char* option, const std::string& folder, const std::string& save);

// The folder OUT for a run that continues from the save `resumed`, or starts anew if that is empty. A run
// owns the saves in OUT only if it continues from one of them, and then only those that the earlier run
// owned.
SaveFolder open_save_folder(const std::string& out, int keep, const std::string& resumed);
