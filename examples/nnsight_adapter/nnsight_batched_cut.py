#!/usr/bin/env python3
"""All prompts in one trace, an invoke each, the rows of padding cut off."""

from nnsight_adapter import batched_cut, main

main(batched_cut)
