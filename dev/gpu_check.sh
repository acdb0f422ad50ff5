#!/usr/bin/env bash
# Checks and measures what only a machine with a GPU can, all at once or group by group; make gpu-check calls it.
#
# After each part it writes dev/results/GPU.md: the part's command, how it ended, and its output. If a part fails, this is
# recorded and the next parts run. Exit code 0: no part failed; 1: one did; 2: no GPU, or a wrong argument. If LLMC is set,
# compare_speed.py runs llm.c too.
#
#   gpu_check.sh [--dry-run] [GROUP...]     --dry-run prints the parts and runs nothing
#
# Groups; all of them if none is named; always in this order:
#   build        installs GoogleTest if it is missing; builds the trainer in both precisions, the kernel tests, the
#                attention benchmark, and the other programs that the Python tests run; the other groups use what is in
#                build/
#   kernels      the kernel tests
#   trainer      the trainer's speed, also by operation, and with the fastest algorithms for matrix products; compares
#                its operations with the predictions of dev/gpu_predicted.py, in dev/results/GPU-predicted.md
#   compare      the trainer's speed compared with PyTorch's
#   attention    attention's speed compared with PyTorch's
#   devices      training on two GPUs, and on all, compared with one; if there is one GPU, ranks that share it
#   python       the Python tests of the trainer, one part per file
#   sanitizers   the kernel tests under compute-sanitizer. Some of racecheck's alarms about kernels that synchronize with
#                TMA and mbarriers are known to be false; a part with only such alarms has not failed
#
#   PART_SECONDS     time limit of a part, except the build (600)
#   BUILD_SECONDS    time limit of the build (3600); it takes half an hour on four cores
#   TOTAL_SECONDS    time limit of everything: the part that runs then is stopped, and no other is started (0: none)
#   RESULTS          the folder for the results (dev/results); if groups are named, so are they in the file's name
#   KERNEL_TESTS     the names of the kernel tests; make sets it
#   CUDA_VISIBLE_DEVICES   the GPU, by its number in nvidia-smi or its UUID; by default the one with the highest compute
#                    capability and, among these, the most memory. CUDA's own numbers differ: it counts the fastest as 0.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

known_groups=(build kernels trainer compare attention devices python sanitizers)
groups=()
part_seconds=${PART_SECONDS:-600} build_seconds=${BUILD_SECONDS:-3600} total_seconds=${TOTAL_SECONDS:-0}
folder=${RESULTS:-dev/results}
read -ra kernel_tests <<<"${KERNEL_TESTS:-}"
dry_run=no
failures=0 parts=0
ended=  # how the previous part ended, in words
may_lack_memory=no  # yes: a part that runs out of memory has not failed
known_alarms=  # a part whose only alarms are about kernels with such names has not failed
fitting=  # the batch that bench_trainer found to fit
PATH=$PATH:/usr/local/cuda/bin  # where compute-sanitizer often is

fail() {
    echo "gpu_check.sh: $1" >&2
    exit 2
}

# only_known_alarms LOG: succeeds if racecheck's log has no failed test and no complaint except hazards in kernels that
# $known_alarms names. A hazard is one line that ends with the first access, and a line "and ... access at ..." for each
# further access.
only_known_alarms() {
    grep -qE '^=+ +(Error|Warning): Race reported' "$1" && ! grep -qE '\[ +FAILED +\]' "$1" &&
        ! grep -E '^=+ +((Error|Warning|Internal)|and (Read|Write)|Program hit|Invalid)' "$1" |
            grep -qvE "(Race reported between|and) (Read|Write) access at .*($known_alarms)"
}

# how_it_ended STATUS LOG SECONDS
how_it_ended() {
    if [ "$1" = 0 ]; then
        echo passed
    elif [ "$1" = 124 ] || [ "$1" = 137 ]; then
        echo "FAILED (not done after $3 s)"
    elif [ $may_lack_memory = yes ] && [ "$1" = 2 ] && grep -qiE 'out of (device )?memory' "$2"; then
        echo "does not fit"
    elif [ -n "$known_alarms" ] && [ "$1" = 9 ] && only_known_alarms "$2"; then
        echo "passed, but for alarms about $known_alarms: such are known to be false at TMA and mbarriers"
    else
        echo "FAILED (exit code $1)"
    fi
}

