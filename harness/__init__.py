"""The harness: contract, adapters, oracles, certificates. Importing it loads no torch."""
