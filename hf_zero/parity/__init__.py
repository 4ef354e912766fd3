"""Comparison of a script's training with the same script over untouched torch."""
