#!/usr/bin/env bash
# One run on several machines, in the queue again whenever it is told to stop:
#   RUN=/shared/run sbatch --nodes=4 deploy/slurm.sh cartpole_ppo --num-envs 4096
# With GPUs ask for one task for each, such as --ntasks-per-node=8 --gpus-per-node=8: under srun JAX
# gives a process one GPU.
#SBATCH --job-name=podracer
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
set -uo pipefail

: "${RUN:?the directory of the run, on a file system that all machines share}"

if [ -e "$RUN/config.json" ]; then
    srun podracer resume "$RUN"
else
    srun podracer train "$@" --run-dir "$RUN"
fi
code=$?

# 75: told to stop, and saved; 143: before Python had begun, so there was nothing to save. At the end
# of its time Slurm does not queue a job again by itself.
# 77, 137: a process or a machine was lost; the others go on from the last save, 20 times at most.
if [ "$code" -eq 75 ] || [ "$code" -eq 143 ] ||
    { { [ "$code" -eq 77 ] || [ "$code" -eq 137 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
