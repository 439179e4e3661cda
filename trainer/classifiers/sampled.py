"""Multi-Head Sampling: a full table, trained against the members of the true groups and a few random ones."""

from __future__ import annotations

from trainer.classifiers.groups import GroupedTable


class SampledClassifier(GroupedTable):
    """Ψ as a table of L rows; a step's softmax runs over whole groups instead of all labels.

    The pool of a step is joined by the members of the groups in which the batch's positives lie, and of
    random groups (`extra_labels`); the configured loss scores it. It saves time, no parameters: all of the
    table serves, and every row is an ordinary ψ_l.
    """
