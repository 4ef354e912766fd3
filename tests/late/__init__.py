"""A simulated accelerator for tests: `tests.late.device` loads it into this process."""
