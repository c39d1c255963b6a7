"""How a benchmark ends when truetap refuses something: in one sentence, as its command does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from truetap.harness.errors import TruetapError


def run(main: Callable[[], None]) -> None:
    """Run a script's ``main``; what a user can act on ends it with truetap's exit code."""
    try:
        main()
    except TruetapError as error:
        remedy = f"\nremedy: {error.remedy}" if error.remedy else ""
        print(f"{Path(sys.argv[0]).name}: {error}{remedy}", file=sys.stderr)
        sys.exit(error.exit_code)
