#!/bin/sh
# Trains a byte-level GPT on tinyshakespeare: validation loss under 1.8 nats a byte in 5 minutes on two cores.
# To train on another text, give its path as the first argument. Further arguments go to ./train:
# tinyshakespeare.sh --steps 100
set -eu
text=$(dirname "$0")/../dev/data/tinyshakespeare.txt
case ${1:-} in
    '' | -*) ;;
    *) text=$1; shift ;;
esac
exec "$(dirname "$0")/../train" --data "$text" \
    --model d4 --batch 16 --seq-len 128 --steps 1150 \
    --lr 2e-3 --min-lr 1e-4 --warmup 50 --weight-decay 0.1 \
    --eval-every 250 --eval-batches 50 --prompt "ROMEO:" --sample tokens=300 "$@"