# part NAME LINES COMMAND...: runs the command, and records how it ended and the last LINES lines of its output, more if it
# failed.
part() {
    local name=$1 lines=$2 status start=$SECONDS limit=$part_seconds left=$((total_seconds - SECONDS))
    shift 2
    if [ $dry_run = yes ]; then
        echo "$name: $*"
        ended=passed
        return
    fi
    if [ "$total_seconds" -gt 0 ] && [ $left -lt "$limit" ]; then
        limit=$left
        if [ $limit -lt 1 ]; then
            skip "$name" "$total_seconds s are over"
            ended=skipped
            return
        fi
    fi
    echo "== $name: $*"
    parts=$((parts + 1))
    timeout --kill-after=10 "$limit" "$@" </dev/null >"$logs/said" 2>&1
    status=$?
    ended=$(how_it_ended $status "$logs/said" "$limit")
    if [[ $ended = FAILED* ]]; then
        failures=$((failures + 1)) lines=$((lines > 60 ? lines : 60))
    fi
    echo "   $ended, $((SECONDS - start)) s"
    echo "| $name | $ended | $((SECONDS - start)) |" >>"$logs/summary"
    {
        printf '\n## %s\n\n' "$name"
        printf '    %s\n' "$*" "" "($ended)" "" # indented as code, so that nothing in it is read as Markdown
        tail -n "$lines" "$logs/said" | sed 's/^/    /'
    } >>"$logs/details"
    write_results
}

# include FILE: adds the file to the results, if the previous part wrote it.
include() {
    if [ $dry_run = no ] && [ "$1" -nt "$logs/facts" ]; then
        { echo; sed 's/^/    /' "$1"; } >>"$logs/details"
    fi
}

# skip NAME WHY: records a part that is skipped.
skip() {
    echo "== $1: skipped, $2"
    echo "| $1 | skipped: $2 | |" >>"$logs/summary"
    write_results
}

# choose_gpu: selects one GPU, the same for CUDA and for nvidia-smi; keeps in $all_gpus which there were.
choose_gpu() {
    local id=${CUDA_VISIBLE_DEVICES:-}
    all_gpus=${id:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | paste -sd,)}
    export CUDA_DEVICE_ORDER=PCI_BUS_ID # as nvidia-smi counts
    [ -n "$id" ] || id=$(nvidia-smi --query-gpu=compute_cap,memory.total,uuid --format=csv,noheader,nounits 2>/dev/null |
        sort -t, -k1,1Vr -k2,2nr | sed -n '1s/.*, *//p')
    id=${id%%,*}
    if [ -n "$id" ]; then export CUDA_VISIBLE_DEVICES=$id; fi
}

# smi FIELDS: prints what nvidia-smi says about the GPU.
smi() {
    nvidia-smi ${CUDA_VISIBLE_DEVICES:+--id="$CUDA_VISIBLE_DEVICES"} --query-gpu="$1" --format=csv,noheader 2>/dev/null |
        head -n 1
}

do_build() {
    local part_seconds=$build_seconds
    if ! g++ -x c++ -E -include gtest/gtest.h /dev/null >/dev/null 2>&1; then
        part "install GoogleTest" 5 make gpu-deps
    fi
    part build 1 make -k -j"$(nproc)" DEVICE=cuda build/cuda-{bf16,fp32}/train \
        "${kernel_tests[@]/#/build/test/cuda/}" build/bench/cuda/attention build/test/fast/{tokenize,formats}_probe
}

do_kernels() {
    local test
    for test in "${kernel_tests[@]}"; do
        part "$test" 12 "build/test/cuda/$test" --gtest_brief=1
    done
}

do_sanitizers() {
    local test tool
    if [ $dry_run = no ] && ! command -v compute-sanitizer >/dev/null; then
        skip "compute-sanitizer" "it is not on the PATH (CUDA Toolkit)"
        return
    fi
    for tool in memcheck racecheck; do
        [ $tool = racecheck ] && known_alarms=hopper_attention
        for test in "${kernel_tests[@]}"; do
            part "$test under $tool" 12 env SMALL_SHAPES=1 compute-sanitizer --tool $tool --error-exitcode 9 \
                "build/test/cuda/$test" --gtest_brief=1
        done
    done
    known_alarms=
}

