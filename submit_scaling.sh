#!/bin/bash
# A scaling study on whole nodes with one task per GPU; each task of an array is one run.
#   python benchmark.py scaling --study cluster --list
# prints the sbatch lines, one for each number of ranks. What follows this file's name goes to benchmark.py scaling.
#SBATCH --job-name=vit-era5
#SBATCH --output=%x-%j.out
#SBATCH --time=01:00:00
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

[[ -f sites/launch.sh ]] || { echo "error: $PWD is not the repository: submit from there, or add -D FOLDER" >&2; exit 2; }
source sites/launch.sh benchmark.py scaling "$@" ${SLURM_ARRAY_TASK_ID:+--only="$SLURM_ARRAY_TASK_ID"}
