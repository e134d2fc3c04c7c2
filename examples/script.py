"""An ordinary PyTorch loop as an island: three lines of Atoll around it.

    atoll serve examples/quickstart.toml            # prints URL and token
    python examples/script.py URL TOKEN             # twice: the run asks for two islands

The model, the optimizer and the loop are this script's own; their settings come from the run.
"""

import sys

import torch

import atoll
from atoll.data.registry import open_dataset
from atoll.models.gpt import GPT, GPTConfig, loss_sum


def main() -> None:
    url, token = sys.argv[1:3]
    run = atoll.join(url, token=token)
    torch.set_num_threads(run.manifest.inner.threads)
    definition = dict(run.manifest.model.definition)
    definition.pop("architecture")
    model = GPT(GPTConfig(**definition))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.manifest.inner.lr)
    dataset = open_dataset(run.manifest.data.definition)

    run.load(model, optimizer, evaluate=loss_sum)
    for rows in run.batches(dataset):
        logits = model(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.manifest.inner.clip)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
    print(f"{run.worker_id}: version {run.version}, params digest {run.digest}")


if __name__ == "__main__":
    main()
