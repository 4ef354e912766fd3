"""The release of DeepSpeed whose interface the facade follows."""

VERSION = "0.19.8+hfzero"
"""The local part says whose it is."""
MAJOR, MINOR, PATCH = (int(part) for part in VERSION.partition("+")[0].split("."))
GIT = "hf-zero"  # in place of a commit and of a branch
TORCH_INFO = {
    **dict.fromkeys(("version", "cuda_version", "nccl_version", "hip_version"), "0.0"),
    "bf16_support": False,
}
"""What extensions were compiled against: none were, and "0.0" sends scripts to torch itself."""
