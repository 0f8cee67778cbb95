#!/usr/bin/env bash
# The tests, from a clean checkout: makes the environments first (see setup.sh), then runs lint, unit tests, the
# tests against a double of the Hub, the contract tests of the policy server and the end-to-end tests with the real
# OpenCode, proxy, Harbor and TRL.
#
#   bash run_tests.sh                 everything
#   bash run_tests.sh trainer         one or more of: lint trainer hub env contract e2e
#   bash run_tests.sh trainer -k ratio   what follows the groups goes to pytest
#   bash run_tests.sh gpu             on a machine with a GPU and vLLM; not among "everything"
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
    lint | trainer | hub | env | contract | e2e | gpu) groups+=("$1") ;;
    *) echo "run_tests.sh: no test group is called $1 (lint, trainer, hub, env, contract, e2e, gpu)" >&2; exit 64 ;;
  esac
  shift
done
((${#groups[@]})) || groups=(lint trainer hub env contract e2e)

export PRESET=local SETUP_TESTS=1
# Settings of the caller's shell would change what is tested; the tests set their own.
unset MODEL MAX_STEPS N_TASKS SANDBOX RUN_DIR ADAPTER_REPO ENGINE HF_TOKEN
source ./setup.sh
setup_all
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
failed=()
run() {
  local name=$1
  shift
  printf '\n=== %s\n' "$name"
  "$@" || failed+=("$name")
}

for group in "${groups[@]}"; do
  case $group in
    lint)
      run "lint: ruff" "$tools/ruff" check --no-cache .
      run "lint: shellcheck" "$tools/shellcheck" -x ./*.sh recipe/*.sh .ci/run
      ;;
    env) run env "$ENV_PYTHON" -m pytest tests/env "$@" ;;
    *) run "$group" "$TRAINER_PYTHON" -m pytest "tests/$group" "$@" ;;
  esac
done

if ((${#failed[@]})); then
  printf '\nFAILED: %s\n' "$(IFS=,; echo "${failed[*]}")" >&2
  exit 1
fi
printf '\nall passed: %s\n' "${groups[*]}"
