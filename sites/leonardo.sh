# shellcheck shell=bash disable=SC2034
# Leonardo Booster at CINECA: 4 NVIDIA A100 of 64 GB and 32 CPUs a node. Untried there: written from its documentation
# (docs.hpc.cineca.it/hpc/leonardo.html). Set once, in ~/.bashrc:
#   export SBATCH_ACCOUNT=<project> SBATCH_PARTITION=boost_usr_prod SBATCH_CPUS_PER_GPU=8
# and give `--qos=boost_qos_dbg` for a short test. Compute nodes do not reach the internet: `make setup` on a login node,
# or CONTAINER=apptainer IMAGE=<file>.sif.

: "${LOG_DIR:=${WORK:+$WORK/$USER/vit-era5/logs}}" # $SCRATCH is cleaned
