#!/bin/bash
# A forecast on whole nodes with one task per GPU, which share out the start dates, or each image.
#   sbatch -N 1 submit_forecast.sh --run_folder logs/base/00 --domain_parallel=4
# What follows the name of this file goes to forecast.py. docs/forecast.md
#SBATCH --job-name=vit-era5
#SBATCH --output=%x-%j.out
#SBATCH --time=00:30:00
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=4

[[ -f sites/launch.sh ]] || { echo "error: $PWD is not the repository: submit from there, or add -D FOLDER" >&2; exit 2; }
source sites/launch.sh forecast.py "$@"
