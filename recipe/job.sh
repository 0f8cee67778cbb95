# shellcheck shell=bash
# Processes of a job, shared by run_job.sh, run_eval.sh and run_eval_watch.sh (sourced, not run).
#
# Each process is the leader of a session of its own, so that whatever it starts can be found and ended with it. A
# server that dies ends the job at once with its name and the end of its log. Bash >= 4.4, Linux (/proc).

EXIT_UNAVAILABLE=69 # a server or process died or could not start
EXIT_STALLED=75     # the watchdog stopped the run
STEP_GRACE=${STEP_GRACE:-30} # seconds between SIGTERM and SIGKILL of a step: the trainer saves a checkpoint
SERVER_GRACE=${SERVER_GRACE:-10} # the same of a server: the env server stops its sandboxes

declare -A JOB_PID=() JOB_OFFSET=()
declare -a JOB_RUNNING=() JOB_FOLLOWERS=()
JOB_STEP=start

say() { printf '%s [%s] %s\n' "$(date +%H:%M:%S)" "$JOB_STEP" "$*"; }

# die CODE MESSAGE...: says what happened and how to go on, then ends the job through the EXIT trap.
die() {
  local code=$1
  shift
  say "ERROR: $*" >&2
  exit "$code"
}

# usage FILE: the comment at the top of a script is its help text.
usage() { sed -n '2,/^[^#]/{/^[^#]/d;s/^# \{0,1\}//;p}' "$1"; }

# job_begin SCRIPT [ARGUMENTS [NAME]]: settings into the environment, run folder, lock, free ports, traps. ARGUMENTS
# are repeated in the resume command; NAME is in the name of a new run folder.
job_begin() {
  local script=$1 arguments=${2:-} name=${3:-} settings
  settings=$(python3 -m recipe.config export) || exit $?
  eval "$settings"
  export RUN_DIR=${RUN_DIR:-$REPO/runs/${name:+$name-}$PRESET-$(date +%Y%m%d-%H%M%S)}
  mkdir -p "$RUN_DIR/logs"
  RUN_DIR=$(cd "$RUN_DIR" && pwd)
  LOGS=$RUN_DIR/logs
  RESUME="RUN_DIR=$(printf %q "$RUN_DIR") bash $script$([[ $PRESET == local ]] && echo ' --local')${arguments:+ $arguments}"
  exec {JOB_LOCK}>"$RUN_DIR/.lock"
  flock -n "$JOB_LOCK" || die "$EXIT_UNAVAILABLE" "another job works in $RUN_DIR: wait for its end or set RUN_DIR to another folder"
  rm -f "$RUN_DIR/stalled.json" "$RUN_DIR/processes"
  trap job_end EXIT
  trap 'job_signal INT 130' INT
  trap 'job_signal TERM 143' TERM
  say "run folder: $RUN_DIR"
  beat setup
  python3 -m recipe.ports PUBLIC_PORT POLICY_PORT ENV_PORT || exit $?
}

step() {
  JOB_STEP=$1
  say "$2"
}

beat() { python3 -m recipe.watchdog --run-dir "$RUN_DIR" --beat "$1"; }

# start_process NAME COMMAND...: in a session of its own, output appended to logs/NAME.log.
start_process() {
  local name=$1 log=$LOGS/$1.log
  shift
  touch "$log"
  JOB_OFFSET[$name]=$(stat -c %s "$log")
  setsid "$@" >>"$log" 2>&1 </dev/null {JOB_LOCK}>&- &
  JOB_PID[$name]=$!
  JOB_RUNNING+=("$name")
  list_processes
}

# list_processes: RUN_DIR/processes, by which the watchdog ends them should this script be killed.
list_processes() {
  local name
  for name in "${JOB_RUNNING[@]}"; do printf '%s %s\n' "${JOB_PID[$name]}" "$name"; done >"$RUN_DIR/processes"
}

is_alive() { kill -0 "${JOB_PID[$1]}" 2>/dev/null; }

# show_log NAME: the end of what the process wrote since it was started.
show_log() {
  printf -- '---- last lines of %s ----\n' "$LOGS/$1.log"
  tail -c "+$((JOB_OFFSET[$1] + 1))" "$LOGS/$1.log" | tail -n 25
  printf -- '----\n'
}

