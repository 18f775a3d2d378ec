"""Machines to plan for: read from files, or measured here."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from dataclasses import dataclass

from zeropage import _core

_BUILT_IN = pathlib.Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Machine:
    """One node; a plan may use many. Speeds are measured, not the vendor's.

    GB/s are 10^9 bytes a second, tflops 10^12 floating-point operations a second, and sizes are GB of 10^9 bytes.
    `unified`: operators run on the host's memory, as on the CPU. `device_*` and `link_gbs` then have no meaning.
    """

    name: str
    tflops: dict[str, float]  # of one device, in matrix products, by dtype
    host_memory_gb: float  # of the node
    host_gbs: float  # of the node: reads and writes of a fused AdamW's updates on the processor
    copy_gbs: float = 0.0  # reads and writes of one thread on the host; 0: half of host_gbs
    disk_gb: float = 0.0  # of the node, as the other disk_*
    disk_read_gbs: float = 0.0
    disk_write_gbs: float = 0.0
    disk_latency_us: float = 100.0
    disk_beside_ms: float = 0.0  # that a GB of disk traffic costs operators on the processor.
    disk_endurance_tb: float = 0.0  # bytes written until it is worn; 0: unknown
    devices: int = 1  # of the node: as many ranks
    unified: bool = False
    device_memory_gb: float = 0.0  # of one device, as the rest
    device_gbs: float = 0.0
    link_gbs: float = 0.0  # to a device and, at the same time, from it
    network_gbs: float = 0.0  # that one device sends to others
    network_latency_us: float = 20.0
    launch_us: float = 5.0  # of the program's thread for each operator
    operator_us: float = 5.0  # minimum for each operator
    source: str = ""  # of these numbers

    @staticmethod
    def load(name: str | os.PathLike[str]) -> Machine:
        """Load a JSON file of these fields by its path, or a built-in machine by its name. Raises ConfigError."""
        path = _BUILT_IN / f"{os.fspath(name)}.json"
        if not path.is_file():
            path = pathlib.Path(name)
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            known = ", ".join(sorted(p.stem for p in _BUILT_IN.glob("*.json")))
            raise _core.ConfigError(
                f"machine {os.fspath(name)!r}: no such file, and none of those that are built in ({known})"
            ) from None
        except ValueError as error:
            raise _core.ConfigError(f"machine {str(path)!r} is not JSON: {error}") from None
        return Machine.of(fields, str(path))

    @staticmethod
    def measure(directory: str | os.PathLike[str] | None = None, device: str = "auto") -> Machine:
        """Measure this machine in a few seconds: memory, disk at `directory` (None: /var/tmp), and a space's device.

        Raises DiskError.
        """
        from zeropage.plan import _measure

        return _measure.machine(pathlib.Path(directory or "/var/tmp"), device)

    @staticmethod
    def of(fields: object, where: str = "machine") -> Machine:
        """Make a machine of these fields. Raises ConfigError for unknown, missing or impossible ones."""
        if not isinstance(fields, dict):
            raise _core.ConfigError(f"{where} must hold one JSON object")
        known = {f.name: f for f in dataclasses.fields(Machine)}
        if unknown := sorted(set(fields) - set(known)):
            raise _core.ConfigError(
                f"{where}: {unknown[0]!r} is not a field of a machine; those are {', '.join(known)}"
            )
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in fields]
        if missing:
            raise _core.ConfigError(f"{where} lacks {', '.join(missing)}")
        machine = Machine(**fields)
        machine._check(where)
        return machine

    def _check(self, where: str) -> None:
        numbers = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type in ("float", "int")}
        if not isinstance(self.tflops, dict) or not self.tflops:
            raise _core.ConfigError(f'{where}: tflops is by dtype, as {{"bfloat16": 120}}')
        numbers |= {f"tflops of {dtype}": value for dtype, value in self.tflops.items()}
        for name, value in numbers.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
                raise _core.ConfigError(f"{where}: {name} = {value!r} is not a number from 0 on")
        needed = ["host_memory_gb", "host_gbs", "devices"]
        needed += [] if self.unified else ["device_memory_gb", "device_gbs", "link_gbs"]
        needed += ["disk_read_gbs", "disk_write_gbs"] if self.disk_gb else []
        for name in needed:
            if not getattr(self, name):
                raise _core.ConfigError(f"{where}: {name} is to be more than 0")

    def to_dict(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def nodes(self, ranks: int) -> int:
        return -(-ranks // self.devices)

    def speeds(self, ranks: int) -> _core.MachineSpeeds:
        """Return one rank's part of the speeds that a node's ranks share."""
        here = min(ranks, self.devices)
        speeds = _core.MachineSpeeds()
        # A machine without a disk gets one without space.
        speeds.disk_read, speeds.disk_write = (
            max(gbs, 1e-9) * 1e9 / here for gbs in (self.disk_read_gbs, self.disk_write_gbs)
        )
        speeds.disk_latency = self.disk_latency_us * 1e-6
        speeds.disk_beside = self.disk_beside_ms * 1e-12
        speeds.disk_bytes = int(self.disk_gb * 1e9 / here)
        speeds.host_bytes = int(self.host_memory_gb * 1e9 / here)
        speeds.memory = self.host_gbs * 1e9 / here
        speeds.copy = min((self.copy_gbs or self.host_gbs / 2) * 1e9, speeds.memory)
        speeds.is_unified = self.unified
        if not self.unified:
            speeds.device_bytes = int(self.device_memory_gb * 1e9)
            speeds.device_memory = self.device_gbs * 1e9
            speeds.upload = speeds.download = self.link_gbs * 1e9
        if ranks > 1:
            if not self.network_gbs:
                raise _core.ConfigError(f"machine {self.name}: network_gbs is needed to plan for {ranks} ranks")
            speeds.network = self.network_gbs * 1e9
        speeds.network_latency = self.network_latency_us * 1e-6
        speeds.launch = self.launch_us * 1e-6
        return speeds

    def flops(self, dtype: str) -> float:
        """Return operations a second in products of that dtype; for an unknown one, the least of all."""
        return self.tflops.get(dtype, min(self.tflops.values())) * 1e12
