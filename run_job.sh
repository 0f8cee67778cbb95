#!/usr/bin/env bash
# The whole job: set-up, tasks, policy server, env server, watchdog, training, final evaluation.
#
#   bash run_job.sh --local                      on this machine: tiny model, CPU, local sandboxes, no Hub
#   ADAPTER_REPO=you/name bash run_job.sh        the Hugging Face job (2 GPUs; one with GPUS=1)
#   RECIPE=deepcoder bash run_job.sh             programming problems on two GPUs of this machine (or with --local)
#   RUN_DIR=runs/job-… bash run_job.sh           goes on where that run stopped
#
# Every knob is an environment variable; `python3 -m recipe.config table` lists them. All files of a run lie in RUN_DIR
# (default runs/<preset>-<time>): logs/<process>.log, tasks/, checkpoints/, adapter/, metrics.jsonl, eval/.
# Ctrl-C, SIGTERM, an error or the death of any process ends all of them and removes every sandbox.
#
# Exit codes (`python3 -m recipe.exits` lists those of all scripts):
#   0   trained and evaluated
#   2   evaluated, but some cells stayed ungraded (the same command tries them again)
#   64  wrong settings or arguments
#   69  a server or a step (the training, say) died or could not start; the message names it and shows its log
#   75  stalled: the watchdog saw no progress within the phase's limit
#   130 Ctrl-C    143 SIGTERM
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$REPO"
# shellcheck source=recipe/job.sh
source recipe/job.sh

while (($#)); do
  case $1 in
    --local) export PRESET=local ;;
    -h | --help) usage "$0"; exit 0 ;;
    *) printf 'run_job.sh: unknown argument %s; see bash run_job.sh --help\n' "$1" >&2; exit 64 ;;
  esac
  shift
done

job_begin run_job.sh

if [[ -n ${JOB_ID:-} && -z $ADAPTER_REPO && $LORA == 1 ]]; then
  die "$EXIT_USAGE" "ADAPTER_REPO is not set, and what a Hugging Face Job trained is gone when it ends: set ADAPTER_REPO=owner/name"
fi
step setup "making the environments (log $LOGS/setup.log)"
job_setup

step seam "checking the places where OpenEnv, Harbor and OpenCode are extended"
run_step seam "$ENV_PYTHON" -c 'from recipe import seams; seams.check()'

start_watchdog

step memory "what policy server and trainer need of the GPU"
run_step memory env "${TRAINER_ENV[@]}" "$TRAINER_PYTHON" -m recipe.gpu_memory

step tasks "preparing the tasks"
beat tasks
FOLLOW='^\[tasks\]' run_step tasks "$TRAINER_PYTHON" prepare_tasks.py

trained=$RUN_DIR/trained
is_trained() { [[ -e $trained && $(<"$trained") == "$MAX_STEPS" ]]; }
if ! is_trained; then
  step resume "looking for the checkpoint to go on from${ADAPTER_REPO:+ in $ADAPTER_REPO}"
  beat resume
  FOLLOW=. run_step resume "$TRAINER_PYTHON" -m recipe.resume # notes in $trained when a checkpoint has all steps
fi
if is_trained; then
  step train "already trained for $MAX_STEPS steps; going on with the evaluation"
  start_policy eval
  start_env
else
  start_policy train
  start_env
  step train "training for $MAX_STEPS steps (log $LOGS/train.log)"
  beat train-setup
  FOLLOW='^step |^resum|^checkpoint|WARN' \
    run_step train env "${TRAINER_ENV[@]}" "$TRAINER_PYTHON" "${TRAIN_SCRIPT:-train_lora.py}"
  # Training left merged weights in the engine: base cells need the base, so it starts anew.
  step policy "stopping the policy server that holds trained weights"
  stop_process policy
  start_policy eval
fi

if [[ $LORA == 1 ]]; then
  result=adapter
  step eval "base against adapter on $N_TASKS held-out tasks (log $LOGS/eval.log)"
  run_eval --label adapter
else
  result=model
  step eval "base on $N_TASKS held-out tasks (log $LOGS/eval.log)"
  run_eval --holds base --label trained
  step policy "stopping the policy server that holds the base"
  stop_process policy
  start_policy eval --weights "$RUN_DIR/model"
  step eval "trained model on the same tasks (log $LOGS/eval.log)"
  run_eval --holds trained --label trained
fi

write_report
step finish "$(printf %-11s $result) $RUN_DIR/$result
         checkpoints $RUN_DIR/checkpoints
         metrics     $RUN_DIR/metrics.jsonl
         results     $RUN_DIR/eval/final_results.json
         cells       $RUN_DIR/eval/cells.jsonl
         rollouts    $RUN_DIR/trials
         to read     $RUN_DIR/report/index.html
         logs        $LOGS"
exit "$EVAL_CODE"
