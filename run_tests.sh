#!/usr/bin/env bash
# The tests, from a clean checkout: makes the environments first (see setup.sh), then runs lint, unit tests, the
# tests against a double of the Hub, the contract tests of the policy server and the end-to-end tests with the real
# OpenCode, proxy, Harbor and TRL.
#
#   bash run_tests.sh                 all groups but the last two, two at a time
#   bash run_tests.sh trainer         one or more of: lint trainer hub env contract e2e
#   bash run_tests.sh trainer -k ratio   what follows the groups goes to pytest
#   bash run_tests.sh long            jobs of minutes each: the second recipe's, and
#                                     training and watcher that are killed at random moments (6 minutes)
#   bash run_tests.sh gpu             on a machine with a GPU and vLLM
#
# Exit codes: 0 all passed, 1 something failed, 64 wrong usage, 69 set-up failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=recipe/common.sh
source recipe/common.sh

case ${1:-} in -h | --help) usage run_tests.sh; exit 0 ;; esac

groups=()
while (($#)) && [[ $1 != -* ]]; do
  case $1 in
    lint | trainer | hub | env | contract | e2e | long | gpu) groups+=("$1") ;;
    *) echo "run_tests.sh: no test group is called $1 (lint, trainer, hub, env, contract, e2e, long, gpu)" >&2; exit 64 ;;
  esac
  shift
done
if ((${#groups[@]} == 0 && $#)); then
  echo "run_tests.sh: $1 goes to pytest: name the groups before it, for example: bash run_tests.sh trainer $1" >&2
  exit 64
fi
((${#groups[@]})) || groups=(lint trainer hub env contract e2e)

# Settings of the caller's shell would change what is tested; the tests set their own.
unset PRESET RECIPE MODEL MAX_STEPS N_TASKS SANDBOX RUN_DIR ADAPTER_REPO ENGINE HF_TOKEN
found=$(bash setup.sh --local --tests) || exit 69
eval "$found"
source ./setup.sh # for what follows: setup_say, setup_fail
CACHE_PATH=$(python3 -m recipe.config get CACHE_PATH)
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

# setup_browser: a test reads the report's page as a browser shows it.
setup_browser() {
  local name
  for name in chromium-headless-shell chromium chromium-browser google-chrome; do
    if CHROMIUM=${CHROMIUM:-$(command -v "$name")}; then export CHROMIUM; return; fi
  done
  if [[ $(id -u) == 0 && -z ${1:-} ]] && command -v apt-get >/dev/null; then
    setup_say "installing Chromium with apt-get, for the test of the report's page"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -q && for name in chromium-headless-shell chromium; do
      if apt-get install -y -q --no-install-recommends "$name"; then break; fi
    done; } >>"$CACHE_PATH/setup.log" 2>&1 || true
    setup_browser again
    return
  fi
  setup_fail "the trainer's tests open a page in Chromium, and there is none: run 'apt-get update && apt-get install -y
  chromium' as root, install Google Chrome, or name a binary in CHROMIUM"
}
if [[ " ${groups[*]} " == *" trainer "* ]]; then setup_browser; fi

tools=$(dirname "$TRAINER_PYTHON")

# run_group GROUP [PYTEST ARGS...]
run_group() {
  local group=$1 code=0
  shift
  case $group in
    lint)
      "$tools/ruff" check --no-cache . || code=1
      "$tools/shellcheck" -x ./*.sh recipe/*.sh .ci/run || code=1
      ;;
    env) "$ENV_PYTHON" -m pytest tests/env "$@" || code=1 ;;
    hub) "$TRAINER_PYTHON" -m pytest tests/hub -m "not long" "$@" || code=1 ;;
    long) "$TRAINER_PYTHON" -m pytest tests/hub -m long "$@" || code=1 ;;
    e2e-rollouts) "$TRAINER_PYTHON" -m pytest tests/e2e --ignore-glob="*eval*" "$@" || code=1 ;;
    e2e-eval) "$TRAINER_PYTHON" -m pytest tests/e2e/test_*eval*.py "$@" || code=1 ;;
    *) "$TRAINER_PYTHON" -m pytest "tests/$group" "$@" || code=1 ;;
  esac
  if ((code)); then touch "$scratch/failed-${group%%-*}"; fi
}

# run_lane: takes one group after the other, longest first, until all are taken; shows the output of each at its end.
# The end-to-end tests are cut in two so that both lanes end at about the same time.
run_lane() {
  local group
  for group in lint hub trainer long e2e-rollouts e2e-eval env contract gpu; do
    if [[ " ${groups[*]} " != *" ${group%%-*} "* ]] || ! mkdir "$scratch/taken-$group" 2>/dev/null; then continue; fi
    run_group "$group" "${pytest_args[@]}" >"$scratch/$group.log" 2>&1
    {
      flock 9
      printf '\n=== %s\n' "$group"
      cat "$scratch/$group.log"
    } 9>"$scratch/lock"
  done
}

# end_lanes: a lane that is ended must not leave its tests running.
end_lanes() {
  local lane
  trap - EXIT
  for lane in $(jobs -p); do kill -TERM -- "-$lane" 2>/dev/null || true; done
  wait
  rm -rf "$scratch"
}

pytest_args=("$@")
scratch=$(mktemp -d)
trap end_lanes EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if ((${#groups[@]} == 1)); then
  printf '\n=== %s\n' "${groups[0]}"
  set -m # in the background, or a signal would wait for the tests to end
  run_group "${groups[0]}" "${pytest_args[@]}" &
  set +m
  wait
else
  setup_say "running ${groups[*]}, two at a time; each is shown when it has ended"
  set -m # a process group a lane
  for _ in 1 2; do run_lane & done # as many as cores: a third made each group half as slow again
  set +m
  wait
fi

failed=()
for group in "${groups[@]}"; do
  if [[ -e $scratch/failed-$group ]]; then failed+=("$group"); fi
done
if ((${#failed[@]})); then
  printf '\nFAILED: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
  exit 1
fi
printf '\nall passed: %s\n' "${groups[*]}"
