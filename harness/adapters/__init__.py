"""Ways to get captures out of one engine each; ``truetap.harness.registry`` finds them by name."""
