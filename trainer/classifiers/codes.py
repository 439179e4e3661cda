"""Codes of Multi-Head Encoding: label l as H local labels (l_1, ..., l_H) in mixed radix, l_h < N_h."""

from __future__ import annotations

import math

import numpy as np

from bidmatch.base.errors import ConfigError
from trainer.clustering import balanced_clusters

# Clusters this many times finer than a group put a group's border between near clusters.
_FINER = 8


def choose_lengths(labels: int, heads: int) -> tuple[int, ...]:
    """N_1, ..., N_H with Π N_h >= L, each about L^(1/H).

    All but the last are powers of two, so that groups are whole clusters of a tree of halvings.
    """
    lengths, left = [], labels
    for remaining in range(heads, 1, -1):
        length = 2 ** round(math.log2(left) / remaining)
        lengths.append(length)
        left = -(-left // length)
    return (*lengths, left)


def check_lengths(lengths: tuple[int, ...], labels: int, heads: int) -> None:
    """Refuse lengths that cannot hold L labels.

    Raises:
        ConfigError: wrong number of lengths, one below 1, or Π N_h < L (or beyond 2^62).
    """
    if len(lengths) != heads:
        raise ConfigError(
            f"classifier.lengths has {len(lengths)} numbers for {heads} heads",
            hint="Give one length a head, or none: they are then chosen from the number of labels.",
        )
    if min(lengths) < 1:
        raise ConfigError(f"classifier.lengths is {list(lengths)}; each must be at least 1")
    product = math.prod(lengths)
    if not labels <= product <= 2**62:
        raise ConfigError(
            f"classifier.lengths {list(lengths)} gives {product} codes for {labels} labels",
            hint=f"Their product must be at least the number of labels (and at most 2^62); for example "
            f"{list(choose_lengths(labels, heads))}.",
        )


def group_lengths(groups: int, labels: int) -> tuple[int, int]:
    """(number of groups, members of the largest) for a setting `groups`, where 0 is about the root of L.

    Raises:
        ConfigError: more groups than labels.
    """
    if groups > labels:
        raise ConfigError(
            f"classifier.groups is {groups}, more than the {labels} labels",
            hint="0 chooses about the root of the number of labels.",
        )
    if groups == 0:
        first, second = choose_lengths(labels, 2)
        return first, second
    return groups, -(-labels // groups)


def mixed_radix(numbers: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """Digits of int64 (L,) numbers below Π N_h, most significant first, int32 (L, H)."""
    digits = np.empty((len(numbers), len(lengths)), dtype=np.int32)
    for head in range(len(lengths) - 1, -1, -1):
        numbers, digits[:, head] = np.divmod(numbers, lengths[head])
    return digits


def flat_codes(codes: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """The number below Π N_h of each code, int64 (L,): what `mixed_radix` undoes."""
    numbers = np.zeros(len(codes), dtype=np.int64)
    for head, length in enumerate(lengths):
        numbers = numbers * length + codes[:, head]
    return numbers


def id_codes(labels: int, lengths: tuple[int, ...]) -> np.ndarray:
    """Codes of the labels 0 to L - 1 by their ids, int32 (L, H)."""
    return mixed_radix(np.arange(labels, dtype=np.int64), lengths)


def cluster_codes(vectors: np.ndarray, lengths: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Codes under which similar labels share local labels.

    The first local label is a balanced cluster (hierarchical 2-means). Inside the clusters, labels are
    ordered by halving again and again at the median along the principal axes of what the cluster means
    leave over. These axes are the same in all clusters, so that a place, and with it every later local
    label, means the same direction in each: what a sum of one vector a head can make use of.

    Args:
        vectors: float (L, any), unit length.
        lengths: N_1, ..., N_H with Π N_h >= L.
        rng: the source of all that is random.

    Returns:
        int32 (L, H), all rows distinct; the parts of a level differ in size by at most one inside their
        parent.
    """
    labels, heads = len(vectors), len(lengths)
    if heads == 1:
        return id_codes(labels, lengths)
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    largest = -(-labels // lengths[0])
    clusters = balanced_clusters(vectors, max(2, largest // _FINER), rng)
    order = np.argsort(clusters, kind="stable")
    group = _even_parts(np.zeros(labels, dtype=np.int64), lengths[0])
    order = order[_order_inside(vectors[order], group)]

    digits = np.empty((labels, heads), dtype=np.int64)
    part = np.zeros(labels, dtype=np.int64)
    for head, length in enumerate(lengths):
        within = _even_parts(part, length) if head < heads - 1 else _places(part)[0]
        digits[:, head] = within
        part = part * length + within
    codes = np.empty((labels, heads), dtype=np.int32)
    codes[order] = digits
    return codes


def _places(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place of each item inside its part, and the part's size; `part` is ascending, int64 (L,)."""
    starts = np.flatnonzero(np.diff(part, prepend=-1))
    sizes = np.diff(np.append(starts, len(part)))
    return np.arange(len(part)) - np.repeat(starts, sizes), np.repeat(sizes, sizes)


def _even_parts(part: np.ndarray, count: int) -> np.ndarray:
    """Which of `count` even stretches of its part each item lies in, int64 (L,)."""
    place, size = _places(part)
    return place * count // size


def _order_inside(vectors: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Positions that sort each group by halvings along shared axes; `group` is ascending, int64 (L,)."""
    sizes = np.bincount(group)
    # reduceat keeps the empty groups out: parts are those that have members.
    starts = np.flatnonzero(np.diff(group, prepend=-1))
    members = np.diff(np.append(starts, len(group)))
    means = np.add.reduceat(vectors, starts, axis=0) / members[:, None]
    rest = vectors - np.repeat(means, members, axis=0)
    _, axes = np.linalg.eigh(rest.T @ rest)
    order = np.arange(len(vectors))
    part = group
    for depth in range(max(1, int(sizes.max(initial=1)) - 1).bit_length()):
        along = rest[order] @ axes[:, -1 - depth % axes.shape[1]]
        order = order[np.lexsort((along, part))]
        part = part * 2 + _even_parts(part, 2)
    return order
