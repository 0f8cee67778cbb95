"""A signal to recipe/job.sh in the moment when it starts a process: that one is ended with the others."""

from __future__ import annotations

import signal
import time

import pytest
from test_job_sh import Job, start  # noqa: F401 (a fixture)

# Holds the start for a while, in the child or before the child is noted, as a busy machine does for milliseconds.
SLOW_SESSION = """
bin=$RUN_DIR/bin; mkdir "$bin"
printf '#!/bin/sh\\ntouch "$RUN_DIR/here"; sleep 0.5; exec %s "$@"\\n' "$(command -v setsid)" >"$bin/setsid"
chmod +x "$bin/setsid"
PATH=$bin:$PATH
"""
SLOW_NOTE = """
list_processes() { touch "$RUN_DIR/here"; sleep 0.5; JOB_RUNNING=("${JOB_RUNNING[@]}"); }
eval "$(declare -f start_process | sed 's/JOB_RUNNING+=("$name");/list_processes; &/')"
"""


@pytest.mark.parametrize("slow", [SLOW_SESSION, SLOW_NOTE], ids=["no session yet", "not noted yet"])
def test_a_process_that_is_just_being_started_is_ended_too(start, slow):  # noqa: F811
    job: Job = start(slow + "step work 'starting it'\nrun_step work sleep 600\n")
    job.wait_for("", "here")
    for _ in range(20):  # wherever it is in that moment: a signal that interrupts a failing test must not fail the job
        job.process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    code, output = job.end()
    assert code == 143 and "in step work: stopping" in output, output
