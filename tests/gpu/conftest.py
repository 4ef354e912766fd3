"""These tests need a GPU. Without one they are not collected: tests/ranks shows the same logic
on the CPU.
"""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
