import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.shuffle import MIXTURE_PERIOD, Mixture, Permutation, derive_key


@given(st.integers(0, 2**64 - 1), st.integers(1, 3000))
def test_a_permutation_is_a_bijection(key: int, size: int) -> None:
    assert sorted(Permutation(key, size)(np.arange(size)).tolist()) == list(range(size))


@given(st.integers(0, 2**64 - 1), st.integers(1, 2**52), st.data())
@settings(max_examples=50)
def test_a_permutation_is_pure_and_elementwise(key: int, size: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    whole = Permutation(key, size)(index)
    assert ((whole >= 0) & (whole < size)).all()
    assert [int(Permutation(key, size)(np.array([i]))[0]) for i in index] == whole.tolist()
    assert len(set(whole.tolist())) == len(set(index.tolist()))


def test_permutations_look_random() -> None:
    size = 10_000
    image = Permutation(7, size)(np.arange(size))
    assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 0.03
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.03
    assert (image == Permutation(8, size)(np.arange(size))).sum() < 10


def test_every_order_of_three_is_about_as_likely() -> None:
    orders = [tuple(Permutation(key, 3)(np.arange(3)).tolist()) for key in range(3000)]
    counts = np.array([orders.count(order) for order in set(orders)])
    assert len(counts) == 6
    assert ((counts > 400) & (counts < 600)).all()


def test_an_empty_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, 0)


def test_keys_differ_by_type_and_place() -> None:
    keys = {derive_key(1, 2), derive_key(12), derive_key("1", 2), derive_key(2, 1), derive_key("12")}
    assert len(keys) == 5


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 3 * MIXTURE_PERIOD))
@settings(max_examples=30)
def test_a_mixture_keeps_its_proportions_and_each_sources_own_order(weights: list[float], length: int) -> None:
    source, local = Mixture(weights).locate(np.arange(length))
    shares = np.array(weights) / sum(weights)
    for number, share in enumerate(shares):
        mine = local[source == number]
        assert (mine == np.arange(len(mine))).all()
        assert abs(len(mine) - share * length) <= len(weights) + length / MIXTURE_PERIOD * (len(weights) + 1)


def test_a_mixture_far_along_is_worked_out_from_the_index_alone() -> None:
    mixture = Mixture([3, 1])
    source, local = mixture.locate(np.array([10**15, 10**15 + 1, 10**15 + 2, 10**15 + 3]))
    assert sorted(source.tolist()) == [0, 0, 0, 1]
    assert abs(int(local[source == 1][0]) - 10**15 // 4) <= 1


def test_a_source_of_tiny_weight_still_comes() -> None:
    source, _ = Mixture([1e9, 1.0]).locate(np.arange(MIXTURE_PERIOD))
    assert (source == 1).sum() == 1
