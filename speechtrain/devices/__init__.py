"""What differs between chips, and nothing else. One file per device."""
