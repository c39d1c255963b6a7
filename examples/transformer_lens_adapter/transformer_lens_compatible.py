#!/usr/bin/env python3
"""A bridge in compatibility mode: weights folded and centred as HookedTransformer did it."""

from transformer_lens_adapter import compatible, main

main(compatible)
