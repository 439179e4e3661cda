"""The vectors of a batch's texts, made in chunks and by several processes, and the way back.

The loss is computed on vectors alone. Where a batch is encoded in chunks, or by several processes, its
gradients are first taken with respect to the vectors and then carried through the encoder chunk by chunk, so
that the memory of a step is bounded by the chunk (gradient caching).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.corpus import TextSource
from trainer.encoders.base import joined
from trainer.model import HeadVectors

if TYPE_CHECKING:
    from trainer.loop import Training

# Padded tokens that cost about as much as a further call of the encoder, which keeps a GPU waiting.
_WORTH_A_CALL = {"cpu": 64, "cuda": 4096}


@dataclass(frozen=True)
class Texts:
    """What a batch takes of a corpus.

    Attributes:
        source: the corpus.
        rows: which of its texts, int64 (n,).
        classifier: whether their Φ_C is needed.
    """

    source: TextSource
    rows: np.ndarray
    classifier: bool

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, int64 (n,)."""
        offsets = self.source.tokens.offsets
        lengths: np.ndarray = offsets[self.rows + 1] - offsets[self.rows]
        return lengths


def shares_of(lengths: np.ndarray, chunk: int, processes: int) -> list[list[np.ndarray]]:
    """Which texts each process encodes, and which of them at once.

    Texts are dealt out in order of length, so that little is padded and all processes get as much. So long as
    a chunk is smaller than a process's share, chunks are the same however many processes there are.

    Args:
        lengths: tokens of each text, int64 (n,).
        chunk: texts encoded at once; 0: all of a process's share.
        processes: how many.

    Returns:
        for each process its chunks: int64 places of texts in order of length; none are empty.
    """
    order = np.argsort(lengths, kind="stable")
    if chunk and chunk < -(-len(order) // processes):
        pieces = [order[start : start + chunk] for start in range(0, len(order), chunk)]
        return [pieces[process::processes] for process in range(processes)]
    shares = [order[process::processes] for process in range(processes)]
    return [[share] if len(share) else [] for share in shares]


def length_groups(lengths: np.ndarray, worth: int, cuts: int = 2) -> list[slice]:
    """Texts in order of length cut where it saves most padding, so long as it saves `worth` tokens.

    Args:
        lengths: tokens of each text, int64 (n,), ascending.
        worth: padded tokens that cost as much as one more call of the encoder.
        cuts: how often each part is cut again at most.
    """
    saved = np.arange(1, len(lengths)) * (lengths[-1:] - lengths[:-1])
    if not cuts or not len(saved) or saved.max() < worth:
        return [slice(0, len(lengths))]
    at = int(saved.argmax()) + 1
    behind = length_groups(lengths[at:], worth, cuts - 1)
    return [
        *length_groups(lengths[:at], worth, cuts - 1),
        *(slice(at + group.start, at + group.stop) for group in behind),
    ]


class Vectors:
    """What the model makes of a batch's texts, and the way back for their gradients.

    Texts of all corpora share the calls of the encoder: fewer and larger ones cost less a text, and each
    parameter's gradient is made once.

    Args:
        training: the run.
        texts: of each corpus.
        seed: of dropout; a text gets the same mask however many processes there are, so long as the chunks
            are the same.

    Attributes:
        pairs: for each corpus the vectors of its n texts by each pair of heads, float32.
    """

    def __init__(self, training: Training, texts: Sequence[Texts], seed: int):
        self._training, self._texts, self._seed = training, texts, seed
        device, workers = training.device.device, training.workers
        self._lengths = np.concatenate([part.lengths for part in texts])
        self._corpus = np.repeat(np.arange(len(texts)), [len(part.rows) for part in texts])
        self._rows = np.concatenate([part.rows for part in texts])
        shares = shares_of(self._lengths, training.config.batch.chunk, workers.count)
        self._chunks = shares[workers.rank]
        # The graph of one chunk is kept: it takes no more memory than making it again would.
        self._graph: list[torch.Tensor] | None = None
        if len(self._chunks) == 1:
            own = self._graph = self._encode(self._chunks[0])
        else:
            with torch.no_grad():
                made = [self._none(), *(self._encode(chunk) for chunk in self._chunks)]
            own = [torch.cat(parts) for parts in zip(*made, strict=True)]
        self._whole = workers.count == 1 and self._graph is not None
        self._matrices = []
        for corpus, mine in enumerate(own):
            dealt = [[self._of(corpus, chunk) for chunk in share] for share in shares]
            order = np.concatenate(
                [np.zeros(0, dtype=np.int64), *(part for share in dealt for part in share)]
            )
            back = torch.from_numpy(np.argsort(order)).to(device)
            if self._whole:
                self._matrices.append(mine[back])
            else:
                whole = workers.gather(mine.detach(), [sum(map(len, share)) for share in dealt])
                self._matrices.append(whole[back].requires_grad_())
        self.pairs = [self._split(part, matrix) for part, matrix in zip(texts, self._matrices, strict=True)]

    def backward(self) -> None:
        """Carry the vectors' gradients into the model's parameters; call it after the loss's own."""
        if self._whole:
            return
        starts = np.cumsum([0, *(len(part.rows) for part in self._texts)])
        for chunk in self._chunks:
            made = self._encode(chunk) if self._graph is None else self._graph
            outputs, gradients = [], []
            for corpus, (matrix, output) in enumerate(zip(self._matrices, made, strict=True)):
                if matrix.grad is not None and len(output):
                    places = torch.from_numpy(self._of(corpus, chunk) - starts[corpus]).to(output.device)
                    outputs.append(output)
                    gradients.append(matrix.grad[places])
            if outputs:
                torch.autograd.backward(outputs, gradients)

    def _of(self, corpus: int, places: np.ndarray) -> np.ndarray:
        return places[self._corpus[places] == corpus]

    def _none(self) -> list[torch.Tensor]:
        device = self._training.device.device
        return [torch.zeros(0, sum(self._widths(part)), device=device) for part in self._texts]

    def _widths(self, texts: Texts) -> list[int]:
        pairs = self._training.model.widths
        return [width for d, c in pairs for width in (d, c if texts.classifier else 0)]

    def _groups(self, chunk: np.ndarray) -> list[np.ndarray]:
        """A chunk's places by call of the encoder, in their order within each corpus."""
        if self._training.encoded_sparse:
            # Word vectors with sparse gradients make an encoder of little else: padding costs as much as text
            # there, and the gradients of each call are to be merged.
            found = (self._of(corpus, chunk) for corpus in range(len(self._texts)))
            return [places for places in found if len(places)]
        worth = _WORTH_A_CALL[self._training.device.device.type]
        return [chunk[group] for group in length_groups(self._lengths[chunk], worth)]

    def _encode(self, chunk: np.ndarray) -> list[torch.Tensor]:
        """For each corpus the vectors of its texts in the chunk, those of all heads side by side."""
        training, device = self._training, self._training.device.device
        torch.manual_seed(self._seed + int(chunk[0]))
        made = [[none] for none in self._none()]
        with training.device.autocast():
            for group in self._groups(chunk):
                of = [(corpus, self._of(corpus, group)) for corpus in range(len(self._texts))]
                of = [(corpus, places) for corpus, places in of if len(places)]
                batches = [
                    self._texts[corpus].source.batch(self._rows[places], device) for corpus, places in of
                ]
                phi = training.model.encoder.encode(joined(batches))
                parts = torch.split(phi, [len(places) for _, places in of])
                for (corpus, _), part in zip(of, parts, strict=True):
                    pairs = training.model.heads_of(part, classifier=self._texts[corpus].classifier)
                    made[corpus].append(torch.cat([head.float() for pair in pairs for head in pair], dim=1))
        return [torch.cat(parts) for parts in made]

    def _split(self, texts: Texts, matrix: torch.Tensor) -> list[HeadVectors]:
        parts = torch.split(matrix, self._widths(texts), dim=1)
        return [HeadVectors(d, c) for d, c in zip(parts[::2], parts[1::2], strict=True)]
