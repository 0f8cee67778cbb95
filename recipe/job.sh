# shellcheck shell=bash
# What run_job.sh, run_eval.sh and run_eval_watch.sh share (sourced, not run): begin and end of a job and its steps.

# shellcheck source=recipe/common.sh
source "$REPO/recipe/common.sh"
# shellcheck source=recipe/processes.sh
source "$REPO/recipe/processes.sh"
EXIT_USAGE=64   # exit codes: recipe/exits.py
EXIT_STALLED=75 # the watchdog stopped the run
JOB_STEP=start

# say TEXT...: where it cannot be written (a full disk), the job goes on, or ends, as it would.
say() { printf '%s [%s] %s\n' "$(date +%H:%M:%S)" "$JOB_STEP" "$*" || true; }

# die CODE MESSAGE...: says what happened and how to go on, then ends the job through the EXIT trap.
die() {
  local code=$1
  shift
  say "ERROR: $*" >&2
  exit "$code"
}

# job_begin SCRIPT [ARGUMENTS [NAME]]: settings into the environment, run folder, lock, free ports, traps. ARGUMENTS,
# quoted, are repeated in the resume command; NAME is in the name of a new run folder.
job_begin() {
  local script=$1 arguments=${2:-} name=${3:-} settings
  settings=$(python3 -m recipe.config export) || exit $?
  eval "$settings"
  python3 -m recipe.sandbox_keys || exit $?
  export RUN_DIR=${RUN_DIR:-$REPO/runs/${name:+$name-}$PRESET-$(date +%Y%m%d-%H%M%S)}
  mkdir -p "$RUN_DIR/logs" || die "$EXIT_USAGE" "cannot make $RUN_DIR: set RUN_DIR to a folder that can be written"
  RUN_DIR=$(cd "$RUN_DIR" && pwd)
  LOGS=$RUN_DIR/logs
  [[ ${OLDPWD:-$REPO} == "$REPO" ]] || script=$(printf %q "$REPO")/$script # started from another folder
  RESUME_WITH=$(python3 -m recipe.resume_command "$script${arguments:+ $arguments}")
  export RESUME_WITH
  exec {JOB_LOCK}>"$RUN_DIR/.lock"
  flock -n "$JOB_LOCK" || die "$EXIT_UNAVAILABLE" "another job works in $RUN_DIR: wait for its end or set RUN_DIR to another folder"
  rm -f "$RUN_DIR/stalled.json" "$RUN_DIR/processes" "$RUN_DIR/pushing"
  trap job_end EXIT
  trap 'job_signal INT 130' INT
  trap 'job_signal TERM 143' TERM
  say "run folder: $RUN_DIR"
  beat setup
  python3 -m recipe.ports PUBLIC_PORT POLICY_PORT ENV_PORT || exit $?
}

# require_lora: ends a job that knows adapters only.
require_lora() {
  [[ $LORA == 1 ]] || die "$EXIT_USAGE" "LORA=0 trains whole models, and this script evaluates adapters: set LORA=1. run_job.sh evaluates a model"
}

step() {
  JOB_STEP=$1
  say "$2"
}

beat() { python3 -m recipe.watchdog --run-dir "$RUN_DIR" --beat "$1"; }

job_stalled() {
  python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["message"])' "$RUN_DIR/stalled.json" >&2
  exit "$EXIT_STALLED"
}

sweep_sandboxes() {
  local -a sweep=(recipe.hf_sandbox_jobs sweep)
  [[ -n ${ENV_PYTHON:-} ]] || return 0
  case ${SANDBOX:-} in
    local) sweep=(recipe.sandbox_local sweep --run-dir "$RUN_DIR") ;;
    hf-sandbox) [[ -e $LOGS/env.log ]] || return 0 ;; # none was ever started
    *) return 0 ;;
  esac
  "$ENV_PYTHON" -m "${sweep[@]}" >>"$LOGS/env.log" 2>&1 || say "the sandbox sweep failed, see $LOGS/env.log" >&2
  python3 -m recipe.sandbox_costs --run-dir "$RUN_DIR"
}

# shellcheck disable=SC2317,SC2329 # called by the traps
job_signal() {
  # In a trap a plain `return` gives the status of what was interrupted, by which `set -e` would end the job.
  if [[ -n $JOB_STARTING ]]; then JOB_SIGNAL="$*"; return 0; fi
  if [[ -e $RUN_DIR/stalled.json ]]; then job_stalled; fi
  say "got SIG$1 in step $JOB_STEP: stopping. Resume with: $RESUME_WITH" >&2
  exit "$2"
}

