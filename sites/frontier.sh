# shellcheck shell=bash disable=SC2034
# Frontier at OLCF: 8 AMD devices (4 MI250X of 2 each) and 56 usable CPUs a node. Set once, in ~/.bashrc:
#   export SBATCH_ACCOUNT=<project> SBATCH_PARTITION=batch SBATCH_CPUS_PER_GPU=7
# and give `--gpus-per-node=8` for whole nodes. PYTHON must be of an environment with the ROCm build of torch.

: "${MODULES:=rocm}"
: "${LOG_DIR:=${MEMBERWORK:+$MEMBERWORK/${SLURM_JOB_ACCOUNT:-}/vit-era5/logs}}"
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-hsn0}" # the fast network
export MIOPEN_USER_DB_PATH="${MIOPEN_USER_DB_PATH:-/tmp/$USER-miopen-$SLURM_JOB_ID}" # not in the shared home folder
mkdir -p "$MIOPEN_USER_DB_PATH"
