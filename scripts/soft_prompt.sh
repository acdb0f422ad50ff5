#!/bin/sh
# Trains a soft prompt for a frozen model in a Hugging Face folder: vectors that stand before every sequence, initialized
# with the embeddings of a text's tokens: soft_prompt.sh FOLDER TEXT. Further arguments go to ./train:
# soft_prompt.sh smollm2 book.txt --soft-prompt 50
set -eu
model=${1:?a folder with a model, and a text} text=${2:?a text}
shift 2
exec "$(dirname "$0")/../train" --model "$model" --train prompt --soft-prompt "20:A play by William Shakespeare." \
    --data "$text" --batch 4 --seq-len 128 --steps 200 --lr 3e-3 --warmup 10 --weight-decay 0 --eval-every 50 \
    --eval-batches 4 --out out/prompt --save-every 100 "$@"
