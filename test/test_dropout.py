"""Dropout compared with transformers and PEFT, using the trainer's own masks; no memory option changes a bit
of it."""

import itertools

import numpy as np
import peft
import pytest
import reference
import torch
import transformers.models.bloom.modeling_bloom as bloom
from adapter_files import OPTIONS, make_adapter
from model_files import DATA, linked, prepare
from reference_runs import LOSS_BOUND
from trainer_runs import by_key, figures, read_log, saved_bytes

SHARE, SEED, STEPS = 0.2, 1337, 6
PLACES, ATTENTION, PROJECTED, OUTPUT = 16, 4, 5, 6  # places in a block
USUALLY = "fp32"  # see conftest.py
LINEAR = (("c_attn", "query_key_value"), ("attn.c_proj", "self_attention.dense"), ("c_fc", "dense_h_to_4h"),
          ("mlp.c_proj", "dense_4h_to_h"))


def name_hash(name):
    """FNV-1a."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


class Masks:
    """The factors at each place in the trainer, as in llmc/dropout.cuh."""
    sequence = 0

    def factors(self, place, shape):
        dropped = round(SHARE * 65536)
        key = reference.mix64(reference.mix64(reference.mix64(SEED) ^ np.uint64(name_hash("dropout")))
                              ^ np.uint64(self.sequence))
        here = reference.mix64(key ^ np.uint64(place))
        i = np.arange(int(np.prod(shape)), dtype=np.uint64)
        bits = reference.mix64(here ^ (i // np.uint64(4))) >> (i % np.uint64(4) * np.uint64(16))
        kept = (bits & np.uint64(0xFFFF)) >= dropped
        return torch.from_numpy(kept.astype(np.float32) * np.float32(65536 / (65536 - dropped))).reshape(shape)


class Dropped(torch.nn.Module):
    def __init__(self, masks, place):
        super().__init__()
        self.masks, self.place = masks, place

    def forward(self, x):
        return x * self.masks.factors(self.place, x.shape)


def put_masks(model, masks, monkeypatch):
    blocks = model.transformer.h
    for layer, block in enumerate(blocks):
        at = layer * PLACES
        if hasattr(block, "attn"):
            block.attn.resid_dropout = Dropped(masks, at + PROJECTED)
            block.mlp.dropout = Dropped(masks, at + OUTPUT)
        else:
            block.self_attention.attention_dropout = Dropped(masks, at + ATTENTION)
    if hasattr(model.transformer, "drop"):
        model.transformer.drop = Dropped(masks, len(blocks) * PLACES)
    attentions = itertools.cycle(layer * PLACES + ATTENTION for layer in range(len(blocks)))
    monkeypatch.setattr(torch.nn.functional, "dropout",  # GPT-2's attention calls it
                        lambda x, p, training: x * masks.factors(next(attentions), x.shape))
    calls = itertools.cycle(layer * PLACES + place for layer in range(len(blocks)) for place in (PROJECTED, OUTPUT))
    monkeypatch.setattr(bloom, "dropout_add",
                        lambda x, residual, share, training: residual + x * masks.factors(next(calls), x.shape))


def losses_of(options, masks, put):
    trainer = reference.Trainer(reference.parse_options(list(map(str, options))))
    put(trainer.model)
    whole, batch = trainer.loss, trainer.options.batch

    def loss(sequences):
        value = whole(sequences)
        masks.sequence += batch
        return value

    trainer.loss = loss
    return {line["step"]: line["loss"] for line in trainer.train()}


@pytest.fixture(scope="module", params=("gpt2", "bloom"))
def folder(request, tmp_path_factory):
    work = prepare(tmp_path_factory.mktemp(request.param), request.param, OPTIONS)
    make_adapter(work, peft.LoraConfig(r=4, lora_alpha=7, lora_dropout=SHARE, target_modules="all-linear",
                                       task_type="CAUSAL_LM", fan_in_fan_out=request.param == "gpt2"))
    return work


@pytest.fixture
def work(folder, tmp_path):
    return linked(tmp_path, folder, "adapter")


def test_losses(train, work, monkeypatch):
    """The masks are the same; with others the losses would be far off."""
    options = ("--model", work / "model", "--data", work / "data.bin", *DATA[4:], "--grad-accum", 2, "--steps", STEPS, "--lr",
               3e-3, "--seed", SEED)
    masks = Masks()
    expected = losses_of(options, masks, lambda model: put_masks(model, masks, monkeypatch))
    train(*options, "--dropout", SHARE, "--log", work / "log", "--sample", "tokens=0")
    got, bound = by_key(read_log(work / "log"), "loss"), LOSS_BOUND[train.precision]
    assert got == pytest.approx(expected, rel=0, abs=bound)
    train(*options, "--log", work / "plain", "--sample", "tokens=0")
    plain = by_key(read_log(work / "plain"), "loss")
    assert max(abs(plain[step] - got[step]) for step in got) > 5 * bound


def test_losses_of_lora(train, work):
    options = ("--model", work / "model", "--adapter", work / "adapter", "--data", work / "data.bin", *DATA[4:], "--steps",
               STEPS, "--lr", 3e-3, "--seed", SEED)
    masks = Masks()

    def put(model):
        for name, module in model.named_modules():
            if hasattr(module, "lora_dropout"):
                layer = int(name.split(".h.")[1].split(".")[0])
                [number] = [i for i, ends in enumerate(LINEAR) if name.endswith(ends)]
                module.lora_dropout["default"] = Dropped(masks, layer * PLACES + number)

    expected = losses_of(options, masks, put)
    train(*options, "--log", work / "log", "--sample", "tokens=0")
    assert by_key(read_log(work / "log"), "loss") == pytest.approx(expected, rel=0, abs=LOSS_BOUND[train.precision])


def trained(train, work, name, *options):
    train(*DATA, "--steps", 4, "--dropout", SHARE, "--out", name, "--log", f"{name}.log", "--sample", "tokens=0", *options,
          cwd=work)
    return figures(read_log(work / f"{name}.log")), saved_bytes(work / name)


def test_memory_options_and_resume_change_no_bit(train, work):
    first = trained(train, work, "none", "--recompute", "none", "--grad-accum", 2)
    for level in ("norm", "attention", "block"):
        assert first == trained(train, work, level, "--recompute", level, "--grad-accum", 2)
    assert first == trained(train, work, "one", "--threads", 1, "--grad-accum", 2)
    whole = trained(train, work, "whole", "--save-every", 2, "--keep", 0)[1]
    train("--resume", "whole/step-00000002", cwd=work)
    assert saved_bytes(work / "whole") == whole


def test_validation_drops_nothing(train_fp32, work):
    train_fp32(*DATA, "--steps", 1, "--lr", 0, "--dropout", 0.9, "--val-data", "data.bin", "--log", "a", "--sample", "tokens=0",
               cwd=work)
    train_fp32(*DATA, "--steps", 1, "--lr", 0, "--val-data", "data.bin", "--log", "b", "--sample", "tokens=0", cwd=work)
    assert by_key(read_log(work / "a"), "val_loss") == by_key(read_log(work / "b"), "val_loss")