# python_with MODULE...: prints the first Python here that has all these modules.
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

do_python() {
    local python file
    python=$(python_with pytest torch transformers)
    if [ -z "$python" ] && [ $dry_run = no ]; then
        timeout "$part_seconds" dev/venv.sh >"$logs/venv.log" 2>&1 || tail -n 1 "$logs/venv.log"
        python=$(python_with pytest torch transformers)
    fi
    if [ -z "$python" ] && [ $dry_run = no ]; then
        skip "Python tests" "no .venv can be made here, and python3 has no pytest, torch and transformers"
        return
    fi
    while read -r file; do
        part "$(basename "$file")" 15 env MORE_TESTS=1 ASAN_TRAINERS= \
            TRAIN_BINARIES="build/cuda-bf16/train build/cuda-fp32/train" \
            "${python:-.venv/bin/python}" -m pytest -q "$file"
    done < <(grep -lE '^ *def test_.*\btrain(_fp32|_bf16)?\b|\b(binaries|Train)\b|BINARIES' test/test_*.py)
}

# time_step MODEL PRECISION BATCH OPTION...: a part that measures the trainer's steps.
time_step() {
    part "train $1, $2, batch $3, seq_len 1024${4:+, ${*:4}}" 200 "build/cuda-$2/train" --bench json --warmup 3 \
        --steps 10 --model "$1" --batch "$3" --seq-len 1024 "${@:4}"
}

# bench_trainer MODEL PRECISION BATCH...: measures steps with the first of these batches that fits; sets $fitting to it.
bench_trainer() {
    local model=$1 precision=$2 batch
    shift 2
    fitting=
    may_lack_memory=yes
    for batch in "$@"; do
        time_step "$model" "$precision" "$batch"
        [ "$ended" = passed ] && fitting=$batch
        [ "$ended" = "does not fit" ] || break
    done
    may_lack_memory=no
}

# d12 BATCH: measures d12's step with options that may make it faster; and its operations one by one, with the algorithms
# that cuBLASLt proposes first and with those that a search finds fastest.
d12() {
    local searched=(--advanced "algorithms=build/matmul-$gpu.json")
    local operations=(build/cuda-bf16/train --bench ops --warmup 3 --steps 10 --model d12 --batch "$1" \
        --seq-len 1024 --chunk-rows head=4096)
    may_lack_memory=yes
    time_step d12 bf16 "$1" --recompute none --chunk-rows head=0
    may_lack_memory=no
    time_step d12 bf16 "$1" --chunk-rows head=4096
    time_step d12 bf16 "$1" --chunk-rows head=4096 --advanced graph=off
    if [ "$(smi compute_cap)" = 9.0 ]; then
        time_step d12 bf16 "$1" --chunk-rows head=4096 --advanced attention=common
    fi
    part "operations of d12, bf16, batch $1" 60 "${operations[@]}"
    time_step d12 bf16 "$1" --chunk-rows head=4096 "${searched[@]}"
    part "operations of d12, bf16, batch $1, searched algorithms" 60 "${operations[@]}" "${searched[@]}"
    part "operations of d12, bf16, batch $1, beside what was predicted" 40 python3 dev/gpu_compare.py --gpu "$gpu_name" \
        --out "$folder/$gpu-predicted.md" "${operations[@]}" "${searched[@]}" --bench json
}

do_trainer() {
    bench_trainer d12 bf16 64 32 16 8 4
    if [ -n "$fitting" ]; then
        d12 "$fitting"
    else
        skip "other ways to run d12" "d12 did not run"
    fi
    bench_trainer d12 fp32 16 8 4
    bench_trainer d48 bf16 16 8 4 2 1
}

# measure NAME FILE SCRIPT OPTION...: a part that runs a script of dev/bench, which writes a table.
measure() {
    local name=$1 file=$folder/$2 python
    python=$(python_with torch)
    part "$name" 1 "${python:-python3}" "dev/bench/$3" --device cuda --timeout 240 --out "$file" "${@:4}"
    include "$file"
}

do_attention() {
    measure "attention by length and head size" "$gpu-attention.md" attention.py --rounds 1 --lengths 1024,4096,16384
}

