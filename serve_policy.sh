#!/usr/bin/env bash
# The policy server alone, for set-ups on several machines (run_job.sh calls this script too; see README.md).
#
#   bash serve_policy.sh --mode train      takes weight updates from the trainer
#   bash serve_policy.sh --mode eval       the pristine base; adapters are loaded beside it at run time
#   bash serve_policy.sh --mode eval --weights DIR     a trained model, under the name of MODEL (LORA=0)
#   ... --print-command                    prints the command and its environment, runs nothing
#   PRESET=local bash serve_policy.sh --mode train      the tiny model on the CPU engine
#
# ENGINE=vllm runs `vllm serve` (0.31; python3 -m where there is no command), ENGINE=cpu our own server for small models
# (recipe/policy_cpu, in the trainer's environment: TRAINER_PYTHON), ENGINE=auto takes vllm where a GPU and vllm are.
# Both speak the same HTTP contract.
# Settings are environment variables, see README.md: MODEL, POLICY_HOST, POLICY_PORT, POLICY_GPU, MAX_MODEL_LEN, DTYPE,
# GPUS, GPU_MEMORY_UTILIZATION, PREFIX_CACHING, LORA, LORA_R, TOOL_CALL_PARSER. VLLM_FLAGS: further flags of vLLM, to
# try one (benchmarks).
# Exit codes: 64 wrong settings or arguments, 69 the server cannot start or died, 130/143 ended by a signal; vLLM's own.
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$REPO"

# shellcheck source=recipe/common.sh
source recipe/common.sh

fail() { echo "serve_policy.sh: $1" >&2; exit "${2:-64}"; }

mode='' weights='' print_only=0
while (($#)); do
  case $1 in
    -h | --help) usage serve_policy.sh; exit 0 ;;
    --mode) mode=${2:-}; shift ;;
    --weights) weights=${2:-}; shift ;;
    --print-command) print_only=1 ;;
    *) fail "unknown argument $1; see serve_policy.sh --help" ;;
  esac
  shift || fail "--mode and --weights need a value; see serve_policy.sh --help"
done
[[ $mode == train || $mode == eval ]] || fail "say --mode train (weight updates) or --mode eval (pristine base)"

export PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}
settings=$(python3 -m recipe.config export) || exit 64
eval "$settings"
weights=${weights:-$MODEL}

# The smallest rank vLLM has kernels for that holds an adapter of rank LORA_R.
lora_rank() {
  local rank
  for rank in 1 8 16 32 64 128 256 320 512; do
    if ((rank >= LORA_R)); then echo "$rank"; return; fi
  done
}
rank=$(lora_rank)
memory_share=$(python3 -m recipe.config get ENGINE_MEMORY_SHARE)

env=() command=()
[[ -n $POLICY_GPU ]] && env+=(CUDA_VISIBLE_DEVICES="$POLICY_GPU")
if [[ $ENGINE == vllm ]]; then
  serve=(vllm serve "$weights")
  if ! command -v vllm >/dev/null && vllm_is_module; then
    serve=(python3 -m vllm.entrypoints.openai.api_server --model "$weights")
  fi
  command=("${serve[@]}" --served-model-name "$MODEL" --host "$POLICY_HOST" --port "$POLICY_PORT"
    --dtype "$DTYPE" --max-model-len "$MAX_MODEL_LEN" --gpu-memory-utilization "$memory_share"
    # No sampling defaults from the checkpoint: what a request does not set must not be truncated.
    --generation-config vllm
    # Exact token ids (OpenEnv 0.10.0 asks for them with each request too) and the log-probs of the distribution that was
    # sampled: without both nothing can be trained.
    --return-tokens-as-token-ids --logprobs-mode processed_logprobs
    # OpenCode always sends tool_choice=auto.
    --enable-auto-tool-choice --tool-call-parser "$TOOL_CALL_PARSER")
  [[ $MODEL_REVISION == main || -d $weights ]] ||
    command+=(--revision "$MODEL_REVISION" --tokenizer-revision "$MODEL_REVISION")
  if [[ $PREFIX_CACHING == 1 ]]; then
    command+=(--enable-prefix-caching --enable-prompt-tokens-details) # the trainer's canary reads what was cached
    if [[ $TOOL_CALL_PARSER == lfm2 ]]; then command+=(--mamba-cache-mode align); fi # Lfm2 refuses mode "all"
  else
    command+=(--no-enable-prefix-caching)
  fi
  if [[ $mode == train ]]; then
    env+=(VLLM_SERVER_DEV_MODE=1) # pausing and weight routes
    # Our own way of new weights, beside vLLM's for WEIGHT_SYNC=stock (recipe/vllm_weights.py).
    command+=(--worker-extension-cls recipe.vllm_weights.FlatWeights)
    # No --enable-lora: with it TRL would send adapters under names that change, which the agent cannot ask for.
    command+=(--weight-transfer-config '{"backend":"nccl"}')
  else
    if [[ $LORA == 1 ]]; then
      env+=(VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)
      command+=(--enable-lora --max-lora-rank "$rank")
    fi
  fi
  # shellcheck disable=SC2206 # words, as typed
  command+=(${VLLM_FLAGS:-})
else
  if [[ -z ${TRAINER_PYTHON:-} && $print_only == 0 ]]; then
    # shellcheck source=setup.sh
    source "$REPO/setup.sh"
    setup_all >&2
  fi
  command=("${TRAINER_PYTHON:-TRAINER_PYTHON}" -m recipe.policy_cpu --model "$weights" --served-model-name "$MODEL" --host "$POLICY_HOST"
    --port "$POLICY_PORT" --dtype "$DTYPE" --max-model-len "$MAX_MODEL_LEN")
  if [[ $mode == train ]]; then command+=(--dev-mode)
  elif [[ $LORA == 1 ]]; then command+=(--enable-lora --max-lora-rank "$rank"); fi
fi

# The trainer's template, see recipe/chat_template.py.
template=$RUN_DIR/chat-template.jinja
[[ -n $RUN_DIR ]] || template=$(python3 -m recipe.config get CACHE_PATH)/chat-template-$POLICY_PORT.jinja # by itself
command+=(--chat-template "$template")

if [[ $mode == train ]]; then
  routes="the weight routes of training mode ask for no key: whoever reaches $POLICY_HOST:$POLICY_PORT can replace the policy's weights"
  case $POLICY_HOST in
    127.* | localhost | ::1) echo "serve_policy.sh: $routes; on loopback that is every process of this machine" >&2 ;;
    *) echo "serve_policy.sh: WARNING: $routes. POLICY_HOST is no loopback address: use a private network" >&2 ;;
  esac
fi

if ((print_only)); then
  printf '%q ' "${env[@]}" "${command[@]}"
  echo
  exit 0
fi
python3 -m recipe.ports POLICY_PORT || exit $?
command -v "${command[0]}" >/dev/null ||
  fail "${command[0]} is not installed here: run in the image vllm/vllm-openai:v0.31.0, or set ENGINE=cpu for a small model" 69
if [[ $ENGINE == vllm ]]; then python=python3; else python=$TRAINER_PYTHON; fi
"$python" -m recipe.chat_template "$template" || exit $?
# exec: the caller's process id is the server's, so a signal reaches it.
exec env "${env[@]}" "${command[@]}"
