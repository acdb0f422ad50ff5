#!/usr/bin/env python3
"""Sends a log of ./train --log to Weights & Biases: scripts/log_to_wandb.py LOG.jsonl PROJECT [NAME]

It needs `pip install wandb` and `wandb login`; WANDB_MODE=offline keeps the run here. Send a log when its run is done."""

import json
import sys

import wandb

TAGS = {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/learning_rate", "val_loss": "eval/loss",
        "tokens_per_second": "train/tokens_per_second"}

if len(sys.argv) < 3:
    sys.exit(__doc__)
run = wandb.init(project=sys.argv[2], name=sys.argv[3] if len(sys.argv) > 3 else None)
for record in map(json.loads, open(sys.argv[1], encoding="utf-8")):
    run.log({TAGS[key]: value for key, value in record.items() if key in TAGS}, step=record["step"])
run.finish()
