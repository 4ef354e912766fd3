"""Command line arguments of DeepSpeed scripts."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed``, ``--deepspeed_config FILE`` and, if the script has none, ``--local_rank`` to ``parser``."""
    group = parser.add_argument_group("ZeRO", "arguments of DeepSpeed scripts, read by hf_zero.initialize(args=...)")
    group.add_argument("--deepspeed", action="store_true", default=False, help="the script asks this flag whether to use ZeRO")
    group.add_argument("--deepspeed_config", metavar="FILE", default=None, help="the ZeRO configuration, a JSON file")
    if not any("--local_rank" in action.option_strings for action in parser._actions):
        group.add_argument("--local_rank", type=int, default=-1, help="set by launchers that pass it; LOCAL_RANK counts otherwise")
    return parser
