"""``hf-zero analyze``: the difficulty of the samples of a dataset."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_zero.cli.printing import AsJson, PrintableTable, print_json, print_table

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)


def analyze(
    dataset: Annotated[
        str,
        typer.Argument(
            help="A folder that save_to_disk has written, a parquet, JSON, CSV or Arrow file, or a "
            "folder of these."
        ),
    ],
    metric: Annotated[
        str,
        typer.Option(
            help="seqlen (tokens of a sample), vocab_rarity (minus the sum of the logarithms of "
            "their shares of all tokens), or module:function, a function of a sample."
        ),
    ] = "seqlen",
    split: Annotated[str | None, typer.Option(help="Of a dataset that has several.")] = None,
    column: Annotated[
        str | None,
        typer.Option(help="The column of tokens or text; default: input_ids, or the only one."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that measure.", min=1)] = 1,
    out: Annotated[
        str | None, typer.Option(help="Folder of the index; default: DATASET-difficulty/METRIC.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the difficulty of each sample once and store the values beside the data, for training
    with data_efficiency.data_sampling.

    Example: hf-zero analyze data/train --metric vocab_rarity --workers 8
    """

    from hf_zero.integrations.datasets.analyze import analyze as analyze_dataset

    index = analyze_dataset(
        dataset, metric, column=column, split=split, workers=workers, out=out, progress=not as_json
    )
    values = {percentile: index.at(percentile) for percentile in PERCENTILES}
    if as_json:
        print_json({**index.header, "folder": index.folder, "percentiles": values})
        return
    table = PrintableTable("metric", "samples", *(f"{percentile} %" for percentile in PERCENTILES))
    table.add_row(index.metric, f"{index.rows:,}", *(f"{value:g}" for value in values.values()))
    print_table(table)
    typer.echo(f'"index_to_metric_path": "{index.folder}"')
