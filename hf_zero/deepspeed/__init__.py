"""What `import deepspeed` gives where hf-zero answers; imported as ``deepspeed`` through
``facade.py``.
"""
