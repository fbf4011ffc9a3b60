"""Train the GPT of `train_gpt.py` on the same text, in a loop written by hand, with Fabric.

    python examples/fabric_gpt.py
    python examples/fabric_gpt.py --strategy ddp
    python examples/fabric_gpt.py --resume fabric_gpt.ckpt

Everything but the name of the strategy is what Fabric's users write for DDP. The checkpoint is one
plain file that either strategy resumes from.
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader
from train_gpt import GPT, Text

import lightning_zero  # noqa: F401  (registers "zero1", "zero2" and "zero3" with Fabric)


@torch.no_grad()
def mean_loss(fabric: Fabric, model: GPT, batches: DataLoader) -> float:
    """Return the mean loss over all batches of all ranks."""
    model.eval()
    losses = torch.stack([model.loss_of(batch) for batch in batches])
    model.train()
    return fabric.all_reduce(losses.mean()).item()


def main(args: argparse.Namespace) -> None:
    fabric = Fabric(accelerator=args.accelerator, devices=args.devices, strategy=args.strategy)
    fabric.launch()
    fabric.seed_everything(0)
    text = Text(context=args.context, batch_size=8)
    text.setup("fit")
    train, val = fabric.setup_dataloaders(text.train_dataloader(), text.val_dataloader())

    with fabric.init_module():
        module = GPT(context=args.context, width=args.width, depth=args.depth)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.95))
    model, optimizer = fabric.setup(module, optimizer)
    model.mark_forward_method("loss_of")
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if args.resume:
        fabric.load(args.resume, state)

    fabric.print(f"step {state['step']:5d}   val_loss {mean_loss(fabric, model, val):.3f}")
    for epoch in range(args.epochs):
        for number, batch in enumerate(train):
            if number == args.batches:
                break
            accumulates = number % args.accumulate != args.accumulate - 1
            with fabric.no_backward_sync(model, enabled=accumulates):
                fabric.backward(model.loss_of(batch) / args.accumulate)
            if not accumulates:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
                state["step"] += 1
        loss = mean_loss(fabric, model, val)
        fabric.print(f"step {state['step']:5d}   val_loss {loss:.3f}   epoch {epoch}")
    if args.save:
        fabric.save(args.save, state)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, help="batches per epoch; all by default")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--save", help="the checkpoint to write at the end")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    main(parser.parse_args())
