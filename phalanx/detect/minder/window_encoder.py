"""What a variational auto-encoder of LSTMs makes of eight seconds of one metric: an embedding without the noise.

Minder (arXiv 2411.01791, 4.2) trains one such model per metric, with a hidden size of 4, a latent size of 8 and one
layer. Here the encoder alone runs, in numpy: the mean of the latent, which is what is compared between machines;
nothing is drawn. `benchmarks/train_minder.py` trains it, with torch.

A batch of windows is one matrix [gates, windows] per step, in pieces that fit the second-level cache and are small
enough that the BLAS starts no threads of its own: metrics are spread over threads instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW = 8
"""Samples (Minder, 4.2)."""

HIDDEN, LATENT = 4, 8

Floats = NDArray[np.float32]

_PIECE = 4096
"""Windows that are encoded at once: 16 gates of them are 256 KiB."""


@dataclass(frozen=True, eq=False)
class WindowEncoder:
    """The encoder of one metric, or of several that are encoded as one.

    Attributes:
        gates: [4 x hidden, hidden + inputs + 1], float32: what multiplies the state, the sample and 1. Rows are the
            input, forget and output gates and the candidate; those of the three gates are halved, since
            sigmoid(x) = (1 + tanh(x / 2)) / 2 makes one call of tanh do for all.
        mean: [latent, hidden], float32: the mean of the latent without its bias, which no distance depends on.
    """

    gates: Floats
    mean: Floats

    @property
    def hidden(self) -> int:
        """Size of the state."""
        return int(self.gates.shape[0]) // 4

    @property
    def inputs(self) -> int:
        """Metrics that it takes: 1, or all of a joint model."""
        return int(self.gates.shape[1]) - self.hidden - 1

    @classmethod
    def from_torch_arrays(cls, arrays: Mapping[str, NDArray[np.floating]]) -> WindowEncoder:
        """From arrays named as torch names those of an LSTM (gates in the order i, f, g, o) and of a linear layer.

        Args:
            arrays: ``weight_ih``, ``weight_hh``, ``bias_ih``, ``bias_hh`` and ``mean``.
        """
        joined = np.concatenate(
            [arrays["weight_hh"], arrays["weight_ih"], (arrays["bias_ih"] + arrays["bias_hh"])[:, None]], axis=1
        )
        i, f, g, o = np.split(np.asarray(joined, np.float64), 4)
        gates = np.concatenate([i / 2, f / 2, o / 2, g])
        return cls(np.ascontiguousarray(gates, np.float32), np.ascontiguousarray(arrays["mean"], np.float32))

    @property
    def projection(self) -> Floats:
        """[hidden, hidden]: its product with a state has the distances that the latent has, in half the numbers."""
        return np.ascontiguousarray(np.linalg.qr(self.mean.astype(np.float64), mode="r"), np.float32)

    def latent(self, samples: Floats) -> Floats:
        """Means of the latent, less their bias: [latent, machines, windows] of [machines, samples].

        A joint model takes [metrics, machines, samples].
        """
        return self._project(self.mean, samples)

    def embed(self, samples: Floats) -> Floats:
        """What is as far apart as the latents are: [hidden, machines, windows] of [machines, samples].

        Windows are of 8 samples, one for each sample from the eighth on. What is NaN in a window makes its embedding
        NaN.
        """
        return self._project(self.projection, samples)

    def _project(self, matrix: Floats, samples: Floats) -> Floats:
        """Its product with the last state of every window."""
        samples = samples if samples.ndim == 3 else samples[None]
        assert samples.shape[0] == self.inputs, f"{samples.shape[0]} metrics, not {self.inputs}"
        machines, windows = samples.shape[1], samples.shape[2] - WINDOW + 1
        found = np.empty((matrix.shape[0], machines, max(windows, 0)), np.float32)
        # A piece is some machines and some of their windows, whichever fit.
        wide = min(windows, _PIECE)
        high = max(1, _PIECE // max(wide, 1))
        for first in range(0, machines, high):
            for start in range(0, windows, wide):
                end = min(start + wide, windows)
                piece = samples[:, first : first + high, start : end + WINDOW - 1]
                state = self._last_state(piece)
                found[:, first : first + high, start:end] = (matrix @ state).reshape(-1, piece.shape[1], end - start)
        return found

    def _last_state(self, samples: Floats) -> Floats:
        """[hidden, machines x windows] after the eighth sample of [inputs, machines, samples]."""
        hidden, inputs = self.hidden, self.inputs
        windows = samples.shape[2] - WINDOW + 1
        count = samples.shape[1] * windows
        fed = np.empty((hidden + inputs + 1, count), np.float32)  # the state, the sample, 1
        fed[:hidden], fed[-1] = 0, 1
        cell = np.zeros((hidden, count), np.float32)
        gate = np.empty((4 * hidden, count), np.float32)
        kept = np.empty((hidden, count), np.float32)
        gates = gate[: 3 * hidden]
        let_in, keep, let_out, candidate = (gate[at : at + hidden] for at in range(0, 4 * hidden, hidden))
        for step in range(WINDOW):
            fed[hidden:-1] = samples[:, :, step : step + windows].reshape(inputs, count)
            np.matmul(self.gates, fed, out=gate)
            np.tanh(gate, out=gate)
            gates += 1
            gates *= 0.5
            cell *= keep
            np.multiply(let_in, candidate, out=kept)
            cell += kept
            np.tanh(cell, out=kept)
            np.multiply(let_out, kept, out=fed[:hidden])
        return fed[:hidden]
