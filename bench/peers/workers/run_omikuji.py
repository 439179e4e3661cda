"""omikuji as Parabel (its defaults) and as Bonsai (unbalanced 100-means, three levels), three trees each."""

from pathlib import Path

import omikuji
import scipy.sparse as sp
from handover import padded, read_problem, timed, write_ranking

BONSAI = {"cluster_balanced": False, "cluster_k": 100, "max_depth": 3}
BEAM = 10

problem = read_problem()


def write_text(file: Path, x: sp.csr_matrix, y: sp.csr_matrix) -> None:
    """The XMC repository's text format, which omikuji trains on."""
    with file.open("w") as out:
        out.write(f"{x.shape[0]} {x.shape[1]} {y.shape[1]}\n")
        for row in range(x.shape[0]):
            labels = y.indices[y.indptr[row] : y.indptr[row + 1]]
            span = slice(x.indptr[row], x.indptr[row + 1])
            pairs = zip(x.indices[span], x.data[span], strict=True)
            out.write(",".join(map(str, labels)) + "".join(f" {i}:{v:.6g}" for i, v in pairs) + "\n")


def rank(model: omikuji.Model, x: sp.csr_matrix) -> list[list[int]]:
    lists = []
    for row in range(x.shape[0]):
        span = slice(x.indptr[row], x.indptr[row + 1])
        pairs = list(zip(x.indices[span].tolist(), x.data[span].tolist(), strict=True))
        lists.append([label for label, _ in model.predict(pairs, beam_size=BEAM, top_k=problem.depth)])
    return lists


data = problem.folder / "train.txt"
write_text(data, problem.train_x, problem.train_y)
for name, changed in (("omikuji-parabel", {}), ("omikuji-bonsai", BONSAI)):
    parameters = omikuji.Model.default_hyper_param()
    for field, value in changed.items():
        setattr(parameters, field, value)
    model, train_seconds = timed(
        lambda parameters=parameters: omikuji.Model.train_on_data(str(data), parameters, problem.threads)
    )
    model.init_prediction_thread_pool(problem.threads)
    lists, rank_seconds = timed(lambda model=model: rank(model, problem.test_x))
    settings = f"{changed or 'defaults'}, {parameters.n_trees} trees, beam {BEAM}"
    write_ranking(
        problem, name, "omikuji", settings, padded(lists, problem.depth), train_seconds, rank_seconds
    )
