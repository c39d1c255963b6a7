#!/usr/bin/env python3
"""All prompts in one tensor, padded on the left, with an attention mask that says so."""

from transformer_lens_adapter import main, padded_left_masked

main(padded_left_masked)
