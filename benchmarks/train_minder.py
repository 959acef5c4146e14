"""Train the encoders of `phalanx detect machines`: one LSTM-VAE per metric, on healthy jobs of the develop split only.

    python benchmarks/train_minder.py                   # writes phalanx/detect/minder/weights/encoders.npz
    python benchmarks/train_minder.py --quick --out DIR

As in Minder (arXiv 2411.01791, 4.2): windows of 8 samples, hidden size 4, latent size 8, one layer; the loss is the
squared error of the reconstruction and, weakly, the divergence of the latent from a normal distribution. `one_model`
is the paper's INT: one such model of all metrics. Prints the error of the reconstruction on jobs that were not
trained on. `benchmarks/calibrate_minder.py` comes next.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from support.harness import benchmark_parser, machine
from support.minder_variants import MORE

from phalanx.detect.minder.minder_weights import ONE_MODEL
from phalanx.detect.minder.window_encoder import HIDDEN, LATENT, WINDOW
from phalanx.detect.monitoring.job_scenarios import draw_scenario
from phalanx.detect.monitoring.metric_catalogue import DETECTED, normalise
from phalanx.detect.monitoring.metric_generator import generate

FIRST_TRAINED, FIRST_HELD_OUT = 300_000, 310_000
"""Numbers of scenarios of the develop split, which no other part uses."""

BETA = 1e-4
"""Weight of the divergence, the error being in variances of healthy windows; the paper gives none."""

RATE = 3e-2

SEED = 2411


class WindowVAEs(torch.nn.Module):
    """Several models of the same shape at once: [models, batch, 8, inputs] to a reconstruction and the latent.

    Small matrices cost what their calls cost, so that seven models are trained in little more than the time of one.
    """

    def __init__(self, models: int, inputs: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(SEED)

        def weights(*shape: int, size: float = HIDDEN**-0.5) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.rand(models, *shape, generator=drawn) * 2 - 1) * size)

        self.input, self.state, self.bias = (weights(rows, 4 * HIDDEN) for rows in (inputs, HIDDEN, 1))
        self.mean, self.mean_bias = weights(HIDDEN, LATENT), weights(1, LATENT)
        self.variance = weights(HIDDEN, LATENT, size=0.1)
        self.variance_bias = torch.nn.Parameter(torch.full((models, 1, LATENT), -8.0))  # little noise at first
        self.decoder_input, self.decoder_state = (
            weights(LATENT, 4 * HIDDEN, size=LATENT**-0.5),
            weights(HIDDEN, 4 * HIDDEN),
        )
        self.decoder_bias, self.output, self.output_bias = (
            weights(1, 4 * HIDDEN),
            weights(HIDDEN, inputs),
            weights(1, inputs),
        )
        with torch.no_grad():  # gates that keep the state are open at first
            self.bias[..., HIDDEN : 2 * HIDDEN] += 1
            self.decoder_bias[..., HIDDEN : 2 * HIDDEN] += 1

    def forward(
        self, windows: torch.Tensor, drawn: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The reconstruction, mean and log-variance; without a generator the mean is decoded."""
        state = cell = windows.new_zeros(*windows.shape[:2], HIDDEN)
        fed = torch.einsum("mbti,mig->mbtg", windows, self.input) + self.bias[:, :, None]
        for at in range(WINDOW):
            state, cell = lstm_cell(fed[:, :, at] + torch.bmm(state, self.state), cell)
        mean = torch.bmm(state, self.mean) + self.mean_bias
        log_variance = (torch.bmm(state, self.variance) + self.variance_bias).clamp(-16, 4)
        latent = mean
        if drawn is not None:
            latent = mean + torch.exp(0.5 * log_variance) * torch.randn(mean.shape, generator=drawn)
        again = torch.bmm(latent, self.decoder_input) + self.decoder_bias
        state = cell = torch.zeros_like(state)
        out = []
        for _ in range(WINDOW):
            state, cell = lstm_cell(again + torch.bmm(state, self.decoder_state), cell)
            out.append(torch.bmm(state, self.output) + self.output_bias)
        return torch.stack(out, 2), mean, log_variance

    def arrays(
        self, model: int, middle: NDArray[np.float32], size: NDArray[np.float32]
    ) -> dict[str, NDArray[np.float32]]:
        """What `WindowEncoder.from_torch_arrays` takes; the scaling of samples becomes part of the weights."""
        kept = {name: value[model].detach().numpy().T for name, value in self.named_parameters()}
        weight = kept["input"] / size
        bias = kept["bias"][:, 0] - weight @ middle
        return {
            "weight_ih": weight,
            "weight_hh": kept["state"],
            "bias_ih": bias,
            "bias_hh": np.zeros_like(bias),
            "mean": kept["mean"],
        }


