"""Integration of TRL: weights for the engines that generate."""
