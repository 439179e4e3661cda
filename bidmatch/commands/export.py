"""`bidmatch export`: from a training run to a bundle."""

from __future__ import annotations

from pathlib import Path

import click

from bidmatch.base.console import emit_json

_EPILOG = """\b
Examples:
  bidmatch export --checkpoint runs/demo/run --out runs/demo/bundle
  bidmatch export --checkpoint runs/hd --out bundles/hd --target-recall 0.995 --quality-bound 0.2 --overwrite
  bidmatch export --checkpoint runs/hd --out bundles/hd --index milvus --uri http://milvus:19530

The encoder is written as ONNX and held against torch. Its 8-bit variant serves only where it loses at most
--quality-bound points of P@1, P@5 and recall@10 on the run's validation queries. M, ef_construction and ef
of the index are the cheapest that reach --target-recall. Where the run has wide heads (--set wide_dim=512 in
training), what the index finds is re-scored with their vectors, kept in 8 bits. The bundle appears whole or
not at all.
"""


@click.command(short_help="Turn a training run into a bundle.", epilog=_EPILOG)
@click.option(
    "--checkpoint",
    "run",
    required=True,
    metavar="RUN",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The --out folder of `bidmatch train`.",
)
@click.option(
    "--out", required=True, metavar="BUNDLE", type=click.Path(path_type=Path), help="The folder to make."
)
@click.option(
    "--target-recall",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.99,
    show_default=True,
    help="Recall@k of exact search that the index must reach.",
)
@click.option(
    "--recall-k",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="That k; the number of phrases where there are fewer.",
)
@click.option(
    "--quality-bound",
    type=click.FloatRange(0),
    default=0.5,
    show_default=True,
    help="Points of P@1, P@5 and recall@10 that the 8-bit encoder may lose.",
)
@click.option(
    "--half-weight",
    default="auto",
    show_default=True,
    metavar="auto|0..2",
    help="Weight of the encoder's half in the score, of 2 in all; `auto`: 1, unless another is better on the "
    "validation queries by more than their noise.",
)
@click.option("--no-rescore", is_flag=True, help="Leave the run's wide heads out: the index alone serves.")
@click.option(
    "--candidates",
    type=click.IntRange(1),
    help="Phrases to re-score for a query; otherwise the least, from 100 up, that do about as well as more "
    "on the validation queries.",
)
@click.option(
    "--index",
    "place",
    type=click.Choice(["hnsw", "milvus"]),
    default="hnsw",
    show_default=True,
    help="Where the index is: in the bundle, or in Milvus at --uri (extra `milvus`). The token is taken from "
    "BIDMATCH_MILVUS_TOKEN.",
)
@click.option("--uri", help="Of the Milvus deployment, such as http://milvus:19530; without credentials.")
@click.option(
    "--alias", help="Milvus alias that leads to the new collection when all is there; default: bidmatch."
)
@click.option(
    "--index-type",
    type=click.Choice(["HNSW", "DISKANN", "AUTOINDEX", "FLAT"]),
    help="Kind of Milvus' index; default: HNSW.",
)
@click.option("--threads", type=click.IntRange(0), default=0, help="CPU threads; 0 (the default): all cores.")
@click.option(
    "--build-threads",
    type=click.IntRange(0),
    default=0,
    help="Threads that build the index; 0 (the default): one up to 100,000 phrases, which makes repeated "
    "exports the same byte for byte, and --threads beyond.",
)
@click.option("--overwrite", is_flag=True, help="Replace a bundle that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the new bundle's manifest as JSON.")
def command(
    run: Path,
    out: Path,
    target_recall: float,
    recall_k: int,
    quality_bound: float,
    half_weight: str,
    no_rescore: bool,
    candidates: int | None,
    place: str,
    uri: str | None,
    alias: str | None,
    index_type: str | None,
    threads: int,
    build_threads: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Turn a training run into a bundle: ONNX encoder, HNSW index, vectors and phrases, verified."""
    from export.build import ExportOptions, build_bundle, check_free
    from export.source import from_run

    check_free(out, overwrite=overwrite)
    options = ExportOptions(
        target_recall=target_recall,
        recall_k=recall_k,
        quality_bound=quality_bound,
        threads=threads,
        build_threads=build_threads,
        half_weight=_weight(half_weight),
        rescore=not no_rescore,
        candidates=candidates,
        milvus=_milvus(place, uri, alias, index_type),
    )
    manifest = build_bundle(from_run(run), out, options, overwrite=overwrite)
    if as_json:
        emit_json(manifest.model_dump(mode="json"))
    else:
        click.echo(f"{out}  {manifest.bundle_id}")


def _milvus(place: str, uri: str | None, alias: str | None, index_type: str | None) -> dict[str, str] | None:
    """Fields of `export.milvus.MilvusTarget`; None where the index is a file.

    Raises:
        click.UsageError: an option does not fit the others.
    """
    given = {"uri": uri, "alias": alias, "index_type": index_type}
    named = {name: value for name, value in given.items() if value is not None}
    if place == "hnsw":
        if named:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in named)
            raise click.UsageError(f"{flags}: of Milvus alone; add --index milvus")
        return None
    if uri is None:
        raise click.UsageError("--index milvus needs --uri, such as --uri http://milvus:19530")
    return named


def _weight(given: str) -> float | None:
    """The weight that was asked for; None for `auto`.

    Raises:
        click.BadParameter: it is no number in 0..2.
    """
    if given == "auto":
        return None
    try:
        weight = float(given)
    except ValueError:
        weight = -1.0
    if not 0 <= weight <= 2:
        raise click.BadParameter(
            f"{given!r} is neither `auto` nor a number from 0 to 2", param_hint="'--half-weight'"
        )
    return weight
