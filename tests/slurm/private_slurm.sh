#!/bin/bash
# A Slurm of our own on this machine, for tests: several "nodes", each a slurmd with its own hostname and /dev/shm. Needs root.
#
#   private_slurm.sh start DIR [NODES]   everything lives below DIR; ends when all nodes are idle
#   private_slurm.sh stop DIR            ends only the daemons that start began
#
# Afterwards: source DIR/environment. Two partitions: main (preemptible, 20 s of grace) and high (preempts main).
set -eu
action=$1 dir=$(realpath -m "$2") nodes=${3:-2}

if [ "$action" = stop ]; then
  export SLURM_CONF=$dir/slurm.conf
  timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
  sleep 1
  for file in "$dir"/pid/*; do
    [ -s "$file" ] || continue
    pid=$(cat "$file")
    # The number may long belong to somebody else: only a process that names our directory or node is ours.
    if tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -Eq 'slurmd|slurmctld|munged'; then kill "$pid" 2>/dev/null || true; fi
  done
  exit 0
fi
[ "$action" = start ] || { echo "usage: $0 start|stop DIR [NODES]" >&2; exit 2; }

host=$(hostname -s) cpus=$(nproc) last=$((nodes - 1))
port=${SLURM_TEST_PORT:-$((20000 + $$ % 20000))}
mkdir -p "$dir"/{state,log,pid}
dd if=/dev/urandom of="$dir/munge.key" bs=1024 count=1 status=none
chmod 400 "$dir/munge.key"

# TmpFS a node: two slurmd would collide on the PMIx directories. cred_expire: a requeued job waits until its old credential has
# expired. config_overrides: "nodes" may claim the same processors.
cat >"$dir/slurm.conf" <<CONF
ClusterName=private
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=5
SlurmctldPort=$port
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
TmpFS=$dir/tmp/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
MpiDefault=pmix
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
SlurmdTimeout=15
JobRequeue=1
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[0-$last] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$((cpus > 2 ? cpus : 2)) State=UNKNOWN
PartitionName=main Nodes=n[0-$last] Default=YES PriorityTier=1 GraceTime=20 PreemptMode=REQUEUE MaxTime=INFINITE State=UP
PartitionName=high Nodes=n[0-$last] PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
CONF
# TCP between the "nodes" goes over the loopback interface; they are one machine after all, with more ranks than cores: a waiting
# rank must give its core away.
cat >"$dir/environment" <<ENV
export SLURM_CONF=$dir/slurm.conf
export OMPI_MCA_btl_tcp_if_include=lo
export OMPI_MCA_mpi_yield_when_idle=1
ENV
. "$dir/environment"

munged --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/pid/munged" --log-file="$dir/log/munged.log" \
  --seed-file="$dir/munge.seed"
slurmctld -i -D >"$dir/log/slurmctld.out" 2>&1 &
echo $! >"$dir/pid/slurmctld"
for i in $(seq 0 $last); do
  mkdir -p "$dir/spool/n$i" "$dir/tmp/n$i"
  chmod 1777 "$dir/tmp/n$i"
  # Open MPI names its shared memory after host and rank: two "nodes" with one name and one /dev/shm would share it.
  unshare --uts --mount sh -c "hostname n$i; mount -t tmpfs none /dev/shm; exec slurmd -N n$i -D" >"$dir/log/slurmd-n$i.out" 2>&1 &
  echo $! >"$dir/pid/slurmd-n$i"
done
for _ in $(seq 150); do
  [ "$(sinfo -h -p main -t idle -o %D 2>/dev/null)" = "$nodes" ] && exit 0
  sleep 0.2
done
echo "private_slurm.sh: the nodes did not become idle in 30 s" >&2
tail -n 5 "$dir"/log/*.out >&2
exit 1
