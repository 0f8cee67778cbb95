#!/usr/bin/env bash
# Makes what the recipe runs on: the trainer's environment, the env server's, the pinned OpenCode, a sandbox runtime.
#
#   bash setup.sh [--local] [--tests]      make everything, print where it lies
#   bash setup.sh --env-server             only what the env server's machine needs, where it has one of its own
#   bash setup.sh --launcher               make the launcher's environment only, print its interpreter
#   source setup.sh; setup_all             the same from a script; exports TRAINER_PYTHON, ENV_PYTHON, OPENCODE_BIN
#
# Idempotent: an environment is made once per requirements file and Python version under CACHE_DIR and then reused.
# Variables:
#   TRAINER_PYTHON, ENV_PYTHON, OPENCODE_BIN   use these (existing) interpreters and binary, make none
#   ENVIRONMENTS=present   install nothing at all: those three, or python3 and opencode of the PATH, as they are
#   TRAINER_BASE_PYTHON, ENV_BASE_PYTHON, LAUNCHER_BASE_PYTHON   interpreters to make the environments from
#   INSTALLER=auto|pip|uv                      auto takes uv where it is on PATH
#   TORCH_INDEX=<package index URL>            where to take torch from, e.g. an index of CPU builds
#   CACHE_DIR                                  default ~/.cache/lfm-opencode-lora-rl
# Exit codes: 0 ok, 64 wrong settings, 69 something could not be installed.
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=recipe/common.sh
source "$REPO/recipe/common.sh"

setup_say() { printf '%s [setup] %s\n' "$(date +%H:%M:%S)" "$*" >&2; }
setup_fail() { setup_say "ERROR: $1"; exit "${2:-69}"; }

# can_import PYTHON MODULE
can_import() { "$1" -c "import $2" >/dev/null 2>&1; }

