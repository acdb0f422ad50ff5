#!/bin/sh
# Trains GPT-2 124M on FineWeb's shards (dev/data/download.py fineweb), in data/ of the current folder, on one GPU: half a
# million tokens a step, as for the smallest model in the GPT-3 paper. If memory is short, use a smaller --batch and a larger
# --grad-accum, or --recompute norm. Arguments go to ./train: gpt2_124M.sh --batch 16 --grad-accum 32
set -eu
exec "$(dirname "$0")/../train" --data 'data/fineweb_train_*.bin' --val-data 'data/fineweb_val_*.bin' \
    --model d12 --batch 64 --seq-len 1024 --grad-accum 8 --chunk-rows head=4096 --steps 19000 \
    --lr 6e-4 --min-lr 6e-5 --warmup 700 --weight-decay 0.1 \
    --eval-every 250 --eval-batches 3 --sample every=1000 \
    --out out/gpt2_124M --save-every 1000 --log out/gpt2_124M.jsonl "$@"
