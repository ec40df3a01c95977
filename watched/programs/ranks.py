"""On-policy distillation by ranks: DDP, dataloader workers, weight sync, checkpoints.

Rank 0 prints, without times: two runs print the same.
"""

import argparse
import os

import steps
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--prompts", default="prompts")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--hidden", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--save-interval", type=int, default=8)
parser.add_argument("--pace", type=float, default=0.2)
parser.add_argument("--tokens", type=int, default=8)
args = parser.parse_args()


class Prompts(Dataset):
    """One file for each prompt."""

    def __init__(self, folder):
        self.paths = sorted(os.path.join(folder, name) for name in os.listdir(folder))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, at):
        [text] = steps.load_dataset(self.paths[at])
        return torch.tensor([min(ord(c), 127) for c in text[:24].ljust(24)])


def say(text):
    if steps.rank() == 0:
        print(text, flush=True)


def batches(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    steps.init_process_group(100_000)
    say(f"process group of {steps.world()} ranks is up")
    rows = Prompts(args.prompts)
    sampler = DistributedSampler(rows, steps.world(), steps.rank(), drop_last=True)
    loader = DataLoader(rows, 4, sampler=sampler, num_workers=args.workers, prefetch_factor=1, drop_last=True)
    say(f"{len(rows)} prompts")
    model, optimizer = steps.build_actor(args.hidden, args.lr)
    rollout = steps.build_rollout(args.hidden)
    teacher = steps.build_teacher(args.hidden)
    batch = batches(loader)
    say("training starts")
    for step in range(1, args.steps + 1):
        steps.update_weights(model, rollout)
        full = steps.generate_sequences(rollout, next(batch), args.tokens)
        wanted = steps.compute_log_prob(teacher, full)
        loss, norm = steps.update_actor(model, optimizer, full, wanted)
        loss, norm = steps.reduce_metrics([loss, norm])
        steps.time.sleep(args.pace)
        say(f"step {step}/{args.steps} loss={loss:.4f} grad_norm={norm:.3f}")
        if step % args.save_interval == 0:
            steps.save_checkpoint(model, optimizer, step, f"out/step_{step}")
            say(f"saved a checkpoint of step {step}")
    say("training is done")
    steps.dist.destroy_process_group()


if __name__ == "__main__":
    main()
