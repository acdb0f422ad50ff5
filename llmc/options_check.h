// options_check.h - fails on options that are valid by themselves and cannot be combined.
#pragma once

#include <string>

#include "llmc/adapter.h"
#include "llmc/build.h"
#include "llmc/error.h"
#include "llmc/options.h"
#include "llmc/options_placement.h"
#include "llmc/resume.h"

// A bench only measures a run and does not make it: fails on options that only a real run needs.
inline void check_bench_options(const Asked& o) {
    if (o.bench.empty()) return;
    for (const std::string& name : words_of(
             "--plan --timeline --resume --out --save-base --save-every --log --loss-by-position --val-data "
             "--merge --export --print-every --eval-every --sample.every --prompt --epochs --keep-best "
             "--early-stopping --report --tensorboard"))
        if (o.has(name)) fail("%s: a bench only measures; leave it out, or --bench", o.spelled(name));
    for (const char* name : {"--steps", "--warmup"})
        if (o.has(name) && strtod(o.first(name), nullptr) > 1e6)
            fail("%s: a bench measures at most 1000000 steps", o.spelled(name));
    if (o.has("--steps") && o.bench_steps == 0) fail("--steps 0: a bench measures at least one step");
    if (o.bench == "forward" && o.has("--memory"))
        fail("--memory %s chooses for training, and --bench forward does none", o.memory);
}

// A calibration measures the device, independent of any training: fails on options for more than that.
inline void check_calibration(const Asked& o) {
    if (o.calibrate.empty()) return;
    for (const auto& [name, values] : o.settings)
        if (name != "--calibrate" && name != "--threads" && name != "--devices" &&
            !(name == "--grad-accum" && o.devices > 1))  // complete_devices() has set it
            fail("--calibrate %s measures the device and stops: leave %s out", o.calibrate, o.spelled(name));
}

// A conversation, and a file of prompts, only need a model: fails on options for more than that.
inline void check_answers(const Asked& o) {
    if (o.has("--prompt") && o.prompt.empty())
        fail("--prompt: the text is empty; without --prompt, samples of a training begin a new text");
    if (o.raw_prompt && !o.has("--prompt") && o.prompts.empty())
        fail("--raw-prompt: is for a prompt: add --prompt TEXT, or --prompts FILE");
    const bool does_more = o.plan || !o.val_data.empty() || !o.merge.empty() || !o.export_file.empty() ||
                           !o.save_base.empty() || !o.bench.empty();
    if (o.steps == 0 && o.has("--prompt") && !o.of_save.contains("--prompt") && o.sample_tokens == 0 &&
        !does_more)
        fail("--prompt: --sample tokens=0 leaves nothing to answer");
    if (o.has("--prompt") && parse_new_model(o.model) && o.resume.empty() && !o.has("--data") &&
        !o.has("--steps") && o.bench.empty())
        fail(
            "--prompt: --model %s is a new one, which knows nothing: give the folder of a trained model, or "
            "--steps N to train one first",
            o.model);
    if (!o.only_answers()) return;
    const std::string self = o.chat ? "--chat" : "--prompts " + o.prompts;
    if (o.chat && o.raw_prompt) fail("--raw-prompt: --chat writes a conversation in the model's chat format");
    if (o.chat && !o.prompts.empty())
        fail("--chat and --prompts %s cannot be combined: give one of them", o.prompts);
    for (const std::string& name :
         words_of("--data --val-data --prompt --sample.every --out --save-every --merge --export --epochs "
                  "--save-base --log --loss-by-position --eval-every --timeline --bench --memory --report "
                  "--tensorboard"))
        if (o.has(name) && !o.of_save.contains(name))
            fail("%s only answers: leave %s out", self, o.spelled(name));
    if (o.steps > 0) fail("%s trains nothing: leave --steps %s out", self, o.first("--steps"));
    if (o.batch == 0) fail("--batch auto is for training; with %s, give a number", self);
    if (o.sample_tokens == 0) fail("%s: with --sample tokens=0, answers have no tokens", self);
    if (parse_new_model(o.model) && o.resume.empty())
        fail("%s: --model %s is a new one, which knows nothing: give the folder of a trained model", self,
             o.model);
}

