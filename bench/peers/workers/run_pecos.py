"""PECOS XR-Linear: PIFA label embeddings, one balanced tree, teacher-forcing negatives (its defaults)."""

from handover import ranked, read_problem, timed, write_ranking
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.xlinear.model import XLinearModel

SPLITS, LEAF, BEAM = 16, 100, 10

problem = read_problem()


def train() -> XLinearModel:
    labels = LabelEmbeddingFactory.create(problem.train_y, problem.train_x, method="pifa")
    tree = Indexer.gen(
        labels,
        indexer_type="hierarchicalkmeans",
        nr_splits=SPLITS,
        max_leaf_size=LEAF,
        threads=problem.threads,
        seed=0,
    )
    return XLinearModel.train(
        problem.train_x, problem.train_y, C=tree, negative_sampling_scheme="tfn", threads=problem.threads
    )


model, train_seconds = timed(train)
scores, rank_seconds = timed(
    lambda: model.predict(problem.test_x, beam_size=BEAM, only_topk=problem.depth, threads=problem.threads)
)
settings = f"PIFA, {SPLITS}-way tree, leaves of {LEAF}, tfn, beam {BEAM}"
write_ranking(
    problem,
    "pecos-xrlinear",
    "libpecos",
    settings,
    ranked(scores, problem.depth),
    train_seconds,
    rank_seconds,
)
