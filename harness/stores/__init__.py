"""Stores of captures, put through the STORE clauses."""
