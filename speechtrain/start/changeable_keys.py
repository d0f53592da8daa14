"""The keys of a config that may change when a run continues. A change of any other key makes another run."""

from __future__ import annotations

PER_START = ("resume", "accept_code", "dry_run")
"""Keys that apply to one start of a run only."""

_CHANGEABLE = (
    *("world_size", "run_dir", "launcher", "tracking", "device", "decoder", "final_decoder", *PER_START),
    *("data.workers", "data.cache", "data.timeout_seconds", "data.max_bad", "data.max_bad_share"),
    *("data.max_decoded_seconds", "data.decoded_gib"),
)
_CHANGEABLE_LIMITS = (
    *("max_steps", "max_epochs", "max_hours", "target", "log_every", "validate_every", "save_every"),
    *("keep", "on_save_error", "on_collapse", "max_bad_updates", "timeout_seconds", "profile", "shard"),
    "checkpoint_layers",  # It does not change the losses.
)
_ALL_CHANGEABLE = (*_CHANGEABLE, *(f"trainer.{key}" for key in _CHANGEABLE_LIMITS))


def may_change(key: str) -> bool:
    """Return whether the dotted ``key`` may change when a run continues."""
    if key.endswith(".run_dir"):  # A part that writes files, such as a tracker, repeats the run directory.
        return True
    return any(f"{key}.".startswith(f"{prefix}.") for prefix in _ALL_CHANGEABLE)
