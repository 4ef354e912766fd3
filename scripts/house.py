"""Measures of how the package is built, for a checkout: to be compared before and after a change.

    python scripts/house.py [CHECKOUT]

Prints files and lines of each package, import circles, arrows inside core, the widest classes
(attributes that methods set on self) and parameter lists of ``__init__``, the longest functions.
tests/gloo/test_step_path.py prints the files, functions and frames of a step, a save and a load.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.append(str(HERE))  # behind the checkout, whose hf_zero is the one that runs
SHOWN = 6


def most(values: dict[str, int], count: int = SHOWN) -> str:
    chosen = sorted(values.items(), key=lambda each: -each[1])[:count]
    return ", ".join(f"{name.removeprefix('hf_zero.')} {value}" for name, value in chosen)


def report(checkout: Path) -> None:
    from tests.helpers import house

    modules = house.sources(checkout / "hf_zero")
    folders = house.packages(modules)
    print(f"{'package':24}{'files':>7}{'lines':>9}{'longest':>9}")
    for folder, (files, lines, longest) in folders.items():
        print(f"{folder:24}{files:7}{lines:9,}{longest:9}")
    total = [sum(each[place] for each in folders.values()) for place in (0, 1)]
    print(f"{'all':24}{total[0]:7}{total[1]:9,}{max(each[2] for each in folders.values()):9}")

    found = house.circles(house.graph(modules, everywhere=True))
    print(f"\nimport circles (also inside functions): {len(found)}")
    for circle in found:
        print("  " + " <-> ".join(module.removeprefix("hf_zero.") for module in circle))
    loaded = house.graph(modules, everywhere=False)
    print(f"import circles at load time: {len(house.circles(loaded))}")
    print(f"imports inside zero: {house.inner_arrows(loaded, 'hf_zero.zero')}")

    widths = [width for width in house.class_widths(modules) if not width.frozen]
    print(f"widest classes: {most({each.name: each.attributes for each in widths})}")
    print(f"longest __init__: {most({each.name: each.parameters for each in widths})}")
    print(f"longest functions: {most(house.function_lengths(modules))}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, nargs="?", default=HERE)
    report(parser.parse_args().checkout.resolve())


if __name__ == "__main__":
    main()
