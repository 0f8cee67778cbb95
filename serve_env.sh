#!/usr/bin/env bash
# The env server and the capture proxy alone, for set-ups on several machines (run_job.sh calls it too; see README.md).
#
#   RUN_DIR=runs/a bash serve_env.sh            # settings are environment variables, see README.md
#   RUN_DIR=runs/a PRESET=local bash serve_env.sh
#
# Needs: tasks in RUN_DIR/tasks/{train,test} (prepare_tasks.py), a policy server (serve_policy.sh) at POLICY_URL, by
# default at POLICY_PORT of this machine, and ENV_PYTHON, the env server's Python (setup.sh makes and exports it).
# Serves: ENV_HOST:ENV_PORT (127.0.0.1:8002) for the trainer, PUBLIC_PORT/capture for the sandboxes. `--help` lists everything else.
# Exit codes: 64 wrong settings, 69 could not start or died (the message says why), 130/143 ended by a signal.
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$REPO"
# shellcheck source=recipe/common.sh
source recipe/common.sh

case ${1:-} in
  -h | --help)
    usage serve_env.sh
    python3 -c 'import ast; print(ast.get_docstring(ast.parse(open("recipe/env_server.py").read())))'
    exit 0
    ;;
  '') ;;
  *)
    echo "serve_env.sh takes no arguments, its settings are environment variables; see serve_env.sh --help" >&2
    exit 64
    ;;
esac

export PYTHONPATH=$REPO${PYTHONPATH:+:$PYTHONPATH}
settings=$(python3 -m recipe.config export) || exit 64
eval "$settings"
if [[ -z ${ENV_PYTHON:-} ]]; then
  # shellcheck source=setup.sh
  source "$REPO/setup.sh"
  SETUP_ENV_ONLY=1 setup_all >&2
fi
# exec: the caller's process id is the server's, so a signal reaches it and its sandboxes end with it.
exec "$ENV_PYTHON" -m recipe.env_server
