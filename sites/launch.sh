# shellcheck shell=bash
# The body that all submit_*.sh share: source sites/launch.sh SCRIPT.py ARGUMENTS...
# Starts the script once per task of the job, sees that it may save before the job ends, and requeues what it saved.
# docs/launch.md describes the variables.

fail() { echo "error: $1" >&2; exit 2; }

script=$1
shift
[[ -f $script ]] || fail "$script: not in $PWD"
program=("$script")
if [[ $script == tools/* ]]; then # part of a package: python -m tools.name
    module=${script%.py}
    module=${module%/__main__}
    program=(-m "${module//\//.}")
fi
[[ ${SLURM_JOB_ID:-} ]] || fail "no Slurm job here: submit with sbatch, or run python $script"

# The site: paths, modules, container.
if [[ ! ${SITE:-} ]]; then
    case ${NERSC_HOST:-}:${LMOD_SYSTEM_NAME:-}:${SYSTEMNAME:-}:${SLURM_CLUSTER_NAME:-} in
        perlmutter:* | *:perlmutter) SITE=perlmutter ;;
        *:frontier:* | *:frontier) SITE=frontier ;;
        *:juwelsbooster:*) SITE=juwels ;;
        *:lumi | *:leonardo) SITE=$SLURM_CLUSTER_NAME ;;
        *:daint | *:clariden | *:santis) SITE=alps ;;
        *) SITE=generic ;;
    esac
fi
site_file=sites/$SITE.sh
[[ $SITE == */* ]] && site_file=$SITE
[[ -f $site_file ]] || fail "SITE=$SITE: no file $site_file; there are $(cd sites && echo [!l]*.sh l[!a]*.sh)"
unset MASTER_ADDR MASTER_PORT # what the login shell held is not of this job; a site file may set them
# shellcheck source=/dev/null
source "$site_file"
if [[ ${MODULES:-} ]]; then
    # shellcheck disable=SC2086 # a list
    module load $MODULES || fail "$site_file: module load $MODULES failed"
fi

# The command of one task.
data=${DATA_DIR:-} # of training and validation
if [[ ${STAGE_TO:-} ]]; then
    [[ $data ]] || fail "STAGE_TO=$STAGE_TO needs DATA_DIR, the folder whose train/ and valid/ are copied"
    data=$STAGE_TO/staged-$SLURM_JOB_ID # on the disk of each node
