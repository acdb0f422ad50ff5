#!/bin/sh
# Fine-tunes a GPT-2 from a Hugging Face folder on a text: finetune.sh FOLDER TEXT. The text becomes shards first.
# What follows goes to ./train: finetune.sh gpt2 book.txt --steps 1e3
set -eu
model=$(realpath "${1:?a folder with a GPT-2, and a text}") text=$(realpath "${2:?a text}")
shift 2
cd "$(dirname "$0")/.."
dev/venv.sh
.venv/bin/python dev/data/tokenize_text.py "$text" --vocab "$model" --out out/finetune --val-tokens 10000
exec ./train --model "$model" --data 'out/finetune_train_*.bin' --val-data 'out/finetune_val_*.bin' \
    --batch 4 --seq-len 256 --grad-accum 4 --steps 200 --lr 3e-5 --warmup 20 --schedule linear \
    --eval-every 50 --out out/finetuned --save-every 100 "$@"
