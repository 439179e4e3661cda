"""What a comparison holds: the figures of each run, and of each row over its runs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

# Bin ("all", "head", "torso", "tail") -> measure ("P@1", ...) -> percent.
Figures = dict[str, dict[str, float]]


class Spread(BaseModel):
    """One figure over the runs of a row.

    Attributes:
        mean: over the runs; NaN (null in JSON) where there is nothing to measure.
        sd: sample standard deviation over the runs; None with fewer than two.
        n: runs.
    """

    mean: float
    sd: float | None = None
    n: int = 1


class Run(BaseModel):
    """One training run, or the one ranking of a system that was not trained here.

    Attributes:
        seed: of the run; None for a ranking.
        folder: the run folder, from the comparison's folder; None for a ranking.
        error: why there are no figures, or None.
        model_id: of the trained model.
        device: what it was trained on, such as "cuda, bf16".
        seconds: spent training, evaluation and reading aside; None where unknown.
        peak_host_bytes: largest resident memory of the process during the run, or None.
        peak_gpu_bytes: largest memory that the run's tensors held on the GPU, or None.
        views: view -> figures.
    """

    seed: int | None = None
    folder: str | None = None
    error: str | None = None
    model_id: str | None = None
    device: str | None = None
    seconds: float | None = None
    peak_host_bytes: int | None = None
    peak_gpu_bytes: int | None = None
    views: dict[str, Figures] = {}


class Row(BaseModel):
    """One method.

    Attributes:
        name: of the row.
        kind: `trained` here, `ranking` of another system, or `lexical` baseline.
        given: what it was made from: the item of --presets, or the file.
        served: the view that a bundle of it would serve; None where no run has figures.
        dim: served width; None where it has none.
        wide_dim: width of the vectors that re-score, or None.
        config: all settings but the seed; None for what was not trained here.
        runs: the runs, failed ones too.
        views: view -> bin -> measure -> spread over the runs that have figures.
        seconds: training time over those runs.
        peak_host_bytes: likewise.
        peak_gpu_bytes: likewise.
    """

    name: str
    kind: Literal["trained", "ranking", "lexical"]
    given: str
    served: str | None = None
    dim: int | None = None
    wide_dim: int | None = None
    config: dict[str, Any] | None = None
    runs: list[Run] = []
    views: dict[str, dict[str, dict[str, Spread]]] = {}
    seconds: Spread | None = None
    peak_host_bytes: Spread | None = None
    peak_gpu_bytes: Spread | None = None

    @property
    def errors(self) -> list[tuple[int | None, str]]:
        """Seed and reason of each run that failed."""
        return [(run.seed, run.error) for run in self.runs if run.error is not None]

    def figure(self, measure: str, part: str = "all") -> Spread | None:
        """A measure of the served view, over all phrases or in a bin; None where there is none."""
        return None if self.served is None else self.views[self.served][part].get(measure)


class Difference(BaseModel):
    """How a row's measure differs from the reference's.

    Attributes:
        mean: of the differences by seed, in percentage points.
        half_width: of the 95% interval of that mean over the seeds; None with fewer than two.
        query_error: standard error of the difference over queries, from above; P@1 only, else None.
        within_noise: whether the difference is no larger than those; None where neither is known.
    """

    mean: float
    half_width: float | None
    query_error: float | None
    within_noise: bool | None


class Differences(BaseModel):
    """Differences of all other rows from one.

    Attributes:
        reference: name of that row.
        why: why it is the reference: `first` or `best`, by P@1.
        rows: name -> measure -> difference.
    """

    reference: str
    why: Literal["first", "best"]
    rows: dict[str, dict[str, Difference]]


class Data(BaseModel):
    """What was trained and measured on.

    Attributes:
        format: as the reader recognised it.
        files: as given.
        fingerprint: of the pairs.
        split: how the held-out queries were chosen.
        phrases: L.
        train_queries: queries of the training part; a run keeps a share of them for validation.
        test_queries: held-out queries, all of them measured.
        test_pairs: relevant pairs among those.
    """

    format: str
    files: list[str]
    fingerprint: str
    split: dict[str, Any]
    phrases: int
    train_queries: int
    test_queries: int
    test_pairs: int


class Comparison(BaseModel):
    """Everything in compare.json.

    Attributes:
        created: when it was last written, UTC.
        bidmatch: version.
        data: see Data.
        seeds: of the training runs.
        base: preset beneath all rows, or None.
        assignments: settings of all rows.
        depth: to which rankings from elsewhere were cut.
        propensity: A and B.
        rows: in the order given.
        query_error: row -> standard error of its P@1 over queries, in percentage points.
        differences: from the first row, and from the best one where that is another.
        views: row -> other view -> measure -> its difference from the row's served view.
    """

    created: str
    bidmatch: str
    data: Data
    seeds: list[int]
    base: str | None
    assignments: list[str]
    depth: int
    propensity: dict[str, float]
    rows: list[Row] = []
    query_error: dict[str, float] = {}
    differences: list[Differences] = []
    views: dict[str, dict[str, dict[str, Difference]]] = {}
