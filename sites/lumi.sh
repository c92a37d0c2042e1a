# shellcheck shell=bash disable=SC2034
# LUMI at CSC: 8 AMD devices (4 MI250X of 2 each) and 56 usable CPUs a node. Untried there: written from its user guide
# (docs.lumi-supercomputer.eu, LUMI AI guide). Set once, in ~/.bashrc:
#   export SBATCH_ACCOUNT=project_<number> SBATCH_PARTITION=small-g SBATCH_CPUS_PER_GPU=7 SBATCH_MEM_PER_GPU=60G
# and give `-p standard-g --gpus-per-node=8` for whole nodes. Python comes from a container, which the file system likes
# better than a .venv's many files: CONTAINER=apptainer IMAGE=<one of /appl/local/laifs/containers/, or your own>.

if [[ ${CONTAINER:-none} == apptainer ]]; then
    module use /appl/local/laifs/modules
    : "${MODULES:=lumi-aif-singularity-bindings}" # Slingshot's libraries and the file systems, in the container
fi
if [[ -d /scratch/${SLURM_JOB_ACCOUNT:-none} ]]; then : "${LOG_DIR:=/scratch/$SLURM_JOB_ACCOUNT/$USER/vit-era5/logs}"; fi
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-hsn0,hsn1,hsn2,hsn3}" # the fast network
export MIOPEN_USER_DB_PATH="${MIOPEN_USER_DB_PATH:-/tmp/$USER-miopen-$SLURM_JOB_ID}" # not in the shared home folder
export MIOPEN_CUSTOM_CACHE_DIR="${MIOPEN_CUSTOM_CACHE_DIR:-$MIOPEN_USER_DB_PATH}"
mkdir -p "$MIOPEN_USER_DB_PATH"
if [[ ${SLURM_GPUS_ON_NODE:-} == 8 && ! ${SLURM_CPU_BIND:-} ]]; then # task i gets the 7 CPUs nearest to device i
    for first in 48 56 16 24 0 8 32 40; do # the first of each 8 is the system's
        masks+=$(printf ',0x%x' $((0xfe << first)))
    done
    export SLURM_CPU_BIND=mask_cpu:${masks#,}
fi
