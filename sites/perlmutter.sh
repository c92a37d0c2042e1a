# shellcheck shell=bash disable=SC2034
# Perlmutter at NERSC: 4 NVIDIA A100 and 128 CPUs a GPU node. Set once, in ~/.bashrc:
#   export SBATCH_ACCOUNT=<project> SBATCH_CONSTRAINT=gpu SBATCH_QOS=shared SBATCH_CPUS_PER_GPU=32
# and give `-q regular` for whole nodes.

: "${LOG_DIR:=${SCRATCH:+$SCRATCH/vit-era5/logs}}"
case ${CONTAINER:-none} in
    none) [[ -x .venv/bin/python ]] || : "${MODULES:=pytorch}" ;;
    shifter) : "${CONTAINER_FLAGS:=--module=gpu,nccl-plugin}" ;;
esac
