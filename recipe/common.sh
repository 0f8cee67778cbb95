# shellcheck shell=bash
# What every script of the recipe may need (sourced, not run).

# usage FILE: the comment at the top of a script is its help text.
usage() { sed -n '2,/^[^#]/{/^[^#]/d;s/^# \{0,1\}//;p}' "$1"; }

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# vllm_is_module: a vLLM that was unpacked into a folder has no command of its own.
vllm_is_module() { python3 -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("vllm"))'; }

# Threads of a CPU model that wait for the next operation sleep instead of spinning: policy server, trainer and agents
# share the cores here, and spinning was measured to cost four times the work itself once they are busy.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
