"""Optimizers that torch lacks."""

from zeropage._lion import Lion

__all__ = ["Lion"]
