// options_placement.h - the table of what can be placed outside the device: the keys of --offload. The
// command line, --memory, saves and messages all read it, so a new placement is one more line here.
#pragma once

#include <cstdlib>
#include <string>

#include "llmc/build.h"
#include "llmc/model_config.h"
#include "llmc/run_config.h"
#include "llmc/step_plan.h"

struct PlacementOption {
    const char* key;     // in --offload
    const char* values;  // of the key, for the help
    const char* help;
    // The value in the options, as it would be written: "disk", "host:8".
    std::string (*value)(const RunConfig&);
    // Sets the value. Returns what is wrong with it, or "".
    std::string (*set)(RunConfig&, const std::string&);
    // True if --memory may try the value that the options have.
    bool (*may_try)(const RunConfig&);
    // True if a resumed run that does not train leaves it out: it then has the save's own weights.
    bool of_training_only;

    std::string setting() const { return std::string("--offload.") + key; }
};

// True if the host's cores can do the updates: the state is not on the device, neither gradients nor trained
// weights are on a disk. With several devices, which exchange these, both are on the device.
inline bool host_can_update(const RunConfig& o) {
    const auto may_be = [&](const std::string& placement) {
        return placement == "device" || (o.devices == 1 && placement != "disk");
    };
    return o.state != "device" && may_be(o.gradients) && (may_be(o.weights) || o.trains_adapter());
}

// Sets a field to a placement. Returns what is wrong with it, or "".
inline std::string set_home(std::string& field, const std::string& value) {
    for (const char* const placement : kPlacementNames)
        if (value == placement) return field = value, "";
    return "'" + printable(value) + "' is none of device, host, disk";
}

// Splits "host:8" into "host" and 8, with `word` as the name of -1 and `none` for no number. Returns false if
// what follows the colon is neither the word nor a number from 1 to `most`.
inline bool split_count(const std::string& value, const char* word, int none, int most,
                        std::string& placement, int& count) {
    const size_t colon = value.find(':');
    placement = value.substr(0, colon);
    count = none;
    if (colon == value.npos) return true;
    const std::string number = value.substr(colon + 1);
    if (*word && number == word) return count = -1, true;
    char* end = nullptr;
    const double parsed = strtod(number.c_str(), &end);
    count = parsed >= 1 && parsed <= most ? static_cast<int>(parsed) : 0;
    return !number.empty() && *end == '\0' && count >= 1 && count == parsed;
}

// Where offloaded activations go: to host memory beside a GPU, and else to the disk.
inline const char* activation_placement_name() { return kBuild.host_is_device ? "disk" : "host"; }

// Activations can be offloaded to one place only; `auto` is its other name. Returns
// what is wrong with the name of a place, or "".
inline std::string wrong_activation_placement(const std::string& placement) {
    const std::string there = activation_placement_name();
    if (placement == "auto" || placement == "device" || placement == there) return "";
    if (placement == "host") return "on a CPU the host's memory is the device's; " + there + " takes none";
    if (placement == "disk") return "beside a GPU activations are offloaded to host memory: " + there;
    return "device, " + there + " or auto, which is " + there + " in this build";
}

constexpr int kMostChunks = 1 << 30;

inline std::string set_state(RunConfig& o, const std::string& value) {
    std::string placement;
    int buffers;
    if (!split_count(value, "block", RunConfig().state_buffers, kMostChunks, placement, buffers))
        return "the number of chunks on the device, or block, follows the colon, as in host:8";
    if (placement == "device" && placement != value) return "chunks are of a state outside the device";
    const std::string wrong = set_home(o.state, placement);
    if (wrong.empty()) o.state_buffers = buffers;
    return wrong;
}
inline std::string state_value(const RunConfig& o) {
    if (o.state_buffers == RunConfig().state_buffers) return o.state;
    return o.state + ":" + (o.state_buffers < 0 ? "block" : std::to_string(o.state_buffers));
}