// Fails on options of adapters that this run does not use.
inline void check_adapter_options(const Asked& o) {
    for (const char* name : {"--lora-rank", "--lora-alpha", "--lora-targets", "--lora-dropout"}) {
        if (!o.has(name)) continue;
        if (!o.adapter.empty() && name != std::string("--lora-dropout"))
            fail("%s %s: the adapter of %s %s keeps the one that it was trained with", name, o.first(name),
                 o.has("--adapter") ? "--adapter" : "--model", o.adapter);
        if (o.train != "lora") fail("%s %s is of an adapter: add --train lora", name, o.first(name));
    }
    if (o.has("--soft-prompt")) {
        const char* const prompt = o.first("--soft-prompt");
        if (o.train != "prompt") fail("--soft-prompt %s: add --train prompt", prompt);
        if (!o.adapter.empty()) fail("--soft-prompt %s: --adapter %s has its own", prompt, o.adapter);
    }
    if (o.has("--adapter") && !o.resume.empty() && !o.of_save.contains("--adapter"))
        fail("--adapter %s: --resume %s goes on with its own", o.adapter, o.resume);
    if (!o.merge.empty() && !o.trains_adapter() && o.resume.empty())
        fail("--merge %s: there is no adapter to merge; give --train lora or --adapter", o.merge);
    if (o.export_part == "adapter" && !o.trains_adapter() && o.resume.empty())
        fail("--export part=adapter: there is no adapter; give --train lora or --adapter");
    if (o.export_part == "adapter" && o.export_type != "q8_0" && o.export_type.find('q') != std::string::npos)
        fail("--export part=adapter: llama.cpp has adapters in f32, f16, bf16 and q8_0, not in %s",
             o.export_type);
    for (const char* name : {"--export.type", "--export.part"})
        if (o.has(name) && o.export_file.empty())
            fail("--export %s=%s: add --export FILE", std::strchr(name, '.') + 1, o.first(name));
    if (o.trains_adapter() && parse_new_model(o.model) && o.bench.empty())
        fail("--model %s makes a new model, and an adapter belongs to a trained one: give its folder",
             o.model);
}

// Fails if --seq-len auto has nothing to choose, or is combined with options that it would choose.
inline void check_auto_length(const Asked& o) {
    if (!o.auto_length) return;
    if (!o.resume.empty())
        fail("--seq-len auto: --resume %s goes on with its own length: leave --seq-len out", o.resume);
    if (o.batch == 0) fail("--seq-len auto and --batch auto: one of them must be a number");
    if (o.steps == 0 || o.bench == "forward")
        fail("--seq-len auto is for training; for a validation alone, give a number");
    if (parse_new_model(o.model))
        fail(
            "--seq-len auto is for a trained model; --model %s makes a new one, which gets as many positions "
            "as --seq-len says",
            o.model);
}

// Fails on chunks that the kernels cannot process.
inline void check_chunk_rows(const Asked& o) {
    if (o.mlp_rows > 0 && o.mlp_rows % 8)
        fail("--chunk-rows mlp=%ld: a multiple of 8 is needed, or all or auto", o.mlp_rows);
    if (o.attention_rows > 0 && o.attention_rows % 128)
        fail("--chunk-rows attention=%ld: a multiple of 128 is needed, or all or auto", o.attention_rows);
    // A save has none where auto chose none, because sequences are short.
    const bool chose_no_rows = o.of_save.contains("--chunk-rows.attention");
    if (o.offload_keys && o.attention_rows == 0 && !chose_no_rows)
        fail(
            "--offload keys=%s needs --chunk-rows attention=N or auto: keys are offloaded in pieces of N "
            "rows",
            o.first("--offload.keys"));
    if (o.offload_keys && o.attention_rows > 0 && o.attention_rows % key_piece(kBuild.is_fast_cpu))
        fail(
            "--chunk-rows attention=%ld: with --offload keys=%s, pieces of keys have as many rows, which "
            "must be a multiple of %d",
            o.attention_rows, o.first("--offload.keys"), key_piece(kBuild.is_fast_cpu));
}

