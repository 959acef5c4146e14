"""How many sequences go through the model at once, where the config leaves that open."""

from __future__ import annotations

import torch

from phalanx.data.batch import Batch
from phalanx.train.attention import settle_attention
from phalanx.train.derived.figures import cpu_micro_batch
from phalanx.train.failures import out_of_memory, too_big
from phalanx.train.run import Run

_GPU_MEMORY_SHARE = 0.9


def choose_micro_batch(run: Run) -> int:
    """`train.micro_batch`, or the largest fitting divisor of this rank's share of the global batch.

    The choice depends on sizes and memory alone, never on a stopwatch, so that a run repeated on the same machine does
    the same arithmetic. It is kept in the checkpoints.

    Raises:
        UserError: not even one sequence fits.
    """
    wanted = run.config.train.micro_batch
    if wanted:
        return wanted
    share = run.config.train.global_batch // run.trainer.data_ranks
    if run.device.torch_device.type == "cpu":
        return cpu_micro_batch(share, run.config.data.sequence_length)
    divisors = [n for n in range(share, 0, -1) if share % n == 0]
    return next((n for n in divisors if _fits_everywhere(run, n)), 0) or _refuse(run)


def _fits_everywhere(run: Run, micro_batch: int) -> bool:
    if not settle_attention(run, micro_batch):
        return False
    return all(run.ranks.peers.gather(_fits(run, micro_batch)))


def _fits(run: Run, micro_batch: int) -> bool:
    """Whether forward and backward of `micro_batch` sequences leave a tenth of the GPU's memory to the optimizer."""
    batch = run.loader.batch(0, 1)
    rows = torch.zeros(micro_batch, dtype=torch.int64)
    repeated = Batch(
        batch.tokens_BS[rows],
        batch.targets_BS[rows],
        batch.weights_BS[rows],
        None if batch.documents_BS is None else batch.documents_BS[rows],
        batch.sample_index_B[rows],
    )
    torch.cuda.reset_peak_memory_stats()
    try:
        run.trainer.accumulate_gradients(repeated, micro_batch=micro_batch, seed=0, step=0)
        peak_bytes = torch.cuda.max_memory_allocated()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return False
    finally:
        run.trainer.zero_grad()
        torch.cuda.empty_cache()
    return peak_bytes < _GPU_MEMORY_SHARE * torch.cuda.get_device_properties(0).total_memory


def _refuse(run: Run) -> int:
    raise too_big(run.config, 1, MemoryError("not even one sequence fits"))
