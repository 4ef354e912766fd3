"""The run under FSDP2 that tests go on from."""

import pytest

from tests.gloo.fsdp import mean, write
from tests.helpers.processes import run_processes


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The folder of its checkpoints, and its losses."""
    folder = tmp_path_factory.mktemp("fsdp")
    return folder, mean(run_processes(2, write, str(folder)))
