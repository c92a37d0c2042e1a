#!/bin/bash
# What a run rests on, checked on whole nodes with one task per GPU: software, devices, network, folders.
#   sbatch -N 2 submit_preflight.sh
# What follows the name of this file goes to tools/preflight/__main__.py. docs/launch.md
#SBATCH --job-name=vit-era5
#SBATCH --output=%x-%j.out
#SBATCH --time=00:05:00
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=4

[[ -f sites/launch.sh ]] || { echo "error: $PWD is not the repository: submit from there, or add -D FOLDER" >&2; exit 2; }
source sites/launch.sh tools/preflight/__main__.py "$@"
