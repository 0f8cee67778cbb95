#!/usr/bin/env bash
# The live learning curve: evaluates each new checkpoint against the base while training goes on elsewhere.
#
#   ADAPTER_REPO=you/name bash run_eval_watch.sh                          checkpoints of the Hub repository
#   bash run_eval_watch.sh --local --checkpoints runs/local-…/checkpoints a run on this machine
#
# A job of its own: policy server (pristine base, each checkpoint loaded beside it), env server and public port.
# N_TASKS (default 100 here) held-out tasks, stratified by difficulty and the same for every checkpoint; base cells are
# computed once. With --local its ports are 8100 to 8102 unless set, because the training job has the default ones.
# It ends after the checkpoint of step MAX_STEPS, or when none has come for EVAL_IDLE_LIMIT seconds.
# Results: RUN_DIR/eval/checkpoint-N_results.json, and of all of them summary.json, summary.md and learning_curve.png;
# with ADAPTER_REPO also in eval/ of that repository, from which a start on another machine goes on.
#
# Exit codes: 0 ended by itself · 2 some cells stayed ungraded · 64 wrong settings or arguments · 69 a server or a step
# died or could not start, or the Hub failed · 75 stalled · 130 Ctrl-C · 143 SIGTERM. The same RUN_DIR goes on where it stopped.
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$REPO"
# shellcheck source=recipe/job.sh
source recipe/job.sh

CHECKPOINTS=
while (($#)); do
  case $1 in
    --local)
      export PRESET=local PUBLIC_PORT=${PUBLIC_PORT:-8100} POLICY_PORT=${POLICY_PORT:-8101} ENV_PORT=${ENV_PORT:-8102}
      ;;
    --checkpoints) CHECKPOINTS=${2:-}; shift ;;
    -h | --help) usage "$0"; exit 0 ;;
    *) printf 'run_eval_watch.sh: unknown argument %s; see bash run_eval_watch.sh --help\n' "$1" >&2; exit 64 ;;
  esac
  shift || break
done
if [[ -z $CHECKPOINTS && -z ${ADAPTER_REPO:-} ]]; then
  echo "run_eval_watch.sh: set ADAPTER_REPO=owner/name or name a folder with --checkpoints" >&2
  exit 64
fi
if [[ ${PRESET:-job} == job ]]; then export N_TASKS=${N_TASKS:-100}; fi
export N_TRAIN_TASKS=${N_TRAIN_TASKS:-1} # the env server serves both splits; the other one is not needed here
source_arguments=()
if [[ -n $CHECKPOINTS ]]; then
  CHECKPOINTS=$(realpath -m "$CHECKPOINTS") # may not exist yet
  source_arguments=(--checkpoints "$CHECKPOINTS")
fi

job_begin run_eval_watch.sh "${CHECKPOINTS:+--checkpoints $(printf %q "$CHECKPOINTS")}" eval-watch
require_lora
job_setup
start_watchdog

step hub "may results be pushed to ${ADAPTER_REPO:-no repository}?"
run_step hub "$TRAINER_PYTHON" -m recipe.results_repo

step tasks "preparing the tasks"
beat tasks
# All held-out tasks, so that N_TASKS of them can be a stratified subset.
FOLLOW='^\[tasks\]' run_step tasks env -u N_TASKS "$TRAINER_PYTHON" prepare_tasks.py

start_policy eval
start_env
step watch "waiting for checkpoints in ${CHECKPOINTS:-$ADAPTER_REPO} (log $LOGS/eval.log)"
EVAL_SCRIPT=eval_watch.py run_eval "${source_arguments[@]}"
write_report
step finish "learning curve $RUN_DIR/eval/summary.json"
exit "$EVAL_CODE"
