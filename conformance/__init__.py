"""Contract tests for capture APIs: ``pytest --pyargs truetap.conformance --adapter NAME``."""
