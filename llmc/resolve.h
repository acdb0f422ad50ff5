// resolve.h - from what was asked for (options.h) to what a run is (run_config.h): its decisions, in the
// order in which they depend on each other.
#pragma once

#include <malloc.h>

#include <optional>
#include <utility>

#include "llmc/options.h"
#include "llmc/plan_choice.h"
#include "llmc/ranks_agree.h"
#include "llmc/run_config.h"
#include "llmc/run_inputs_check.h"
#include "llmc/run_start.h"

// A run as it was resolved. The decisions, in their order:
//
//   before this  values that depend on other options: the rate, --steps 0 of a prompt, --grad-accum of
//                --devices; refuses what cannot be combined (options_parse.h, options_check.h)
//   the length   of --seq-len auto, by plans of runs without data (plan_choice.h)
//   the inputs   opened; the built-in text, the length, the date, how tokens are drawn, what is merged
//                already; refuses what does not fit them (run_inputs.h, run_inputs_check.h)
//   the setting  of --memory, --batch auto, --chunk-rows auto and --zero auto, by trials (plan_choice.h)
//   the prompts  that are answered at a time, by what is free
//   the steps    of --epochs: packing needs the length, and an epoch's steps need the batch
//
// With several ranks, the first one decides the length and the setting, and the others take its answer.
class Resolved {
  public:
    // `save` is that of --resume, held until it is loaded. `asked` must outlive this.
    Resolved(const Asked& asked, RankEngine* engine, std::optional<HeldSave> save)
        : inputs(asked,
                 chosen_by_first_rank(engine, asked, [&] { return with_chosen_length(asked, choices); }),
                 std::move(save)),
          run(inputs.run()) {
        check_attention<floatX>(run, inputs.config);
        if (run.rank.is_first()) remark_inputs(run, inputs);
        if (run.show_example > 0) return;
        malloc_trim(0);  // returns what reading and tokenizing have freed to the system
        run = chosen_by_first_rank(engine, run, [&] { return with_chosen_setting(run, inputs, choices); });
        run = answering_as_many_as_fit(run, inputs);
        run = with_steps_of_epochs(run, inputs);
        if (!run.planned_gpu) malloc_trim(0);  // and what the search has freed
    }
    Resolved(const Resolved&) = delete;

    Choices choices;  // what was chosen for the length; how the setting was chosen, for the report
    RunInputs inputs;
    RunConfig run;
};
