// ranks_agree.h - makes sure that all ranks of a run on several devices are about to do the same: the same
// program, options, data and plan, from the same save. If they were not, they would wait for each other
// forever, or train something that nobody asked for. Settings that are left open (--memory, --batch auto and
// the like) are chosen by the first rank, and the others take its answer; so all have the same plan, whatever
// each of them could measure. Before the first step, everything is compared.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "llmc/ranks_exchange.h"
#include "llmc/run_config.h"
#include "llmc/options.h"
#include "llmc/plan.h"
#include "llmc/plan_choice.h"
#include "llmc/plan_free_memory.h"
#include "llmc/plan_report.h"
#include "llmc/plan_settings.h"
#include "llmc/random.h"
#include "llmc/recompute.h"
#include "llmc/run_inputs.h"
#include "llmc/state.h"

// What must be the same on all ranks, by names that messages use.
using RankFacts = std::vector<std::pair<std::string, std::string>>;

inline RankFacts facts_of(const RunConfig& o, const RunInputs& in, const MemoryReport& plan,
                          const Plans& plans) {
    RankFacts facts = {{"the program", version_text()}};
    for (const auto& [name, words] : o.settings) facts.emplace_back(setting_name(name), joined(words, " "));
    for (const auto& [name, value] : in.facts) facts.emplace_back("what is in the files of " + name, value);
    facts.emplace_back("the model", format("%ld parameters, %ld trained", plan.parameters, plan.trained));
    if (in.progress) facts.emplace_back("the save's step", std::to_string(in.progress->step));
    facts.emplace_back("the peak of the plan's activations", std::to_string(plan.activations()));
    facts.emplace_back("a digest of the plan's exchanges", digest_of_exchanges(plans));
    return facts;
}

// The first difference between two ranks' facts, as "--lr is 3e-4, and on rank 0 1e-4"; empty if there is
// none.
inline std::string first_difference(const RankFacts& own, const RankFacts& first) {
    const auto find = [](const RankFacts& facts, const std::string& name) {
        const auto at = std::ranges::find_if(facts, [&](const auto& fact) { return fact.first == name; });
        return at == facts.end() ? std::string("not given") : at->second;
    };
    for (const RankFacts* facts : {&own, &first})
        for (const auto& [name, value] : *facts)
            if (find(own, name) != find(first, name))
                return name + " is " + find(own, name) + ", and on rank 0 " + find(first, name);
    return "";
}

// A digest of the weights: of the first elements of those units that each rank has as a whole.
inline std::string digest_of_weights(const State<floatX>& state) {
    uint64_t digest = 0;
    std::vector<floatX> values;
    const auto& units = state.layout.units();
    for (size_t unit = 0; unit < units.size(); unit++) {
        if (state.options.slices_blocks && state.layout.is_block(static_cast<int>(unit))) continue;
        const Unit& u = units[unit];
        values.resize(static_cast<size_t>(std::min<int64_t>(u.size, 1 << 16)));
        if (values.empty()) continue;
        state.find(StatePart::Weights)->read(u.offset, static_cast<int64_t>(values.size()), values.data());
        const auto* const bytes = reinterpret_cast<const char*>(values.data());
        digest = mix64(digest ^ name_hash({bytes, values.size() * sizeof(floatX)}));
    }
    return std::to_string(digest);
}

// Fails on a rank whose facts differ from those of the first rank.
inline void check_ranks_agree(Exchange& exchange, const Rank& rank, const RankFacts& own) {
    std::string text;
    nlohmann::json::to_cbor(own, text);
    const std::vector<std::string> all = exchange.gather_texts(text);
    if (text != all[0]) fail("%s", first_difference(own, nlohmann::json::from_cbor(all[0]).get<RankFacts>()));
    for (size_t r = 0; r < all.size(); r++)
        if (all[r] != text) {
            usleep(2000000);  // that rank says what differs, and ends all
            fail("rank %zu does not do what rank %d does", r, rank.number);
        }
}

// The first rank learns the least memory and disk space that any rank has, and plans for that.
inline void learn_least_of_ranks(Exchange& exchange, const RunConfig& o) {
    const FreeMemory device = memory_for(o);
    const size_t files = space_on_disk() / static_cast<size_t>(o.rank.on_this_machine);
    const auto all = exchange.gather(std::vector<uint64_t>{device.bytes, files});
    if (!o.rank.is_first()) return;
    for (size_t r = 1; 2 * r < all.size(); r++) {
        if (all[2 * r] < device.bytes)
            least_of_ranks.device.at_most(all[2 * r], format("what rank %zu has", r));
        least_of_ranks.files = std::min<size_t>(least_of_ranks.files, all[2 * r + 1]);
    }
}

// What choose() makes of the given options, on the first of several ranks; on the others, what that rank has
// chosen. All of them must call it.
template <class Choose>
RunConfig chosen_by_first_rank(RankEngine* engine, const RunConfig& given, Choose&& choose) {
    if (!engine) return choose();
    Arena none;  // the exchange gathers only vectors of the host here
    const Stream stream = nullptr;
    const Slices slices = slices_of(given.rank);
    Exchange exchange(none, stream, slices);
    exchange.connect(*engine);
    // A rank that was given other options must fail, and not take those of the first rank. The program is
    // compared now too, because another one may exchange other things from here on.
    RankFacts facts = {{"the program", version_text()}};
    for (const auto& [name, words] : given.settings)
        facts.emplace_back(setting_name(name), joined(words, " "));
    check_ranks_agree(exchange, given.rank, facts);
    if (!given.memory.empty() || given.batch == 0 || given.auto_length || given.zero == "auto")
        learn_least_of_ranks(exchange, given);
    RunConfig chosen = given;
    std::string text;
    if (given.rank.is_first()) {
        chosen = choose();
        text = choices_text(chosen);
    }
    text = exchange.gather_texts(text)[0];
    if (!given.rank.is_first()) take_choices(chosen, text);
    return chosen;
}