// Fails if --memory is combined with what it chooses itself, or with nothing to choose.
inline void check_memory(const Asked& o) {
    if (o.has("--memory") && o.memory.empty()) parse_bytes("", "--memory");  // fails
    if (o.has("--memory.host") && o.host_memory.empty()) parse_bytes("", "--memory host=");
    if (o.has("--memory") && o.batch != 0 && o.has("--recompute"))
        fail("--memory %s chooses what to recompute itself: leave --recompute %s out", o.memory, o.recompute);
    if (o.has("--memory") && o.offloaded_inputs > 0)
        fail(
            "--memory %s offloads the inputs of all blocks or of none: give --offload inputs=%s without a "
            "number",
            o.memory, activation_placement_name());
    if (o.allow_8bit && !o.resume.empty())
        fail("--state-formats auto: a resumed run keeps the formats of --resume %s", o.resume);
    if (o.allow_8bit && !o.has("--memory") && (!o.has("--gpu") || o.has("--recompute")))
        fail(
            "--state-formats auto is for --memory to choose by; for 8-bit moments use --state-formats "
            "m=8bit,v=8bit");
    if (o.has("--memory") && o.steps == 0)
        fail("--memory %s: there is nothing to choose without training, --steps 0", o.memory);
    if (!o.has("--memory.host")) return;
    const std::string& size = o.host_memory;
    if (kBuild.host_is_device)
        fail("--memory host=%s is for a GPU; on a CPU, --memory itself is the host's memory", size);
    if (!o.has("--memory"))
        fail("--memory host=%s needs the device's size too, as in 8GiB,host=%s", size, size);
    if (o.batch == 0)
        fail("--memory host=%s: --batch auto leaves everything where it is; give a number", size);
}

// Fails on options for another build, or for another optimizer than the one that was chosen.
inline void check_build(const Asked& o) {
    if (o.has("--advanced.algorithms") && !searches_algorithms())
        fail("--advanced algorithms=%s is for cuBLASLt on a GPU; on the CPU oneDNN chooses for itself",
             o.matmul_algorithms);
    if (o.tf32 && !has_tf32())
        fail("--advanced tf32=on is for products of fp32 operands on a GPU, and this build is %s",
             searches_algorithms() ? "in bf16: make PRECISION=fp32"
                                   : "for the CPU: make DEVICE=cuda PRECISION=fp32");
    for (const char* of_adamw : {"--state-formats.m", "--state-formats.v", "--optimizer.beta1",
                                 "--optimizer.beta2", "--optimizer.eps"})
        if (o.optimizer == "sgd" && o.has(of_adamw))
            fail("%s is AdamW's, and --optimizer sgd keeps no moments", o.spelled(of_adamw));
}

// Fails if several devices cannot share this run.
inline void check_devices(const Asked& o) {
    if (o.devices == 1) {
        if (o.has("--zero") && o.zero != "auto")
            fail("--zero %s is for several devices: add --devices N", o.zero);
        for (const char* name : {"--machines", "--network", "--advanced.patience"})
            if (o.has(name)) fail("%s is for several devices: add --devices N", o.spelled(name));
        return;
    }
    if (o.updates == "host" && o.state != "device" && !host_can_update(o))
        fail(
            "--devices %d: the host's cores update what is on the devices: give gradients=device, or leave "
            "out --offload updates=host",
            o.devices);
    if (o.has("--machines") && !o.plan)
        fail("--machines %d: is for --plan; ranks know which machines they are on", o.machines);
    if (o.devices % o.machines)
        fail("--machines %d: each has as many of the %d devices: give a number that divides them", o.machines,
             o.devices);
    if (o.steps == 0) fail("--devices %d: is for training, and --steps is 0", o.devices);
    if (o.grad_accum % o.devices) {
        const int less = o.grad_accum / o.devices * o.devices, more = less + o.devices;
        fail("--grad-accum %d: the %d devices share the micro-batches of a step equally: give %s%d",
             o.grad_accum, o.devices, less > 0 ? (std::to_string(less) + " or ") : "", more);
    }
    const bool is_chosen = o.has("--memory") && o.batch > 0;  // how many micro-batches a step has
    const bool keeps_slices = o.zero == "2" || (o.zero == "3" && !o.trains_adapter());  // of gradients
    if (keeps_slices && o.own_micro_batches() > o.micro_batches_together() && !is_chosen)
        fail(
            "--zero %s: each device keeps no gradients between its %d micro-batches: add --by-block, or give "
            "--grad-accum %d",
            o.zero, o.own_micro_batches(), o.devices);
    if (keeps_slices && o.gradients != "device")
        fail("--zero %s: with --offload gradients=%s they are not on the device: give --zero 1", o.zero,
             o.gradients);
    const bool divides_base = o.zero == "3" && o.trains_adapter();
    if (divides_base && parse_new_model(o.model))
        fail("--zero 3: divides a frozen model that is in files, and --model %s is a new one: give --zero 1",
             o.model);
    if (divides_base && !o.save_base.empty())
        fail("--zero 3: no device has all of the base that --save-base %s would save: give --zero 1",
             o.save_base);
    if (o.zero == "3" && o.weights != "device")
        fail("--zero 3: with --offload weights=%s the blocks' weights are not on the devices: give --zero 1",
             o.weights);
}

