# shellcheck shell=bash
# Processes under supervision (sourced by recipe/job.sh, not run).
#
# Each process is the leader of a session of its own, so that whatever it starts can be found and ended with it. A
# server that dies ends the job at once with its name and the end of its log. Bash >= 4.4, Linux (/proc).
# Reads RUN_DIR, LOGS, RESUME_WITH, JOB_STEP and EXIT_USAGE, and calls say, die, job_signal, job_stalled and
# sweep_sandboxes of recipe/job.sh.

EXIT_UNAVAILABLE=69 # a server or process died or could not start
STEP_GRACE=${STEP_GRACE:-60} # seconds between SIGTERM and SIGKILL of a step: the trainer ends a group and saves it
PUSH_GRACE=${PUSH_GRACE:-300} # further seconds for a step whose last push or save is under way (recipe/hub.py)
SERVER_GRACE=${SERVER_GRACE:-10} # the same of a server: the env server stops its sandboxes

declare -A JOB_PID=() JOB_OFFSET=()
declare -a JOB_RUNNING=() JOB_FOLLOWERS=() SERVER_FOLLOWERS=()
JOB_STARTING='' # while it is set, a signal to the job waits in JOB_SIGNAL
JOB_SIGNAL=''

# start_process NAME COMMAND...: in a session of its own, output appended to logs/NAME.log. A signal that comes meanwhile
# is obeyed at the end of this: a process that is not listed, or has no session yet, would not be ended with the job.
start_process() {
  local name=$1 log=$LOGS/$1.log
  shift
  touch "$log"
  JOB_OFFSET[$name]=$(stat -c %s "$log")
  JOB_STARTING=1
  setsid "$@" >>"$log" 2>&1 </dev/null {JOB_LOCK}>&- &
  JOB_PID[$name]=$!
  JOB_RUNNING+=("$name")
  list_processes
  while is_alive "$name" && ! is_left "${JOB_PID[$name]}"; do sleep 0.01; done
  # shellcheck disable=SC2034 # read by job_signal
  JOB_STARTING=''
  # shellcheck disable=SC2086 # its two arguments
  if [[ -n $JOB_SIGNAL ]]; then job_signal $JOB_SIGNAL; fi
}

# list_processes: RUN_DIR/processes, by which the watchdog ends them should this script be killed.
list_processes() {
  local name lines=''
  for name in "${JOB_RUNNING[@]}"; do lines+="${JOB_PID[$name]} $name"$'\n'; done
  # a kill in between, or a full disk, leaves the list of before
  if ! { printf %s "$lines" >"$RUN_DIR/.processes" && mv -f "$RUN_DIR/.processes" "$RUN_DIR/processes"; }; then
    say "WARN $RUN_DIR/processes cannot be written: a kill -9 of this job would leave what it started since" >&2
  fi
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
  Checkpoints and finished evaluation cells are kept. Resume with: $RESUME_WITH"
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
  local name=$1 code=0
  while is_alive "$name"; do
    check_servers "$name"
    sleep 0.3 # wait -n would not see a process that ended since the line above, and wait for another one's end
  done
  wait "${JOB_PID[$name]}" || code=$?
  forget "$name"
  wait_followers
  return "$code"
}

# run_step NAME COMMAND...: a process that has to succeed; its log is shown when it does not.
run_step() {
  local name=$1 code=0
  start_process "$@"
  if [[ -n ${FOLLOW:-} ]]; then follow "$name" "$FOLLOW"; fi
  supervise "$name" || code=$?
  if ((code)); then step_failed "$name" "$code"; fi
}

