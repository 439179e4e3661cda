"""napkinXC's probabilistic label tree with its defaults: balanced 2-means, leaves of 100, logistic loss."""

import numpy as np
from handover import padded, read_problem, timed, write_ranking
from napkinxc.models import PLT

problem = read_problem()
labels = [row.tolist() for row in np.split(problem.train_y.indices, problem.train_y.indptr[1:-1])]
model = PLT(str(problem.folder / "plt"), threads=problem.threads, seed=0)


def train() -> None:
    model.fit(problem.train_x, labels)
    model.load()


_, train_seconds = timed(train)
lists, rank_seconds = timed(lambda: model.predict(problem.test_x, top_k=problem.depth))
write_ranking(
    problem, "napkinxc-plt", "napkinxc", "defaults", padded(lists, problem.depth), train_seconds, rank_seconds
)
