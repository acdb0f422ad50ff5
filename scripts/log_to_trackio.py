#!/usr/bin/env python3
"""Sends a log of ./train --log to trackio: scripts/log_to_trackio.py LOG.jsonl PROJECT [NAME]

It needs `pip install trackio`; `trackio show` then draws the run. Send a log when its run is done."""

import json
import sys

import trackio

TAGS = {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/learning_rate", "val_loss": "eval/loss",
        "tokens_per_second": "train/tokens_per_second"}

if len(sys.argv) < 3:
    sys.exit(__doc__)
trackio.init(project=sys.argv[2], name=sys.argv[3] if len(sys.argv) > 3 else None)
for record in map(json.loads, open(sys.argv[1], encoding="utf-8")):
    trackio.log({TAGS[key]: value for key, value in record.items() if key in TAGS}, step=record["step"])
trackio.finish()
