"""What a distillation or RL job does in each of its phases, with a small network."""

import json
import os
import time
import urllib.request

import torch
import torch.distributed as dist
from torch.nn import functional as F


class Network(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embed = torch.nn.Embedding(128, hidden)
        self.layers = torch.nn.GRU(hidden, hidden, batch_first=True)
        self.head = torch.nn.Linear(hidden, 128)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids))[0])


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return int(os.environ.get("RANK", "0"))


def read_config(args):
    return {"data": args.data, "steps": args.steps, "hidden": args.hidden, "lr": args.lr}


def load_dataset(path):
    return [json.loads(line)["prompt"][-1]["content"] for line in open(path)]


def filter_overlong(rows, limit=400):
    return [row for row in rows if len(row) < limit]


def init_process_group(seconds):
    from datetime import timedelta

    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def build_actor(hidden, lr):
    torch.manual_seed(7)
    model = Network(hidden)
    if world() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def build_rollout(hidden):
    return Network(hidden).eval()


def build_teacher(hidden):
    torch.manual_seed(11)
    return Network(hidden).eval()


def load_checkpoint(model, optimizer, folder):
    saved = torch.load(f"{folder}/rank{rank()}.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


def update_weights(model, rollout):
    source = getattr(model, "module", model).state_dict()
    for name, tensor in rollout.state_dict().items():
        tensor.copy_(source[name])
        if world() > 1:
            dist.broadcast(tensor, 0)


def next_batch(rows, step, size=4):
    at = (step * world() + rank()) * size % max(1, len(rows) - size)
    texts = [row[:24].ljust(24) for row in rows[at : at + size]]
    return torch.tensor([[min(ord(c), 127) for c in text] for text in texts])


def sample_token(logits):
    return torch.multinomial(logits.softmax(-1), 1)


def generate_sequences(rollout, ids, tokens=8):
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, sample_token(rollout(ids)[:, -1])], 1)
    return ids


def compute_reward(ids):
    return torch.tensor([len(set(row.tolist())) / len(row) for row in ids])


def ask_server(url, ids):
    body = json.dumps({"ids": ids.tolist()}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
        return torch.tensor(json.load(answer)["logits"])


def compute_log_prob(teacher, ids, url=""):
    with torch.no_grad():
        logits = ask_server(url, ids) if url else teacher(ids)
    return logits.log_softmax(-1)


def distill_loss(got, wanted):
    return F.kl_div(got, wanted, reduction="batchmean", log_target=True) / got.shape[1]


def update_actor(model, optimizer, ids, wanted):
    loss = distill_loss(model(ids).log_softmax(-1), wanted)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def reduce_metrics(values):
    found = torch.tensor(values)
    if world() > 1:
        dist.all_reduce(found)
    return (found / world()).tolist()


def save_checkpoint(model, optimizer, step, folder):
    os.makedirs(folder, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, f"{folder}/rank{rank()}.pt")
    if world() > 1:
        dist.barrier()


def wait_for_server(url, log, limit=60):
    for attempt in range(limit):
        try:
            return urllib.request.urlopen(url + "/health").status
        except OSError as error:
            log(f"waiting for the teacher at {url}: {error} (attempt {attempt + 1})")
            time.sleep(1)
    raise TimeoutError(f"teacher at {url} was not ready after {limit} s")
