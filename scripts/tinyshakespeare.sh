#!/bin/sh
# Trains a byte-level GPT on tinyshakespeare: validation loss under 1.8 nats a byte in 5 minutes on two cores.
# Wants the text: .venv/bin/python dev/data/download.py tinyshakespeare, or a path as the first argument.
set -eu
text=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.."
exec ./train --data "${text:-data/tinyshakespeare.txt}" \
    --model d4 --batch 16 --seq-len 128 --steps 1150 \
    --lr 2e-3 --min-lr 1e-4 --warmup 50 --weight-decay 0.1 \
    --eval-every 250 --eval-batches 50 --prompt "ROMEO:" --sample-tokens 300
