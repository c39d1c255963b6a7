"""What real pipelines did wrong, by what it concerns: layers, rows, replies, the engine."""
