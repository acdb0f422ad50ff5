// run_config.cpp - a run's configuration as JSON: --plan json prints it, and ranks send it to each other.
#include "llmc/run_config.h"

#include <nlohmann/json.hpp>

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Sampling, temperature, top_k, top_p, min_p, repetition_penalty)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MemorySetting, batch, grad_accum, recompute, head_rows, mlp_rows,
                                   attention_rows, master, adam_m, adam_v, weights, embeddings, gradients,
                                   state, updates, prefetch, state_buffers, offloaded_inputs, offload_keys,
                                   zero, by_block)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(InputConfig, model, tokenizer, is_default_model, adapter, base, head,
                                   store, any_base, resume, begins_anew, data, val_data, plans_examples,
                                   loss_on, chat_format, chat_date, show_example, rope_scaling, positions,
                                   seq_len, auto_length, chose_length)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TrainingConfig, train, lora_rank, lora_alpha, lora_dropout, lora_targets,
                                   soft_prompt, soft_prompt_text, dropout, steps, epochs, lr, min_lr, warmup,
                                   schedule, optimizer, weight_decay, beta1, beta2, eps, clip, clip_per_block,
                                   update_in_backward, seed, eval_every, eval_batches, early_stopping)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(OutputConfig, out, save_every, keep, keep_best, merge, save_base,
                                   merge_is_there, export_file, export_type, export_part, log,
                                   loss_by_position, tensorboard, report, report_with, timeline,
                                   validates_by_position, print_every, validates_otherwise, changed)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AnswerConfig, prompt, prompts, chat, raw_prompt, sample_every,
                                   sample_tokens, limits_answers, sampling, stops)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DeviceConfig, devices, machines, network, patience, threads, memory,
                                   host_memory, allow_8bit, plan, json, gpu, fills_gpu, bench, bench_warmup,
                                   bench_steps, profile_ops, rates, calibrate, attention, graph,
                                   matmul_algorithms, tf32)

nlohmann::json json_of_setting(const MemorySetting& setting) { return setting; }

nlohmann::json json_of_run(const RunConfig& run) {
    return {{"inputs", static_cast<const InputConfig&>(run)},
            {"training", static_cast<const TrainingConfig&>(run)},
            {"outputs", static_cast<const OutputConfig&>(run)},
            {"answers", static_cast<const AnswerConfig&>(run)},
            {"device", static_cast<const DeviceConfig&>(run)}};
}

// As CBOR, which keeps words that are no UTF-8: names of files.
std::string choices_text(const RunConfig& run) {
    std::string text;
    nlohmann::json::to_cbor({{"memory_setting", static_cast<const MemorySetting&>(run)},
                             {"seq_len", run.seq_len},
                             {"chose_length", run.chose_length},
                             {"settings", run.settings}},
                            text);
    return text;
}

void take_choices(RunConfig& run, const std::string& text) {
    const auto json = nlohmann::json::from_cbor(text);
    json.at("memory_setting").get_to(static_cast<MemorySetting&>(run));
    json.at("seq_len").get_to(run.seq_len);
    json.at("chose_length").get_to(run.chose_length);
    json.at("settings").get_to(run.settings);
}