# find_python WHAT MIN_MINOR [OVERRIDE]: prints the first Python 3.MIN_MINOR or newer (up to 3.14) that can make a venv.
# Images have Pythons without ensurepip but with pip: that is enough.
find_python() {
  local what=$1 min=$2 override=${3:-} candidate
  local -a candidates=(python3)
  for minor in 12 13 11 14; do candidates+=("python3.$minor"); done
  shopt -s nullglob
  candidates+=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3 /opt/*/bin/python3)
  shopt -u nullglob
  [[ -n $override ]] && candidates=("$override")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c "import sys, venv; sys.exit(not (3, $min) <= sys.version_info[:2] <= (3, 14))" \
      >/dev/null 2>&1 && { can_import "$candidate" ensurepip || can_import "$candidate" pip; }; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  if [[ -z $override ]] && command -v uv >/dev/null; then
    candidate=$(uv python find ">=3.$min,<3.15" 2>/dev/null || true)
    if [[ -n $candidate ]]; then echo "$candidate"; return; fi
  fi
  setup_fail "no Python >= 3.$min with venv was found for the $what${override:+ at $override}: install one (for example
  apt-get install python3.12-venv, or uv python install 3.12) or name it in $(tr '[:lower:] ' '[:upper:]_' <<<"$what")_BASE_PYTHON"
}

installer() {
  case ${INSTALLER:-auto} in
    pip | uv) echo "$INSTALLER" ;;
    auto) if command -v uv >/dev/null; then echo uv; else echo pip; fi ;;
    *) setup_fail "INSTALLER=$INSTALLER: must be auto, pip or uv" 64 ;;
  esac
}

# install PYTHON ARGS...: installs into the environment of PYTHON; its output goes to the set-up log.
install() {
  local python=$1 log=$CACHE_PATH/setup.log
  shift
  local -a command=("$python" -m pip install --no-input --disable-pip-version-check)
  if [[ $(installer) == uv ]]; then
    command=(uv pip install --python "$python")
  elif ! can_import "$python" pip; then # made without ensurepip: the pip of its base installs into it
    command=("$("$python" -c 'import sys; print(sys._base_executable)')" -m pip --python "$python" install --no-input
      --disable-pip-version-check)
  fi
  if ! "${command[@]}" "$@" >>"$log" 2>&1; then
    tail -n 20 "$log" >&2
    setup_fail "installing ($*) failed; the lines above are the end of $log. Run the same command again to go on"
  fi
}

# install_torch PYTHON: torch first and alone, because the same version comes as a CPU and as a CUDA build.
install_torch() {
  local python=$1 spec picked
  spec=$(grep '^torch==' "$REPO/requirements/trainer.in")
  local -a index=()
  [[ -n ${TORCH_INDEX:-} ]] && index=(--index-url "$TORCH_INDEX")
  if ! has_gpu && [[ -z ${TORCH_INDEX:-} && $(uname -sm) == "Linux x86_64" ]]; then
    picked=$("$python" -m pip install --disable-pip-version-check --dry-run --quiet --no-deps --report - "$spec" 2>/dev/null |
      "$python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' || true)
    if [[ $(installer) == uv || $picked != *+cpu* ]]; then
      setup_say "no GPU here, and $spec from the default index is a CUDA build: about 3 GB to download, 5 GB on disk."
      setup_say "To take a CPU build (about 200 MB), stop now and set TORCH_INDEX to the URL of an index of CPU builds."
    fi
  fi
  setup_say "installing $spec"
  install "$python" "${index[@]}" "$spec"
}

# torch_of PYTHON: the requirement that keeps the torch that this Python has.
torch_of() { "$1" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' 2>/dev/null || true; }

# make_env NAME BASE_PYTHON REQUIREMENTS [--system-site-packages]: prints the interpreter of a finished environment.
# With the flag it lies on top of the base's packages, whose torch it must not replace.
make_env() {
  local name=$1 base=$2 requirements=$3 flag=${4:-} key dir keep='' pip=''
  [[ -z $flag ]] || keep=$(torch_of "$base")
  key=$({ cat "$requirements"; "$base" -V; echo "$base ${TORCH_INDEX:-} $flag${keep:+ $keep}"; } | sha256sum | cut -c1-12)
  dir=$CACHE_PATH/envs/$name-$key
  mkdir -p "$CACHE_PATH/envs"
  (
    flock 9 # two runs that start together make it once
    if [[ ! -e $dir/.complete ]]; then
      local free
      free=$(df -Pk "$CACHE_PATH" | awk 'NR == 2 {print int($4 / 1048576)}')
      ((free >= 4)) || setup_fail "only ${free} GiB are free in $CACHE_PATH; about 4 are needed: free some or set CACHE_DIR"
      setup_say "making the $name environment ($(grep -c == "$requirements") packages, $("$base" -V)${keep:+, on top of its $keep}) in $dir"
      rm -rf "$dir"
      if ! can_import "$base" ensurepip; then pip=--without-pip; fi
      "$base" -m venv ${flag:+"$flag"} ${pip:+"$pip"} "$dir" >&2 || setup_fail "$base cannot make a virtual environment in $dir"
      [[ $name == trainer ]] && install_torch "$dir/bin/python"
      if [[ -n $flag ]]; then
        # pip, because uv does not see the base's packages and would install a second torch.
        printf '%s\n' "$keep" >"$dir/keep.txt"
        INSTALLER=pip install "$dir/bin/python" -r "$requirements" -c "$dir/keep.txt"
      else
        install "$dir/bin/python" -r "$requirements"
      fi
      touch "$dir/.complete"
    fi
    if [[ -n ${SETUP_TESTS:-} ]] && ! cmp -s "$REPO/requirements/tests.txt" "$dir/.tests"; then
      setup_say "adding the test tools to the $name environment"
      install "$dir/bin/python" -r "$REPO/requirements/tests.txt"
      cp "$REPO/requirements/tests.txt" "$dir/.tests"
    fi
  ) 9>"$dir.lock" || return 69 # callers use ||, which switches set -e off in here
  echo "$dir/bin/python"
}

sandbox_runtime_works() {
  bwrap --ro-bind / / --unshare-pid --unshare-net --dev /dev --proc /proc true 2>/dev/null ||
    proot -r / true >/dev/null 2>&1
}

setup_sandbox_runtime() {
  sandbox_runtime_works && return
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    setup_say "installing bubblewrap and proot with apt-get"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q bubblewrap proot; } \
      >>"$CACHE_PATH/setup.log" 2>&1 || true
    sandbox_runtime_works && return
  fi
  setup_fail "local sandboxes need bubblewrap, or proot where user namespaces are refused, and neither works here:
  run 'apt-get update && apt-get install -y bubblewrap proot' as root (other systems: the packages of these names)"
}

# env_lock SANDBOX: the requirements file of the env server; some backends need an SDK that nobody else carries.
env_lock() {
  local lock=$REPO/requirements/env-server-$1.txt
  [[ -e $lock ]] || lock=$REPO/requirements/env-server.txt
  echo "$lock"
}

# find_cache: CACHE_PATH, a folder that can be written.
find_cache() {
  CACHE_PATH=$(cd "$REPO" && python3 -m recipe.config get CACHE_PATH) || exit 64
  { mkdir -p "$CACHE_PATH" && [[ -w $CACHE_PATH ]]; } 2>/dev/null ||
    setup_fail "$CACHE_PATH cannot be made or written: set CACHE_DIR to a folder that can" 64
}

# check_given: what the caller named is there.
check_given() {
  local name
  for name in TRAINER_PYTHON ENV_PYTHON OPENCODE_BIN; do
    [[ -z ${!name:-} ]] || command -v "${!name}" >/dev/null ||
      setup_fail "$name=${!name} is no program of this machine: correct it, or unset it and set-up makes its own" 64
  done
  installer >/dev/null
}

# setup_all: everything; needs the settings in the environment or takes them from PRESET.
setup_all() {
  local exported
  exported=$(cd "$REPO" && python3 -m recipe.config export) || exit 64
  eval "$exported"
  if [[ $ENGINE == vllm && -z ${SETUP_ENV_ONLY:-} ]] && ! command -v vllm >/dev/null && ! vllm_is_module; then
    setup_fail "there is no vLLM here, neither a command nor a module of python3: run in the image vllm/vllm-openai:v0.31.0, install vLLM and set ENVIRONMENTS=present, or run the small job that needs none with --local"
  fi
  check_given
  find_cache
  if [[ $ENVIRONMENTS == present ]]; then
    : "${TRAINER_PYTHON:=$(command -v python3)}" "${ENV_PYTHON:=$TRAINER_PYTHON}" "${OPENCODE_BIN:=$(command -v opencode || true)}"
    [[ -n $OPENCODE_BIN ]] || setup_fail "ENVIRONMENTS=present, but there is no opencode on PATH: set OPENCODE_BIN" 64
  fi
  local trainer_base='' env_base made
  if [[ -z ${TRAINER_PYTHON:-} && -z ${SETUP_ENV_ONLY:-} ]]; then
    # In the job image vLLM, torch and transformers are those of python3, and stay untouched.
    if [[ $ENGINE == vllm ]]; then trainer_base=python3; fi
    trainer_base=$(find_python trainer 11 "${TRAINER_BASE_PYTHON:-$trainer_base}") || exit 69
  fi
  if [[ -z ${ENV_PYTHON:-} ]]; then env_base=$(find_python env 12 "${ENV_BASE_PYTHON:-}") || exit 69; fi
  made=$(mktemp -d)
  # Side by side: each is bound by one core of pip and by the network. An absent result file means that one failed.
  if [[ -z ${ENV_PYTHON:-} ]]; then
    (make_env env-server "$env_base" "$(env_lock "$SANDBOX")" >"$made/env.tmp" && mv "$made/env.tmp" "$made/env") &
  fi
  if [[ -n $trainer_base ]]; then
    if [[ $ENGINE == vllm ]]; then
      TRAINER_PYTHON=$(make_env trainer-job "$trainer_base" "$REPO/requirements/trainer-job.txt" \
        --system-site-packages) || exit 69
    else
      TRAINER_PYTHON=$(make_env trainer "$trainer_base" "$REPO/requirements/trainer.txt") || exit 69
    fi
  fi
  if [[ -z ${ENV_PYTHON:-} ]]; then
    wait
    [[ -s $made/env ]] || exit 69
    ENV_PYTHON=$(<"$made/env")
  fi
  rm -rf "$made"
  export TRAINER_PYTHON=${TRAINER_PYTHON:-} ENV_PYTHON
  # In the job everything is imported once, before anything is trained; here versions and places are enough.
  local -a how=(--quick)
  if [[ $PRESET == job ]]; then how=(); fi
  if [[ -n ${SETUP_ENV_ONLY:-} ]]; then how+=(--only "env server"); fi
  setup_say "what each process imports:"
  (cd "$REPO" && python3 -m recipe.environments "${how[@]}") | sed 's/^/         /' >&2 ||
    setup_fail "the environments are not as the recipe needs them; the lines above say what to do"
  if [[ -z ${OPENCODE_BIN:-} ]]; then
    OPENCODE_BIN=$(cd "$REPO" && "$ENV_PYTHON" -m recipe.opencode_binary) || exit 69
  fi
  export OPENCODE_BIN
  setup_say "agent: OpenCode $OPENCODE_VERSION at $OPENCODE_BIN"
  if [[ $SANDBOX == local ]]; then setup_sandbox_runtime; fi
}

# setup_launcher: prints the interpreter that launch.py runs in.
setup_launcher() {
  local base
  find_cache
  base=$(find_python launcher 11 "${LAUNCHER_BASE_PYTHON:-}") || exit 69
  make_env launcher "$base" "$REPO/requirements/launcher.txt"
}

setup_main() {
  while (($#)); do
    case $1 in
      --local) export PRESET=local ;;
      --tests) export SETUP_TESTS=1 ;;
      --launcher) setup_launcher; return ;;
      --env-server) SETUP_ENV_ONLY=1 ;;
      -h | --help) usage "${BASH_SOURCE[0]}"; return 0 ;;
      *) setup_fail "unknown argument $1; see bash setup.sh --help" 64 ;;
    esac
    shift
  done
  setup_all
  printf 'export TRAINER_PYTHON=%q ENV_PYTHON=%q OPENCODE_BIN=%q OMP_WAIT_POLICY=%q\n' \
    "$TRAINER_PYTHON" "$ENV_PYTHON" "$OPENCODE_BIN" "$OMP_WAIT_POLICY"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then setup_main "$@"; fi
