#!/bin/sh
# Fine-tunes a model in a Hugging Face folder on a text: finetune.sh FOLDER TEXT. The model's own tokenizer tokenizes the
# text, whose last tenth is for validation. Further arguments go to ./train: finetune.sh smollm2 book.txt --steps 1e3
set -eu
model=${1:?a folder with a model, and a text} text=${2:?a text}
shift 2
exec "$(dirname "$0")/../train" --model "$model" --data "$text" --batch 4 --seq-len 256 --grad-accum 4 --steps 200 --lr 3e-5 --warmup 20 \
    --schedule linear --eval-every 50 --eval-batches 4 --out out/finetuned --save-every 100 "$@"
