"""The notebook of recipes/notebook, run by a Jupyter kernel: Accelerate's ``notebook_launcher``
forks two ranks from it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_zero.measures.metrics_file import read_metrics, read_rows
from hf_zero.report.run import read_run

NOTEBOOK = Path(__file__).resolve().parents[3] / "recipes" / "notebook" / "train.ipynb"


@pytest.mark.long
def test_the_notebook_trains_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install 'hf-zero[dev]'")
    pytest.importorskip("ipykernel", reason="pip install 'hf-zero[dev]'")
    import nbformat

    root = str(NOTEBOOK.parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.getenv("PYTHONPATH")])))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=place).execute()
    said = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert "2 ranks, loss " in said
    folder = tmp_path / "runs" / "notebook"
    losses = [row["loss"] for row in read_metrics(folder)]
    assert len(losses) == 30 and losses[-1] < losses[0] / 1.5
    (header,) = [row["run"] for row in read_rows(folder) if "run" in row]
    assert (header["stage"], header["ranks"]) == (3, 2)
    assert read_run(folder).trace is not None and (folder / "state").is_dir()
