#!/usr/bin/env bash
# A real Slurm cluster of 4 nodes with 4 pretended GPUs each, all on this machine: to try and to test the submit scripts.
#
#   cluster.sh start [DIR]   start it, its state in DIR (default: /tmp/slurm-<user>)
#   cluster.sh shell [DIR]   start it if need be, and open a shell in which sbatch, squeue, ... use it
#   cluster.sh stop [DIR]    end its jobs and daemons
#
# Runs as root or as any user. GPUs are names only: a task finds none and computes on the CPU.
# Partitions: debug (default), and urgent, whose jobs preempt those of debug.
set -euo pipefail

nodes=4
dir=$(realpath -m "${2:-/tmp/slurm-$(id -un)}")
export PATH=$PATH:/usr/sbin:/sbin SLURM_CONF=$dir/slurm.conf

fail() { echo "error: $1" >&2; exit 2; }

pids() { cat "$dir"/slurmd-*.pid "$dir/slurmctld.pid" "$dir/munged.pid" 2>/dev/null || true; }

alive() { # is this pid one of our daemons, and running? (a pid file may outlive its process)
    [[ $1 ]] && kill -0 "$1" 2>/dev/null && grep -qsE '^(slurmctld|slurmd|munged)$' "/proc/$1/comm"
}

running() { alive "$(cat "$dir/slurmctld.pid" 2>/dev/null)" && scontrol ping >/dev/null 2>&1; }

listening() { (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

free_ports() { # the first of $1 consecutive free ports below the range that systems hand out; differs by DIR
    local base=$((20000 + $(cksum <<<"$dir" | cut -d' ' -f1) % 1000 * 10)) i
    for _ in {1..100}; do
        for ((i = 0; i < $1; i++)); do
            listening $((base + i)) && { base=$((20000 + (base - 20000 + 10) % 10000)); continue 2; }
        done
        echo $base
        return
    done
    fail "no $1 free ports in a row between 20000 and 30000"
}

configure() {
    local port=$1
    cat >"$dir/slurm.conf" <<END
ClusterName=laptop
SlurmctldHost=localhost
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
# cred_expire: a requeued job may start again after seconds; the default is 120
AuthInfo=socket=$dir/munge.socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
MailProg=/bin/true
# without cgroups, systemd or a data base
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=5
SlurmdParameters=config_overrides
EnforcePartLimits=ALL
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=5
InactiveLimit=0
KillWait=15
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=node[1-$nodes] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] Sockets=1 CoresPerSocket=64 ThreadsPerCore=2 RealMemory=256000 Gres=gpu:a100:4 Feature=gpu,a100,cpu State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES DefaultTime=00:10:00 MaxTime=2-0 PriorityTier=1 State=UP
PartitionName=urgent Nodes=ALL MaxTime=2-0 PriorityTier=10 State=UP
END
    echo 'Name=gpu Type=a100 File=/dev/null,/dev/zero,/dev/full,/dev/random' >"$dir/gres.conf"
}

start() {
    local program missing=() i
    for program in slurmctld slurmd sbatch munged; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    if [[ ${missing[*]} ]]; then
        fail "Slurm is not installed (no ${missing[*]}): apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
    fi
    if running; then return; fi
    stop
    rm -rf "$dir/state" "$dir/spool" "$dir/log"
    mkdir -p "$dir/state" "$dir/spool" "$dir/log"
    chmod 755 "$dir" # munged wants it so
    configure "$(free_ports $((nodes + 1)))"
    (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
    munged --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
        --log-file="$dir/munged.log" --seed-file="$dir/munged.seed" || fail "munged did not start: see $dir/munged.log"
    slurmctld || fail "slurmctld did not start: see $dir/log/slurmctld.log"
    for ((i = 1; i <= nodes; i++)); do
        slurmd -N "node$i" || fail "slurmd did not start: see $dir/log/slurmd-node$i.log"
    done
    for i in {1..150}; do
        [[ $(sinfo -h -t idle -p debug -o %D 2>/dev/null) == "$nodes" ]] && return
        sleep 0.2
    done
    fail "the nodes did not come up within 30 s: see $dir/log"
}

stop() {
    local pid i
    if running; then
        scancel --full --signal=KILL --user="$(id -un)" >/dev/null 2>&1 || true
        scancel --user="$(id -un)" >/dev/null 2>&1 || true
        for i in {1..100}; do
            [[ $(squeue -h 2>/dev/null) ]] || break
            sleep 0.2
        done
    fi
    for pid in $(pids); do
        if alive "$pid"; then kill "$pid"; fi
    done
    for pid in $(pids); do
        for i in {1..100}; do
            alive "$pid" || break
            sleep 0.1
        done
        if alive "$pid"; then kill -KILL "$pid"; fi
    done
    rm -f "$dir"/*.pid "$dir"/munge.socket*
}

case ${1:-} in
    start)
        start
        echo "4 nodes with 4 pretended GPUs each are up; to use them: export SLURM_CONF=$SLURM_CONF"
        ;;
    stop) stop ;;
    shell)
        start
        echo "sbatch, squeue, scancel, ... now use the cluster of this machine; 'exit' leaves, 'make slurm-stop' ends it"
        PS1='(slurm) \w\$ ' exec bash --norc
        ;;
    *) fail "usage: $0 start|stop|shell [DIR]" ;;
esac
