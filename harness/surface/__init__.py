"""What a release of vLLM offers to capture code, derived from the release's own files.

``wheel`` brings a release's Python files onto disk. ``definitions`` reads them and ``link`` runs
parts of them, without torch and without the engine; ``strict`` makes an error of whatever truetap
did not prepare for. The sections are built on these, and ``facts`` puts what they found into one
file per release.
"""
