#!/bin/bash
# Train on two nodes of a SLURM cluster: sbatch train_on_slurm.sh [arguments of train_on_slurm.py]
#SBATCH --job-name=hf-zero
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# With GPUs, a task for each, and "train_batch_size": 16 in zero3.json, a sample for each:
##SBATCH --ntasks-per-node=8
##SBATCH --gpus-per-node=8

STOPPED=85 # exit code of train_on_slurm.py after a checkpoint that SIGTERM has asked for

# SLURM signals this shell too when it takes the job's nodes; srun must end first.
trap : TERM

# Ranks end some seconds apart, and none may be killed while another still saves.
srun --kill-on-bad-exit=0 --wait=120 \
    python train_on_slurm.py --output_dir "runs/slurm-$SLURM_JOB_ID" "$@"
code=$?
if [ "$code" -eq "$STOPPED" ]; then
    # SLURM requeues a preempted job by itself, but not one that ends before its time limit.
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
