"""Shared by tests: what PyTorch and transformers compute for a model, and how close the trainer must come."""

import itertools

import numpy as np
import reference
import torch
from trainer_runs import by_key, read_log, write_shard
from transformers import AutoModelForCausalLM

# In fp32 only the order of sums differs. In bf16 each of about 15 roundings between a loss and a gradient
# adds up to 2^-9 = 0.2%, in random directions; the most that was seen is 1.2%, and any wrong term is far
# more.
GRADIENT_BOUND = {"fp32": 1e-4, "bf16": 3e-2}
LOSS_BOUND = {"fp32": 1e-4, "bf16": 1e-2}


def run_reference(*arguments):
    return list(reference.Trainer(reference.parse_options(list(map(str, arguments)))).train())


def open_with_transformers(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True,
                                                       attn_implementation="eager")
    assert not any(info.values()), info
    return model.eval()


def greedy(folder, prompt, count):
    """The tokens that transformers adds."""
    model = open_with_transformers(folder).float()
    model.generation_config.eos_token_id = None
    tokens = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                            do_sample=False, max_new_tokens=count, pad_token_id=0)
    return tokens[0, len(prompt):].tolist()


def gradients_in_bf16(options):
    """The gradients of transformers' own model in bf16, at the first step."""
    options = reference.parse_options(list(map(str, options)))
    trainer, gradients = reference.Trainer(options), {}
    trainer.model.to(torch.bfloat16)
    for _ in range(options.grad_accum):
        trainer.model.zero_grad()
        (trainer.loss(list(itertools.islice(trainer.sequences, options.batch))) / options.grad_accum).backward()
        for name, parameter in trainer.trained.items():
            gradients[name] = gradients.get(name, 0) + parameter.grad.float()
    return gradients


def last_logits(train, folder, contexts, tokens):
    """For each context, the logits of some tokens after it, minus their mean. If sequences differ only in
    their last target, their losses differ by the differences of those logits. A step at rate 0 logs the loss
    of one sequence."""
    shards, work = [np.append(context, token) for context in contexts for token in tokens], folder.with_name("logits")
    work.mkdir()
    for i, shard in enumerate(shards):
        write_shard(work / f"{i:03}.bin", shard)
    length = len(contexts[0])
    train("--model", folder, "--data", work / "*.bin", "--batch", 1, "--seq-len", length, "--steps", len(shards),
          "--lr", 0, "--log", work / "log", "--sample", "tokens=0", "--seed", 3)
    order = itertools.islice(reference.training_sequences(shards, length, 3), len(shards))
    losses = dict(zip((tuple(sequence) for sequence in order), by_key(read_log(work / "log"), "loss").values()))
    return centred(-length * np.array([losses[tuple(shard)] for shard in shards]).reshape(len(contexts), -1))


def centred(logits):
    return logits - logits.mean(axis=1, keepdims=True)


@torch.no_grad()
def expected_logits(model, contexts, tokens):
    return centred(model(torch.from_numpy(contexts)).logits[:, -1, tokens].float().numpy().astype(np.float64))
