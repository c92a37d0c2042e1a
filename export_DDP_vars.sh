# shellcheck shell=sh
# Sourced in each task of a Slurm job step: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for torch.
# Sourced in the batch script: MASTER_ADDR and MASTER_PORT, which srun then hands to the tasks. Outside Slurm: nothing.
#
# The device of a task is LOCAL_RANK modulo the number of devices it sees. sites/launch.sh shows all of the job's devices
# on a node to each task there.

if [ -n "${SLURM_STEP_ID:-}" ] && [ -n "${SLURM_PROCID:-}" ]; then
    export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_STEP_NUM_TASKS"
fi

if [ -n "${SLURM_JOB_ID:-}" ]; then
    if [ -z "${MASTER_ADDR:-}" ]; then
        # The batch script runs on the first node, where rank 0 will be: its own name is known to the others. On one node
        # rank 0 listens where no other machine reaches it.
        MASTER_ADDR=$(hostname)
        if [ "${SLURM_STEP_NUM_NODES:-${SLURM_JOB_NUM_NODES:-}}" = 1 ]; then MASTER_ADDR=127.0.0.1; fi
        if [ "${SLURM_STEP_NUM_NODES:-1}" -gt 1 ]; then # srun without a batch script: this may be another node
            MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
        fi
        # A node's name need not resolve. Then it is the node of srun, and a batch script leaves the choice to the tasks.
        found=0
        getent hosts "$MASTER_ADDR" >/dev/null 2>&1 || found=$? # 2: no such name
        if [ "$found" -eq 2 ]; then MASTER_ADDR=${SLURM_LAUNCH_NODE_IPADDR:-}; fi
        export MASTER_ADDR
        [ -n "$MASTER_ADDR" ] || unset MASTER_ADDR
        unset found
    fi
    if [ -z "${MASTER_PORT:-}" ]; then
        # By the job, since jobs may share a node; 12000-31999 is below the ports that systems hand out (32768 on).
        MASTER_PORT=$((12000 + SLURM_JOB_ID % 20000))
        # Only the batch script may look for a free one: all tasks must agree.
        while [ -z "${SLURM_STEP_ID:-}" ] && bash -c ": < /dev/tcp/127.0.0.1/$MASTER_PORT" 2>/dev/null; do
            MASTER_PORT=$((12000 + (MASTER_PORT - 12000 + 37) % 20000))
        done
        export MASTER_PORT
    fi
fi
