#!/bin/bash
# Rung 4, domain parallel, on whole nodes with one task per GPU.
#   sbatch -N 4 submit_shard.sh --config=shard --domain_parallel=4
# What follows the name of this file goes to train_shard.py. docs/launch.md
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
source sites/launch.sh train_shard.py "$@"
