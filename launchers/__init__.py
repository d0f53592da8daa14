"""Ways to start N processes, one file each. Named by ``_target_`` strings only, never imported."""
