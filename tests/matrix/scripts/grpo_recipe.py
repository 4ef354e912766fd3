"""The script of the recipe grpo, named first among the arguments, with a stub of vLLM."""

from __future__ import annotations

import runpy
import sys

import vllm_stub

vllm_stub.install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(f"updates: {vllm_stub.LLM.made[0].generator.updates}", flush=True)