# shellcheck disable=SC2317,SC2329
job_end() {
  local code=$?
  set +e # whatever fails, everything is ended
  case $code in
    0 | 2 | 64 | 69 | 75 | 130 | 143) ;;
    *)
      say "ERROR: a command of the job itself failed with code $code" >&2
      code=$EXIT_UNAVAILABLE
      ;;
  esac
  trap '' INT TERM # a second Ctrl-C must not leave servers behind
  stop_all
  JOB_FOLLOWERS+=("${SERVER_FOLLOWERS[@]}")
  wait_followers
  rm -f "$RUN_DIR/processes"
  trap - EXIT
  say "ends with exit code $code; logs in $LOGS"
  exit "$code"
}

# --- the steps that the three scripts share ---------------------------------------------------------------------

# job_setup: environments and the agent's binary; exports TRAINER_PYTHON, ENV_PYTHON, OPENCODE_BIN.
job_setup() {
  # shellcheck disable=SC2016 # expanded by the inner shell
  FOLLOW=. run_step setup bash -c 'bash setup.sh >"$RUN_DIR/setup.env"'
  # shellcheck source=/dev/null
  source "$RUN_DIR/setup.env"
  if [[ -z ${CAPTURE_ADMIN_KEY:-} ]]; then
    CAPTURE_ADMIN_KEY=$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')
  fi
  export CAPTURE_ADMIN_KEY # opens the proxy's management routes; lives in the environment only
  assign_gpus
}

# assign_gpus: with GPUS=1 policy server and trainer share POLICY_GPU (default: the first). With GPUS=2 and several there
# the policy server has POLICY_GPU (default: the second) and the trainer the first of the others, named in TRAINER_ENV;
# it must not see more than one, or it would split each row among them. When POLICY_GPU takes all, they share.
assign_gpus() {
  local -a gpus=()
  local gpu
  TRAINER_ENV=()
  if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
  elif command -v nvidia-smi >/dev/null; then
    mapfile -t gpus < <(nvidia-smi -L 2>/dev/null | sed -n 's/^GPU \([0-9]*\):.*/\1/p')
  fi
  ((${#gpus[@]} > 1)) || return 0
  # shellcheck disable=SC2153 # a setting
  if ((GPUS == 1)); then
    export POLICY_GPU=${POLICY_GPU:-${gpus[0]}}
    TRAINER_ENV=(CUDA_VISIBLE_DEVICES="${POLICY_GPU%%,*}")
    say "GPU ${POLICY_GPU}: policy server and trainer"
    return 0
  fi
  export POLICY_GPU=${POLICY_GPU:-${gpus[1]}}
  # shellcheck disable=SC2034 # read by run_job.sh
  TRAINER_ENV=(CUDA_VISIBLE_DEVICES="${gpus[0]}")
  for gpu in "${gpus[@]}"; do
    if [[ ",$POLICY_GPU," != *",$gpu,"* ]]; then
      TRAINER_ENV=(CUDA_VISIBLE_DEVICES="$gpu")
      break
    fi
  done
  say "GPUs: policy server $POLICY_GPU, trainer ${TRAINER_ENV[0]#*=}"
}

start_watchdog() {
  step watchdog "guarding the run: ${STALL_LIMIT} s without progress in training end it"
  start_process watchdog python3 -m recipe.watchdog --run-dir "$RUN_DIR" --pid "$$" --resume "$RESUME_WITH"
}

# start_policy train|eval [--weights DIR]: train takes weight updates, eval is the pristine base that adapters can be
# loaded into, or the model of DIR.
start_policy() {
  step policy "starting the policy server ($1 mode, ${3:-$MODEL})"
  beat policy
  start_process policy bash serve_policy.sh --mode "$@"
  wait_healthy policy "$POLICY_PORT" /health 1800
}

start_env() {
  step env "starting the env server and its capture proxy (public port $PUBLIC_PORT)"
  beat env
  start_process env bash serve_env.sh
  follow_server env 'BLOCKED|^\[env\] route'
  wait_healthy env "$ENV_PORT" /health 600
}

# write_report: tables, curves and the page of rollouts, also sent to ADAPTER_REPO. Its failure costs nothing else.
write_report() {
  local code=0
  step report "writing the report (log $LOGS/report.log)"
  start_process report "$TRAINER_PYTHON" report.py "$RUN_DIR" ${ADAPTER_REPO:+--push "$ADAPTER_REPO"}
  supervise report || code=$?
  if ((code)); then
    show_log report >&2
    say "WARN the report failed with code $code; write it again with: $TRAINER_PYTHON report.py $RUN_DIR" >&2
  fi
}

# run_eval ARGS...: eval_adapter.py or EVAL_SCRIPT; EVAL_CODE is 0, or 2 when cells stayed ungraded.
run_eval() {
  EVAL_CODE=0
  beat eval-setup
  start_process eval "$TRAINER_PYTHON" "${EVAL_SCRIPT:-eval_adapter.py}" "$@"
  follow eval ''
  supervise eval || EVAL_CODE=$?
  if ((EVAL_CODE != 0 && EVAL_CODE != 2)); then step_failed eval "$EVAL_CODE"; fi
}
