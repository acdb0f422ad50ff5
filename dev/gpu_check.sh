#!/usr/bin/env bash
# All there is to check and to measure on a machine with a GPU, in one go: make gpu-check calls this.
#
# Builds the trainer in both precisions and the tests of kernels, runs those, under compute-sanitizer too, then the
# Python tests and the benchmarks, and writes dev/results/GPU.md after each part: its command, how it ended, what it
# said. A part that fails is written down and the others go on. Exit code 0: all passed; 1: a part failed; 2: no GPU.
# With LLMC set, compare.py has llm.c run too.
#
#   --dry-run        prints the parts and runs nothing
#   PART_SECONDS     how long a part may take (2400)
#   KERNEL_TESTS     the tests' names, which make knows
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

part_seconds=${PART_SECONDS:-2400}
read -ra kernel_tests <<<"${KERNEL_TESTS:-}"
dry_run=no
failures=0 parts=0
ended=  # how the part before did, in words
may_lack_memory=no  # such a part is no failure
fitting=  # bench_trainer's batch
PATH=$PATH:/usr/local/cuda/bin  # where compute-sanitizer often is

fail() {
    echo "gpu_check.sh: $1" >&2
    exit 2
}

# how_it_ended STATUS LOG
how_it_ended() {
    if [ "$1" = 0 ]; then
        echo passed
    elif [ "$1" = 124 ]; then
        echo "FAILED (not done after $part_seconds s)"
    elif [ $may_lack_memory = yes ] && [ "$1" = 2 ] && grep -qi memory "$2"; then
        echo "does not fit"
    else
        echo "FAILED (exit code $1)"
    fi
}

# part NAME LINES COMMAND...: runs it, and writes down how it ended and the last LINES lines it said, more if it failed.
part() {
    local name=$1 lines=$2 status start=$SECONDS
    shift 2
    if [ $dry_run = yes ]; then
        echo "$name: $*"
        ended=passed
        return
    fi
    echo "== $name: $*"
    parts=$((parts + 1))
    timeout --kill-after=30 "$part_seconds" "$@" </dev/null >"$logs/said" 2>&1
    status=$?
    ended=$(how_it_ended $status "$logs/said")
    if [[ $ended = FAILED* ]]; then
        failures=$((failures + 1)) lines=$((lines > 60 ? lines : 60))
    fi
    echo "   $ended, $((SECONDS - start)) s"
    echo "| $name | $ended | $((SECONDS - start)) |" >>"$logs/summary"
    {
        printf '\n## %s\n\n' "$name"
        printf '    %s\n' "$*" "" "($ended)" "" # a block of code, so that nothing in it is taken for Markdown
        tail -n "$lines" "$logs/said" | sed 's/^/    /'
    } >>"$logs/details"
    write_results
}

# include FILE: what the part before wrote, if it did.
include() {
    if [ $dry_run = no ] && [ "$1" -nt "$logs/facts" ]; then
        { echo; sed 's/^/    /' "$1"; } >>"$logs/details"
    fi
}

# skip NAME WHY
skip() {
    echo "== $1: skipped, $2"
    echo "| $1 | skipped: $2 | |" >>"$logs/summary"
}

build() {
    local precision test
    for precision in bf16 fp32; do
        part "build the trainer, $precision" 1 make DEVICE=cuda PRECISION=$precision "build/cuda-$precision/train"
    done
    for test in "${kernel_tests[@]}"; do
        part "build $test" 1 make DEVICE=cuda "build/test/cuda/$test"
    done
    part "build the attention benchmark" 1 make DEVICE=cuda build/bench/cuda/attention
}

test_kernels() {
    local test tool
    for test in "${kernel_tests[@]}"; do
        part "$test" 12 "build/test/cuda/$test" --gtest_brief=1
    done
    if [ $dry_run = no ] && ! command -v compute-sanitizer >/dev/null; then
        skip "compute-sanitizer" "it is not on the PATH (CUDA Toolkit)"
        return
    fi
    for tool in memcheck racecheck; do
        for test in "${kernel_tests[@]}"; do
            part "$test under $tool" 12 env SMALL_SHAPES=1 compute-sanitizer --tool $tool --error-exitcode 9 \
                "build/test/cuda/$test" --gtest_brief=1
        done
    done
}

# python_with MODULE...: the first Python here that has them all.
python_with() {
    local python modules
    modules=$(printf 'import %s\n' "$@")
    for python in .venv/bin/python python3; do
        if "$python" -c "$modules" 2>/dev/null; then
            echo "$python"
            return
        fi
    done
}

