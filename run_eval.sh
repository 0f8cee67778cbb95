#!/usr/bin/env bash
# Base against one adapter on the held-out tasks, as a job of its own.
#
#   bash run_eval.sh --local --adapter runs/local-…/adapter      on this machine
#   bash run_eval.sh --adapter you/name                          an adapter on the Hub
#   bash run_eval.sh --adapter you/name/checkpoint-300@1a2b3c    a checkpoint of it at a commit
#   RUN_DIR=runs/eval-… bash run_eval.sh --adapter …             goes on where that evaluation stopped
#
# Starts its own policy server (pristine base, the adapter loaded beside it) and env server; the adapter defaults to
# ADAPTER_REPO. Every knob is an environment variable (`python3 -m recipe.config table`): N_TASKS tasks are evaluated,
# K_SAMPLES times each.
# Results: RUN_DIR/eval/final_results.json, the same table as final_results.md, one line a cell in cells.jsonl; with
# ADAPTER_REPO also in eval/ of that repository. A checkpoint's are called checkpoint-N_final_results, those of a named
# revision begin with its first eight digits.
#
# Exit codes: 0 every cell graded · 2 some stayed ungraded · 64 wrong settings, arguments or adapter · 69 a server or
# a step died or could not start, or the Hub failed · 75 stalled · 130 Ctrl-C · 143 SIGTERM
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$REPO"
# shellcheck source=recipe/job.sh
source recipe/job.sh

ADAPTER=${ADAPTER_REPO:-}
while (($#)); do
  case $1 in
    --local) export PRESET=local ;;
    --adapter) ADAPTER=${2:-}; shift ;;
    -h | --help) usage "$0"; exit 0 ;;
    *) printf 'run_eval.sh: unknown argument %s; see bash run_eval.sh --help\n' "$1" >&2; exit 64 ;;
  esac
  shift || break
done
if [[ -z $ADAPTER ]]; then
  echo "run_eval.sh: name the adapter: --adapter FOLDER or --adapter owner/name[/checkpoint-N][@revision]" >&2
  exit 64
fi
if [[ -d $ADAPTER ]]; then ADAPTER=$(realpath "$ADAPTER"); fi
export N_TRAIN_TASKS=${N_TRAIN_TASKS:-1} # the env server serves both splits; the other one is not needed here

job_begin run_eval.sh "--adapter $(printf %q "$ADAPTER")" eval
require_lora
job_setup
start_watchdog

step adapter "fetching $ADAPTER"
# shellcheck disable=SC2016 # expanded by the inner shell
run_step adapter bash -c '"$TRAINER_PYTHON" -m recipe.results_repo &&
  "$TRAINER_PYTHON" -m recipe.adapters "$1" --into "$RUN_DIR/adapter" >"$RUN_DIR/adapter.found"' - "$ADAPTER"
mapfile -t found <"$RUN_DIR/adapter.found" # folder, source, name of the results files

step tasks "preparing the tasks"
beat tasks
FOLLOW='^\[tasks\]' run_step tasks "$TRAINER_PYTHON" prepare_tasks.py

start_policy eval
start_env
step eval "base against $ADAPTER on $N_TASKS held-out tasks (log $LOGS/eval.log)"
run_eval --adapter "${found[0]}" --source "${found[1]}" --results "${found[2]}"
if [[ -z ${EVAL_SCRIPT:-} ]]; then write_report; fi # another script (bench/) leaves none of what it reads
step finish "results $RUN_DIR/eval/${found[2]}.json${ADAPTER_REPO:+, and eval/ of $ADAPTER_REPO}
         to read $RUN_DIR/report/index.html"
exit "$EVAL_CODE"
