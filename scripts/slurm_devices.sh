#!/bin/sh
# Trains on the CPUs of several machines under Slurm: sbatch scripts/slurm_devices.sh MODEL DATA. One rank for each socket;
# change the numbers to fit your machines. Further arguments go to ./train. Slurm signals two minutes before the time limit,
# and the run saves; submitted again, it goes on from there.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --output=train-%j.log
set -eu
model=${1:?a folder with a model, or a size such as d12, and data} data=${2:?a file of data}
shift 2
exec srun --mpi=pmix --cpu-bind=sockets ./train --model "$model" --data "$data" --batch 4 --seq-len 1024 \
    --threads "${SLURM_CPUS_PER_TASK:-16}" --save-every 100 --out out/slurm --resume auto "$@"
