"""``python -m hf_zero.deepspeed train.py …``: the ``deepspeed`` command, under a name that does not
overwrite DeepSpeed's own.
"""

from hf_zero.deepspeed.launcher import main

if __name__ == "__main__":
    main()