test_python() {
    local python
    if [ $dry_run = yes ]; then
        python=.venv/bin/python
    else
        timeout "$part_seconds" dev/venv.sh >"$logs/venv.log" 2>&1 || tail -n 1 "$logs/venv.log"
        python=$(python_with pytest torch transformers)
    fi
    if [ -z "$python" ]; then
        skip "Python tests" "no .venv can be made here, and python3 has no pytest, torch and transformers"
        return
    fi
    part "Python tests" 15 env TRAIN_BINARIES="build/cuda-bf16/train build/cuda-fp32/train" "$python" -m pytest -q test
}

# bench_trainer MODEL PRECISION BATCH...: with the first of these batches that fits, which is then $fitting.
bench_trainer() {
    local model=$1 precision=$2 batch
    shift 2
    fitting=
    may_lack_memory=yes
    for batch in "$@"; do
        part "train $model, $precision, batch $batch, seq_len 1024" 200 "build/cuda-$precision/train" --bench \
            --bench-warmup 3 --bench-steps 10 --json --model "$model" --batch "$batch" --seq-len 1024
        [ "$ended" = passed ] && fitting=$batch
        [ "$ended" = "does not fit" ] || break
    done
    may_lack_memory=no
}

# search_algorithms BATCH: d12's operations one by one, with the algorithms that cuBLASLt names first and with those
# that a search finds fastest; and its step with these, to set beside bench_trainer's.
search_algorithms() {
    local step=(build/cuda-bf16/train --bench-warmup 3 --bench-steps 10 --model d12 --batch "$1" --seq-len 1024)
    local searched=(--matmul-algorithms "build/matmul-$gpu.json")
    part "operations of d12, bf16, batch $1" 60 "${step[@]}" --profile-ops
    part "train d12, bf16, batch $1, searched algorithms" 200 "${step[@]}" --bench --json "${searched[@]}"
    part "operations of d12, bf16, batch $1, searched algorithms" 60 "${step[@]}" --profile-ops "${searched[@]}"
}

bench() {
    local python torch
    bench_trainer d12 bf16 64 32 16 8 4
    if [ -n "$fitting" ]; then
        search_algorithms "$fitting"
    else
        skip "searched algorithms" "d12 did not run"
    fi
    bench_trainer d12 fp32 64 32 16 8 4
    bench_trainer d48 bf16 16 8 4 2 1
    torch=$(python_with torch)
    python=${torch:-python3}
    part "attention by length and head size" 1 "$python" dev/bench/attention.py --device cuda --out \
        "dev/results/$gpu-attention.md"
    include "dev/results/$gpu-attention.md"
    if [ -z "$torch" ] && [ $dry_run = no ]; then
        skip "compare with PyTorch" "no Python here has torch"
        return
    fi
    part "compare with PyTorch" 1 "$python" dev/bench/compare.py --device cuda --precision bf16 --model d12 --batch 32 \
        --seq-len 1024 --steps 10 --warmup 5 --out "dev/results/$gpu-compare-d12.md"
    include "dev/results/$gpu-compare-d12.md"
}

facts() {
    echo "- date: $(date -u '+%Y-%m-%d %H:%M UTC')"
    echo "- commit: $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    echo "- GPU, memory, driver, compute capability: $(nvidia-smi --format=csv,noheader \
        --query-gpu=name,memory.total,driver_version,compute_cap | head -n 1)"
    echo "- CUDA of the driver: $(nvidia-smi | grep -o 'CUDA[A-Za-z ]*Version: *[0-9.]*' | head -n 1)"
    echo "- nvcc: $(make -s DEVICE=cuda nvcc-version)"
}

write_results() {
    {
        printf '# make gpu-check: %s\n\n%s parts, %s failed.\n\n' "$gpu_name" $parts $failures
        cat "$logs/facts"
        printf '\n| part | | s |\n|---|---|---:|\n'
        cat "$logs/summary" "$logs/details"
    } >"$results"
}

main() {
    case ${1:-} in
        "") ;;
        --dry-run) dry_run=yes ;;
        *) fail "$1: the only option is --dry-run" ;;
    esac
    [ ${#kernel_tests[@]} -gt 0 ] || fail "KERNEL_TESTS is empty: start it with make gpu-check"
    gpu_name=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1) || gpu_name=
    [ -n "$gpu_name" ] || fail "no GPU answers nvidia-smi; this checks the CUDA build on one"
    gpu=$(tr -cs '[:alnum:]\n' - <<<"${gpu_name,,}")
    results=dev/results/$gpu.md
    if [ $dry_run = no ]; then
        logs=$(mktemp -d)
        trap 'rm -rf "$logs"' EXIT
        touch "$logs/summary" "$logs/details"
        mkdir -p dev/results
        facts >"$logs/facts"
    fi
    build
    test_kernels
    test_python
    bench
    if [ $dry_run = yes ]; then
        echo "results: $results"
        return
    fi
    write_results  # what was skipped last too
    echo "$parts parts, $failures failed; written: $results"
    [ $failures = 0 ]
}

main "$@"
