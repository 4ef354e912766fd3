"""Every case of TRL's trainers, by the name of its trainer and its own: ``--cases
sft.packed,dpo.adapters``.
"""

from __future__ import annotations

import trl_dpo
import trl_grpo
import trl_more
import trl_reward
import trl_sft
from trl_run import Run

TRAINERS = {
    "sft": trl_sft,
    "dpo": trl_dpo,
    "reward": trl_reward,
    "grpo": trl_grpo,
    "more": trl_more,
}
CASES = {
    f"{trainer}.{name}": case
    for trainer, module in TRAINERS.items()
    for name, case in module.CASES.items()
}

if __name__ == "__main__":
    Run().main(CASES)
