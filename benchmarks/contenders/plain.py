"""A loop of plain PyTorch in the form of nanoGPT's: a GPT of `nn.Module`s, random windows, AdamW, clipped gradients.

As nanoGPT does on a CPU: AdamW is not the fused one, the next batch is drawn after the forward pass, and the loss is
read back when it is printed, every tenth step.
"""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contenders.task import Task, characters


class LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = LayerNorm(width), LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class GPT(nn.Module):
    def __init__(self, task: Task, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, task.hidden)
        self.position = nn.Embedding(task.length, task.hidden)
        self.blocks = nn.ModuleList(Block(task.hidden, task.heads) for _ in range(task.layers))
        self.norm = LayerNorm(task.hidden)
        self.head = nn.Linear(task.hidden, vocabulary, bias=False)
        self.token.weight = self.head.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def run(task: Task) -> None:
    torch.manual_seed(0)
    data, vocabulary = characters(task)
    model = GPT(task, vocabulary)
    optimizer = make_optimizer(model)
    bf16 = task.precision == "bf16"
    precision = torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()

    def draw() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - task.length, (task.batch,))
        rows = [torch.from_numpy(data[i : i + task.length + 1].astype("int64")) for i in starts]
        return torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])

    tokens, targets = draw()
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1.0 + math.cos(math.pi * step / task.steps))
        with precision:
            loss = model(tokens, targets)
        tokens, targets = draw()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW that decays matrices and not vectors."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
