"""The batch script for SLURM, with stand-ins for SLURM and Ray: how it ends, and that it ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "extract.sbatch"
ALIVE = "exec tail --pid=$PPID -f /dev/null >/dev/null 2>&1"
"""Ends soon after the script does."""
STAND_INS = {
    "bin/scontrol": "printf 'n1\\nn2\\n'",
    "bin/srun": f'case "$*" in *hostname*) echo 10.0.0.1;; *) echo "$*" >>started; {ALIVE};; esac',
    "bin/sleep": "exit 0",
    ".venv/bin/ray": "exit 0",
    ".venv/bin/python": "cat >/dev/null",
    ".venv/bin/truetap": 'echo "$*" >asked; exit 4',
}


@pytest.mark.parametrize(
    ("changed", "arguments", "code", "said"),
    [
        ({}, ["run.toml"], 4, ""),  # extract's own code
        ({}, [], 2, "give the configuration of a run"),
        ({"bin/scontrol": "exit 1"}, ["run.toml"], 3, "scontrol tells no nodes"),
        ({"bin/srun": "exit 1"}, ["run.toml"], 3, "cannot ask n1"),
        ({".venv/bin/ray": "exit 1"}, ["run.toml"], 3, "did not answer within five minutes"),
        (
            {
                ".venv/bin/ray": "exit 1",
                "bin/sleep": "exec /bin/sleep 0.05",
                "bin/srun": 'case "$*" in *hostname*) echo 10.0.0.1;; *) exit 1;; esac',
            },
            ["run.toml"],
            3,
            "Ray's head on n1 ended",
        ),
        ({".venv/bin/python": "exit 1"}, ["run.toml"], 3, "Ray is not up"),
    ],
    ids=["well", "call", "nodes", "address", "deaf", "died", "few"],
)
def test_it_ends_with_truetaps_codes(
    tmp_path: Path, changed: dict[str, str], arguments: list[str], code: int, said: str
) -> None:
    for name, does in (STAND_INS | changed).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{does}\n")
        file.chmod(0o755)
    slurm = {"JOB_NODELIST": "n[1-2]", "JOB_ID": "7", "JOB_NUM_NODES": "2", "CPUS_PER_TASK": "1"}
    done = subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=tmp_path,
        env=os.environ
        | {f"SLURM_{name}": value for name, value in slurm.items()}
        | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    if code == 4:
        assert (tmp_path / "asked").read_text() == "extract run.toml --ray 10.0.0.1:20007\n"
        head, other = sorted((tmp_path / "started").read_text().splitlines(), key=len)[::-1]
        assert ("-w n1 " in head, "--head" in head) == (True, True)
        assert ("-w n2 " in other, "--head" in other) == (True, False)
