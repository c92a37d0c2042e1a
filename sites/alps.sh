# shellcheck shell=bash disable=SC2034
# Alps at CSCS (Daint, Clariden, Santis): 4 NVIDIA GH200 and 288 ARM CPUs a node, which jobs do not share. Untried there:
# written from its documentation (docs.cscs.ch). Set once, in ~/.bashrc:
#   export SBATCH_ACCOUNT=<project> SBATCH_CPUS_PER_GPU=64
# Containers are started by srun (a relative of pyxis and enroot): CONTAINER=environment IMAGE=<name in ~/.edf, or path>.
# The environment's file says what is mounted, so it needs the folders of this repository and of the data, and the plugin
# by which NCCL finds the network:
#   image = "<path of a .sqsh>"
#   mounts = ["/capstor", "/users"]
#   annotations.com.hooks.aws_ofi_nccl = { enabled = "true", variant = "cuda-dl" }

: "${LOG_DIR:=${SCRATCH:+$SCRATCH/vit-era5/logs}}"
