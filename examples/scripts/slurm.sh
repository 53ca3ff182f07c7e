#!/usr/bin/env bash
# A run over several nodes under Slurm: a Ray cluster on all nodes of the job, and any script of this folder beside it.
#   sbatch --nodes 4 --gpus-per-node 8 --ntasks-per-node 1 --exclusive --signal B:TERM@120 examples/scripts/slurm.sh \
#       examples/scripts/dapo_math.sh --actor_num_nodes 4
# Two minutes before the end of the job's time Slurm sends SIGTERM: the run saves a checkpoint and ends, and the same line
# resumes it. Python's environment must be active where sbatch is called, and under the same path on all nodes.
set -euo pipefail
PORT=${PORT:-6379}
HOST=$(hostname --all-ip-addresses | awk '{print $1}') # of this node: Slurm runs the script on the first of the job
wait_for_head="until (: > /dev/tcp/$HOST/$PORT) 2> /dev/null; do
    [ \$SECONDS -lt 300 ] || { echo 'Ray did not start on the first node within 300 s' >&2; exit 1; }
    sleep 1
done"
# the token in ~/.ray, which all nodes of the job see, keeps others out of the cluster
export RAY_AUTH_MODE=token
ray get-auth-token --generate > /dev/null
# vLLM's processes end with the worker that started them
export RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper=1

srun --overlap --ntasks-per-node 1 bash -c "
    [ \$SLURM_NODEID -gt 0 ] || exec ray start --head --port $PORT --block
    $wait_for_head
    exec ray start --address $HOST:$PORT --block" > "ray-$SLURM_JOB_ID.log" 2>&1 &
bash -c "$wait_for_head"
RAY_ADDRESS=$HOST:$PORT exec bash "$@" # exec: Slurm's signal reaches the run