fi
folders=("$PWD" ${DATA_DIR:+"$DATA_DIR"} ${STAGE_TO:+"$STAGE_TO"} ${LOG_DIR:+"$LOG_DIR"})
passed=(SLURM_ CUDA_ ROCR_ HIP_ NVIDIA_ NCCL_ GLOO_ FI_ TORCH PYTORCH_ OMP_ GOMP_ PROFILE_) # prefixes; podman starts with an empty environment
read -ra container <<<"${CONTAINER_FLAGS:-}"
by_srun=()
case ${CONTAINER:=none} in
    none) container=() ;;
    shifter) container=(shifter "--image=${IMAGE:-}" "${container[@]}") ;;
    podman-hpc)
        container=(podman-hpc run --rm --gpu --ipc=host --network=host --workdir="$PWD" "${container[@]}")
        container+=("${folders[@]/#/--volume=}") # one folder a word, the same path inside
        for ((i = 0; i < ${#container[@]}; i++)); do
            [[ ${container[i]} == --volume=/* && ${container[i]} != *:* ]] && container[i]+=:${container[i]#--volume=}
        done
        for name in RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT ENABLE_PROFILING; do container+=("--env=$name"); done
        for name in "${passed[@]}"; do container+=("--env=$name*"); done
        container+=("${IMAGE:-}")
        ;;
    apptainer)
        if [[ -e /dev/nvidiactl ]]; then container+=(--nv); fi # without it the container has no driver
        if [[ -e /dev/kfd ]]; then container+=(--rocm); fi
        engine=apptainer # or what it was called before
        if ! command -v apptainer && command -v singularity; then engine=singularity; fi >/dev/null
        container=("$engine" exec --pwd="$PWD" "${folders[@]/#/--bind=}" "${container[@]}" "${IMAGE:-}")
        ;;
    pyxis) # srun starts the container; the same paths inside
        mounts=''
        for folder in "${folders[@]}"; do mounts+=",$folder:$folder"; done
        by_srun=("--container-image=${IMAGE:-}" "--container-mounts=${mounts#,}" "--container-workdir=$PWD" "${container[@]}")
        container=()
        ;;
    environment) # of CSCS: srun reads from a file what is mounted
        by_srun=("--environment=${IMAGE:-}" "${container[@]}")
        container=()
        ;;
    *) fail "CONTAINER=$CONTAINER: use shifter, podman-hpc, apptainer, pyxis, environment or none" ;;
esac
[[ $CONTAINER == none || ${IMAGE:-} ]] || fail "CONTAINER=$CONTAINER needs IMAGE, the image's name"
if [[ ! ${PYTHON:-} ]]; then
    PYTHON=python
    if [[ $CONTAINER == none && -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
paths=() # before the user's arguments, which win
if [[ ${DATA_DIR:-} ]]; then
    paths=("--train_data_path=$data/train" "--valid_data_path=$data/valid" "--inf_data_path=$DATA_DIR/test")
    for name in global_means global_stds time_means; do paths+=("--${name}_path=$DATA_DIR/stats/$name.npy"); done
fi
if [[ ${LOG_DIR:-} ]]; then
    mkdir -p "$LOG_DIR" || fail "LOG_DIR=$LOG_DIR: cannot be made"
    paths+=("--expdir=$LOG_DIR")
fi

# Tasks: as many as asked for, else one per GPU. Each gets its share of the node's CPUs.
nodes=$SLURM_JOB_NUM_NODES
layout=()
if [[ ${SLURM_NTASKS:-} ]]; then
    per_node=${SLURM_NTASKS_PER_NODE:-$(((SLURM_NTASKS + nodes - 1) / nodes))}
    tasks=$SLURM_NTASKS
else
    per_node=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
    per_node=${per_node##*:} # a100:4
    tasks=$((nodes * per_node))
    layout+=("--ntasks-per-node=$per_node")
fi
cpus=${SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE / per_node))}
layout+=("--cpus-per-task=$((cpus > 0 ? cpus : 1))")
# Slurm's default deals tasks out to the sockets in turn, far from their GPUs: in blocks each has the CPUs of its own.
layout+=("--distribution=${SLURM_DISTRIBUTION:-block:block}")
unset SLURM_CPUS_PER_GPU # excludes --cpus-per-task
if [[ ${SLURM_GPUS_PER_TASK:-} == 0 ]]; then unset SLURM_GPUS_PER_TASK; fi # srun refuses a 0 that sbatch accepts
# A task that sees its own GPU alone cannot copy to its neighbours' directly: on one node it sees all of the job's, and
# takes LOCAL_RANK's. On several it is not known how many tasks, and GPUs, each has.
if [[ ${SLURM_GPUS_PER_TASK:-} && $nodes == 1 ]]; then
    layout+=("--gpus-per-node=$((per_node * ${SLURM_GPUS_PER_TASK##*:}))")
    unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK
fi

source ./export_DDP_vars.sh # the address and the port, the same for all tasks

# Signals. USR1 comes --signal seconds before the time limit, TERM with preemption and scancel. srun hands USR1 on to
# every task, and the script saves and exits with status 75.
warned='' interrupted=''
# shellcheck disable=SC2317 # called by the traps
on_signal() {
    interrupted=1
    echo "launch: $1: asking the tasks to save and stop"
    kill -USR1 "$srun_pid" 2>/dev/null
}
trap 'warned=1; on_signal "the time limit is near"' USR1
trap 'on_signal "to be preempted, requeued or cancelled"' TERM

echo "launch: job $SLURM_JOB_ID${SLURM_RESTART_COUNT:+, restart $SLURM_RESTART_COUNT}: $script on $nodes node(s) x $per_node task(s) ($SLURM_JOB_NODELIST), site $SITE"
step() { # the words of srun; sets status
    srun --export=ALL "$@" &
    srun_pid=$!
    while :; do # a trap ends `wait` early
        interrupted=''
        wait "$srun_pid"
        status=$?
        [[ $interrupted ]] || break
    done
}
start() { # the words of Python, once in each task
    # A task that ends leaves the others --wait seconds: enough to finish a save, and no job hangs because one rank died.
    # shellcheck disable=SC2016 # expanded by the task
    step --kill-on-bad-exit=0 --wait="${SLURM_WAIT:-120}" --nodes="$nodes" --ntasks="$tasks" "${layout[@]}" "${by_srun[@]}" \
        bash -c 'source ./export_DDP_vars.sh && exec "$@"' task "${container[@]}" "$PYTHON" "$@"
}
on_each_node() { # a command of bash, and its arguments
    step --kill-on-bad-exit=1 --wait=0 --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 bash -c "$1" task "${@:2}"
}
if [[ ${PREFLIGHT:-0} != 0 && ! ${SLURM_RESTART_COUNT:-} ]]; then
    checked=() # the run's own folders and device
    for word in "$@"; do [[ $word =~ ^--(expdir|train_data_path|device)= ]] && checked+=("$word"); done
    start -m tools.preflight "${paths[@]}" ${DATA_DIR:+"--train_data_path=$DATA_DIR/train"} "${checked[@]}"
    [[ $status == 0 ]] || { echo "launch: the preflight ended with status $status: nothing was started" >&2; exit "$status"; }
fi
status=0
if [[ ${STAGE_TO:-} ]]; then # what a killed start of this job has left goes first
    # shellcheck disable=SC2016
    on_each_node 'rm -rf "$1" && mkdir "$1" && cp -rL "$2/train" "$2/valid" "$1" || exit 2' "$data" "$DATA_DIR"
    [[ $status == 0 ]] || echo "launch: STAGE_TO=$STAGE_TO: the data were not copied: nothing was started" >&2
fi
[[ $status != 0 ]] || start "${program[@]}" "${paths[@]}" "$@"

# With --no-kill a job outlives its nodes, but for the first one: the run goes on, on those that are left.
has_lost_nodes() {
    local left
    left=$(scontrol show job "$SLURM_JOB_ID" --oneliner 2>/dev/null | sed -n 's/.* NumNodes=\([0-9]*\).*/\1/p')
    [[ ${left:-$nodes} -lt $nodes ]] || return 1
    nodes=$left
    if ((tasks > nodes * per_node)); then tasks=$((nodes * per_node)); fi
}
while [[ $status != 0 && $status != 75 ]] && has_lost_nodes; do
    echo "launch: a node was lost: going on with $nodes node(s) x $per_node task(s)"
    unset SLURM_JOB_NODELIST SLURM_NODELIST # of before
    start "${program[@]}" "${paths[@]}" "$@"
done
if [[ ${STAGE_TO:-} ]]; then
    ended=$status
    # shellcheck disable=SC2016
    on_each_node 'rm -rf "$1"' "$data"
    status=$ended
fi

if [[ $warned && $status == 75 && ${REQUEUE:-1} != 0 ]]; then
    job=$SLURM_JOB_ID # of an array this task alone: the number of its last task is that of the array
    if [[ ${SLURM_ARRAY_JOB_ID:-} ]]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    if scontrol requeue "$job"; then
        echo "launch: stopped after saving and requeued; the job resumes when it starts again"
    elif [[ $(scontrol show job "$job" 2>/dev/null) == *" Requeue=0 "* ]]; then
        echo "launch: stopped after saving, but the job may not be requeued: submit it again to resume"
    else # at the limit itself Slurm may do it before us
        echo "launch: stopped after saving; if squeue -j $job lists no such job once this one has ended, submit it again to resume"
    fi
elif [[ $status == 75 ]]; then
    echo "launch: stopped after saving; preempted or requeued, it resumes by itself (squeue lists it), else submit it again to resume"
elif [[ $warned && $status == 138 ]]; then
    echo "launch: the warning came before training had begun: nothing was saved, not requeued; ask for more time (-t)" >&2
fi
exit "$status"
