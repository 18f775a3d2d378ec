"""Hosts on this machine: network namespaces, each with a link of a chosen rate to a switch. Needs root and iproute2."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

INTERFACE = "zp-link"  # of every host
_SWITCH = "zp-switch"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def sent_bytes() -> int:
    """Return the bytes that this host has sent through its link, or through sockets of its own, headers included."""
    links = Path("/sys/class/net")
    link = links / INTERFACE if (links / INTERFACE).exists() else links / "lo"
    return int((link / "statistics/tx_bytes").read_text())


class OneHost:
    """The same for ranks on this host, which nothing limits."""

    def __init__(self, count: int) -> None:
        self.names = ["localhost"] * count

    def address(self, _host: int) -> str:
        return "127.0.0.1"

    def __enter__(self) -> OneHost:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def limit(self, gigabits: float) -> None:
        if gigabits:
            raise SystemExit("ranks on one host have no link to limit: pass --gigabits 0")

    def start(
        self, _host: int, command: Sequence[str], environment: dict[str, str], **pipes: Any
    ) -> subprocess.Popen:
        set_here = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": self.address(0), **environment}
        return subprocess.Popen(command, env=set_here, text=True, **pipes)


class Hosts:
    """`count` hosts while the context lasts. Names are the system's, so only one such context can exist at a time."""

    def __init__(self, count: int) -> None:
        self.names = [f"zp-host-{i}" for i in range(count)]

    def address(self, host: int) -> str:
        return f"10.78.0.{host + 1}"

    def __enter__(self) -> Hosts:
        self._remove()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        _ip("netns", "add", _SWITCH)
        _ip("-n", _SWITCH, "link", "add", "bridge", "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", "bridge", "up")
        for i, name in enumerate(self.names):
            _ip("netns", "add", name)
            port = f"port-{i}"
            _ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", _SWITCH)
            _ip("-n", _SWITCH, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in [*self.names, _SWITCH]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def limit(self, gigabits: float) -> None:
        """Limit what each host sends to so many gigabits a second. 0 lifts the limit."""
        for name in self.names:
            queue = ["tc", "-n", name, "qdisc", "replace" if gigabits else "del", "dev", INTERFACE, "root"]
            # A burst holds a millisecond's bytes, and several packets of 64 KiB, the largest that a host makes.
            burst = max(256 * 1024, int(gigabits * 1e9 / 8 / 1000))
            limit = ["tbf", "rate", f"{int(gigabits * 1e6)}kbit", "burst", str(burst), "latency", "50ms"]
            subprocess.run([*queue, *(limit if gigabits else [])], check=gigabits > 0, capture_output=not gigabits)

    def start(self, host: int, command: Sequence[str], environment: dict[str, str], **pipes: Any) -> subprocess.Popen:
        """Start a process on a host. Its collectives go through the link."""
        set_here = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "MASTER_ADDR": self.address(0), **environment}
        inside = ["ip", "netns", "exec", self.names[host], *command]
        return subprocess.Popen(inside, env=set_here, text=True, **pipes)
