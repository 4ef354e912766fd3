"""Several hosts started from one: the hostfile, what each host runs, and the process that starts
and ends them all.
"""
