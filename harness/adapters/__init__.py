"""Ways to get captures out of one engine each; looked up by name in ``truetap.harness.registry``."""
