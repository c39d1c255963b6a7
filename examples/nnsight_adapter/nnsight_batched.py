#!/usr/bin/env python3
"""All prompts in one trace, an invoke each: every row that nnsight gives, padding too."""

from nnsight_adapter import batched, main

main(batched)
