#!/bin/sh
# Trains a LoRA adapter for a frozen model in a Hugging Face folder on a text: lora.sh FOLDER TEXT. The adapter is saved in
# out/lora in PEFT's format; --merge DIR also saves the merged model. Further arguments go to ./train:
# lora.sh smollm2 book.txt --lora-rank 32
set -eu
model=${1:?a folder with a model, and a text} text=${2:?a text}
shift 2
exec "$(dirname "$0")/../train" --model "$model" --train lora --lora-rank 16 --lora-alpha 32 --data "$text" --batch 4 --seq-len 256 \
    --steps 200 --lr 2e-4 --warmup 10 --schedule linear --eval-every 50 --eval-batches 4 --out out/lora --save-every 100 "$@"
