"""Record what the pinned releases require of Python and of each other.

    python scripts/pins.py            # writes tests/package/pins.json, from constraints.txt
    python scripts/pins.py --check    # says whether the file names the pinned versions; no network

pip's report holds the metadata of each release: of torch that of the ordinary build, which the
package index has. ``tests/package/test_pins.py`` reads the file, so that no test needs a network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
RECORD = ROOT / "tests" / "package" / "pins.json"


def pins(text: str) -> dict[str, str]:
    """Return the pinned version of each package, by canonical name."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    named = (line.partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version for name, _, version in named}


def recorded(pinned: dict[str, str], report: dict[str, Any]) -> dict[str, Any]:
    """Return version, ``Requires-Python`` and ``Requires-Dist`` of each release in pip's
    ``report``; of the requirements those without an extra that name a pinned package.
    """
    rows: dict[str, Any] = {}
    for item in report["install"]:
        metadata = item["metadata"]
        requires = [
            text
            for text in metadata.get("requires_dist", [])
            if "extra" not in str(Requirement(text).marker or "")
            and canonicalize_name(Requirement(text).name) in pinned
        ]
        rows[canonicalize_name(metadata["name"])] = {
            "version": metadata["version"],
            "requires_python": metadata.get("requires_python") or "",
            "requires": sorted(requires),
        }
    return dict(sorted(rows.items()))


def ask_pip() -> dict[str, Any]:
    """Return pip's report on the pinned releases, which it does not install.

    Settings of pip that name another place than the package index are left out.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PIP_") or name == "PIP_CERT"
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        subprocess.run(
            [*pip, "--ignore-installed", "--no-deps", "--report", report, "-r", CONSTRAINTS],
            env={**environment, "PIP_CONFIG_FILE": os.devnull},
            check=True,
        )
        return dict(json.loads(report.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare versions, write nothing")
    check = parser.parse_args().check
    pinned = pins(CONSTRAINTS.read_text())
    if check:
        rows = json.loads(RECORD.read_text())
        stale = {
            name for name in pinned | rows if pinned.get(name) != rows.get(name, {}).get("version")
        }
        print(f"stale: {', '.join(sorted(stale)) or 'nothing'}")
        return 1 if stale else 0
    RECORD.write_text(json.dumps(recorded(pinned, ask_pip()), indent=1) + "\n")
    print(f"{RECORD.relative_to(ROOT)}: {len(pinned)} releases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
