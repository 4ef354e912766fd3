"""The modules of `import deepspeed` when hf-zero provides them; imported as ``deepspeed`` through
``facade.py``.
"""
