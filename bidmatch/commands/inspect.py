"""`bidmatch inspect`: what is in a bundle."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bidmatch.base.console import emit_json
from bidmatch.base.errors import ConfigError
from bidmatch.base.files import atomic_file, refuse_inside
from bidmatch.reliability import reliability_page, summary_of
from export.bundle.format import VECTORS, Manifest, collection_of
from export.bundle.read import open_bundle, read_manifest

_EPILOG = """\b
Examples:
  bidmatch inspect runs/demo/bundle
  bidmatch inspect runs/demo/bundle --html calibration.html
  bidmatch inspect runs/demo/bundle --json | jq .index.curve
"""


@click.command(short_help="Print what is in a bundle.", epilog=_EPILOG)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Read and verify every file, or the manifest alone.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write a page with the reliability plot of the bundle's calibration.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def command(bundle: Path, verify: bool, html: Path | None, as_json: bool) -> None:
    """Print what is in BUNDLE, after verifying it."""
    columns: list[str] | None = None
    if verify:
        with open_bundle(bundle) as opened:
            manifest, columns = opened.manifest, opened.phrases.column_names
    else:
        manifest = read_manifest(bundle)
    if html is not None:
        if manifest.calibration is None:
            raise ConfigError(f"{bundle} has no calibration to plot", hint="Leave --html out.")
        refuse_inside(html, bundle, "bundle")
        with atomic_file(html) as partial:
            partial.write_text(reliability_page(manifest, manifest.calibration), encoding="utf-8")
    if as_json:
        emit_json({"path": str(bundle), "verified": verify, **manifest.model_dump(mode="json")})
        return
    console = Console(highlight=False)
    for table in _tables(bundle, manifest, columns):
        console.print(table)
    console.print(
        f"All {len(manifest.files) + 1} files verified." if verify else "Files not verified (--no-verify).",
        style="green" if verify else "yellow",
    )


def _tables(path: Path, manifest: Manifest, columns: list[str] | None) -> list[Table]:
    return [
        _summary(path, manifest, columns),
        _files(manifest),
        _encoders(manifest),
        _curve(manifest),
        *_rescoring(manifest),
        *_weights(manifest),
        *_quality(manifest),
        *_calibration(manifest),
        _licences(manifest),
    ]


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=bool(headers))
    for position, header in enumerate(headers):
        table.add_column(header, justify="left" if position == 0 else "right", overflow="fold")
    return table


def _summary(path: Path, manifest: Manifest, columns: list[str] | None) -> Table:
    model, counts, split = manifest.model, manifest.counts, manifest.data.split
    rows = {
        "folder": str(path),
        "format": str(manifest.format_version),
        "created": manifest.created,
        "model": f"{model.id} ({model.kind}, started from {model.name})",
        "phrases": f"{counts.phrases:,}" + ("" if columns is None else f" (columns: {', '.join(columns)})"),
        "vectors": f"{manifest.dim} wide ({manifest.encoder_dim} encoder, "
        f"{manifest.dim - manifest.encoder_dim} classifier), inner product",
        "queries": f"{counts.train_queries:,} training, {counts.validation_queries:,} validation, "
        f"{counts.test_queries:,} test",
        "data": f"fingerprint {manifest.data.fingerprint}; split {split.kind}, "
        f"share {split.share:g}, seed {split.seed}",
        "made with": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
        "measured on": ", ".join(f"{name} {value}" for name, value in manifest.measured_on.items()),
    }
    if manifest.milvus is not None:
        where, name = manifest.milvus, collection_of(manifest.files[VECTORS].sha256)
        rows["index in Milvus"] = f"{where.index_type} at {where.uri}, collection {name}, alias {where.alias}"
    if model.not_in_index:
        rows["not in the index"] = model.not_in_index
    table = _table(f"Bundle {manifest.bundle_id}")
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _files(manifest: Manifest) -> Table:
    table = _table("Files", "file", "bytes", "SHA-256")
    for name, record in manifest.files.items():
        table.add_row(name, f"{record.bytes:,}", record.sha256[:16] + "…")
    return table


def _encoders(manifest: Manifest) -> Table:
    encoder = manifest.encoder
    parity = encoder.parity
    table = _table(
        f"Encoder: {encoder.precision} serves; ONNX opset {encoder.opset}; cosine with torch at least "
        f"{parity.min_cosine} on {parity.queries:,} texts; bound {encoder.quality_bound:g} points",
        *("", "MB", "ms/query", "ms/query of 32", "P@1", "P@5", "recall@10"),
    )
    for candidate in encoder.candidates:
        figures = [f"{candidate.quality[name]:.2f}" if name in candidate.quality else "-" for name in _JUDGED]
        table.add_row(
            candidate.precision + (" *" if candidate.chosen else ""),
            f"{candidate.bytes / 1e6:.1f}",
            f"{candidate.ms_per_query:.3f}",
            f"{candidate.ms_per_query_batched:.3f}",
            *figures,
        )
    table.caption = "\n".join(
        f"{candidate.precision}: {candidate.reason}" for candidate in encoder.candidates
    )
    table.caption_justify = "left"
    return table


_JUDGED = ("P@1", "P@5", "recall@10")


def _curve(manifest: Manifest) -> Table:
    index = manifest.index
    verdict = "reached" if index.reached else "NOT reached"
    table = _table(
        f"Index: recall@{index.k} {index.recall:.4f}, target {index.target_recall:g} {verdict}, on "
        f"{index.queries:,} {index.query_source}; built in {index.build_seconds:g} s "
        f"({index.build_threads} thread{'s' * (index.build_threads > 1)}), asked for {index.results} results",
        *("M", "ef_construction", "ef", f"recall@{index.k}", "mean µs", "p99 µs"),
    )
    for point in index.curve:
        chosen = (point.M, point.ef_construction, point.ef) == (index.M, index.ef_construction, index.ef)
        table.add_row(
            f"{point.M}" + (" *" if chosen else ""),
            str(point.ef_construction),
            str(point.ef),
            f"{point.recall:.4f}",
            f"{point.mean_us:,.0f}",
            f"{point.p99_us:,.0f}",
        )
    return table


def _rescoring(manifest: Manifest) -> list[Table]:
    """What re-scoring costs and brings; nothing where there is none."""
    record = manifest.rescore
    if record is None:
        return []
    names = list(record.narrow)
    table = _table(
        f"Re-scoring: {record.candidates} candidates ({record.per_match} a match), {record.dim} numbers "
        f"a phrase in 8 bits ({record.encoder_dim} encoder, {record.dim - record.encoder_dim} classifier), "
        f"{record.bytes / 1e6:,.1f} MB, {record.microseconds:,.0f} µs a query; percent on "
        f"{record.queries:,} validation queries",
        *("", "µs", *names),
    )

    def row(label: str, cost: str, quality: dict[str, float]) -> None:
        table.add_row(label, cost, *(f"{quality[name]:.2f}" for name in names))

    row("index alone", "-", record.narrow)
    row("re-scored *", f"{record.microseconds:,.0f}", record.rescored)
    for point in record.curve:
        row(f"{point.candidates} from exact search", f"{point.microseconds:,.0f}", point.quality)
    table.caption = record.reason
    table.caption_justify = "left"
    return [table]


def _weights(manifest: Manifest) -> list[Table]:
    """How much each half of a vector counts; nothing for a model of one head."""
    if manifest.blend is None:
        return []
    halves = {"narrow": manifest.blend.narrow, "wide": manifest.blend.wide}
    tried = manifest.blend.narrow.curve
    table = _table(
        "Weights of the halves, encoder : classifier; gain over 1 : 1 in points of P@1 + P@5 + recall@10, "
        "with its standard error",
        *("", "weights", *(f"{point.encoder:g}" for point in tried)),
    )
    notes = []
    for name, weights in halves.items():
        if weights is None:
            continue
        gains = (f"{point.gain:+.2f} ± {point.error:.2f}" for point in weights.curve)
        table.add_row(name, f"{weights.pair[0]:g} : {weights.pair[1]:g}", *gains)
        notes.append(f"{name}: {weights.reason}")
    table.caption, table.caption_justify = "\n".join(notes), "left"
    return [table]


def _calibration(manifest: Manifest) -> list[Table]:
    """How far the relevance can be trusted; nothing where there is none."""
    record = manifest.calibration
    if record is None:
        return []
    table = _table(f"Calibration: {summary_of(record)}", "relevance", "phrases", "predicted", "clicked")
    for one in record.bins:
        shares = (f"{one.predicted:.3f}", f"{one.clicked:.3f}") if one.pairs else ("-", "-")
        table.add_row(f"{one.low:g} to {one.high:g}", f"{one.pairs:,}", *shares)
    return [table]


def _quality(manifest: Manifest) -> list[Table]:
    """What the bundle finds of the validation queries; nothing where there are none."""
    quality = manifest.quality
    if not quality.queries:
        return []
    constants = ", ".join(f"{name} = {value:g}" for name, value in quality.propensity.items())
    table = _table(
        f"Percent on {quality.queries:,} validation queries ({constants})",
        *("", "exact search", "index", "served"),
    )
    for name, value in quality.exact.items():
        others = (
            f"{figures[name]:.2f}" if name in figures else "-" for figures in (quality.index, quality.served)
        )
        table.add_row(name, f"{value:.2f}", *others)
    return [table]


def _licences(manifest: Manifest) -> Table:
    table = _table("Licences", "what", "licence", "source")
    for licence in manifest.licences:
        table.add_row(licence.what, licence.licence, licence.source)
    return table
