"""Parts of the judge of machines: the encoder against torch, groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.detect.minder.machine_groups import machine_groups
from phalanx.detect.minder.minder_weights import shipped_numbers
from phalanx.detect.minder.window_encoder import WINDOW, WindowEncoder


@pytest.mark.parametrize("inputs", [1, 3])
def test_the_encoder_gives_what_torch_gives(inputs: int) -> None:
    torch.manual_seed(0)
    lstm, linear = torch.nn.LSTM(inputs, 4, batch_first=True), torch.nn.Linear(4, 8, bias=False)
    arrays = {
        name: getattr(lstm, f"{name}_l0").detach().numpy() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    }
    encoder = WindowEncoder.from_torch_arrays(arrays | {"mean": linear.weight.detach().numpy()})
    samples = np.random.default_rng(1).random((inputs, 3, 30), np.float32)
    windows = torch.from_numpy(samples).unfold(2, WINDOW, 1).permute(1, 2, 3, 0).reshape(-1, WINDOW, inputs)
    with torch.no_grad():
        expected = linear(lstm(windows)[1][0][0]).numpy().reshape(3, 23, 8).transpose(2, 0, 1)
    np.testing.assert_allclose(encoder.latent(samples), expected, atol=1e-6)
    # What is compared has the distances of the latents, in half the numbers.
    embedded = encoder.embed(samples)
    assert embedded.shape == (4, 3, 23)
    ours = np.linalg.norm(embedded[:, 0] - embedded[:, 1], axis=0)
    np.testing.assert_allclose(ours, np.linalg.norm(expected[:, 0] - expected[:, 1], axis=0), atol=1e-5)


def test_what_is_missing_makes_its_windows_unknown_and_no_others() -> None:
    encoder = shipped_numbers().encoders["cpu_usage"]
    samples = np.random.default_rng(2).random((2, 40), np.float32)
    holed = samples.copy()
    holed[1, 20] = np.nan
    whole, found = encoder.embed(samples), encoder.embed(holed)
    unknown = np.isnan(found).all(axis=0)
    assert list(np.flatnonzero(unknown[1])) == list(range(13, 21)) and not unknown[0].any()
    np.testing.assert_array_equal(found[:, ~unknown], whole[:, ~unknown])


def test_groups_are_cut_where_there_is_a_gap_and_odd_machines_are_none() -> None:
    random = np.random.default_rng(6)
    habits = random.standard_normal((8, 40)).astype(np.float32)
    assert machine_groups(habits) is None
    odd = habits.copy()
    odd[:, 3] += 30
    assert machine_groups(odd) is None
    two = habits.copy()
    two[2, 25:] += 25
    groups = machine_groups(two)
    assert groups is not None
    assert len(set(groups[:25])) == len(set(groups[25:])) == 1 and groups[0] != groups[30]
    assert machine_groups(habits[:, :7]) is None
