"""speculators' trainer, unmodified, with truetap's backend registered.

    python -m truetap.pipeline.speculators_train --hidden-states-backend truetap ...
    torchrun --nproc-per-node 8 -m truetap.pipeline.speculators_train ...

All options are those of ``python -m speculators.train``, and ``--truetap-shards`` and
``--truetap-allow-uncertified``. Exit codes of refusals are truetap's.
"""

from __future__ import annotations

import re
import runpy
import sys

from truetap.harness.errors import TruetapError


def main() -> None:
    """Register the backend, then be ``speculators.train``."""
    try:
        # The trainer reads the registry when it is imported.
        from truetap.pipeline import speculators_backend  # noqa: F401

        runpy.run_module("speculators.train", run_name="__main__", alter_sys=True)
    except TruetapError as error:
        remedy = f"\nremedy: {error.remedy}" if error.remedy else ""
        print(f"truetap: {sentence(error)}{remedy}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)


def sentence(error: TruetapError) -> str:
    """Return what an error says, also if a loading process's traceback was put around it."""
    text = str(error).strip()
    if "Original Traceback" not in text:
        return text
    return re.sub(r"^[\w.]+: ", "", text.splitlines()[-1])


if __name__ == "__main__":
    main()