# step_failed NAME CODE: ends the job with 64 when the step found its settings wrong, else with 69.
step_failed() {
  local code=$EXIT_UNAVAILABLE how="failed with code $2" again="Resume with: $RESUME_WITH"
  if (($2 == EXIT_USAGE)); then
    code=$EXIT_USAGE
    again="With the setting corrected, resume with: $RESUME_WITH"
  fi
  if (($2 > 128)); then how="was killed by SIG$(kill -l "$(($2 - 128))")"; fi
  show_log "$1" >&2
  rm -f "$RUN_DIR/pushing" # the log has said it
  die "$code" "step '$1' $how. Its log: $LOGS/$1.log
  Checkpoints and finished evaluation cells are kept. $again"
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

# follow NAME REGEX: shows matching new lines of the process's log until it ends. It holds no lock: it may outlive us.
follow() {
  {
    tail -c "+$((JOB_OFFSET[$1] + 1))" -s 0.5 --pid="${JOB_PID[$1]}" -f "$LOGS/$1.log" 2>/dev/null |
      grep --line-buffered -E -- "$2" | sed -u 's/^/    /'
  } {JOB_LOCK}>&- &
  JOB_FOLLOWERS+=($!)
}

# follow_server NAME REGEX: the same of a server, which outlives the steps.
follow_server() {
  follow "$@"
  SERVER_FOLLOWERS+=("${JOB_FOLLOWERS[-1]}")
  unset 'JOB_FOLLOWERS[-1]'
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
  terminate "${@:2}" || return 0
  await_end "$@"
}

# terminate SID...: SIGTERM to the process groups; fails when nothing of them is left.
terminate() {
  local sid
  is_left "$@" || return 1
  for sid in "$@"; do kill -TERM -- "-$sid" 2>/dev/null || true; done
}

# is_left SID...: does a session of these have a process?
is_left() { (($#)) && [[ -n $(session_pids "$@") ]]; }

# awaits SECONDS CONDITION SID...: until they have ended; fails when SECONDS are over before, or CONDITION, a command
# that is given the SIDs, succeeds.
awaits() {
  local deadline=$((SECONDS + $1)) condition=$2
  shift 2
  while is_left "$@"; do
    if ((SECONDS >= deadline)) || "$condition" "$@"; then return 1; fi
    sleep 0.2
  done
}

# kill_left SID...: a condition that ends what it waits for.
kill_left() {
  local -a left
  mapfile -t left < <(session_pids "$@")
  kill -KILL "${left[@]}" 2>/dev/null || true
  false
}

# await_end GRACE SID...: until they have ended; SIGKILL to what is left after GRACE seconds.
await_end() {
  awaits "$1" false "${@:2}" || awaits 10 kill_left "${@:2}" ||
    say "processes $(session_pids "${@:2}" | xargs) do not end even on SIGKILL" >&2
}

# stop_process NAME: ends one process and everything in its session.
stop_process() {
  forget "$1"
}

# stop_all: the step that uses the servers first, then the servers and the sandboxes. They do not wait for a step that
# has only a push or its last save left, which RUN_DIR/pushing says; it gets PUSH_GRACE seconds more. What is missing then
# is told.
stop_all() {
  local name
  local -a steps=() servers=()
  for name in "${JOB_RUNNING[@]}"; do
    case $name in
      policy | env | watchdog) servers+=("${JOB_PID[$name]}") ;;
      *) steps+=("${JOB_PID[$name]}") ;;
    esac
  done
  terminate "${steps[@]}" || true
  awaits "$STEP_GRACE" only_pushes "${steps[@]}" || only_pushes || await_end 0 "${steps[@]}"
  end_session "$SERVER_GRACE" "${servers[@]}"
  sweep_sandboxes
  wait_for_push "${steps[@]}"
  JOB_RUNNING=()
}

only_pushes() { [[ -e $RUN_DIR/pushing ]]; }
gives_up() { [[ -n $given_up ]]; }

# wait_for_push SID...: a further signal ends the wait.
wait_for_push() {
  local given_up=
  if is_left "$@"; then
    trap 'given_up=1' INT TERM
    say "waiting up to $PUSH_GRACE s for the push or save that is under way; another Ctrl-C or SIGTERM ends the wait" >&2
    awaits "$PUSH_GRACE" gives_up "$@" || true
    trap '' INT TERM
    await_end 0 "$@"
  fi
  if only_pushes; then say "$(<"$RUN_DIR/pushing")" >&2; fi
}
