"""Measures of a step: times, figures, collectives, memory, operations, traces; none of it costs
anything unless the configuration or the script asks for it.
"""