# forget NAME: the process has ended; what outlived it in its session is ended too.
forget() {
  local name kept=()
  end_session "$SERVER_GRACE" "${JOB_PID[$1]}"
  for name in "${JOB_RUNNING[@]}"; do [[ $name == "$1" ]] || kept+=("$name"); done
  JOB_RUNNING=("${kept[@]}")
  unset "JOB_PID[$1]"
  list_processes
}

# process_died NAME CODE: ends the job because a process that should run has ended.
process_died() {
  if [[ -e $RUN_DIR/stalled.json ]]; then job_stalled; fi
  local pid=${JOB_PID[$1]}
  show_log "$1" >&2
  forget "$1"
  die "$EXIT_UNAVAILABLE" "process '$1' (pid $pid) ended with code $2 during step $JOB_STEP. Its log: $LOGS/$1.log
  Checkpoints and finished evaluation cells are kept. Resume with: $RESUME"
}

job_stalled() {
  python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["message"])' "$RUN_DIR/stalled.json" >&2
  exit "$EXIT_STALLED"
}

# check_servers [EXCEPT]: ends the job when any process but EXCEPT has died.
check_servers() {
  local name code
  for name in "${JOB_RUNNING[@]}"; do
    if [[ $name != "${1:-}" ]] && ! is_alive "$name"; then
      code=0
      wait "${JOB_PID[$name]}" || code=$?
      process_died "$name" "$code"
    fi
  done
}

# supervise NAME: waits for the end of NAME and returns its code; the death of any other process ends the job.
supervise() {
  local name=$1 code=0 other pids
  while is_alive "$name"; do
    check_servers "$name"
    pids=()
    for other in "${JOB_RUNNING[@]}"; do pids+=("${JOB_PID[$other]}"); done
    wait -n "${pids[@]}" || true # returns when any of them ends; the loop finds out which
  done
  wait "${JOB_PID[$name]}" || code=$?
  forget "$name"
  wait_followers
  return "$code"
}

# run_step NAME COMMAND...: a process that has to succeed; its log is shown when it does not, and its code is the job's.
run_step() {
  local name=$1 code=0
  start_process "$@"
  if [[ -n ${FOLLOW:-} ]]; then follow "$name" "$FOLLOW"; fi
  supervise "$name" || code=$?
  if ((code)); then step_failed "$name" "$code"; fi
}

# step_failed NAME CODE: ends the job with the step's own code, or 69 when something killed it.
step_failed() {
  local code=$2 how="failed with code $2"
  if ((code > 128)); then
    how="was killed by SIG$(kill -l "$((code - 128))")"
    code=$EXIT_UNAVAILABLE
  fi
  show_log "$1" >&2
  die "$code" "step '$1' $how. Its log: $LOGS/$1.log
  Checkpoints and finished evaluation cells are kept. Resume with: $RESUME"
}

# http_ok PORT PATH: does 127.0.0.1:PORT answer 200? Plain bash, because images without curl exist.
http_ok() {
  # shellcheck disable=SC2016 # expanded by the inner shell
  timeout 5 bash -c 'exec 3<>"/dev/tcp/127.0.0.1/$0" &&
    printf "GET %s HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n" "$1" >&3 && read -r line <&3 && [[ $line == *" 200"* ]]' \
    "$1" "$2" 2>/dev/null
}

# wait_healthy NAME PORT PATH SECONDS: until the server answers; its death or the limit ends the job.
wait_healthy() {
  local name=$1 port=$2 path=$3 limit=$4 start=$SECONDS
  until http_ok "$port" "$path"; do
    check_servers
    if ((SECONDS - start > limit)); then
      show_log "$name" >&2
      die "$EXIT_UNAVAILABLE" "process '$name' did not answer http://127.0.0.1:$port$path within $limit s. Its log: $LOGS/$name.log"
    fi
    sleep 0.5
  done
  check_servers
  say "$name is healthy on port $port after $((SECONDS - start)) s (pid ${JOB_PID[$name]}, log $LOGS/$name.log)"
}

# follow NAME REGEX: shows matching new lines of the process's log until it ends.
follow() {
  tail -c "+$((JOB_OFFSET[$1] + 1))" -s 0.5 --pid="${JOB_PID[$1]}" -f "$LOGS/$1.log" 2>/dev/null |
    grep --line-buffered -E -- "$2" | sed -u 's/^/    /' &
  JOB_FOLLOWERS+=($!)
}

