"""Some steps of a small Llama with fused kernels at stages 1 and 3, and with the optimizer on the
CPU: what a checker of memory accesses runs.

    compute-sanitizer --tool memcheck --error-exitcode 9 python scripts/bench/gpu_steps.py
    python scripts/bench/gpu_steps.py --device cpu        # does it run?
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "stage 2, optimizer on the CPU": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}
SHAPE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "use_cache": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", choices=CONFIGURATIONS, help="one of the configurations")
    chosen = parser.parse_args()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_zero

    for name, section in CONFIGURATIONS.items():
        if chosen.only not in (None, name):
            continue
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "kernels": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": section,
        }
        engine = hf_zero.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )[0]
        ids = torch.randint(5, SHAPE["vocab_size"], (2, 64), device=chosen.device)
        for _ in range(chosen.steps):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
        print(f"{name}: loss {loss.item():.4f}", flush=True)
        if not math.isfinite(loss.item()):
            raise SystemExit(1)
        engine.destroy()


if __name__ == "__main__":
    main()
