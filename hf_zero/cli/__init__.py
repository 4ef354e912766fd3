"""The ``hf-zero`` command: one module per subcommand, registered in ``app.py``."""

from hf_zero.cli.app import main

__all__ = ["main"]