// Fails if options that are valid by themselves cannot be combined.
inline void check_options(const Asked& o) {
    check_adapter_options(o);
    check_auto_length(o);
    check_answers(o);
    if (o.has("--steps") && o.has("--epochs") && o.steps == 0)
        fail("--epochs %s: nothing is trained without --data", o.first("--epochs"));
    if (o.has("--steps") && o.has("--epochs"))
        fail("--epochs %s and --steps %s both say how long to train: give one of them", o.first("--epochs"),
             o.first("--steps"));
    check_bench_options(o);
    if (o.keep_best && o.out.empty()) fail("--keep-best: nothing is saved without --out");
    const char* const compares = o.keep_best ? "--keep-best" : o.early_stopping > 0 ? "--early-stopping" : "";
    if (*compares && (o.eval_every == 0 || o.steps == 0))
        fail("%s compares validations, and there are none during this run: give --eval-every N", compares);
    check_calibration(o);
    check_chunk_rows(o);
    check_build(o);
    for (const char* name : {"--timeline", "--report"})
        if (o.has(name) && o.steps == 0)
            fail("%s %s is of a training step, and --steps 0 has none", name, o.first(name));
    if (o.has("--report.with") && o.report.empty())
        fail("--report-with %s: add --report FILE, the page that shows it", o.report_with);
    if (o.min_lr > o.lr) fail("--min-lr %g is above --lr %g", o.min_lr, o.lr);
    if (o.save_every > 0 && o.out.empty()) fail("--save-every %ld needs --out DIR", o.save_every);
    if (!o.tokenizer.empty() && !parse_new_model(o.model))
        fail("--tokenizer %s is for a new model, such as --model d12: --model %s has its own", o.tokenizer,
             o.model);
    check_devices(o);
    if (o.has("--gpu") && o.gpu.empty()) fail("--gpu: names no GPU, such as RTX 4090 or H100");
    if (o.has("--gpu") && !o.plan) fail("--gpu %s only plans: add --plan", o.gpu);
    if (o.has("--gpu") && !o.rates.empty())
        fail("--gpu %s plans with the GPU's nominal rates, and --rates %s with measured ones: leave one out",
             o.gpu, o.rates);
    if (o.update_in_backward && o.own_micro_batches() > 1 && !o.by_block)
        fail(
            "--update-in-backward consumes gradients at once: with --grad-accum %d it needs --by-block, so "
            "that a block's are complete",
            o.grad_accum);
    if (o.update_in_backward && o.clip > 0 && o.has("--advanced.clip") && !o.clip_per_block)
        fail(
            "--advanced clip=model: --update-in-backward updates blocks before the gradient's norm is known "
            "and clips each by its own: leave it out, or give --clip 0");
    if (!o.val_data.empty() && o.data.empty() && o.steps > 0)
        fail("--val-data needs --data, or --steps 0: to validate the model as it is");
    if (!o.val_data.empty() && o.batch == 0 && o.steps == 0)
        fail("--batch auto is for training; for a validation alone, give a number");
    check_memory(o);
    if (int64_t{o.batch} * o.seq_len > kMostTokens)
        fail("--batch %d x --seq-len %d: more than 2^30 tokens in a micro-batch; use --grad-accum", o.batch,
             o.seq_len);
}
