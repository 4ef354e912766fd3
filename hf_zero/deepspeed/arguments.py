"""Command line arguments of DeepSpeed scripts."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE`` to ``parser``.

    ``--local_rank`` is the script's own, before or after.
    """
    group = parser.add_argument_group(
        "ZeRO", "arguments of DeepSpeed scripts, read by hf_zero.initialize(args=...)"
    )
    group.add_argument(
        "--deepspeed",
        action="store_true",
        default=False,
        help="the script asks this flag whether to use ZeRO",
    )
    group.add_argument(
        "--deepspeed_config",
        metavar="FILE",
        default=None,
        help="the ZeRO configuration, a JSON file",
    )
    return parser
