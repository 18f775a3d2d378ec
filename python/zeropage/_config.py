"""A space's configuration: typed, frozen, and checked by name when it is made. The core checks the values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from zeropage import _core
from zeropage._settings import TABLE, Settings

ConfigLike: TypeAlias = "Config | Mapping[str, Any] | str | os.PathLike[str] | None"

_TYPES = {setting.name: setting.type for setting in TABLE}


class _Checked(type):
    """Lists the known settings if a name is unknown, and records the settings that the caller gave."""

    def __call__(cls, **settings: Any) -> Any:
        for name in settings:
            _core.Config().set(name, "")  # raises for an unknown name
        config = super().__call__(**settings)
        object.__setattr__(config, "_given", frozenset(settings))
        return config


@dataclass(frozen=True, kw_only=True, repr=False)
class Config(Settings, metaclass=_Checked):
    """Settings by name; docs/settings.md explains each. Unknown names raise ConfigError."""

    _given = frozenset[str]()

    @staticmethod
    def of(config: ConfigLike) -> Config:
        """Read settings from a Config, a mapping, the path of a JSON file, or None for the defaults.

        Raises ConfigError for a file that cannot be read or does not hold one object of settings.
        """
        if config is None:
            return Config()
        if isinstance(config, Config):
            return config
        if isinstance(config, Mapping):
            return Config(**config)
        try:
            with open(config, encoding="utf-8") as file:
                settings = json.load(file)
        except OSError as error:
            raise _core.ConfigError(f"config {os.fspath(config)!r} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise _core.ConfigError(f"config {os.fspath(config)!r} is not JSON: {error}") from None
        if not isinstance(settings, dict):
            raise _core.ConfigError(f"config {os.fspath(config)!r} must hold one JSON object of settings")
        return Config(**settings)

    @staticmethod
    def _in_force(core: _core.Config) -> Config:
        return Config(**{name: _value(name, text) for name, text in core.items()})

    def given(self) -> dict[str, Any]:
        """Return the settings that the caller named, with their values."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name in self._given}

    def replace(self, **settings: Any) -> Config:
        """Return a copy with these settings changed."""
        return Config(**{**self.given(), **settings})

    def to_dict(self) -> dict[str, Any]:
        """Return every setting with its value."""
        return asdict(self)

    def _core(self) -> _core.Config:
        config = _core.Config()
        for name, value in self.given().items():
            config.set(name, text_of(name, value))
        return config

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.given().items())})"


def text_of(name: str, value: object) -> str:
    """Return the value as the core reads it. Raises ConfigError for disks that one text cannot name."""
    if name == "disk_path" and isinstance(value, list | tuple):  # several disks
        disks = [text_of("", item) for item in value]
        one = len(disks) == 1 and os.path.isdir(disks[0])
        if not all(disks) or not disks or (not one and any(":" in disk for disk in disks)):
            raise _core.ConfigError(
                f"disk_path = {value!r}: each item must be one directory, and no name of several may contain ':'"
            )
        return ":".join(disks)
    return str(os.fspath(value) if isinstance(value, os.PathLike) else value)


def _value(name: str, text: str) -> Any:
    if _TYPES[name] == "bool":
        return text == "true"
    return int(text) if _TYPES[name] in ("bytes", "int") and text.isdigit() else text
