"""What is trained in every case: a tiny model, data-parallel with gloo, the same losses whatever happens meanwhile.

It is copied out of here, and knows nothing of what it is for. Losses of rank 0 go to a file, bit by bit, each written
at once; own time, loss and phase go to the executor.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.core.progress import own_progress

SAVE_STEPS = 5


def main() -> None:
    """Be one rank."""
    options = _read_options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _Training(options).run()
    dist.destroy_process_group()


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int)
    parser.add_argument("--losses", type=Path, required=True, help="file to which rank 0 adds a line per step")
    parser.add_argument("--states", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--pace", type=float, default=0.05, help="rest in every step, seconds")
    parser.add_argument("--quick", type=float, help="rest before the step --from and in later attempts; as --pace")
    parser.add_argument("--from", type=int, default=0, dest="first", help="step from which on --pace holds")
    parser.add_argument("--saving", type=float, default=0.0, help="rest in every checkpoint, seconds")
    parser.add_argument("--work", type=int, default=0, help="more to compute in every step, of no consequence")
    return parser.parse_args()


class _Training:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.attempt = int(os.environ.get("PHALANX_RUN_ATTEMPT", "0"))
        self.page = own_progress(os.environ, self.attempt)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        self.weight = torch.full((256, 256), 0.01)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def run(self) -> None:
        """From the newest checkpoint to the last step."""
        restored = self._restore()
        if self.page is not None:
            self.page.resume(restored)
        self._phase("train")
        for step in range(restored + 1, self.options.steps + 1):
            began_ns = time.monotonic_ns()
            loss, idle_ns = self._train(step)
            if self.page is not None:
                self.page.step(step, busy_ns=time.monotonic_ns() - began_ns - idle_ns, loss=loss)
            self._note(f"{step} {loss.hex()}")
            if step % SAVE_STEPS == 0:
                self._save(step)

    def _train(self, step: int) -> tuple[float, int]:
        """One step; its loss, averaged over the ranks, and how long this rank rested or waited for others."""
        torch.manual_seed(1_000 * step + self.rank)
        loss = (self.model(torch.randn(8, 32)) - 1).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self._use_own_disk(step)
        burden = torch.ones(64, 256)
        for _ in range(self.options.work):
            burden = torch.tanh(burden @ self.weight)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        parts = [gradient.flatten() for gradient in gradients]
        whole = torch.cat([*parts, loss.detach().reshape(1)]) / self.ranks
        began_ns = time.monotonic_ns()
        time.sleep(self._pace_s(step))
        dist.all_reduce(whole)
        idle_ns = time.monotonic_ns() - began_ns
        reduced = whole[:-1].split([part.numel() for part in parts])  # type: ignore[no-untyped-call]
        for gradient, part in zip(gradients, reduced, strict=True):
            gradient.copy_(part.view_as(gradient))
        self.optimizer.step()
        return whole[-1].item(), idle_ns

    def _pace_s(self, step: int) -> float:
        options = self.options
        is_quick = options.quick is not None and (step < options.first or self.attempt > 1)
        return float(options.quick if is_quick else options.pace)

    def _use_own_disk(self, step: int) -> None:
        """As scripts do that keep samples at hand on the disk of their host."""
        if "TMPDIR" in os.environ:
            folder = Path(os.environ["TMPDIR"])
            (folder / f"samples-{self.rank}-{step}").write_bytes(step.to_bytes(4, "little") * 4096)
            (folder / f"samples-{self.rank}-{step - 1}").unlink(missing_ok=True)

    def _save(self, step: int) -> None:
        self._phase("checkpoint", 60.0)
        folder = self.options.states / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        self._note(f"{step} saving")
        time.sleep(self.options.saving)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}
        torch.save(state, folder / f"rank-{self.rank}.writing")
        (folder / f"rank-{self.rank}.writing").replace(folder / f"rank-{self.rank}.pt")
        dist.barrier()
        if self.rank == 0:
            (self.options.states / "latest.writing").write_text(folder.name)
            (self.options.states / "latest.writing").replace(self.options.states / "latest")
        dist.barrier()
        self._phase("train")

    def _restore(self) -> int:
        latest = self.options.states / "latest"
        if not latest.exists():
            return 0
        state = torch.load(self.options.states / latest.read_text() / "rank-0.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def _phase(self, name: str, expects_s: float = 0.0) -> None:
        if self.page is not None:
            self.page.phase(name, expects_s)

    def _note(self, text: str) -> None:
        if self.rank == 0:
            line = f"{time.monotonic_ns()} {self.attempt} {text}\n".encode()
            descriptor = os.open(self.options.losses, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(descriptor, line)
            os.close(descriptor)


if __name__ == "__main__":
    main()
