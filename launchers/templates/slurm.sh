#!/bin/bash
$directives

$environment
cd $folder || exit 4
MASTER_ADDR=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$port

# an earlier job of the array may have finished the run
if [ -n "$$SLURM_ARRAY_TASK_ID" ] && $outcome; then exit 0; fi

# block stop signals until a rank has imported its libraries and can handle them (coreutils 8.31)
hold="env --block-signal=TERM,INT"
$$hold true 2>/dev/null || hold=

# each rank sees all CPUs of the job on its node, and the device shares them out
# shellcheck disable=SC2086  # splitting is wanted
srun --kill-on-bad-exit=1 --cpu-bind=none $$hold $command
started=$$?
$outcome
code=$$?
# all is saved: requeue the job, if that is allowed, so that it continues the same run
if [ "$$code" = 75 ] && [ -z "$$SLURM_ARRAY_TASK_ID" ] && scontrol requeue "$$SLURM_JOB_ID" 2>/dev/null; then
    sleep 60 # until Slurm ends this script
fi
if [ "$$code" = 0 ] && [ "$$started" != 0 ]; then code=$$started; fi
exit "$$code"
