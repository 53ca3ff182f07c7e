#!/usr/bin/env bash
# A run on several nodes under Slurm: a Ray cluster over all of them, and the command that follows on the first.
#   sbatch --nodes 4 --gpus-per-node 8 --ntasks-per-node 1 --signal TERM@120 examples/scripts/slurm.sh \
#       bash examples/scripts/dapo_math.sh --actor_num_nodes 4
# Slurm sends SIGTERM at the end of the job's time; the run saves a checkpoint, and the same sbatch line resumes it.
set -euo pipefail
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ADDRESS=$(srun --nodes 1 --ntasks 1 --nodelist "$HEAD" hostname --ip-address | awk '{print $1}'):${PORT:-6379}
# vLLM's processes end with the worker that started them
export RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper=1

srun --nodes 1 --ntasks 1 --nodelist "$HEAD" ray start --head --port "${ADDRESS##*:}" --block &
OTHERS=$((SLURM_JOB_NUM_NODES - 1))
if [ "$OTHERS" -gt 0 ]; then
    srun --nodes "$OTHERS" --ntasks "$OTHERS" --exclude "$HEAD" \
        bash -c "until ray health-check --address $ADDRESS; do sleep 1; done; ray start --address $ADDRESS --block" &
fi
# exec: Slurm's signals reach the run
RAY_ADDRESS=$ADDRESS exec srun --overlap --nodes 1 --ntasks 1 --nodelist "$HEAD" "$@"