wait_followers() {
  local pid
  for pid in "${JOB_FOLLOWERS[@]}"; do wait "$pid" || true; done
  JOB_FOLLOWERS=()
}

# session_pids SID...: processes of these sessions that are not zombies.
session_pids() {
  local stat line fields
  for stat in /proc/[0-9]*/stat; do
    { read -r line <"$stat"; } 2>/dev/null || continue
    read -ra fields <<<"${line##*) }" # state ppid pgrp session …; the command before may hold spaces
    if [[ " $* " == *" ${fields[3]} "* && ${fields[0]} != [ZX] ]]; then
      stat=${stat#/proc/}
      echo "${stat%/stat}"
    fi
  done
}

# end_session GRACE SID...: SIGTERM to all process groups at once, SIGKILL to what is left after GRACE seconds.
end_session() {
  local sid deadline=$((SECONDS + $1))
  local -a sids=("${@:2}") left=()
  ((${#sids[@]})) || return 0
  mapfile -t left < <(session_pids "${sids[@]}")
  ((${#left[@]})) || return 0
  for sid in "${sids[@]}"; do kill -TERM -- "-$sid" 2>/dev/null || true; done
  while mapfile -t left < <(session_pids "${sids[@]}") && ((${#left[@]})); do
    if ((SECONDS >= deadline + 10)); then
      say "processes ${left[*]} do not end even on SIGKILL" >&2
      return 0
    fi
    if ((SECONDS >= deadline)); then kill -KILL "${left[@]}" 2>/dev/null || true; fi
    sleep 0.2
  done
}

# stop_process NAME: ends one process and everything in its session.
stop_process() {
  forget "$1"
}

# stop_all: the step that uses the servers first, then the servers.
stop_all() {
  local name
  local -a steps=() servers=()
  for name in "${JOB_RUNNING[@]}"; do
    case $name in
      policy | env | watchdog) servers+=("${JOB_PID[$name]}") ;;
      *) steps+=("${JOB_PID[$name]}") ;;
    esac
  done
  end_session "$STEP_GRACE" "${steps[@]}"
  end_session "$SERVER_GRACE" "${servers[@]}"
  JOB_RUNNING=()
}

sweep_sandboxes() {
  if [[ ${SANDBOX:-} == local && -n ${ENV_PYTHON:-} ]]; then
    "$ENV_PYTHON" -m recipe.sandbox_local sweep --run-dir "$RUN_DIR" >>"$LOGS/env.log" 2>&1 ||
      say "the sandbox sweep failed, see $LOGS/env.log" >&2
  fi
}

# shellcheck disable=SC2317,SC2329 # called by the traps
job_signal() {
  if [[ -e $RUN_DIR/stalled.json ]]; then job_stalled; fi
  say "got SIG$1 in step $JOB_STEP: stopping. Resume with: $RESUME" >&2
  exit "$2"
}

# shellcheck disable=SC2317,SC2329
job_end() {
  local code=$?
  trap '' INT TERM # a second Ctrl-C must not leave servers behind
  stop_all
  wait_followers
  sweep_sandboxes
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
  # With two GPUs the trainer has the first and the policy server the second; with one they share it.
  local gpus=0
  if command -v nvidia-smi >/dev/null; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true); fi
  TRAINER_ENV=()
  if ((gpus > 1)) && [[ -z $POLICY_GPU ]]; then
    export POLICY_GPU=1
    # shellcheck disable=SC2034 # read by run_job.sh
    TRAINER_ENV=(CUDA_VISIBLE_DEVICES=0)
  fi
}

start_watchdog() {
  step watchdog "guarding the run: ${STALL_LIMIT} s without progress in training end it"
  start_process watchdog python3 -m recipe.watchdog --run-dir "$RUN_DIR" --pid "$$" --resume "$RESUME"
}

# start_policy train|eval: train takes weight updates, eval is the pristine base that adapters can be loaded into.
start_policy() {
  step policy "starting the policy server ($1 mode, $MODEL)"
  beat policy
  start_process policy bash serve_policy.sh --mode "$1"
  wait_healthy policy "$POLICY_PORT" /health 1800
}

start_env() {
  step env "starting the env server and its capture proxy (public port $PUBLIC_PORT)"
  beat env
  start_process env bash serve_env.sh
  wait_healthy env "$ENV_PORT" /health 600
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
