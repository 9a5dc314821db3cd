#!/usr/bin/env bash
# Start fairseq-train in several processes. All further words are fairseq-train's own.
#
#   examples/distributed.sh cpu PROCESSES DATA --arch …      that many processes on this machine's CPU, one thread each
#   examples/distributed.sh gpu PROCESSES DATA --arch …      that many of this machine's GPUs, one process each
#   examples/distributed.sh torchrun GPUS DATA --arch …      on each node: NODES, NODE_RANK and MASTER_ADDR must be set
#   srun examples/distributed.sh slurm PORT DATA --arch …    in a job with one task for each GPU
#
# The tests run the first form; the others follow fairseq/distributed/utils.py and were not run here.
set -euo pipefail

usage() {
    sed -n 's/^#   \(srun \)\{0,1\}examples/usage: \1examples/p' "$0" >&2
    exit 2
}

[ $# -ge 2 ] || usage
how=$1 number=$2
shift 2
user_dir="$(cd "$(dirname "$0")/.." && pwd)/fairseq_sharing"

case $how in
cpu) # fairseq starts no processes without GPUs, and torchrun's variables make it ask for one
    port=${PORT:-$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
    export OMP_NUM_THREADS=1
    pids=()
    trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
    for ((rank = 0; rank < number; rank++)); do
        fairseq-train "$@" --user-dir "$user_dir" --cpu --distributed-backend gloo --distributed-no-spawn \
            --distributed-world-size "$number" --distributed-rank "$rank" --device-id 0 \
            --distributed-init-method "tcp://127.0.0.1:$port" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        wait "$pid" # the first that fails ends the others
    done
    ;;
gpu) # one machine: fairseq starts the processes itself
    exec fairseq-train "$@" --user-dir "$user_dir" --distributed-world-size "$number"
    ;;
torchrun) # fairseq reads the rank and the number of processes from torchrun, but not when it believes that there is one
    exec torchrun --nnodes "$NODES" --node_rank "$NODE_RANK" --nproc_per_node "$number" \
        --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}" "$(command -v fairseq-train)" \
        "$@" --user-dir "$user_dir" --distributed-world-size $((NODES * number))
    ;;
slurm) # fairseq reads rank and GPU from SLURM; the port must be given, or it takes all for one machine
    exec fairseq-train "$@" --user-dir "$user_dir" --distributed-world-size "$SLURM_NTASKS" --distributed-port "$number"
    ;;
*) usage ;;
esac
