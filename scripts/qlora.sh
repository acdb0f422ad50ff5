#!/bin/sh
# Trains a LoRA adapter for a model whose matrices are quantized to 4 bits (QLoRA), with 8-bit moments and one block's
# activations at a time: qlora.sh FOLDER TEXT. The folder's weights may have 16 or 32 bits, or be in bitsandbytes' NF4
# already (then leave --base out). Further arguments go to ./train: qlora.sh llama book.txt --lora-rank 64
set -eu
model=${1:?a folder with a model, and a text} text=${2:?a text}
shift 2
exec "$(dirname "$0")/../train" --model "$model" --base nf4-double --train lora --lora-rank 32 --lora-alpha 64 --data "$text" \
    --batch 1 --seq-len 512 --grad-accum 8 --steps 200 --lr 2e-4 --warmup 10 --state-formats m=8bit,v=8bit --recompute block \
    --eval-every 50 --eval-batches 4 --out out/qlora --save-every 100 "$@"
