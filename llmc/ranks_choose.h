// ranks_choose.h - settings that are left open (--memory, --batch auto and the like) are chosen by the first
// rank, and the others take its answer: so all have the same plan, whatever each of them could measure.
#pragma once

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "llmc/exchange.h"
#include "llmc/options_declare.h"
#include "llmc/options_parse.h"
#include "llmc/plan_choice.h"
#include "llmc/plan_free_memory.h"
#include "llmc/plan_settings.h"
#include "llmc/ranks_agree.h"

// The settings that were changed from `before` to `after`; null for one that was removed.
inline nlohmann::json changed_settings(const Options& before, const Options& after) {
    nlohmann::json changes = nlohmann::json::object();
    for (const auto& [name, words] : after.given)
        if (const auto was = before.given.find(name); was == before.given.end() || was->second != words)
            changes[name] = words;
    for (const auto& [name, words] : before.given)
        if (!after.has(name)) changes[name] = nullptr;
    return changes;
}

inline void change_settings(Options& o, const nlohmann::json& changes) {
    CLI::App app;
    declare_options(app, o);
    for (const auto& [name, words] : changes.items())
        if (words.is_null())
            o.given.erase(name);
        else
            set_option(app, o, name, words.get<std::vector<std::string>>());
    o.chose_length = !o.context.empty();
}

// Tells the first rank how much each rank may take, which is less on some machines than on others.
inline void learn_least_of_ranks(Exchange& exchange, const Options& o) {
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
Options chosen_by_first_rank(RankEngine* engine, const Options& given, Choose&& choose) {
    if (!engine) return choose();
    Arena none;
    const Stream stream = nullptr;
    const Slices slices = slices_of(given.rank);
    Exchange exchange(none, stream, slices);
    exchange.connect(*engine);
    RankFacts facts;  // else ranks that were given other options would silently take those of the first
    for (const auto& [name, words] : given.given) facts.emplace_back(setting_name(name), joined(words, " "));
    check_ranks_agree(exchange, given.rank, facts);
    if (given.has("--memory") || given.batch == 0 || !given.context.empty())
        learn_least_of_ranks(exchange, given);
    Options chosen = given;
    std::string text;
    if (given.rank.is_first()) {
        chosen = choose();
        text = changed_settings(given, chosen).dump();
    }
    text.resize(exchange.gather(std::vector<uint64_t>{text.size()})[0]);
    const auto all = exchange.gather(std::vector<char>(text.begin(), text.end()));
    if (!given.rank.is_first())
        change_settings(
            chosen, nlohmann::json::parse(all.begin(), all.begin() + static_cast<ptrdiff_t>(text.size())));
    return chosen;
}
