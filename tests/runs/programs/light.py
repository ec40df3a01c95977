"""A value model trained with Lightning on features of the prompts."""

import argparse
import json

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="prompts.jsonl")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--ckpt", default=None)
args = parser.parse_args()


class ValueModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch, index):
        features, target = batch
        loss = torch.nn.functional.mse_loss(self.net(features).squeeze(-1), target)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        features, target = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(features).squeeze(-1), target), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=args.lr)


def load():
    texts = [json.loads(line)["prompt"][-1]["content"] for line in open(args.data)]
    rows = [[ord(c) / 128 for c in text[:32].ljust(32)] for text in texts]
    return TensorDataset(torch.tensor(rows), torch.tensor([len(text) / 64 for text in texts]))


def main():
    L.seed_everything(7)
    data = load()
    trainer = L.Trainer(max_epochs=args.epochs, accelerator="cpu", log_every_n_steps=4, default_root_dir="out")
    trainer.fit(
        ValueModel(),
        DataLoader(data, 16, shuffle=True, num_workers=args.workers),
        DataLoader(data, 16),
        ckpt_path=args.ckpt,
    )


if __name__ == "__main__":
    main()
