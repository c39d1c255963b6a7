"""Begins a run of another run's conversations: for captures or trainings that are compared."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from truetap.pipeline import run_folder
from truetap.pipeline.run_folder import RunFolder


def begin(target: RunFolder, run: RunFolder, sections: Sequence[str]) -> None:
    """Copy the conversations and what is held out; claim these sections as ``run`` has them."""
    target.root.mkdir(parents=True, exist_ok=True)
    known = run_folder.read_json(run.root / "made-from.json")
    for section in sections:
        target.claim(section, known[section])
    for path in (run.heldout, run.conversations):  # the last file says that all is there
        shutil.copy(path, target.root / path.name)