def lstm_cell(gates: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The next state and cell, of input, forget, candidate and output gates."""
    let_in, keep, candidate, let_out = gates.chunk(4, -1)
    cell = torch.sigmoid(keep) * cell + torch.sigmoid(let_in) * torch.tanh(candidate)
    return torch.sigmoid(let_out) * torch.tanh(cell), cell


def healthy_windows(first: int, jobs: int, per_job: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Windows of whole samples of healthy jobs: [windows, 8, metrics]."""
    found = []
    for number in range(first, first + jobs):
        machines = int(random.integers(4, 33))
        table = normalise(generate(draw_scenario("develop", number, machines=machines), MORE).table)
        machine = random.integers(machines, size=per_job)
        start = random.integers(table.samples - WINDOW, size=per_job)
        windows = table.values[:, machine[:, None], start[:, None] + np.arange(WINDOW)].transpose(1, 2, 0)
        found.append(windows[~np.isnan(windows).any(axis=(1, 2))])
    return np.concatenate(found)


def train(windows: torch.Tensor, steps: int, batch: int = 256) -> WindowVAEs:
    """By Adam with a rate that falls to nothing: [models, windows, 8, inputs], in variances of each input."""
    drawn = torch.Generator().manual_seed(SEED)
    models = WindowVAEs(windows.shape[0], windows.shape[3])
    optimizer = torch.optim.Adam(models.parameters(), lr=RATE)
    falling = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        chosen = windows[:, torch.randint(windows.shape[1], (batch,), generator=drawn)]
        rebuilt, mean, log_variance = models(chosen, drawn)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=-1).mean()
        loss = (rebuilt - chosen).square().mean((1, 2, 3)).sum() + BETA * divergence * len(windows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(models.parameters(), 1.0)
        optimizer.step()
        falling.step()
    return models


def errors(models: WindowVAEs, windows: torch.Tensor) -> NDArray[np.float32]:
    """Mean squared errors of the reconstruction from the mean of the latent: [models, inputs]."""
    with torch.no_grad():
        found: NDArray[np.float32] = (models(windows, None)[0] - windows).square().mean((1, 2)).numpy()
    return found


def main() -> None:
    parser = benchmark_parser(__doc__, "20 steps on four jobs")
    parser.add_argument("--out", type=Path, default=Path("phalanx/detect/minder/weights"), help="folder")
    parser.add_argument("--steps", type=int, default=3000, help="of training")
    parser.add_argument("--jobs", type=int, default=64, help="healthy jobs to train on")
    options = parser.parse_args()
    steps, jobs = (20, 4) if options.quick else (options.steps, options.jobs)
    torch.set_num_threads(1)
    random = np.random.default_rng(SEED)
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    windows = healthy_windows(FIRST_TRAINED, jobs, 2000, random)
    held_out = healthy_windows(FIRST_HELD_OUT, max(2, jobs // 8), 2000, random)
    middle, size = windows.mean((0, 1)), windows.std((0, 1))
    scaled, scaled_held_out = (torch.from_numpy((one - middle) / size) for one in (windows, held_out))

    def alone(one: torch.Tensor) -> torch.Tensor:
        return one.permute(2, 0, 1)[..., None].contiguous()

    seven = len(DETECTED)
    with ThreadPoolExecutor(2) as threads:
        parts = (alone(scaled[..., :seven]), alone(scaled[..., seven:]), scaled[None][..., :seven])
        single, further, one_model = threads.map(lambda part: train(part, steps), parts)
    took_s, took_cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    print(f"{machine()}; {len(windows):,} windows of {jobs} jobs; {took_s:.0f} s, {took_cpu_s:.0f} s of processors")
    found = np.concatenate(
        [errors(single, alone(scaled_held_out[..., :seven])), errors(further, alone(scaled_held_out[..., seven:]))]
    )[:, 0]
    joined = errors(one_model, scaled_held_out[None][..., :seven])[0]
    print(f"{'':34s} error of held-out windows; of one model of seven; best linear with 4 numbers; variance")
    for row, name in enumerate(MORE):
        variance = size[row] ** 2
        best = np.linalg.eigvalsh(np.cov(windows[..., row].T))[: WINDOW - HIDDEN].sum() / WINDOW
        of_joint = f"{joined[row] * variance:.2e}" if row < seven else "-       "
        print(f"{name:34s} {found[row] * variance:.2e}  {of_joint}  {best:.2e}  {variance:.2e}")
    arrays = {
        name: (single if row < seven else further).arrays(row % seven, middle[row : row + 1], size[row : row + 1])
        for row, name in enumerate(MORE)
    }
    arrays[ONE_MODEL] = one_model.arrays(0, middle[:seven], size[:seven])
    flat = {f"{name}/{part}": value for name, parts in arrays.items() for part, value in parts.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    np.savez(options.out / "encoders.npz", **flat)


if __name__ == "__main__":
    main()
