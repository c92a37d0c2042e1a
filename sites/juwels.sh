# shellcheck shell=bash disable=SC2034
# JUWELS Booster at JSC: 4 NVIDIA A100 and 48 CPUs a node, which jobs do not share. Untried there: written from its
# documentation (apps.fz-juelich.de/jsc/hps/juwels). Set once, in ~/.bashrc:
#   export SBATCH_ACCOUNT=<budget> SBATCH_PARTITION=booster SBATCH_CPUS_PER_GPU=12
# and SBATCH_GRES=gpu:4 too, should sbatch insist on --gres.
# Compute nodes do not reach the internet: `make setup` on a login node.

: "${LOG_DIR:=${SCRATCH:+$SCRATCH/$USER/vit-era5/logs}}"
export MASTER_ADDR="${MASTER_ADDR:-$(hostname -s)i}" # the node's name on InfiniBand; the plain one is the slow network
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0,1,2,3}" # else the system shows each task one device alone
