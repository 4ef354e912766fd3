"""The ``hf-zero`` command. One module a command; ``app.py`` puts them together."""

from hf_zero.cli.app import main

__all__ = ["main"]
