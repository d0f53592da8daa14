"""Exporters of trained recognisers: one file for each target."""
