"""The differences between chips, and nothing else. One file per device."""
