#!/bin/bash
# Rung 1 on one node, which other jobs may share; -n is the number of GPUs.
#   sbatch -n 1 -t 20 ./submit_pm.sh --config=short
# What follows the name of this file goes to train.py. docs/launch.md
#SBATCH --job-name=vit-era5
#SBATCH --output=%x-%j.out
#SBATCH --time=00:30:00
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-gpu=8
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

[[ -f sites/launch.sh ]] || { echo "error: $PWD is not the repository: submit from there, or add -D FOLDER" >&2; exit 2; }
source sites/launch.sh train.py "$@"
