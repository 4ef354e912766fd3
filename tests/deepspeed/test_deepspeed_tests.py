"""The table of DeepSpeed's own tests is that of the figures; what a run has left open goes on."""

from __future__ import annotations

import json

from scripts.deepspeed_tests import figures, reasons


def test_the_table_is_that_of_the_figures_and_says_why_a_failure_stays() -> None:
    rows = json.loads(figures.RAW.read_text())
    assert figures.table(rows) == figures.TABLE.read_text()
    file = "ops/adam/test_zf_torch_adam.py"
    failed = {"TestIt::test": "NotBuiltError: no", "TestIt::test_other": "NotBuiltError: no"}
    peer = {"of": "deepspeed 0", "passed": list(failed)}
    facade = {"failed": failed, "not_run": []}
    row = {"kind": "public", "private": [], "peer": peer, "facade": facade}
    rows = {"ref": "0", "all": {"public": 1, "mixed": 0, "internals": 0}, "to_run": []}
    other = row | {"peer": peer | {"passed": ["TestIt::test"]}}
    text = figures.table(rows | {"files": {file: row, "b.py": other}})
    why = reasons.ON_PURPOSE[file]
    assert f"| {file} | public | 2 of 2 | on purpose: {why} |" in text
    assert "| b.py | public | 1 of 1 | NotBuiltError: no |" in text
    assert "| public | 2 of 1 | 3 | 3 | 0 (0%) | 3 | 2 | 3 |" in text
