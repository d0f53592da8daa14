"""Network interfaces and cards, from files like the kernel's and a program like hl-smi."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from speechtrain.devices.links import Card, Interface, cards, describe_links, interfaces

PORTS = {"eth0": ("virtio_net", "up"), "ens1": ("habanalabs_en", "up"), "ens2": ("habanalabs_en", "down")}


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A folder like /sys/class/net with the loopback, a bridge without a driver, and ``PORTS``."""
    folder = tmp_path / "net"
    for name in ("lo", "br0", *PORTS):
        (folder / name).mkdir(parents=True)
        (folder / name / "operstate").write_text("unknown\n")
    for name, (driver, state) in PORTS.items():
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / name / "device").mkdir()
        (folder / name / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
        (folder / name / "operstate").write_text(f"{state}\n")
    return folder


def test_interfaces_have_driver_and_state(net: Path) -> None:
    expected = [Interface("br0", "", "unknown")]
    expected += [Interface(name, *PORTS[name]) for name in ("ens1", "ens2", "eth0")]
    assert interfaces(net) == expected


def test_cards_are_the_lines_of_the_query(tmp_path: Path) -> None:
    program = tmp_path / "hl-smi"
    program.write_text("#!/bin/sh\n[ \"$1\" = -Q ] || exit 2\nprintf '0, 1.23.0-a\\n1, 1.23.0-a\\n'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert cards([str(program), "-Q"]) == [Card("0", "1.23.0-a"), Card("1", "1.23.0-a")]
    assert cards([str(program), "-L"]) == []
    assert cards([str(tmp_path / "absent")]) == []


def test_describe_names_the_ports_that_are_down(net: Path) -> None:
    are_up, line = describe_links(interfaces(net), [Card("0", "1.23.0"), Card("1", "1.23.0")])
    assert not are_up
    assert line.startswith("2 Gaudi cards (driver 1.23.0); 1 of 2 ports of the cards are up; down: ens2.")
    assert line.endswith("br0 unknown; eth0 up (virtio_net)")
    assert describe_links([Interface("eth0", "e1000", "down")], []) == (True, "eth0 down (e1000)")
    assert describe_links([], []) == (True, "no network interface but the loopback")
