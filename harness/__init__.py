"""The harness: contract, adapters, oracles, certificates. Importing it loads no engine and no torch."""
