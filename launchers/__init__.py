"""Launchers, one per file: ways to start N processes. Named by ``_target_`` strings, never imported."""
