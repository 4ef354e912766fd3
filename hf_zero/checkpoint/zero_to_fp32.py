"""Make one model folder out of a sharded checkpoint: ``python zero_to_fp32.py . OUT`` in the folder
that holds ``latest``.

hf-zero copies this file beside its checkpoints, under the file name of DeepSpeed's script. It
writes float32 safetensors with Hugging Face's index; ``hf-zero convert-checkpoint`` does the same
with more options.
"""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "checkpoint_dir", help="the folder that holds `latest`, or one checkpoint in it"
    )
    parser.add_argument("output_dir", help="the folder to write the model to")
    parser.add_argument(
        "-t", "--tag", help="which checkpoint (default: the one that `latest` names)"
    )
    parser.add_argument(
        "--max_shard_size", default="5GB", help="largest size of one file (default: %(default)s)"
    )
    parser.add_argument(
        "--safe_serialization",
        action="store_true",
        help="accepted; safetensors is what is always written",
    )
    parser.add_argument(
        "--exclude_frozen_parameters",
        action="store_true",
        help="leave out parameters that were not trained",
    )
    parser.add_argument(
        "--no_verify",
        action="store_true",
        help="do not compare what is read with the hashes in the manifest",
    )
    parser.add_argument(
        "-d", "--debug", action="store_true", help="show a Python traceback on errors"
    )
    options = parser.parse_args()
    from hf_zero.checkpoint.consolidate import convert_zero_checkpoint_to_fp32_state_dict
    from hf_zero.errors import HfZeroError

    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            options.checkpoint_dir,
            options.output_dir,
            max_shard_size=options.max_shard_size,
            tag=options.tag,
            exclude_frozen_parameters=options.exclude_frozen_parameters,
            verify=not options.no_verify,
        )
    except HfZeroError as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
