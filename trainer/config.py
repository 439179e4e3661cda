"""Everything that decides a training run, typed, with its defaults; printed in full with every run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

# Every number has an upper bound, so that a slip of the keyboard is refused by its field and not by the
# allocator an hour later. These are far above what anyone trains with: labels (the largest log of the papers
# has 450 million), what a batch makes at once, the weight of a term of the loss, and a learning rate:
# what float32 holds, as training itself says where a smaller one is too large to converge.
MOST_LABELS = 1_000_000_000
MOST_AT_ONCE = 1_000_000
MOST_WEIGHT = 1e6
MOST_RATE = 1e38


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BagEncoderConfig(_Strict):
    """The papers' frugal encoder: mean of word-piece vectors, then ASTEC's residual block.

    Attributes:
        pretrained: where vocabulary and first word vectors come from: `minilm-l6` (packaged), or the name
            or path of a Hugging Face encoder.
        dropout: on the mean vector, in training.
        word_dropout: probability that a word piece is left out of a text, in training.
    """

    kind: Literal["bag"] = "bag"
    pretrained: str = "minilm-l6"
    dropout: float = Field(0.0, ge=0, lt=1)
    word_dropout: float = Field(0.0, ge=0, lt=1)


class TransformerEncoderConfig(_Strict):
    """A Hugging Face encoder.

    Attributes:
        pretrained: `minilm-l6` (packaged), or any encoder's name or path.
        pooling: `mean` over the tokens, or the `cls` token.
        frozen_layers: this many lower layers (and the embeddings) stay as they are and their activations
            are computed once and cached, so that only what lies above them trains; 0 trains everything.
    """

    kind: Literal["transformer"] = "transformer"
    pretrained: str = "minilm-l6"
    pooling: Literal["mean", "cls"] = "mean"
    frozen_layers: int = Field(0, ge=0, le=1000)


class InceptionEncoderConfig(_Strict):
    """InceptionXML's idea: convolutions of several widths over word-piece vectors, pooled and joined.

    Attributes:
        pretrained: where vocabulary and first word vectors come from, as for `bag`.
        widths: tokens that each group of filters spans.
        filters: filters of each width.
        dropout: on the pooled features, in training.
        word_dropout: probability that a word piece is left out of a text, in training.
    """

    kind: Literal["inception"] = "inception"
    pretrained: str = "minilm-l6"
    widths: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field((1, 2, 3), min_length=1, max_length=16)
    filters: int = Field(128, ge=1, le=4096)
    dropout: float = Field(0.0, ge=0, lt=1)
    word_dropout: float = Field(0.0, ge=0, lt=1)


class CombinedEncoderConfig(_Strict):
    """The bag's features beside a transformer's, joined before the heads.

    Attributes:
        pretrained: encoder that gives the vocabulary of both, the first word vectors and the transformer.
        pooling: of the transformer.
        frozen_layers: lower layers of the transformer that do not train; -1: all of them.
        dropout: on the bag's mean vector, in training.
        word_dropout: probability that a word piece is left out of the bag, in training.
    """

    kind: Literal["combined"] = "combined"
    pretrained: str = "minilm-l6"
    pooling: Literal["mean", "cls"] = "mean"
    frozen_layers: int = Field(-1, ge=-1, le=1000)
    dropout: float = Field(0.0, ge=0, lt=1)
    word_dropout: float = Field(0.0, ge=0, lt=1)


EncoderConfig = Annotated[
    BagEncoderConfig | InceptionEncoderConfig | TransformerEncoderConfig | CombinedEncoderConfig,
    Field(discriminator="kind"),
]


class TableConfig(_Strict):
    """The classifier as one free row ψ_l a label."""

    kind: Literal["table"] = "table"


class ProductConfig(_Strict):
    """Multi-Head Product: ψ_l is the sum of one row of each head.

    Attributes:
        heads: H; 1 is the plain table.
        lengths: rows of each head, their product at least L; empty: chosen from L and H.
        codes: local labels from the label's id in mixed radix, or from clustering label embeddings.
        loss: `heads`: each head's cross-entropy over all its local labels; `pool`: the configured loss on the
            rows ψ_l of the label pool.
    """

    kind: Literal["mhp"] = "mhp"
    heads: int = Field(2, ge=1, le=8)
    lengths: tuple[Annotated[int, Field(ge=1, le=MOST_LABELS)], ...] = ()
    codes: Literal["ids", "clusters"] = "clusters"
    loss: Literal["heads", "pool"] = "heads"


class CascadeConfig(_Strict):
    """Multi-Head Cascade: a head over groups, then the members of the top groups.

    Attributes:
        groups: number of groups; 0: about the root of L.
        top_groups: groups whose members are scored.
        most_labels: largest number of members of the true groups that join the pool of a step.
        codes: as for `mhp`.
    """

    kind: Literal["mhc"] = "mhc"
    groups: int = Field(0, ge=0, le=MOST_LABELS)
    top_groups: int = Field(10, ge=1, le=MOST_LABELS)
    most_labels: int = Field(4096, ge=0, le=MOST_LABELS)
    codes: Literal["ids", "clusters"] = "clusters"


class SampledConfig(_Strict):
    """Multi-Head Sampling: the loss sees the members of the true groups and of a few random ones.

    Attributes:
        groups: number of groups; 0: about the root of L.
        sampled_groups: random groups a step.
        most_labels: largest number of members of all these groups that join the pool of a step.
        codes: as for `mhp`.
    """

    kind: Literal["mhs"] = "mhs"
    groups: int = Field(0, ge=0, le=MOST_LABELS)
    sampled_groups: int = Field(4, ge=0, le=MOST_LABELS)
    most_labels: int = Field(4096, ge=0, le=MOST_LABELS)
    codes: Literal["ids", "clusters"] = "clusters"


ClassifierConfig = Annotated[
    TableConfig | ProductConfig | CascadeConfig | SampledConfig, Field(discriminator="kind")
]

LossName = Literal["supcon", "pal", "decoupled", "pol", "infonce", "triplet", "bce"]


class GandalfConfig(_Strict):
    """Label texts as further training queries, with soft targets from the label graph (Gandalf).

    Attributes:
        enabled: whether there are any.
        graph: `conditional`: G_ij/G_jj; `random_walk`: the same of a graph smoothed by a random walk;
            `glas`: the symmetrised σ(S); `self`: each label text belongs to its own label alone.
        delta: δ, targets at or below it are dropped (of `glas`: pairs whose S is).
        most: targets of a label text at most, the largest ones; 0: all. It bounds memory where queries with
            thousands of clicks make thousands of partners for each of their labels.
        walk_length: ω, steps of the random walk from each label.
        restart: probability that a step of the walk begins at its first label again.
        share: share of the labels whose texts are used.
        sampling: which ones: drawn at random, or the rarest first.
        alone: train on the label texts only, without the log's queries.
    """

    enabled: bool = False
    graph: Literal["conditional", "random_walk", "glas", "self"] = "conditional"
    delta: float = Field(0.1, ge=0, lt=1)
    most: int = Field(200, ge=0, le=MOST_LABELS)
    walk_length: int = Field(400, ge=1, le=100_000)
    restart: float = Field(0.8, ge=0, le=1)
    share: float = Field(1.0, gt=0, le=1)
    sampling: Literal["random", "tail"] = "random"
    alone: bool = False


class LossConfig(_Strict):
    """The four terms of Algorithm 1, L = λ·L_D + (1-λ)·L_C, each head's loss symmetric.

    Attributes:
        dual_encoder: loss of the Φ_D scores.
        classifier: loss of the Φ_C scores against Ψ.
        auxiliary_bce: weight of an added binary loss on the classifier's scores; 0 for none.
        weight: λ, the dual encoder's share.
        dual_encoder_q2l: λ_D, the share of query-to-label in L_D.
        classifier_q2l: λ_C, likewise in L_C.
        temperature: divides the Φ_D cosines.
        classifier_temperature: divides the Φ_C scores.
        normalise_classifier: score the classifier by cosine in training. The papers do not; at small
            widths it is better.
        served: weight of a term on the served score, the sum of both cosines; 0 for none.
        wide: weight of the wide heads' loss (see `TrainConfig.wide_dim`) beside the narrow heads'.
        distillation: weight of the wide score's distribution over the pool as teacher of the narrow one's.
    """

    dual_encoder: LossName = "supcon"
    classifier: LossName = "supcon"
    auxiliary_bce: float = Field(0.0, ge=0, le=MOST_WEIGHT)
    weight: float = Field(0.5, ge=0, le=1)
    dual_encoder_q2l: float = Field(0.5, ge=0, le=1)
    classifier_q2l: float = Field(0.5, ge=0, le=1)
    temperature: float = Field(0.05, gt=0, le=1e4)
    classifier_temperature: float = Field(0.05, gt=0, le=1e4)
    normalise_classifier: bool = True
    served: float = Field(0.0, ge=0, le=MOST_WEIGHT)
    wide: float = Field(1.0, ge=0, le=MOST_WEIGHT)
    distillation: float = Field(0.0, ge=0, le=MOST_WEIGHT)


class BatchConfig(_Strict):
    """How batches and their label pools are made.

    Attributes:
        queries: queries a batch, |Q_B|.
        cluster_size: queries a cluster of the balanced hierarchical 2-means; a batch joins clusters drawn
            at random. 0: as many as `queries`, the papers' clustered batches. 1: random batches.
        positives: β, positives sampled a query.
        extra_positives: β_C, further positives sampled a query, for the classifier alone.
        all_labels: the classifier's pool is all L labels in every step; refused above `all_labels_up_to`.
        all_labels_up_to: largest L for `all_labels`.
        chunk: texts encoded at once; 0: the whole batch. Fewer bound the memory of a step by the chunk
            (gradient caching), for one more pass of the encoder.
        hard_negatives: η, hard negatives sampled a query; 0 for none.
        refresh: τ, epochs between refreshes of clusters and hard negatives; |H_i| = η·τ.
        exact_mining_up_to: largest number of labels whose hard negatives are mined exactly; beyond, by HNSW.
    """

    queries: int = Field(256, ge=2, le=MOST_AT_ONCE)
    cluster_size: int = Field(0, ge=0, le=MOST_AT_ONCE, validate_default=True)
    positives: int = Field(3, ge=1, le=MOST_AT_ONCE)
    extra_positives: int = Field(0, ge=0, le=MOST_AT_ONCE)
    all_labels: bool = False
    all_labels_up_to: int = Field(100_000, ge=1, le=MOST_LABELS)
    chunk: int = Field(0, ge=0, le=MOST_AT_ONCE)
    hard_negatives: int = Field(3, ge=0, le=10_000)
    refresh: int = Field(5, ge=1, le=10_000)
    exact_mining_up_to: int = Field(200_000, ge=0, le=MOST_LABELS)

    @field_validator("cluster_size")
    @classmethod
    def _whole_batches(cls, value: int, info: ValidationInfo) -> int:
        """0 becomes the number of queries a batch, so that a recorded configuration says what was done."""
        return value or int(info.data.get("queries", 0))


class OptimiserConfig(_Strict):
    """Three learning rates under one warm-up and cosine schedule.

    Attributes:
        encoder_lr: of Φ.
        heads_lr: of g1 and g2.
        table_lr: of Ψ.
        warmup: share of all steps spent warming up.
        weight_decay: decoupled weight decay on the dense matrices.
        max_grad_norm: clip of the dense gradients' norm; 0 for none.
    """

    encoder_lr: float = Field(1e-4, ge=0, le=MOST_RATE)
    heads_lr: float = Field(2e-4, ge=0, le=MOST_RATE)
    table_lr: float = Field(1e-3, ge=0, le=MOST_RATE)
    warmup: float = Field(0.05, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0, le=100)
    max_grad_norm: float = Field(1.0, ge=0, le=1e9)


class TrainConfig(_Strict):
    """A whole training run. Every number has bounds, which `bidmatch train --list-presets` prints.

    Attributes:
        encoder: Φ.
        classifier: how Ψ is made.
        gandalf: see GandalfConfig.
        heads: both, half of `dim` each, or one of them alone with all of it.
        dim: width of the served vector; half is Φ_D, half Φ_C.
        wide_dim: width of a second pair of heads and table, trained in the same run, which re-score what the
            narrow ones find; 0 for none.
        max_tokens: texts are cut to this many tokens.
        head_dropout: dropout behind g1 and g2.
        table_from_text: start Ψ_l at g2(Φ(z_l)) instead of noise.
        epochs: passes over the training queries.
        loss: see LossConfig.
        batch: see BatchConfig.
        optimiser: see OptimiserConfig.
        validation_share: share of the training queries kept out of training for the curves and for
            export's choices (at most `validation_max`).
        validation_max: see `validation_share`.
        seed: of everything random.
        device: `auto` (the first GPU, else the CPU), `cpu` or `cuda`.
        precision: `auto` (bf16 where the hardware has it), `fp32` or `bf16`.
        table_device: where Ψ and its optimiser state live: `auto` (with the model) or `cpu` (in host memory,
            for a table that the GPU cannot hold).
        threads: CPU threads; 0 for all cores. Results are reproducible for equal thread counts.
        checkpoint_seconds: time between checkpoints; the last step makes one anyway.
        keep_checkpoints: how many of the last checkpoints are kept.
        propensity_a: A of the propensity model, for PSP@k.
        propensity_b: B of the propensity model.
    """

    encoder: EncoderConfig = BagEncoderConfig()
    classifier: ClassifierConfig = TableConfig()
    gandalf: GandalfConfig = GandalfConfig()
    heads: Literal["both", "dual_encoder", "classifier"] = "both"
    dim: int = Field(64, ge=2, le=4096)
    wide_dim: int = Field(0, ge=0, le=4096)
    max_tokens: int = Field(32, ge=1, le=512)
    head_dropout: float = Field(0.1, ge=0, lt=1)
    table_from_text: bool = True
    epochs: int = Field(20, ge=1, le=100_000)
    loss: LossConfig = LossConfig()
    batch: BatchConfig = BatchConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    validation_share: float = Field(0.05, ge=0, lt=1)
    validation_max: int = Field(2000, ge=0, le=1_000_000_000)
    seed: int = Field(0, ge=0, lt=2**63)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    table_device: Literal["auto", "cpu"] = "auto"
    threads: int = Field(0, ge=0, le=1024)
    checkpoint_seconds: float = Field(60.0, ge=0, le=1e9)
    keep_checkpoints: int = Field(2, ge=1, le=100_000)
    propensity_a: float = Field(0.55, ge=0, le=10)
    propensity_b: float = Field(1.5, ge=0, le=1e6)

    @model_validator(mode="after")
    def _widths_have_two_halves(self) -> TrainConfig:
        if self.dim % 2:
            raise ValueError(f"dim is {self.dim}; it must be even: half is Φ_D, half Φ_C")
        if self.wide_dim % 2 or 0 < self.wide_dim <= self.dim:
            raise ValueError(f"wide_dim is {self.wide_dim}; it must be 0, or even and above dim ({self.dim})")
        return self

    def split_width(self, width: int) -> tuple[int, int]:
        """Widths of Φ_D and Φ_C in a vector of `width`; a head that is switched off has 0."""
        return {"both": (width // 2, width // 2), "dual_encoder": (width, 0), "classifier": (0, width)}[
            self.heads
        ]
