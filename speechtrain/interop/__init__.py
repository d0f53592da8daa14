"""Weights to and from other systems: fairseq, Hugging Face, safetensors."""
