"""The environment of a Ray of our own."""

from __future__ import annotations

import subprocess
import sys

ASKED_AFTER_THE_END = """
import tempfile
from pathlib import Path
from cluster.ray_environment import set_environment
set_environment(Path(tempfile.mkdtemp()), haproxy=False)
import ray
try:
    ray.put(1)
except Exception as error:
    print(type(error).__name__, ray.is_initialized())
"""


def test_a_late_question_to_a_ray_that_has_ended_starts_no_other_one() -> None:
    command = [sys.executable, "-c", ASKED_AFTER_THE_END]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[-1] == "False"
