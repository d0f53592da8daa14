"""Hydra's config groups, installed as ``speechtrain.conf`` (this file makes ``pkg://`` find them)."""