do_compare() {
    if [ $dry_run = no ] && [ -z "$(python_with torch)" ]; then
        skip "compare with PyTorch" "no Python here has torch"
        return
    fi
    measure "compare with PyTorch" "$gpu-compare-d12.md" compare_speed.py --precision bf16 --model d12 --batch 32 \
        --seq-len 1024 --steps 10 --warmup 5 --rounds 2 --train-options "--recompute none --chunk-rows head=0" --llmc-options "-r 0"
}

do_devices() {
    local gpus count precision
    read -ra gpus <<<"${all_gpus//,/ }"
    if [ ${#gpus[@]} -lt 2 ] && [ $dry_run = no ]; then
        on_one_gpu
        return
    fi
    for precision in bf16 fp32; do
        for count in 2 ${#gpus[@]}; do
            part "d12 on $count GPUs, $precision" 12 env CUDA_VISIBLE_DEVICES="$all_gpus" python3 dev/compare_devices.py \
                "build/cuda-$precision/train" --devices "$count" --model d12 --batch 8 --seq-len 1024
            [ "${#gpus[@]}" -gt 2 ] || break
        done
    done
}

# on_one_gpu: two and three ranks that share the only GPU; their losses are compared, as speeds would say nothing.
on_one_gpu() {
    local precision count as_root=()
    [ "$(id -u)" = 0 ] || as_root=(--map-root-user)  # with which others may unshare a namespace, where that is allowed
    if ! command -v mpirun >/dev/null || ! unshare --uts "${as_root[@]}" true 2>/dev/null; then
        skip "several ranks on one GPU" "they need OpenMPI's mpirun and permission to unshare a namespace"
        return
    fi
    for precision in bf16 fp32; do
        for count in 2 3; do
            part "d4, $count ranks on one GPU, $precision" 12 python3 dev/compare_devices.py --one-gpu --zero 0,1,2,3 \
                "build/cuda-$precision/train" --devices "$count" --model d4 --batch 2 --seq-len 256 --steps 8
        done
    done
}

facts() {
    echo "- date: $(date -u '+%Y-%m-%d %H:%M UTC')"
    echo "- commit: $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    echo "- GPU, memory, driver, compute capability: $(smi name,memory.total,driver_version,compute_cap)"
    echo "- CUDA_VISIBLE_DEVICES: ${CUDA_VISIBLE_DEVICES:-not set}"
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

# choose ARGUMENT...: sets $dry_run and $groups from the command line.
choose() {
    local argument
    for argument in "$@"; do
        if [ "$argument" = --dry-run ]; then
            dry_run=yes
        elif [[ " ${known_groups[*]} " = *" $argument "* ]]; then
            groups+=("$argument")
        else
            fail "$argument: neither --dry-run nor a group, which are ${known_groups[*]}"
        fi
    done
}

main() {
    local group name
    choose "$@"
    [ ${#kernel_tests[@]} -gt 0 ] || fail "KERNEL_TESTS is empty: start it with make gpu-check"
    choose_gpu
    gpu_name=$(smi name) || gpu_name=
    [ -n "$gpu_name" ] || [ $dry_run = yes ] || fail "no GPU answers nvidia-smi; this checks the CUDA build on one"
    gpu_name=${gpu_name:-gpu}
    gpu=$(tr -cs '[:alnum:]\n' - <<<"${gpu_name,,}")
    name=$(IFS=-; echo "$gpu${groups[*]:+-${groups[*]}}")
    results=$folder/$name.md
    if [ $dry_run = no ]; then
        logs=$(mktemp -d)
        trap 'rm -rf "$logs"' EXIT
        touch "$logs/summary" "$logs/details"
        mkdir -p "$folder"
        facts >"$logs/facts"
    fi
    [ ${#groups[@]} -gt 0 ] || groups=("${known_groups[@]}")
    for group in "${known_groups[@]}"; do
        if [[ " ${groups[*]} " = *" $group "* ]]; then do_"$group"; fi
    done
    if [ $dry_run = yes ]; then
        echo "results: $results"
        return
    fi
    echo "$parts parts, $failures failed; written: $results"
    [ $failures = 0 ]
}

main "$@"
