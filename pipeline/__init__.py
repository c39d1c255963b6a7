"""The gated production pipeline: prepare, extract, train, evaluate."""
