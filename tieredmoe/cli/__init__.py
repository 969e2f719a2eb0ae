"""The ``tieredmoe`` command."""

from tieredmoe.cli.app import main

__all__ = ["main"]
