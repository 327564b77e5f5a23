#!/bin/bash
# A real Slurm of several virtual nodes on this host, without systemd or cgroups. Needs root.
#
#   cluster.sh install               installs Debian's packages where they are missing
#   cluster.sh up|down DIR           DIR must be short: it holds sockets
#   cluster.sh kill-node DIR nK      like a power failure: slurmd, its steps and their tasks
#   cluster.sh start-node DIR nK
#   cluster.sh stop-controller|start-controller DIR
#
# NODES (3), GPUS of each node (0; they are files that nothing can open as a GPU) and PORT (17000, the
# first of several) may be set. Clients need SLURM_CONF=DIR/slurm.conf.
set -euo pipefail

NODES=${NODES:-3}
GPUS=${GPUS:-0}
PORT=${PORT:-17000}
DIR=${2:-}
export SLURM_CONF=$DIR/slurm.conf
unset SLURM_JOB_ID SLURM_JOBID SLURMD_NODENAME

within() {  # SECONDS COMMAND...: retry until it succeeds
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || { echo "it took too long: $*" >&2; return 1; }
        sleep 0.1
    done
}

gone() {  # PID; a zombie counts as gone
    ! kill -0 "$1" 2>/dev/null || grep -q '^State:.Z' "/proc/$1/status"
}

stop() {  # PIDFILE
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    gone "$pid" || { kill "$pid"; within 10 gone "$pid" || kill -9 "$pid"; }
}

# Prints every process of this cluster with VARIABLE in its environment.
members() {
    local pid
    for pid in $(pgrep .); do
        if grep -qsxz "SLURM_CONF=$SLURM_CONF" "/proc/$pid/environ" &&
            grep -qsxzE "$1" "/proc/$pid/environ"; then
            echo "$pid"
        fi
    done
}

stepds() {  # NODE: its slurmstepds, identified by their log
    local pid
    for pid in $(pgrep '^slurmstepd'); do
        if readlink /proc/"$pid"/fd/* 2>/dev/null | grep -qx "$DIR/log/$1.log"; then
            echo "$pid"
        fi
    done
}

configure() {
    local host gpu gres=
    host=$(hostname -s)
    if [ "$GPUS" != 0 ]; then
        gres=" Gres=gpu:$GPUS"
        mkdir -p "$DIR/dev"
        for ((gpu = 0; gpu < GPUS; gpu++)); do
            # NVIDIA's major number: Slurm asks a device for its own before it names it to a task.
            mknod "$DIR/dev/gpu$gpu" c 195 "$gpu" 2>/dev/null || touch "$DIR/dev/gpu$gpu"
        done
        echo "NodeName=n[1-$NODES] Name=gpu File=$DIR/dev/gpu[0-$((GPUS - 1))]" >"$DIR/gres.conf"
    fi
    cat >"$SLURM_CONF" <<CONFIGURATION
ClusterName=braid
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
# Munge's tickets, and so the wait of a job that is requeued, are short.
AuthInfo=socket=$DIR/munge.sock,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool-%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd-%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=10
SlurmctldTimeout=10
MessageTimeout=5
BatchStartTimeout=10
KillWait=10
MinJobAge=3600
ReturnToService=2
${gres:+GresTypes=gpu}
NodeName=n[1-$NODES] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((PORT + 101))-$((PORT + 100 + NODES))] CPUs=64 RealMemory=16000$gres
PartitionName=batch Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
CONFIGURATION
    echo "CgroupMountpoint=/sys/fs/cgroup" >"$DIR/cgroup.conf"
}

all_idle() {
    [ "$(sinfo -h -N -p batch -o %T | grep -cx idle)" = "$NODES" ]
}

case ${1:-} in
install)
    command -v slurmctld slurmd srun munged >/dev/null && exit 0
    export DEBIAN_FRONTEND=noninteractive
    find_packages="slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins"
    apt-get install -qq --no-install-recommends $find_packages ||
        { apt-get update -qq && apt-get install -qq --no-install-recommends $find_packages; }
    ;;
up)
    mkdir -p -m 755 "$DIR" "$DIR/log" "$DIR/state"
    for ((node = 1; node <= NODES; node++)); do mkdir -p "$DIR/spool-n$node"; done
    (umask 077; head -c 128 /dev/urandom >"$DIR/munge.key")
    configure
    munged --force --key-file="$DIR/munge.key" --socket="$DIR/munge.sock" \
        --pid-file="$DIR/munged.pid" --log-file="$DIR/log/munged.log" --seed-file="$DIR/munge.seed"
    slurmctld -c
    within 20 scontrol ping
    for ((node = 1; node <= NODES; node++)); do slurmd -N "n$node"; done
    within 30 all_idle
    ;;
down)
    [ -d "$DIR" ] || exit 0
    for file in "$DIR"/slurmctld.pid "$DIR"/slurmd-*.pid; do stop "$file"; done
    for node in $(seq "$NODES"); do kill -9 $(stepds "n$node") 2>/dev/null || true; done
    kill -9 $(members 'SLURM_JOB_ID=.*') 2>/dev/null || true
    stop "$DIR/munged.pid"
    ;;
kill-node)
    # slurmd and its slurmstepds first, so that no one reports the tasks' end.
    kill -9 "$(cat "$DIR/slurmd-$3.pid")" $(stepds "$3") || true
    kill -9 $(members "SLURMD_NODENAME=$3") 2>/dev/null || true
    rm -f "$DIR/slurmd-$3.pid"
    ;;
start-node) slurmd -N "$3" ;;
stop-controller) stop "$DIR/slurmctld.pid" ;;
start-controller)
    slurmctld
    within 20 scontrol ping
    ;;
*)
    sed -n '2,11p' "$0"
    exit 2
    ;;
esac
