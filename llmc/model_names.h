// model_names.h - what a --model names if it is no folder: a model that Hugging Face's tools have downloaded;
// a well-known one, whose shape plans know without its files; or one of a family that is not supported.
#pragma once

#include <span>
#include <string>

#include "llmc/families.h"

// ---- downloaded models
//
// They are found by their names on the hub, ORG/NAME. Nothing is downloaded here.
//
// The cache has a folder for each model (https://huggingface.co/docs/huggingface_hub/guides/manage-cache):
//
//     models--ORG--NAME/refs/main           the commit that `main` was when it was downloaded
//     models--ORG--NAME/refs/NAME           the same of another branch, or of a tag
//     models--ORG--NAME/snapshots/COMMIT/   the files of that commit, as links

// True if a text may be the name of a model on the hub: ORG/NAME, of letters, digits, '-', '_' and '.'.
bool is_hub_name(const std::string& text);

// Where huggingface_hub keeps what it downloads.
std::string hub_cache();

// The folder of a model in the cache: the snapshot of `revision`, which is a branch, a tag or a commit.
// Without a revision: that of `main`, or the only one. "" if it was not downloaded.
std::string hub_snapshot(const std::string& name, const std::string& revision = "");

// How an adapter names the model that it is of: by its name on the hub, if a cache has it, else by its path,
// where links are followed except those of a cache, which lead to files without extensions.
std::string lasting_name(const std::string& model);

// The commit of a snapshot in a cache, unless it is the one that the model's name alone leads to; else "".
std::string other_revision(const std::string& folder);

// ---- well-known models
//
// The sizes are those of the config.json that the makers publish on Hugging Face. test_gpu_plans.py compares
// the numbers of parameters with those that they publish.

struct KnownModel {
    const char* name;
    const Family* family;
    int layers, channels, heads, kv_heads, head_size, mlp_width, vocabulary, positions;
    double theta = 0;       // of rotary positions
    bool tied = false;      // the head is the token embedding; always so in GPT-2 and BLOOM
    int llama3_factor = 0;  // of Llama 3.1's scaling of rotary positions; 0: none
    int window = 0;         // of attention; 0: none
    // Further keys of config.json, as JSON. With them the family reads the model as from a file, with windows
    // and rotations by layer; null: the numbers above are all.
    const char* settings = nullptr;
};

std::span<const KnownModel> known_models();

// A name as it is compared: that of "unsloth/Llama-3.2-1B-Instruct" is "-llama-3.2-1b-instruct-".
std::string words_of_model(const std::string& name);
// The first of a list's spellings that a name's words have, without hyphens around it; "" if it has none.
std::string spelling_in(const std::string& words, const char* spellings);

// The known model of a name, with or without an organisation of the hub before it: the longest one whose
// words it has, beside words that do not say another shape. Null if there is none.
const KnownModel* find_known_model(const std::string& name);

// Fails if a name shows that its model is not supported. A name that has a known model's beside that of
// another family is the known one's, which may have been taught by the other.
void refuse_unsupported(const char* option, const std::string& name);

// What an option like --model names: `text` itself, unless that is no file here and has the form of a name on
// the hub. Then the model's folder in the cache, or its file if it has a single GGUF and no config.json.
// Fails if the cache has no such model.
// A resumed run's model may have been removed: `resumes` returns its name then.
std::string find_on_hub(const char* option, const std::string& text, bool resumes = false,
                        const std::string& revision = "");

// The known model of this name if it is not here: neither a file or folder, nor in the hub's cache.
const KnownModel* known_shape(const std::string& name);

// The configuration of a known model, as far as its shape goes.
ModelConfig config_of(const KnownModel& known);
