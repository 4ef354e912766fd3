"""The recipe quantization: its configurations, and a few steps of it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers import launched
from tests.integrations.test_recipe_comparisons import BITS, config_of, rows_and_plots


def test_configurations_differ_in_what_is_compared() -> None:
    full, moq_8, moq_4, qat = (
        config_of(BITS / f"{name}.json") for name in ("full", "moq_8", "moq_4", "qat_int4")
    )
    eight, four = moq_8.pop("quantize_training"), moq_4.pop("quantize_training")
    assert eight["quantize_bits"].pop("target_bits") == 8
    assert four["quantize_bits"].pop("target_bits") == 4
    assert qat.pop("quantization_aware_training")["config"] == "int4_weight"
    assert full == moq_8 == moq_4 == qat and eight == four


def test_four_bits_are_told_from_full_precision(tmp_path: Path) -> None:
    config = json.loads((BITS / "moq_4.json").read_text())
    config["quantize_training"]["quantize_bits"]["start_bits"] = 4
    config["quantize_training"]["quantize_schedule"]["schedule_offset"] = 0
    (tmp_path / "four.json").write_text(json.dumps(config))
    command = ["torchrun", "--nproc_per_node", "2", "run_quantization.py", "--tokens", "3072"]
    files = ["--deepspeed_config", str(BITS / "full.json"), str(tmp_path / "four.json")]
    sizes = ["--num_layers", "1", "--evaluations", "2", "--output_dir", str(tmp_path / "out")]
    launched.output([*command, *files, *sizes], BITS, tmp_path / "log.txt")
    rows, plots = rows_and_plots(tmp_path / "out")
    assert [len(plot.findall("{*}polyline")) for plot in plots] == [2, 2, 2]
    full, four = rows[:3], rows[3:]
    assert [row["step"] for row in full] == [row["step"] for row in four] == [0, 3, 6]
    assert full[-1]["loss"] < full[0]["loss"] and four[-1]["loss"] < four[0]["loss"]
    assert full[0]["loss"] != four[0]["loss"]
    lost = [full[-1][f"loss_in_{bits}_bits"] - full[-1]["loss"] for bits in (8, 4)]
    assert 0 < abs(lost[0]) < abs(lost[1])
