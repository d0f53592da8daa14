#!/bin/bash
$directives

$environment
cd $folder || exit 4
MASTER_ADDR=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$port

# an earlier job of the array may have finished the run
if [ -n "$$SLURM_ARRAY_TASK_ID" ] && $outcome; then exit 0; fi

# block stop signals until a rank has imported its libraries and can handle them
# env has the option from coreutils 8.31 on; with an older env, the signals are not blocked
block_signals="env --block-signal=TERM,INT"
$$block_signals true 2>/dev/null || block_signals=

# with --cpu-bind=none each rank sees all CPUs of the job on its node; the device divides them among the ranks
# shellcheck disable=SC2086  # splitting is wanted
srun --kill-on-bad-exit=1 --cpu-bind=none $$block_signals $command
srun_code=$$?
$outcome
run_code=$$?
# code 75: the run was stopped and has saved; requeue the job, if that is allowed, to continue the run
if [ "$$run_code" = 75 ] && [ -z "$$SLURM_ARRAY_TASK_ID" ] && scontrol requeue "$$SLURM_JOB_ID" 2>/dev/null; then
    sleep 60 # until Slurm ends this script
fi
if [ "$$run_code" = 0 ] && [ "$$srun_code" != 0 ]; then exit "$$srun_code"; fi
exit "$$run_code"
