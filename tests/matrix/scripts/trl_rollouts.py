"""TRL's trainers that sample from vLLM (a stub); one process samples from the model itself."""

from __future__ import annotations

import vllm_stub

vllm_stub.install()

import trl  # noqa: E402
import trl_cases  # noqa: E402
from trl_cases import ADAPTED, sampled  # noqa: E402
from trl_drawing import prompts  # noqa: E402
from trl_run import Run  # noqa: E402


def even(run):
    """Of one length: TRL's online DPO trainer pads those of a server before it counts tokens."""
    tokenizer = plain_tokenizer(run)

    def cut(row):
        return {"prompt": tokenizer.decode(tokenizer(row["prompt"]).input_ids[:5])}

    return prompts(run).map(cut)


def plain_tokenizer(run):
    return vllm_stub.tokenizer_of(run.model("untied"))


TRAINERS = {
    "grpo": lambda mode, more: trl_cases.grpo(vllm_importance_sampling_correction=False, **more),
    "adapters": lambda mode, more: trl_cases.grpo(
        vllm_importance_sampling_correction=False, **ADAPTED, **more
    ),
    "rloo": lambda mode, more: sampled(trl.RLOOTrainer, trl.RLOOConfig, **more),
    "online": lambda mode, more: trl_cases.online(even, plain_tokenizer, **more),
}


def rollout(trainer, mode):
    def train(run, case):
        if run.world == 1:
            return TRAINERS[trainer](mode, {})(run, case)
        more = {"use_vllm": True, "vllm_mode": mode}
        server = None
        if mode == "server":
            server = vllm_stub.serve(run.model("untied")) if run.rank == 0 else None
            more["vllm_server_base_url"] = server.url if server else "http://127.0.0.1:1"
        report = TRAINERS[trainer](mode, more)(run, case)
        made = [server.generator] if server else [each.generator for each in vllm_stub.LLM.made]
        vllm_stub.LLM.made.clear()
        sent = server.paths.count("/update_weights") if server else None
        return {**report, "updates": made[0].updates if made else None, "messages": sent}

    return train


CASES = {
    f"{trainer}.{mode}": rollout(trainer, mode)
    for trainer, mode in (
        ("grpo", "server"),
        ("adapters", "colocate"),
        ("rloo", "colocate"),
        ("online", "server"),
        ("online", "colocate"),
    )
}

if __name__ == "__main__":
    Run().main(CASES)
