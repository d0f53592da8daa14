"""The network interfaces of this host and the Gaudi cards that ``hl-smi`` lists, for the doctor."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speechtrain.devices import affinity

_QUERY = ("hl-smi", "-Q", "module_id,driver_version", "-f", "csv,noheader")
_TIMEOUT = 20.0  # seconds, because a card that hangs also makes hl-smi hang


@dataclass(frozen=True)
class Interface:
    """A network interface: its kernel driver (empty for a virtual one) and its state, such as ``up``."""

    name: str
    driver: str
    state: str


@dataclass(frozen=True)
class Card:
    """A Gaudi card: its place on the board and the version of its driver."""

    module: str
    driver: str


def interfaces(folder: Path = Path("/sys/class/net")) -> list[Interface]:
    """Return the interfaces except the loopback, in the order of their names."""
    ports = []
    for path in sorted(folder.glob("*")):
        if path.name != "lo" and (path / "operstate").is_file():
            driver = path / "device" / "driver"
            driver_name = driver.resolve().name if driver.exists() else ""
            state = affinity.read_small_file(path / "operstate")
            ports.append(Interface(path.name, driver_name, state))
    return ports


def cards(query: Sequence[str] = _QUERY) -> list[Card]:
    """Return the cards that ``hl-smi -Q`` lists. Without that program, or if it fails, there are none."""
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    accelerators = []
    for line in process.stdout.splitlines():
        module, comma, driver = line.partition(",")
        if comma:
            accelerators.append(Card(module.strip(), driver.strip()))
    return accelerators


def describe_links(ports: Sequence[Interface], accelerators: Sequence[Card]) -> tuple[bool, str]:
    """Return whether no port of an accelerator is down, and one line about cards and interfaces.

    Gaudi's ports belong to the driver ``habanalabs``. Several cards train together only if these are up.
    """
    parts = []
    if accelerators:
        versions = sorted({card.driver for card in accelerators})
        parts.append(f"{len(accelerators)} Gaudi cards (driver {', '.join(versions)})")
    own_ports = [port for port in ports if port.driver.startswith("habanalabs")]
    down = [port.name for port in own_ports if port.state != "up"]
    if own_ports:
        parts.append(f"{len(own_ports) - len(down)} of {len(own_ports)} ports of the cards are up")
    if down:
        parts.append(
            f"down: {', '.join(down)}. manage_network_ifs.sh --up of the vendor's driver starts them"
        )
    for port in ports:
        if port not in own_ports:
            suffix = f" ({port.driver})" if port.driver else ""
            parts.append(f"{port.name} {port.state}{suffix}")
    return not down, "; ".join(parts) or "no network interface but the loopback"
