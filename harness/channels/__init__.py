"""Ways to ask the workers of an engine, put through the REPLY clauses."""
