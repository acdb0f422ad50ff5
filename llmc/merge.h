// merge.h - saves a model with its adapter merged into its weights (--merge).
#pragma once

#include <string>

#include "llmc/embedding_and_head.h"
#include "llmc/run_model.h"
#include "llmc/save_merged.h"

// Calls visit(layer, field, matrix) for the matrix of each linear layer with its adapter merged into it, W +
// scale B A, in the layout of W: (in, out) or, if by outputs or quantized, (out, in). Then calls it for the
// rows of embeddings and head that the State does not have, some at a time, with the number of blocks as the
// layer.
template <class Visit>
void for_each_merged(Arena& arena, Stream stream, const ModelConfig& config, Weights& weights,
                     EmbeddingAndHead& ends, Visit&& visit) {
    Range range("merge");
    weights.expect_blocks();
    for (int l = 0; l < config.layers; l++) {
        for (const auto& [w, field] : linears(weights.block(l))) {
            const int64_t outputs = w->outputs(), inputs = w->inputs();
            TensorX matrix =
                arena.take<floatX>("merged", w->by_outputs ? Shape{outputs, inputs} : Shape{inputs, outputs});
            const TensorX weight = weight_of(arena, stream, *w);
            copy_rows_on_device(matrix.data(), inputs, weight.data(), inputs, inputs, outputs, stream);
            merge_lora(arena, stream, matrix, w->adapter, w->by_outputs);
            visit(l, field, matrix);
        }
    }
    weights.release();
    ends.for_each_outside_rows([&](Field field, const TensorX& rows) { visit(config.layers, field, rows); });
}

// Writes the merged model to the new folder `folder`. for_each(visit) runs for_each_merged() in its memory.
template <class ForEach>
void write_merged(const std::string& folder, const RunModel& model, const RunInputs& in, Stream stream,
                  ForEach&& for_each) {
    write_folder(folder, [&](const std::string& temporary) {
        write_settings<floatX>(temporary, in.config, in.saved_tokenizer());
        const bool by_outputs = model.quantized && model.quantized->by_outputs();
        MergedFile<floatX> file(temporary + "/model.safetensors", model.state, by_outputs,
                                model.fields_outside(), stream);
        for_each([&](int layer, Field field, const TensorX& matrix) { file.append(layer, field, matrix); });
        file.finish();
    });
}

// Reports a merge that failed, in a line that says how to merge again. `trained`: this run has trained the
// adapter. `save` has it in that case; without --out, it is first saved beside the folder that --merge names.
[[noreturn]] inline void fail_to_merge(const Options& o, const RunModel& model, const RunInputs& in,
                                       bool trained, const std::string& save, const std::string& why) {
    const std::string failed = format("--merge %s: %s", o.merge.c_str(), why.c_str());
    if (!trained) fail("%s", failed.c_str());
    if (o.saves())
        fail("%s; the adapter is saved: --resume %s --steps 0 --merge DIR merges it", failed.c_str(),
             save.c_str());
    const std::string wanted = without_last_slashes(o.merge) + ".adapter";
    std::string kept = wanted;
    for (int i = 2; file_exists(kept); i++) kept = format("%s-%d", wanted.c_str(), i);
    try {
        write_folder(kept, [&](const std::string& folder) {
            write_adapter(folder, model.trained(), in.adapter, in.saved_tokenizer());
        });
    } catch (const UserError& error) {
        fail("%s; nor can the adapter be saved: %s", failed.c_str(), error.what());
    }
    fail("%s; the adapter is saved: --model %s --adapter %s --steps 0 --merge DIR merges it", failed.c_str(),
         o.model.c_str(), kept.c_str());
}
