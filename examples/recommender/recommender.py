"""A recommender of two towers, with in-batch negatives and the logQ correction.

The data are made, so that the truth is known: the probability that a user takes an item is the
product of the item's popularity, which follows Zipf's law, and of an exponential of a product of
latent factors, the taste. Negatives are the other items of the batch, so a frequent item is a
negative as often as it is a positive, and scores lose its popularity. With `log_q` they are those
of a softmax over all items (Yi et al. 2019, "Sampling-bias-corrected neural modeling for large
corpus item recommendations"). Recall is among all items: of what users take, and of what they would
take if all items were equally popular. Takes some 15 seconds on a CPU.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import megabatch as mb
from megabatch.similarity import ranks

FACTORS, WIDTH, BATCH, K = 8, 32, 512, 20


def probabilities(users: int, items: int) -> tuple[Tensor, Tensor]:
    """Of items to be taken, (users, items): as they are, and if all were equally popular."""
    taste = torch.randn(users, FACTORS) @ torch.randn(FACTORS, items)
    popularity = 1 / (torch.arange(items) + 10.0)
    return (taste + popularity.log()).softmax(1), taste.softmax(1)


def train(
    user: Tensor, item: Tensor, sizes: tuple[int, int], log_q: Tensor | None, steps: int
) -> tuple[Tensor, Tensor]:
    """Vectors of all users and items, from interactions: pairs of indices of both."""
    towers = [nn.Embedding(size, WIDTH) for size in sizes]
    for tower in towers:
        nn.init.normal_(tower.weight, std=0.1)
    loss = mb.InfoNCELoss(temperature=1.0)  # of dot products: a vector's length counts
    parameters = [tower.weight for tower in towers]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    for _ in range(steps):
        batch = torch.randint(len(user), (BATCH,))
        u, i = user[batch], item[batch]
        # Items that recur in the batch are not each other's negatives.
        correction = None if log_q is None else log_q[i]
        value = loss(towers[0](u), towers[1](i), ids=i, log_q=correction)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return parameters[0].detach(), parameters[1].detach()


def main() -> None:
    """Train without and with the correction, and print recall among all items."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.items < K:
        parser.error(f"--items: expected at least {K}, got {options.items}")

    torch.manual_seed(options.seed)
    sizes = options.users, options.items
    taken, taste = probabilities(*sizes)
    user = torch.arange(options.users).repeat_interleave(100)
    item = taken.multinomial(100, replacement=True).flatten()
    held_out = [p.multinomial(1)[:, 0] for p in (taken, taste)]
    # Each item's share of all interactions; one more, so that none has a share of 0.
    counts = torch.bincount(item, minlength=options.items) + 1.0
    log_q = (counts / counts.sum()).log()

    truth = taken.log(), torch.eye(options.items)
    results = {
        "without": train(user, item, sizes, None, options.steps),
        "with log_q": train(user, item, sizes, log_q, options.steps),
        "the truth": truth,
    }
    for name, (users, items) in results.items():
        recalls = [(ranks(users, items, target)[0] < K).float().mean() for target in held_out]
        print(f"{name}: recall@{K} {recalls[0]:.3f}, of equally popular items {recalls[1]:.3f}")
    print(f"{K / options.items:.3f} by chance")


if __name__ == "__main__":
    main()