inline std::string set_inputs(RunConfig& o, const std::string& value) {
    std::string placement;
    int layers;
    if (!split_count(value, "", -1, kMostLayers, placement, layers))
        return "a number of layers follows the colon, as in auto:24";
    if (placement == "device" && placement != value)
        return "a number is of layers whose inputs leave the device";
    const std::string wrong = wrong_activation_placement(placement);
    if (wrong.empty()) o.offloaded_inputs = placement == "device" ? 0 : layers;
    return wrong;
}
inline std::string inputs_value(const RunConfig& o) {
    if (o.offloaded_inputs == 0) return "device";
    return "auto" + (o.offloaded_inputs < 0 ? "" : ":" + std::to_string(o.offloaded_inputs));
}

inline const PlacementOption kPlacements[] = {
    {"weights", "device|host|disk",
     "Weights of the blocks. A frozen model's are read from its own files, others from a file of the run's.",
     [](const RunConfig& o) { return o.weights; },
     [](RunConfig& o, const std::string& value) { return set_home(o.weights, value); },
     [](const RunConfig&) { return true; }, true},
    {"embeddings", "device|host|disk", "Token embedding and head of a frozen model.",
     [](const RunConfig& o) { return o.embeddings; },
     [](RunConfig& o, const std::string& value) { return set_home(o.embeddings, value); },
     [](const RunConfig&) { return true; }, true},
    {"gradients", "device|host|disk", "Gradients of the blocks.",
     [](const RunConfig& o) { return o.gradients; },
     [](RunConfig& o, const std::string& value) { return set_home(o.gradients, value); },
     [](const RunConfig&) { return true; }, false},
    {"state", "device|host|disk[:N|:block]",
     "The optimizer's moments and the master. N chunks of about 3 MB are on the device at a time (default "
     "32); with :block as many as a block has.",
     state_value, set_state, [](const RunConfig&) { return true; }, false},
    {"updates", "device|host",
     "Where offloaded state is updated, beside a GPU: on the device, or by the host's cores.",
     [](const RunConfig& o) { return o.updates; },
     [](RunConfig& o, const std::string& value) -> std::string {
         if (value != "device" && value != "host")
             return "'" + printable(value) + "' is none of device, host";
         return o.updates = value, "";
     },
     host_can_update, false},
    {"inputs", "device|auto[:N]",
     "Inputs of the blocks, or of the first N blocks, until backward needs them. auto is host beside a GPU, "
     "and disk on a CPU; these names work there too.",
     inputs_value, set_inputs, [](const RunConfig&) { return true; }, false},
    {"keys", "device|auto",
     "Keys and values of a sequence, and the sums of their gradients, to where inputs go. Needs --chunk-rows "
     "attention=. With a sliding window or packed documents last bits differ.",
     [](const RunConfig& o) -> std::string { return o.offload_keys ? "auto" : "device"; },
     [](RunConfig& o, const std::string& value) {
         const std::string wrong = wrong_activation_placement(value);
         if (wrong.empty()) o.offload_keys = value != "device";
         return wrong;
     },
     [](const RunConfig& o) { return o.offloaded_inputs == -1; }, false},
};

// What was chosen differently from the given options, as on a command line.
inline std::string placements_text(const RunConfig& chosen, const RunConfig& given) {
    std::string offload, text;
    for (const PlacementOption& p : kPlacements) {
        std::string value = p.value(chosen);
        if (value == p.value(given)) continue;
        if (value.starts_with("auto")) value.replace(0, 4, activation_placement_name());
        offload += (offload.empty() ? " --offload " : ",") + (p.key + ("=" + value));
    }
    if (chosen.prefetch != given.prefetch) text += " --prefetch " + std::to_string(chosen.prefetch);
    if (chosen.by_block && !given.by_block) text += " --by-block";
    if (chosen.zero != given.zero) text += " --zero " + chosen.zero;
    return offload + text;
}
