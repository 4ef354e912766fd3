"""Launch on several hosts from one: the hostfile, the command of each host, and the process that
starts and ends them all.
"""
