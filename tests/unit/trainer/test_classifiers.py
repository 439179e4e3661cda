from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch.nn.functional import cross_entropy, log_softmax, normalize

from trainer.classifiers.base import Classifier
from trainer.classifiers.build import make_codes, new_classifier
from trainer.classifiers.cascade import CascadeClassifier
from trainer.classifiers.groups import GroupedTable
from trainer.classifiers.product import ProductClassifier
from trainer.config import CascadeConfig, ProductConfig, SampledConfig, TableConfig
from trainer.losses.supcon import supcon
from trainer.row_adam import RowAdam

LABELS, WIDTH = 60, 8
KINDS = {
    "table": TableConfig(),
    "mhp": ProductConfig(),
    "mhp of three heads": ProductConfig(heads=3),
    "mhp with spare codes": ProductConfig(lengths=(20, 9)),
    "mhp by pool": ProductConfig(loss="pool"),
    "mhp by ids": ProductConfig(codes="ids"),
    "mhc": CascadeConfig(top_groups=2),
    "mhs": SampledConfig(sampled_groups=2),
}
every_kind = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS.keys())


def label_vectors(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return normalize(torch.randn(LABELS, WIDTH), dim=1)


def make(config, seed: int = 0) -> Classifier:
    codes = make_codes(config, label_vectors(), LABELS, np.random.default_rng(seed))
    torch.manual_seed(seed)
    return new_classifier(config, LABELS, WIDTH, codes)


def a_batch(seed: int = 0, n: int = 12, m: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Φ_C, a pool and positives; the last query has none, the first has several."""
    rng = np.random.default_rng(seed)
    phi_c = torch.from_numpy(rng.standard_normal((n, WIDTH)).astype(np.float32))
    pool = torch.from_numpy(np.sort(rng.choice(LABELS, m, replace=False)))
    positives = np.zeros((n, m), dtype=np.float32)
    positives[np.arange(n), rng.integers(0, m, n)] = 1
    positives[0, :4] = 1
    positives[1, 5] = 0.3
    positives[-1] = 0
    return phi_c, pool, torch.from_numpy(positives)


def clicks(rows: list[list[int]]) -> sp.csr_matrix:
    indptr = np.cumsum([0, *map(len, rows)])
    return sp.csr_matrix((np.ones(indptr[-1]), np.concatenate(rows), indptr), (len(rows), LABELS))


@every_kind
def test_rows_and_table_agree(config):
    classifier = make(config)
    labels = torch.tensor([3, 0, 59, 3])
    rows = classifier.rows(labels)
    assert rows.shape == (4, WIDTH)
    assert rows.requires_grad
    whole = classifier.table(0, LABELS)
    assert whole.shape == (LABELS, WIDTH)
    assert not whole.requires_grad
    assert torch.equal(whole[labels], rows.detach())
    assert torch.equal(classifier.table(10, 20), whole[10:20])


@every_kind
def test_every_parameter_has_one_optimiser_and_learns(config):
    """Gradients of tables are sparse and touch only the pool's rows; all others are dense."""
    classifier = make(config)
    sparse, dense = classifier.sparse_parameters(), classifier.dense_parameters()
    assert {id(p) for p in sparse} | {id(p) for p in dense} == {id(p) for p in classifier.parameters()}
    assert not {id(p) for p in sparse} & {id(p) for p in dense}
    optimisers = [RowAdam(sparse, lr=0.01)] if sparse else []
    optimisers += [torch.optim.AdamW(dense, lr=0.01)] if dense else []  # type: ignore[list-item]
    phi_c, pool, positives = a_batch()
    before = classifier.table(0, LABELS).clone()
    losses = []
    for _ in range(30):
        loss = classifier.loss(phi_c, pool, positives, 0.5, True)
        if loss is None:
            scores = normalize(phi_c, dim=1) @ normalize(classifier.rows(pool), dim=1).T / 0.5
            loss = supcon(scores, positives)
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        assert all(p.grad is not None and p.grad.is_sparse for p in sparse)
        assert all(p.grad is not None and not p.grad.is_sparse for p in dense)
        for optimiser in optimisers:
            optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.05
    if sparse:
        changed = (classifier.table(0, LABELS) != before).any(1).nonzero().flatten()
        assert set(changed.tolist()) <= set(pool.tolist())


@every_kind
def test_the_state_dict_is_the_whole_classifier(config, tmp_path):
    """One made without codes becomes the saved one, codes included."""
    from safetensors.torch import load_file, save_file

    classifier = make(config, seed=3)
    save_file(classifier.state_dict(), tmp_path / "classifier.safetensors")
    other = new_classifier(config, LABELS, WIDTH)
    other.load_state_dict(load_file(tmp_path / "classifier.safetensors"))
    assert torch.equal(other.table(0, LABELS), classifier.table(0, LABELS))
    phi_c, pool, positives = a_batch()
    one, two = (c.loss(phi_c, pool, positives, 0.1, True) for c in (classifier, other))
    assert (one is None) == (two is None)
    assert one is None or torch.equal(one, two)  # type: ignore[arg-type]
    rows = clicks([[1, 2], [30]])
    added = [c.extra_labels(rows, np.random.default_rng(0)) for c in (classifier, other)]
    assert np.array_equal(*added)


def test_the_plain_table_keeps_its_name_in_the_state():
    assert list(make(TableConfig()).state_dict()) == ["psi.weight"]


@every_kind
def test_starting_from_label_vectors_comes_nearer_to_them(config):
    psi = label_vectors()
    classifier = make(config)
    before = float((classifier.table(0, LABELS) - psi).square().sum())
    classifier.start_from(psi)
    after = float((classifier.table(0, LABELS) - psi).square().sum())
    if isinstance(classifier, ProductClassifier):
        # The zero vector is at distance LABELS; random heads lie beyond.
        assert after < 0.8 * LABELS < before
    else:
        assert after == 0


def test_the_product_starts_at_the_least_squares():
    psi = label_vectors()
    classifier = make(ProductConfig())
    assert isinstance(classifier, ProductClassifier)
    classifier.start_from(psi)
    design = np.zeros((LABELS, sum(classifier.lengths)))
    for head, offset in enumerate(np.cumsum([0, *classifier.lengths[:-1]])):
        design[np.arange(LABELS), offset + classifier.codes[:, head].numpy()] = 1
    _, *_ = solution = np.linalg.lstsq(design, psi.numpy(), rcond=None)
    least = np.square(psi.numpy() - design @ solution[0]).sum()
    found = float((classifier.table(0, LABELS) - psi).square().sum())
    assert least <= found * (1 + 1e-5)
    assert found < 1.02 * least


@pytest.mark.parametrize("lengths", [(60,), (8, 8), (4, 4, 4), (20, 30)])
def test_a_row_of_the_product_is_the_sum_of_its_heads_rows(lengths):
    classifier = make(ProductConfig(heads=len(lengths), lengths=lengths))
    assert isinstance(classifier, ProductClassifier)
    codes = classifier.codes.tolist()
    for label in (0, 17, 59):
        expected = sum(classifier.heads[h][codes[label][h]] for h in range(len(lengths)))
        assert torch.allclose(classifier.rows(torch.tensor([label]))[0], expected)


def test_scores_of_the_heads_add_up_to_the_row_s():
    classifier = make(ProductConfig(heads=3))
    assert isinstance(classifier, ProductClassifier)
    phi_c, *_ = a_batch()
    for normalise in (True, False):
        local = classifier.local_scores(phi_c, 0.2, normalise)
        total = sum(scores[:, classifier.codes[:, h].long()] for h, scores in enumerate(local))
        query = normalize(phi_c, dim=1) if normalise else phi_c
        assert torch.allclose(total, query @ classifier.table(0, LABELS).T / 0.2, atol=1e-5)


def naive_product_loss(
    classifier: ProductClassifier,
    phi_c: torch.Tensor,
    pool: torch.Tensor,
    positives: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Σ_h of the mean over queries of the mean over positives of -log p_h(l_h), term by term."""
    rows = []
    for i in range(len(phi_c)):
        if positives[i].sum() == 0:
            continue
        terms = []
        for j in range(len(pool)):
            for h, head in enumerate(classifier.heads):
                local = int(classifier.codes[pool[j], h])
                logs = log_softmax(head @ phi_c[i] / temperature, 0)
                terms.append(-positives[i, j] * logs[local])
        rows.append(torch.stack(terms).sum() / positives[i].sum())
    return torch.stack(rows).mean()


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_the_product_s_loss_and_gradients_equal_the_naive_ones(heads):
    classifier = make(ProductConfig(heads=heads))
    assert isinstance(classifier, ProductClassifier)
    phi_c, pool, positives = a_batch()
    phi_c.requires_grad_()
    inputs = [phi_c, *classifier.heads]
    loss = classifier.loss(phi_c, pool, positives, 0.3, False)
    assert loss is not None
    naive = naive_product_loss(classifier, phi_c, pool, positives, 0.3)
    assert loss.item() == pytest.approx(naive.item(), rel=1e-5)
    for one, other in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(naive, inputs), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_one_head_is_the_softmax_over_all_labels(normalise):
    classifier = make(ProductConfig(heads=1, codes="ids"))
    phi_c, *_ = a_batch()
    labels = torch.randint(0, LABELS, (len(phi_c),), generator=torch.Generator().manual_seed(0))
    pool, place = torch.unique(labels, return_inverse=True)
    positives = torch.nn.functional.one_hot(place, len(pool)).float()
    loss = classifier.loss(phi_c, pool, positives, 0.2, normalise)
    assert loss is not None
    query = normalize(phi_c, dim=1) if normalise else phi_c
    scores = query @ classifier.table(0, LABELS).T / 0.2
    assert loss.item() == pytest.approx(cross_entropy(scores, labels).item(), rel=1e-5)


def naive_cascade_loss(
    classifier: CascadeClassifier,
    phi_c: torch.Tensor,
    pool: torch.Tensor,
    positives: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    rows = []
    group = classifier.group_of[pool].tolist()
    for i in range(len(phi_c)):
        if positives[i].sum() == 0:
            continue
        by_group = classifier.groups @ phi_c[i] / temperature
        top = set(by_group.topk(classifier.top_groups).indices.tolist())
        candidates = top | {group[j] for j in range(len(pool)) if positives[i, j] > 0}
        inside = [j for j in range(len(pool)) if group[j] in candidates]
        by_member = classifier.psi.weight[pool[inside]] @ phi_c[i] / temperature
        group_logs, member_logs = log_softmax(by_group, 0), log_softmax(by_member, 0)
        terms = [
            -positives[i, j] * (group_logs[group[j]] + member_logs[place]) for place, j in enumerate(inside)
        ]
        rows.append(torch.stack(terms).sum() / positives[i].sum())
    return torch.stack(rows).mean()


def test_the_cascade_s_loss_and_gradients_equal_the_naive_ones():
    classifier = make(CascadeConfig(top_groups=2))
    assert isinstance(classifier, CascadeClassifier)
    classifier.psi.sparse = False
    phi_c, pool, positives = a_batch()
    phi_c.requires_grad_()
    inputs = [phi_c, classifier.groups, classifier.psi.weight]
    loss = classifier.loss(phi_c, pool, positives, 0.3, False)
    assert loss is not None
    naive = naive_cascade_loss(classifier, phi_c, pool, positives, 0.3)
    assert loss.item() == pytest.approx(naive.item(), rel=1e-5)
    for one, other in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(naive, inputs), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_cascade_over_all_groups_is_what_an_index_gives(normalise):
    """And over some of them, what is left of it; the sentence for the export says so."""
    phi_c, *_ = a_batch()
    found = {}
    for top in (1, 8):
        classifier = make(CascadeConfig(groups=8, top_groups=top))
        assert isinstance(classifier, CascadeClassifier)
        assert f"{top} best of 8 groups" in str(classifier.not_in_index)
        found[top] = classifier.best(phi_c, 5, 0.1, normalise)[0]
    psi = classifier.table(0, LABELS)
    query, psi = (normalize(phi_c, dim=1), normalize(psi, dim=1)) if normalise else (phi_c, psi)
    assert torch.equal(found[8], (query @ psi.T).topk(5, dim=1).indices)
    groups = classifier.group_scores(phi_c, 0.1, normalise).argmax(1)
    assert (classifier.groups_of(found[1].flatten()).view(-1, 5) == groups[:, None]).all()


@pytest.mark.parametrize("config", [TableConfig(), ProductConfig(), SampledConfig()])
def test_an_index_reproduces_what_is_no_cascade(config):
    assert make(config).not_in_index is None


@pytest.mark.parametrize("config", [TableConfig(), ProductConfig()])
def test_kinds_without_groups_add_no_labels(config):
    assert len(make(config).extra_labels(clicks([[1, 2]]), np.random.default_rng(0))) == 0


def test_the_pool_gains_the_members_of_the_true_and_of_sampled_groups():
    classifier = make(SampledConfig(groups=10, sampled_groups=2))
    assert isinstance(classifier, GroupedTable)
    group = classifier.group_of.numpy()
    rows = clicks([[4, 11], [11], [50]])
    true = {int(group[label]) for label in (4, 11, 50)}
    seen = set()
    for seed in range(40):
        added = classifier.extra_labels(rows, np.random.default_rng(seed))
        assert np.array_equal(added, np.unique(added))
        groups = {int(g) for g in group[added]}
        assert true <= groups
        assert len(groups - true) <= 2
        # Whole groups.
        assert len(added) == sum((group == g).sum() for g in groups)
        seen |= groups
    assert seen == set(range(10))


def test_the_cascade_s_pool_gains_the_members_of_the_true_groups_alone():
    classifier = make(CascadeConfig(groups=10))
    assert isinstance(classifier, GroupedTable)
    group = classifier.group_of.numpy()
    added = classifier.extra_labels(clicks([[4]]), np.random.default_rng(0))
    assert added.tolist() == np.flatnonzero(group == group[4]).tolist()


@pytest.mark.parametrize("config", [CascadeConfig(most_labels=7), SampledConfig(most_labels=7)])
def test_the_pool_is_bounded_and_drawn_from_all_of_the_groups(config):
    classifier = make(config)
    drawn = set()
    for seed in range(300):
        added = classifier.extra_labels(clicks([[1, 20, 33], [7]]), np.random.default_rng(seed))
        assert len(added) <= 7
        drawn |= set(added.tolist())
    whole = type(config)(most_labels=1000)
    possible = set()
    for seed in range(300):
        possible |= set(
            make(whole).extra_labels(clicks([[1, 20, 33], [7]]), np.random.default_rng(seed)).tolist()
        )
    assert drawn == possible


def test_a_batch_without_positives_has_no_loss_and_only_sampled_groups():
    phi_c, pool, positives = a_batch()
    for config in (ProductConfig(), CascadeConfig()):
        loss = make(config).loss(phi_c, pool, torch.zeros_like(positives), 0.1, True)
        assert loss is not None
        assert loss.item() == 0
    nothing = sp.csr_matrix((3, LABELS))
    assert len(make(CascadeConfig()).extra_labels(nothing, np.random.default_rng(0))) == 0
    assert len(make(SampledConfig()).extra_labels(nothing, np.random.default_rng(0))) > 0
