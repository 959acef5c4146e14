"""A small GPT under DDP: every so often rank 0 alone validates, generates and answers questions, inline.

The others are in the next step's collective meanwhile, and nothing is said of it.

    torchrun --nproc-per-node 2 rank0_validates.py 1000
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, LENGTH, WIDTH = 256, 64, 128


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, idx, targets=None):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        logits = self.head(self.blocks(x, mask=mask, is_causal=True))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(size):
    begin = torch.randint(WORDS, (size, 1))
    text = (begin + 7 * torch.arange(LENGTH + 1)) % WORDS
    return text[:, :-1], text[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0, help="that the validation takes")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1337 + rank)
    raw = GPT()
    model = DDP(raw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    for step in range(options.steps):
        if rank == 0 and step and step % options.every == 0:
            model.eval()
            with torch.no_grad():
                end, losses = time.monotonic() + options.seconds, []
                while time.monotonic() < end:
                    losses.append(raw(*batch(16))[1].item())
                print(f"step {step}: validation loss {sum(losses) / len(losses):.4f}", flush=True)
                text = torch.zeros(4, 1, dtype=torch.long)
                while text.shape[1] < LENGTH:
                    likely = F.softmax(raw(text)[0][:, -1], dim=-1)
                    text = torch.cat([text, torch.multinomial(likely, 1)], dim=1)
                right = 0
                for _ in range(50):  # four endings each, of which the likeliest is taken
                    idx, targets = batch(4)
                    logits = raw(idx)[0]
                    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)
                    right += int(losses.argmin() == 0)
                print(f"step {step}: {right}/50 answers right", flush=True)
            model.train()
        optimizer.zero_grad(set_to_none=True)
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            (model(*batch(8))[1] / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} norm {norm:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
