"""Integration of PEFT: adapters trained and saved under ZeRO."""
