"""What hf-zero puts into PEFT: adapters trained and saved under ZeRO."""
