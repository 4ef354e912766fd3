"""Simulation of a training step of one rank of any world."""

from hf_zero.planning.simulation.figures import CollectiveCount, PhaseBytes, Simulation
from hf_zero.planning.simulation.machine import Machine, Seconds
from hf_zero.planning.simulation.measuring import Measured, measure
from hf_zero.planning.simulation.simulating import simulate

__all__ = [
    "CollectiveCount",
    "Machine",
    "Measured",
    "PhaseBytes",
    "Seconds",
    "Simulation",
    "measure",
    "simulate",
]
