"""The network interfaces and the Gaudi cards of this host, for the command ``doctor``."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speechtrain.devices import affinity

_QUERY = ("hl-smi", "-Q", "module_id,driver_version", "-f", "csv,noheader")
_TIMEOUT_SECONDS = 20.0  # A card that hangs also makes hl-smi hang.


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    driver: str  # its kernel driver, empty for a virtual interface
    state: str  # such as "up" or "down"


@dataclass(frozen=True)
class Card:
    """A Gaudi card."""

    module: str  # the number of its position on the board
    driver: str  # the version of its driver


def interfaces(folder: Path = Path("/sys/class/net")) -> list[Interface]:
    """Return the interfaces that Linux lists in ``folder``, except the loopback, sorted by name."""
    ports = []
    for path in sorted(folder.glob("*")):
        state_file = path / "operstate"
        if path.name != "lo" and state_file.is_file():
            driver = path / "device" / "driver"
            driver_name = driver.resolve().name if driver.exists() else ""
            state = affinity.read_small_file(state_file)
            ports.append(Interface(path.name, driver_name, state))
    return ports


def cards(query: Sequence[str] = _QUERY) -> list[Card]:
    """Return the Gaudi cards that ``hl-smi`` lists, none if the program is missing or fails."""
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    accelerators = []
    for line in process.stdout.splitlines():
        module, comma, driver = line.partition(",")
        if comma:
            accelerators.append(Card(module.strip(), driver.strip()))
    return accelerators


def describe_links(ports: Sequence[Interface], accelerators: Sequence[Card]) -> tuple[bool, str]:
    """Return whether all ports of the Gaudi cards are up, and one line about cards and interfaces.

    The ports of the cards have the driver ``habanalabs``. Several cards can train together only if all are
    up.
    """
    parts = []
    if accelerators:
        versions = sorted({card.driver for card in accelerators})
        parts.append(f"{len(accelerators)} Gaudi cards (driver {', '.join(versions)})")
    card_ports = [port for port in ports if port.driver.startswith("habanalabs")]
    down = [port.name for port in card_ports if port.state != "up"]
    if card_ports:
        up_count = len(card_ports) - len(down)
        parts.append(f"{up_count} of {len(card_ports)} ports of the cards are up")
    if down:
        parts.append(
            f"down: {', '.join(down)}. manage_network_ifs.sh --up of the vendor's driver starts them"
        )
    for port in ports:
        if port not in card_ports:
            suffix = f" ({port.driver})" if port.driver else ""
            parts.append(f"{port.name} {port.state}{suffix}")
    text = "; ".join(parts) or "no network interface but the loopback"
    return not down, text
