#!/usr/bin/env python3
"""All prompts in one tensor, padded on the left, and no word of it to TransformerLens."""

from transformer_lens_adapter import main, padded_left

main(padded_left)
