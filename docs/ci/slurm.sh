#!/usr/bin/env bash
# An example for Slurm: every node that a long job will get is checked by itself, at the
# same time, and has a report of its own. Submit it before the job:
#   sbatch --nodes=4 --gpus-per-node=8 docs/ci/slurm.sh
#SBATCH --job-name=gkd-gate
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:30:00
# A minute before that the steps are asked to end, so that each still writes its report.
#SBATCH --signal=TERM@60
set -euo pipefail

# Activate the job's own environment here. Add --gkd-student and the like for its models.
export STAGES=${STAGES:-environment,nccl}
srun --ntasks-per-node=1 --kill-on-bad-exit=0 bash -c '
    exec pytest --gkd-stages="$STAGES" --gkd-report=".gkd/$SLURMD_NODENAME" \
        --junitxml="gkd-$SLURMD_NODENAME.xml"
'
