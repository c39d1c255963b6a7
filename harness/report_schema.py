"""The JSON Schema of a conformance report, made from the records that write it.

``conformance/report.schema.json`` is the copy for readers who do not use Python;
``python -m truetap.harness.report_schema FILE`` writes it anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter

from truetap.harness.report import SCHEMA, Report, Verdict


def schema() -> dict[str, Any]:
    """Return the schema: strict, so that a mistyped name is no optional one left out."""
    made = TypeAdapter(Report).json_schema()
    made["properties"]["schema"] = {"const": SCHEMA, "type": "string"}
    made["properties"]["verdict"] = {
        "description": "For readers; truetap works it out again from the clauses.",
        "enum": list(get_args(Verdict)),
        "type": "string",
    }
    made["required"] += ["environment", "clauses", "schema", "verdict"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def validate(document: Mapping[str, Any]) -> Report:
    """Return the report in a document; ``pydantic.ValidationError`` names every mistake.

    Stricter than ``report.load``, which reads what it needs and leaves judging to the gate.
    """
    left = dict(document)
    TypeAdapter(Verdict).validate_python(left.pop("verdict", None))
    return TypeAdapter(Report).validate_json(json.dumps(left))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(schema(), indent=1) + "\n")
