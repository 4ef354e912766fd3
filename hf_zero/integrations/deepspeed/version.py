"""The release of DeepSpeed whose interface the facade follows."""

VERSION = "0.19.8+hfzero"
"""The local part says whose it is."""
MAJOR, MINOR, PATCH = (int(part) for part in VERSION.partition("+")[0].split("."))
GIT = "hf-zero"  # in the place of a commit and of a branch
